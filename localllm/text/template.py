"""Messages to the text a model was trained on, by the chat template that came with it."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from localllm.errors import DamagedModel, UsageError
from localllm.text.control import Literals, RenderedChat, unused_characters
from localllm.text.sandbox import Sandbox
from localllm.text.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same thing, the usual one first


class ChatTemplate:
    """Renders conversations as `transformers` does, in a process that a hostile template cannot escape.

    **Control tokens in messages are text.** A literal such as `<|im_start|>` in a message, a tool or a
    document is marked, so that `Tokenizer.encode_chat` encodes it as text; control ids come from the template
    alone. Control tokens are those of the tokenizer, and any added token that the template mentions
    (`<tool_call>`, `<think>`). What an assistant message says came from the model, and templates look into
    it for `</think>` and the like, so there only the tokenizer's own control tokens are marked. Arguments
    for the template (`enable_thinking`) are the caller's own and stay as they are.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Collection[str] = (),
        added_tokens: Collection[str] = (),
    ):
        """The four are as in `Tokenizer`. Nothing is compiled yet."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        written = "\n".join(self._templates.values())
        mentioned = {token for token in added_tokens if token in written and not token.isspace()}
        self._said_by_model = Literals(frozenset(control_tokens))
        self._said_by_others = Literals(frozenset(control_tokens) | mentioned)
        self._sandbox = Sandbox()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The templates of a model."""
        return cls(
            tokenizer.chat_templates,
            special_tokens=tokenizer.special_tokens,
            control_tokens=tokenizer.control_tokens,
            added_tokens=tokenizer.added_tokens,
        )

    def warm_up(self) -> None:
        """Start the process (about 0.1 s) without waiting for it, so that the first `render` need not."""
        self._sandbox.start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The conversation as the model wants to read it. `arguments` are for this template, by name.

        With tools the template named "tool_use" is taken where there is one.
        Raises UsageError if the model has no template, or if the template or JSON cannot represent the
        conversation (the message says why); DamagedModel if the template is no Jinja, tries to break out or
        uses too much time or memory.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise UsageError("a message is not an object", "give each a role and a content")
        source = self._choose(with_tools=tools is not None)
        common = {**self._special_tokens, **(arguments or {}), "add_generation_prompt": add_generation_prompt}
        plain = _to_json([messages, tools, documents, source, common])
        try:
            marks = unused_characters(plain)
        except StopIteration as error:
            raise UsageError("the conversation uses every private-use character", "leave one out") from error
        try:
            said = {
                "messages": [self._mark_message(message, marks) for message in messages],
                "tools": self._said_by_others.mark(tools, marks),
                "documents": self._said_by_others.mark(documents, marks),
            }
        except RecursionError as error:
            raise UsageError("the conversation is nested too deeply", "send flatter tools") from error
        variables = {**common, **said}
        answer = self._sandbox.ask(_to_json({"source": source, "variables": variables}).encode())
        [(outcome, words)] = answer.items()
        chat = self._said_by_others.cut(words, marks)
        if outcome == "text":
            return chat
        if outcome == "refused":
            raise UsageError(f"the chat template refuses this conversation: {chat.text}")
        if outcome == "failed":
            raise UsageError(f"the chat template cannot render this conversation ({chat.text})")
        raise DamagedModel(f"the chat template is broken ({chat.text})", "use another one of this model")

    def close(self) -> None:
        """End the process. A later `render` starts another."""
        self._sandbox.close()

    def _choose(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        names = ", ".join(self._templates)
        found = f"only templates for {names}" if names else "no chat template"
        raise UsageError(f"this model has {found}", "give a plain prompt; base models continue a text")

    def _mark_message(self, message: Mapping[str, Any], marks: tuple[str, str]) -> Any:
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        literals = self._said_by_model if message.get("role") == "assistant" else self._said_by_others
        return literals.mark(dict(message), marks)


def _to_json(value: Any) -> str:
    """Raises UsageError for what JSON or Unicode does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_to_dict)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the conversation is not JSON: {error}", "use strings, numbers, lists and dicts"
        ) from error
    return text


def _to_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
