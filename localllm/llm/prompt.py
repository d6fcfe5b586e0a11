"""The token ids of a prompt: of a text, of token ids, or of messages through the model's chat template."""

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

# How a model is spoken to by another chat template than its own. Knows nothing of requests and of the engine.

MAX_CACHED_FORMATS = 8  # templates beside the model's own


@dataclass(frozen=True)
class ChatFormat:
    """What a chat template decides: how conversations are rendered, and how answers are parsed and ended."""

    template: ChatTemplate | None
    output: OutputFormat
    grammars: GrammarCompiler
    eos_ids: frozenset[int]


class ChatFormats:
    """Of one model, by template: made once, as long as there are not too many."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int], renderer: ChatTemplate):
        """eos_ids: those of the model itself; renderer: whose process renders all templates."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.renderer = renderer
        self.cached: dict[str, ChatFormat] = {}

    def get(self, source: str) -> ChatFormat:
        """source: Jinja."""
        if found := self.cached.get(source):
            return found
        templates = {"default": source}
        output = OutputFormat.detect(templates, self.tokenizer.added_tokens)
        ends = self.eos_ids | self.tokenizer.added_token_ids(
            find_turn_end_tokens(templates.values(), self.tokenizer.added_tokens)
        )
        grammars = GrammarCompiler(self.tokenizer, self.vocab_size, ends, output)
        voice = ChatFormat(self.renderer.with_templates(templates), output, grammars, ends)
        while len(self.cached) >= MAX_CACHED_FORMATS:
            self.cached.pop(next(iter(self.cached)), None)
        self.cached[source] = voice
        return voice


def accept_any_length(text: str) -> None:
    """It may be of any length."""


@dataclass(frozen=True)
class PromptEncoder:
    """Of one model, or of an edition of it."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    edition: Edition | None

    def token_ids(self, chat: ChatRequest, check: Callable[[str], None]) -> list[int]:
        """Token ids of the whole prompt, `chat.before` included. check: as in `encode`.

        Raises UsageError for an empty prompt or token ids outside the vocabulary, DamagedModel where the tokenizer
        itself gives such ids.
        """
        ids = self.append_to(chat.before, self.encode(chat, check))
        if not ids:
            raise UsageError("the prompt is empty", "give it at least one token")
        beyond = self.first_unknown_id(ids)
        if beyond is not None and (isinstance(chat.prompt, str) or chat.is_chat):
            raise DamagedModel(
                f"the tokenizer knows a token {beyond} and the model only {self.vocab_size}",
                "they are of two models, fetch this one again",
            )
        if beyond is not None:
            raise self.unknown_id_error(beyond)
        return ids

    def encode(self, chat: ChatRequest, check: Callable[[str], None] = accept_any_length) -> list[int]:
        """Token ids of the prompt alone. check: called with the text before it is tokenized, to raise where it is
        too long. Raises UsageError for invalid messages or template arguments, or a model without a template."""
        if isinstance(chat.prompt, str):
            check(chat.prompt)
            return self.tokenizer.encode(chat.prompt)
        if not chat.is_chat:
            return to_token_ids(chat.prompt)
        if self.template is None:
            raise UsageError(
                f"{self.name} has no chat template", "give the prompt as text: --raw, or /v1/completions"
            )
        turns = list(cast(Sequence[Message], chat.prompt))
        turns = self.edition.prepend_to(turns) if self.edition and not chat.before else turns
        messages = [normalize_message(message) for message in turns]
        # A required call is held to by a grammar, so the template need not mention the tools.
        with_tools = bool(chat.tools) and not chat.tool_use.must_call
        arguments = self.template.template_arguments(
            chat.template_arguments, think=chat.think, with_tools=with_tools
        )
        tools = [without_strict(tool) for tool in chat.tools] if chat.tools else chat.tools
        begun = messages.pop() if ends_with_begun_answer(messages) else None
        rendered = self.template.render(messages, tools=tools, arguments=arguments)
        if begun is not None:
            rendered = self.template.begin_answer(rendered, begun.get("content") or "")
        check(rendered.text)
        return self.tokenizer.encode_chat(rendered)

    def append_to(self, before: Sequence[int], ids: list[int]) -> list[int]:
        """A text's token ids behind others: what is put before every text stands at the begin alone."""
        earlier = to_token_ids(before)
        if (strange := self.first_unknown_id(earlier)) is not None:
            raise self.unknown_id_error(strange)
        begin = self.tokenizer.encode("")[:1] if earlier else []
        return [*earlier, *(ids[1:] if begin and ids[:1] == begin else ids)]

    def first_unknown_id(self, ids: Sequence[int]) -> int | None:
        """The first that is no token of the model."""
        return next((token for token in ids if not 0 <= token < self.vocab_size), None)

    def unknown_id_error(self, token_id: int) -> UsageError:
        return UsageError(f"{token_id} is not a token of this model", f"its ids are 0 to {self.vocab_size - 1}")


def ends_with_begun_answer(messages: Sequence[Message]) -> bool:
    """Is the last message one that the answer is to go on with? Raises UsageError where it has called tools."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("prefix"):
        return False
    if last.get("tool_calls"):
        raise UsageError("an answer cannot go on behind calls of tools", "send what the tools gave back")
    return True
