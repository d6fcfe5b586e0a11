"""The chat format, as token ids and as a Jinja template: a special token before and after each message."""

from tokenizers import Tokenizer

from tools.demo_model.text import Message

BEGIN, SYSTEM, USER, ASSISTANT, END, PAD = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|pad|>",
)

CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('The roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return number


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Return token ids, and for each whether it counts in the loss, as those of the assistant do."""
    begin, end = token_id(tokenizer, BEGIN), token_id(tokenizer, END)
    tokens, learned = [begin], [False]
    for message in messages:
        role = message["role"]
        content = tokenizer.encode(message["content"].strip(), add_special_tokens=False).ids
        tokens += [token_id(tokenizer, f"<|{role}|>"), *content, end]
        learned += [False, *[role == "assistant"] * (len(content) + 1)]
    return tokens, learned
