"""Encodes prompts (text, token ids, or messages through a chat template), and defines chat formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from localllm.errors import DamagedModel, UsageError
from localllm.modelfile.edition import Edition
from localllm.request import ChatRequest, to_token_ids
from localllm.text.folder import find_turn_end_tokens
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.grammar.functions import without_strict
from localllm.text.messages import Message, normalize_message
from localllm.text.output.formats import OutputFormat
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

MAX_CACHED_FORMATS = 8  # besides the model's own


def accept_any_length(text: str) -> None:
    """Default length check, which accepts every text."""


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts for a model, or for an edition of it."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    edition: Edition | None

    def token_ids(self, chat: ChatRequest, check: Callable[[str], None]) -> list[int]:
        """Return the token ids of the whole prompt, including `chat.before`. check: as in `encode`.

        Raises UsageError for an empty prompt or ids outside the vocabulary, DamagedModel if the tokenizer returns
        such ids.
        """
        ids = self.append_to(chat.before, self.encode(chat, check))
        if not ids:
            raise UsageError("the prompt is empty", "give it at least one token")
        invalid_id = self.first_invalid_id(ids)
        if invalid_id is not None and (isinstance(chat.prompt, str) or chat.is_chat):
            raise DamagedModel(
                f"the tokenizer has the token {invalid_id}, and the model only {self.vocab_size} tokens",
                "they belong to different models, fetch this one again",
            )
        if invalid_id is not None:
            raise self.invalid_id_error(invalid_id)
        return ids

    def encode(self, chat: ChatRequest, check: Callable[[str], None] = accept_any_length) -> list[int]:
        """Return the token ids of the prompt without `chat.before`.

        check: called with the text before it is tokenized, to raise an error if it is too long. Raises UsageError
        for invalid messages or template arguments, or messages for a model without a chat template.
        """
        if isinstance(chat.prompt, str):
            check(chat.prompt)
            return self.tokenizer.encode(chat.prompt)
        if not chat.is_chat:
            return to_token_ids(chat.prompt)
        if self.template is None:
            raise UsageError(
                f"{self.name} has no chat template", "give the prompt as text: --raw, or /v1/completions"
            )
        messages = list(cast(Sequence[Message], chat.prompt))
        messages = self.edition.prepend_to(messages) if self.edition and not chat.before else messages
        messages = [normalize_message(message) for message in messages]
        # A grammar enforces a required call, so the template need not support tools.
        with_tools = bool(chat.tools) and not chat.tool_use.must_call
        arguments = self.template.template_arguments(
            chat.template_arguments, think=chat.think, with_tools=with_tools
        )
        tools = [without_strict(tool) for tool in chat.tools] if chat.tools else chat.tools
        prefix = messages.pop() if ends_with_prefix(messages) else None
        rendered = self.template.render(messages, tools=tools, arguments=arguments)
        if prefix is not None:
            rendered = self.template.begin_answer(rendered, prefix.get("content") or "")
        check(rendered.text)
        return self.tokenizer.encode_chat(rendered)

    def append_to(self, before: Sequence[int], ids: list[int]) -> list[int]:
        """Append a text's ids to those before it, without its beginning-of-sequence token."""
        before_ids = to_token_ids(before)
        if (invalid_id := self.first_invalid_id(before_ids)) is not None:
            raise self.invalid_id_error(invalid_id)
        bos = self.tokenizer.encode("")[:1] if before_ids else []
        return [*before_ids, *(ids[1:] if bos and ids[:1] == bos else ids)]

    def first_invalid_id(self, ids: Sequence[int]) -> int | None:
        """Return the first id outside the vocabulary."""
        return next((token for token in ids if not 0 <= token < self.vocab_size), None)

    def invalid_id_error(self, token_id: int) -> UsageError:
        return UsageError(f"{token_id} is not a token of this model", f"its ids are 0 to {self.vocab_size - 1}")


def ends_with_prefix(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the answer. Raises UsageError if it contains tool calls."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("prefix"):
        return False
    if last.get("tool_calls"):
        raise UsageError("an answer cannot continue after tool calls", "send the results of the tools")
    return True


@dataclass(frozen=True)
class ChatFormat:
    """The consequences of a chat template: how messages are rendered, and how answers are parsed and end."""

    template: ChatTemplate | None
    output: OutputFormat
    grammars: GrammarCompiler
    eos_ids: frozenset[int]


class ChatFormats:
    """A cache of a model's chat formats for templates other than its own."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int], renderer: ChatTemplate):
        """eos_ids: of the model itself; renderer: its process renders all templates."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.renderer = renderer
        self.cached: dict[str, ChatFormat] = {}

    def get(self, source: str) -> ChatFormat:
        """Return the chat format of a Jinja template."""
        if cached := self.cached.get(source):
            return cached
        templates = {"default": source}
        output = OutputFormat.detect(templates, self.tokenizer.added_tokens)
        eos_ids = self.eos_ids | self.tokenizer.added_token_ids(
            find_turn_end_tokens(templates.values(), self.tokenizer.added_tokens)
        )
        grammars = GrammarCompiler(self.tokenizer, self.vocab_size, eos_ids, output)
        chat_format = ChatFormat(self.renderer.with_templates(templates), output, grammars, eos_ids)
        while len(self.cached) >= MAX_CACHED_FORMATS:
            self.cached.pop(next(iter(self.cached)), None)
        self.cached[source] = chat_format
        return chat_format
