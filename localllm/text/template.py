"""Messages to the text a model was trained on, by the chat template that came with it."""

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

from localllm.errors import DamagedModel, LocalLLMError, PromptRefused, UsageError
from localllm.text.control import ChatPiece, LiteralMarker, RenderedChat, find_unused_characters
from localllm.text.messages import convert_tool_arguments
from localllm.text.output.formats import OutputFormat
from localllm.text.sandbox import TemplateSandbox
from localllm.text.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same thing, the usual one first
_SWITCHES = ("enable_thinking", "thinking")  # names of the argument that turns thinking on and off
_GIVEN = {"messages", "tools", "add_generation_prompt"}  # arguments that every template gets
_EVERYWHERE = {"chat_template", "documents"}  # arguments that need no mention in a template


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
        self._control_tokens, self._added_tokens = frozenset(control_tokens), frozenset(added_tokens)
        self._said_by_model = LiteralMarker(self._control_tokens)
        self._said_by_others = self._literals_of(self._templates.values())
        self._sandbox = TemplateSandbox()
        self._names: dict[str, frozenset[str]] = {}  # by source

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """The templates of a model."""
        return cls(
            tokenizer.chat_templates,
            special_tokens=tokenizer.special_tokens,
            control_tokens=tokenizer.control_tokens,
            added_tokens=tokenizer.added_tokens,
        )

    @property
    def sources(self) -> Mapping[str, str]:
        """Jinja, by name."""
        return self._templates

    def with_templates(self, templates: Mapping[str, str]) -> Self:
        """Other templates for the same model, rendered in the same process: to close one is to close the other."""
        other = copy.copy(self)
        other._templates = dict(templates)
        other._said_by_others = self._literals_of(templates.values())
        return other

    def check(self) -> None:
        """Raises DamagedModel for a template that is no Jinja."""
        for source in self._templates.values():
            self._names_in(source)

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

        Of several templates, the one named by the argument `chat_template` is taken, else "tool_use" where
        there are tools, else "default". Arguments of tool calls may be objects or JSON text: the template gets
        objects, or text where it cannot do with objects.
        Raises UsageError if the model has no template, or if the template or JSON cannot represent the
        conversation (the message says why); DamagedModel if the template is no Jinja, tries to break out or
        uses too much time or memory.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise UsageError("a message is not an object", "give each a role and a content")
        own = {"documents": documents, **(arguments or {})}
        source = self._choose(own.pop("chat_template", None), with_tools=tools is not None)
        documents = own.pop("documents")
        common = {**self._special_tokens, **own, "add_generation_prompt": add_generation_prompt}
        plain = _to_json([messages, tools, documents, source, common])
        try:
            marks = find_unused_characters(plain)
        except StopIteration as error:
            raise UsageError("the conversation uses every private-use character", "leave one out") from error

        def ask(messages: Sequence[Mapping[str, Any]]) -> tuple[str, RenderedChat]:
            try:
                said = {
                    "messages": [self._mark_message(message, marks) for message in messages],
                    "tools": self._said_by_others.mark(tools, marks),
                    "documents": self._said_by_others.mark(documents, marks),
                }
            except RecursionError as error:
                raise UsageError("the conversation is nested too deeply", "send flatter tools") from error
            request = {"source": source, "variables": {**common, **said}}
            [(outcome, words)] = self._sandbox.request(_to_json(request).encode()).items()
            return outcome, self._said_by_others.split(words, marks)

        outcome, chat = ask([convert_tool_arguments(message, as_text=False) for message in messages])
        if outcome == "failed" and any("tool_calls" in message for message in messages):
            again, other = ask([convert_tool_arguments(message, as_text=True) for message in messages])
            outcome, chat = (again, other) if again == "text" else (outcome, chat)
        if outcome == "text":
            return chat
        if outcome == "refused":
            system = any(message.get("role") == "system" for message in messages)
            remedy = "it may know no system prompt: say it in the first question" if system else None
            raise PromptRefused(f"the chat template refuses this conversation: {chat.text}", remedy)
        raise self._fault(outcome, chat.text)

    def begin_answer(self, chat: RenderedChat, text: str) -> RenderedChat:
        """The rendered chat with the begin of the answer behind it, which is only text. Thoughts that the template
        has opened are closed before it. Raises UsageError for a model whose answers are messages in channels."""
        output = OutputFormat.detect(self._templates, self._added_tokens)
        if output.channels:
            raise UsageError("the answers of this model cannot go on from a text", "end with a user's message")
        begun: tuple[ChatPiece, ...] = ()
        if output.reasoning and chat.text.rstrip().endswith(output.reasoning.begin):
            begun = (ChatPiece(f"{output.reasoning.end}\n\n"),)
        marks = find_unused_characters(text)
        said = self._said_by_model.split(self._said_by_model.mark(text, marks), marks)
        return RenderedChat((*chat.pieces, *begun, *said.pieces))

    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]:
        """The arguments for a template that a person asked for; `think` in the words of this template.

        Raises UsageError for an argument, or for tools, that the template does not read, or a switch that it does
        not have.
        """
        if not given and think is None and not with_tools:
            return {}
        source = self._choose(given.get("chat_template"), with_tools=with_tools)
        # Not by the names that it reads from outside: some templates set `tools` themselves where it is missing.
        if with_tools and not re.search(r"\btools\b", source):
            raise UsageError("the chat template does not read tools", "describe them in the system prompt")
        known = self._names_in(source)
        if unknown := sorted(given.keys() - known - _EVERYWHERE):
            names = ", ".join(sorted(known - self._special_tokens.keys())) or "none at all"
            raise UsageError(f"the chat template does not read {unknown[0]}", f"it reads {names}")
        switches = [name for name in _SWITCHES if name in known]
        if think is None or (think and not switches and "reasoning_effort" in known):
            return dict(given)
        if not switches:
            remedy = "reasoning_effort=low makes it shorter" if "reasoning_effort" in known else None
            raise UsageError("the chat template has no switch for thinking", remedy)
        return dict.fromkeys(switches, think) | dict(given)

    def close(self) -> None:
        """End the process. A later `render` starts another."""
        self._sandbox.close()

    def _literals_of(self, templates: Iterable[str]) -> LiteralMarker:
        """Of what others than the model write: control tokens, and those that the templates mention."""
        written = "\n".join(templates)
        mentioned = {token for token in self._added_tokens if token in written and not token.isspace()}
        return LiteralMarker(self._control_tokens | mentioned)

    def _names_in(self, source: str) -> frozenset[str]:
        """The variables that a template reads from outside; the process is asked once."""
        if source not in self._names:
            [(outcome, words)] = self._sandbox.request(_to_json({"source": source}).encode()).items()
            if outcome != "text":
                raise self._fault(outcome, words)
            self._names[source] = frozenset(words.split()) - _GIVEN
        return self._names[source]

    def _choose(self, name: Any, *, with_tools: bool) -> str:
        wanted = [name] if name is not None else ["tool_use", "default"] if with_tools else ["default"]
        known = (name for name in wanted if isinstance(name, str) and name in self._templates)
        source = next((self._templates[name] for name in known), None)
        if source is None:
            names = ", ".join(self._templates)
            found = f"only templates for {names}" if names else "no chat template"
            by_name, plain = "name one as chat_template", "`localllm run` continues the prompt as it is"
            raise UsageError(f"this model has {found}", by_name if names else plain)
        return source

    def _fault(self, outcome: str, words: str) -> LocalLLMError:
        if outcome == "failed":
            return UsageError(f"the chat template cannot render this conversation ({words})")
        return DamagedModel(f"the chat template is broken ({words})", "use another one of this model")

    def _mark_message(self, message: Mapping[str, Any], marks: tuple[str, str]) -> Any:
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            # gpt-oss's template refuses a call with both content and `thinking`.
            other = {} if message.get("tool_calls") and message.get("content") else {"thinking": reasoning}
            message = {**other, **message, "reasoning_content": reasoning}
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
