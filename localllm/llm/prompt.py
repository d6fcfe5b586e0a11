"""What a model is asked, as token ids: of a text, of token ids, or of messages through its chat template.

Knows nothing of the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from localllm.errors import DamagedModel, UsageError
from localllm.modelfile.edition import Edition
from localllm.request import to_token_ids
from localllm.text.grammar.functions import without_strict
from localllm.text.messages import Message, normalize_message
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]


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

    def token_ids(
        self,
        prompt: Prompt,
        tools: Sequence[Message] | None,
        template_arguments: Mapping[str, Any] | None,
        before: Sequence[int] = (),
        *,
        allow_ignored_tools: bool = False,
        check: Callable[[str], None] = accept_any_length,
    ) -> list[int]:
        """As `encode`, behind `before`. Raises UsageError for none, or one that the model lacks."""
        said = self.encode(
            prompt,
            tools,
            template_arguments,
            is_first=not before,
            allow_ignored_tools=allow_ignored_tools,
            check=check,
        )
        ids = self.append_to(before, said)
        if not ids:
            raise UsageError("the prompt is empty", "give it at least one token")
        beyond = self.first_unknown_id(ids)
        if beyond is not None and (isinstance(prompt, str) or is_messages(prompt)):
            raise DamagedModel(
                f"the tokenizer knows a token {beyond} and the model only {self.vocab_size}",
                "they are of two models, fetch this one again",
            )
        if beyond is not None:
            raise self.unknown_id_error(beyond)
        return ids

    def encode(
        self,
        prompt: Prompt,
        tools: Sequence[Message] | None,
        template_arguments: Mapping[str, Any] | None,
        *,
        is_first: bool = True,
        allow_ignored_tools: bool = False,
        check: Callable[[str], None] = accept_any_length,
    ) -> list[int]:
        """As `LLM.encode`. check: is given the text before it is tokenized, and raises where it is too long.
        Raises UsageError for messages that are none, or where there is no template."""
        if isinstance(prompt, str):
            check(prompt)
            return self.tokenizer.encode(prompt)
        if not is_messages(prompt):
            return to_token_ids(prompt)
        if self.template is None:
            raise UsageError(
                f"{self.name} has no chat template", "give the prompt as text: --raw, or /v1/completions"
            )
        said = list(cast(Sequence[Message], prompt))
        said = self.edition.prepend_to(said) if self.edition and is_first else said
        messages = [normalize_message(message) for message in said]
        with_tools = bool(tools) and not allow_ignored_tools
        arguments = self.template.template_arguments(template_arguments or {}, with_tools=with_tools)
        told = [without_strict(tool) for tool in tools] if tools else tools
        rendered = self.template.render(messages, tools=told, arguments=arguments)
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
        return UsageError(f"{token_id} is no token of this model", f"its ids are 0 to {self.vocab_size - 1}")


def is_messages(prompt: object) -> bool:
    parts = prompt if isinstance(prompt, list | tuple) else ()
    return bool(parts) and all(isinstance(part, Mapping) for part in parts)
