"""Renders messages to the text a model was trained on, with its chat template."""

import copy
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from localllm.errors import DamagedModel, LocalLLMError, PromptRefused, UsageError
from localllm.text.control import ChatPiece, LiteralMarker, RenderedChat, find_unused_characters
from localllm.text.messages import convert_tool_arguments
from localllm.text.output.formats import OutputFormat
from localllm.text.tokenizer import Tokenizer

TEMPLATE_PROCESS = Path(__file__).with_name("template_process.py")
START_LIMIT_S = 30.0  # for a cold disk under load; about 0.1 s otherwise
RENDER_LIMIT_S = 2.0  # wall-clock time; the process's own limit of CPU time ends it earlier
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field, the usual one first
_SWITCHES = ("enable_thinking", "thinking")  # names of the argument that enables thinking
_GIVEN = {"messages", "tools", "add_generation_prompt"}  # arguments that every template receives
_EVERYWHERE = {"chat_template", "documents"}  # arguments that templates need not mention


class ChatTemplate:
    """Renders conversations like `transformers`, in a process that a hostile template cannot escape.

    **Control tokens in messages are text.** A literal such as `<|im_start|>` in a message, a tool or a document is
    marked, so that `Tokenizer.encode_chat` encodes it as text; control ids come from the template alone. Control
    tokens are those of the tokenizer, and any added token that the template mentions (`<tool_call>`, `<think>`).
    Assistant messages came from the model, and templates search them for `</think>` and the like, so that only the
    tokenizer's own control tokens are marked in these. Arguments for the template (`enable_thinking`) come from
    the caller and are not marked.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Collection[str] = (),
        added_tokens: Collection[str] = (),
    ):
        """The arguments are as in `Tokenizer`. Nothing is compiled yet."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._control_tokens, self._added_tokens = frozenset(control_tokens), frozenset(added_tokens)
        self._said_by_model = LiteralMarker(self._control_tokens)
        self._said_by_others = self._literals_of(self._templates.values())
        self._sandbox = TemplateSandbox()
        self._names: dict[str, frozenset[str]] = {}  # by source

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """Return the templates of a model."""
        return cls(
            tokenizer.chat_templates,
            special_tokens=tokenizer.special_tokens,
            control_tokens=tokenizer.control_tokens,
            added_tokens=tokenizer.added_tokens,
        )

    @property
    def sources(self) -> Mapping[str, str]:
        """Jinja sources by name."""
        return self._templates

    def with_templates(self, templates: Mapping[str, str]) -> Self:
        """Return other templates for the same model, sharing its process: closing one closes the other."""
        other = copy.copy(self)
        other._templates = dict(templates)
        other._said_by_others = self._literals_of(templates.values())
        return other

    def check(self) -> None:
        """Raise DamagedModel for a template that is not valid Jinja."""
        for source in self._templates.values():
            self._names_in(source)

    def warm_up(self) -> None:
        """Start the process (about 0.1 s) without waiting for it, to speed up the first `render`."""
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
        """Render a conversation as the model expects it. arguments: for this template, by name

        Among several templates, the one named by the argument `chat_template` is used, otherwise "tool_use" if
        there are tools, otherwise "default". Arguments of tool calls may be objects or JSON text: the template
        receives objects, or text if it fails with objects.

        Raises UsageError if the model has no template, or the template or JSON cannot represent the conversation
        (the message says why); DamagedModel if the template is not valid Jinja, tries to escape or uses too much
        time or memory.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise UsageError("a message is not an object", "give each a role and a content")
        own_arguments = {"documents": documents, **(arguments or {})}
        source = self._choose(own_arguments.pop("chat_template", None), with_tools=tools is not None)
        documents = own_arguments.pop("documents")
        common = {**self._special_tokens, **own_arguments, "add_generation_prompt": add_generation_prompt}
        serialized = _to_json([messages, tools, documents, source, common])
        try:
            marks = find_unused_characters(serialized)
        except StopIteration as error:
            raise UsageError("the conversation uses every private-use character", "leave one out") from error

        def request_rendering(messages: Sequence[Mapping[str, Any]]) -> tuple[str, RenderedChat]:
            try:
                marked = {
                    "messages": [self._mark_message(message, marks) for message in messages],
                    "tools": self._said_by_others.mark(tools, marks),
                    "documents": self._said_by_others.mark(documents, marks),
                }
            except RecursionError as error:
                raise UsageError("the conversation is nested too deeply", "send flatter tools") from error
            request = {"source": source, "variables": {**common, **marked}}
            [(outcome, response)] = self._sandbox.request(_to_json(request).encode()).items()
            return outcome, self._said_by_others.split(response, marks)

        outcome, chat = request_rendering([convert_tool_arguments(message, as_text=False) for message in messages])
        if outcome == "failed" and any("tool_calls" in message for message in messages):
            other_outcome, other_chat = request_rendering(
                [convert_tool_arguments(message, as_text=True) for message in messages]
            )
            outcome, chat = (other_outcome, other_chat) if other_outcome == "text" else (outcome, chat)
        if outcome == "text":
            return chat
        if outcome == "refused":
            system = any(message.get("role") == "system" for message in messages)
            remedy = "it may not support system prompts: put it in the first question" if system else None
            raise PromptRefused(f"the chat template refuses this conversation: {chat.text}", remedy)
        raise self._fault(outcome, chat.text)

    def begin_answer(self, chat: RenderedChat, text: str) -> RenderedChat:
        """The rendered chat with the begin of the answer behind it, which is only text. Thoughts that the template
        has opened are closed before it. Raises UsageError for a model whose answers are messages in channels."""
        output = OutputFormat.detect(self._templates, self._added_tokens)
        if output.channels:
            raise UsageError("this model cannot continue a given answer", "end with a user's message")
        begun: tuple[ChatPiece, ...] = ()
        if output.reasoning and chat.text.rstrip().endswith(output.reasoning.begin):
            begun = (ChatPiece(f"{output.reasoning.end}\n\n"),)
        marks = find_unused_characters(text)
        said = self._said_by_model.split(self._said_by_model.mark(text, marks), marks)
        return RenderedChat((*chat.pieces, *begun, *said.pieces))

    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]:
        """Return the template arguments that a user requested, with `think` translated for this template.

        Raises UsageError for an argument, or tools, that the template does not read, or a switch that it does not
        have.
        """
        if not given and think is None and not with_tools:
            return {}
        source = self._choose(given.get("chat_template"), with_tools=with_tools)
        # Checked in the source, because some templates assign `tools` themselves if it is missing.
        if with_tools and not re.search(r"\btools\b", source):
            raise UsageError("the chat template does not read tools", "describe them in the system prompt")
        readable = self._names_in(source)
        if unknown := sorted(given.keys() - readable - _EVERYWHERE):
            names = ", ".join(sorted(readable - self._special_tokens.keys())) or "none at all"
            raise UsageError(f"the chat template does not read {unknown[0]}", f"it reads {names}")
        switches = [name for name in _SWITCHES if name in readable]
        if think is None or (think and not switches and "reasoning_effort" in readable):
            return dict(given)
        if not switches:
            remedy = "reasoning_effort=low makes it shorter" if "reasoning_effort" in readable else None
            raise UsageError("the chat template has no switch for thinking", remedy)
        return dict.fromkeys(switches, think) | dict(given)

    def close(self) -> None:
        """End the process. A later `render` starts another."""
        self._sandbox.close()

    def _literals_of(self, templates: Iterable[str]) -> LiteralMarker:
        """Return the literals to mark in text not from the model: control tokens, and added tokens in the
        templates.
        """
        all_sources = "\n".join(templates)
        mentioned = {token for token in self._added_tokens if token in all_sources and not token.isspace()}
        return LiteralMarker(self._control_tokens | mentioned)

    def _names_in(self, source: str) -> frozenset[str]:
        """Return the variables that a template reads from outside, cached."""
        if source not in self._names:
            [(outcome, words)] = self._sandbox.request(_to_json({"source": source}).encode()).items()
            if outcome != "text":
                raise self._fault(outcome, words)
            self._names[source] = frozenset(words.split()) - _GIVEN
        return self._names[source]

    def _choose(self, name: Any, *, with_tools: bool) -> str:
        candidates = [name] if name is not None else ["tool_use", "default"] if with_tools else ["default"]
        existing = (name for name in candidates if isinstance(name, str) and name in self._templates)
        source = next((self._templates[name] for name in existing), None)
        if source is None:
            names = ", ".join(self._templates)
            available = f"only templates for {names}" if names else "no chat template"
            choose_remedy, run_remedy = "name one as chat_template", "`localllm run` continues the prompt as it is"
            raise UsageError(f"this model has {available}", choose_remedy if names else run_remedy)
        return source

    def _fault(self, outcome: str, words: str) -> LocalLLMError:
        if outcome == "failed":
            return UsageError(f"the chat template cannot render this conversation ({words})")
        return DamagedModel(f"the chat template is broken ({words})", "use another one of this model")

    def _mark_message(self, message: Mapping[str, Any], marks: tuple[str, str]) -> Any:
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            # gpt-oss's template rejects a call with both content and `thinking`.
            other = {} if message.get("tool_calls") and message.get("content") else {"thinking": reasoning}
            message = {**other, **message, "reasoning_content": reasoning}
        literals = self._said_by_model if message.get("role") == "assistant" else self._said_by_others
        return literals.mark(dict(message), marks)


def _to_json(value: Any) -> str:
    """Encode to JSON. Raises UsageError for values that JSON or Unicode cannot represent."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_to_dict)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the conversation is not JSON: {error}", "use only strings, numbers, lists and dicts"
        ) from error
    return text


def _to_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


class TemplateSandbox:
    """A process that renders templates with limited memory and time, started on demand and replaced when it dies.

    Safe to use from several threads, with one rendering at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self._lock:
            self._start()

    def request(self, request: bytes) -> dict[str, str]:
        """Send one line of JSON and return the response.

        Raises DamagedModel if the process died of the request, LocalLLMError if it cannot be started.
        """
        with self._lock:
            process = self._start()
            try:
                if not self._ready and self._exchange(process, b"", START_LIMIT_S) != b"ready\n":
                    raise LocalLLMError("the process for chat templates did not start", "is jinja2 installed?")
                self._ready = True
                line = self._exchange(process, request + b"\n", RENDER_LIMIT_S)
                if not line.endswith(b"\n"):
                    raise DamagedModel(_cause(process), "the template is broken, or the conversation is too long")
                return json.loads(line)
            except BaseException:
                self._end()  # otherwise the next exchange would receive this response
                raise

    def close(self) -> None:
        """End the process, if there is one. The next request starts another."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # -P: import nothing from the folder of the program or the user; its own process group receives no
            # Ctrl-C
            command = [sys.executable, "-P", str(TEMPLATE_PROCESS)]
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0
                )
            except OSError as error:
                raise LocalLLMError(f"the process for chat templates cannot be started: {error}") from error
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._ready = None, False

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, limit_s: float) -> bytes:
        """Write a request, then read a line; it is incomplete if the process died or took too long."""
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        deadline = time.monotonic() + limit_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
                read = os.read(process.stdout.fileno(), 2**20)
                if not read:
                    break
                line += read
        return bytes(line)


def _cause(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        code = -signal.SIGPROF  # still running
    if code == -signal.SIGPROF:
        return "the chat template ran for too long and was stopped"
    return "the chat template used too much memory"
