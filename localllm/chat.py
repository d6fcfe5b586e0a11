"""One conversation with a model: who said what, the parameters, how full the context is; on disk as JSON.

Knows nothing of terminals. The model is anything shaped like an LLM.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from localllm.errors import UsageError
from localllm.files import write_whole
from localllm.metrics import Metrics
from localllm.params import params_from_json, params_to_json
from localllm.request import GenerationEvent, Kind, SamplingParams

FILE_VERSION = 1
Message = dict[str, str]
Events = Generator[GenerationEvent, None, None]


class Stream(Iterator[GenerationEvent], Protocol):
    def close(self) -> None: ...


class ChatModel(Protocol):
    """What a conversation needs of an LLM."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def default_params(self) -> SamplingParams: ...
    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Stream: ...


class Chat:
    """`messages` are the turns so far, without the system prompt; `system` stands before them when asked.

    What the model thought stays with its answer as `reasoning_content`: templates say how much of it they want.
    """

    def __init__(
        self,
        model: ChatModel,
        params: SamplingParams | None = None,
        system: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ):
        self.model = model
        self.params = params or model.default_params
        self.system = system
        self.template_arguments = dict(template_arguments or {})
        self.messages: list[Message] = []
        self.last: Metrics | None = None  # of the last answer, if it came to its end

    def ask(self, text: str) -> Events:
        """Stream the answer to `text`; both become part of the conversation.

        Closing the iterator stops the answer, and what was said so far stays. A question that got no answer
        at all (an error, or stopped before the first word) leaves the conversation as it was.
        Raises UsageError for a system prompt without a chat template, and whatever the model raises.
        """
        self.messages.append({"role": "user", "content": text})
        self.last = None
        said, finished = dict.fromkeys(Kind, ""), False
        try:
            stream = self.model.stream(self._prompt(), self.params, template_arguments=self.template_arguments)
            with closing(stream) as events:
                for event in events:
                    said[event.kind] += event.text
                    finished = finished or event.finish_reason is not None
                    self.last = event.metrics or self.last
                    yield event
        finally:
            if said[Kind.CONTENT] or finished:
                thoughts = {"reasoning_content": said[Kind.REASONING]} if said[Kind.REASONING] else {}
                self.messages.append({"role": "assistant", "content": said[Kind.CONTENT], **thoughts})
            else:
                self.messages.pop()

    def undo(self) -> str | None:
        """Take back the last question and its answer; gives the question, or None if there is none."""
        if not self.messages:
            return None
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        self.last = None
        return question

    def clear(self) -> None:
        """Forget what was said; system prompt and parameters stay."""
        self.messages.clear()
        self.last = None

    @property
    def used_tokens(self) -> int | None:
        """Tokens that the conversation took after the last answer; None without one, or if it was stopped."""
        return self.last.prompt_tokens + self.last.output_tokens if self.last else None

    def save(self, path: Path) -> None:
        """Write the conversation to a file, whole or not at all, readable for this user alone.

        Raises UsageError where the file cannot be written.
        """
        content = {
            "version": FILE_VERSION,
            "model": self.model.name,
            "system": self.system,
            "params": params_to_json(self.params),
            "messages": self.messages,
        }
        try:
            write_whole(path, json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False))
        except OSError as error:
            raise UsageError(f"the conversation cannot be saved: {error}") from error

    def load(self, path: Path) -> str:
        """Take over the conversation of a file; gives the name of the model it was held with.

        Raises UsageError, and changes nothing, where the file is not there or is no conversation.
        """
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise UsageError(f"the conversation cannot be read: {error}") from error
        except ValueError as error:
            raise UsageError(f"{path} is not JSON ({error})") from error
        if not isinstance(content, dict) or content.get("version") != FILE_VERSION:
            raise UsageError(f"{path} is no conversation of format {FILE_VERSION}")
        try:
            params, messages = params_from_json(content["params"]), _checked(content["messages"])
            system, name = content["system"], str(content["model"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{path} is a damaged conversation ({error!r})") from error
        if not (system is None or isinstance(system, str)):
            raise UsageError(f"{path} is a damaged conversation (system is no text)")
        self.params, self.messages, self.system, self.last = params, messages, system, None
        return name

    def _prompt(self) -> str | list[Message]:
        if self.model.has_chat_template:
            system = [{"role": "system", "content": self.system}] if self.system else []
            return [*system, *self.messages]
        if self.system:
            raise UsageError(f"{self.model.name} has no chat template for a system prompt", "write it as text")
        # A model that only continues text gets the text so far.
        return "\n".join(message["content"] for message in self.messages)


def _checked(messages: Any) -> list[Message]:
    """Raises ValueError unless question and answer take turns, as templates demand."""
    kept = ("role", "content", "reasoning_content")
    checked = [{name: str(m[name]) for name in kept if name in m or name != "reasoning_content"} for m in messages]
    roles = [message["role"] for message in checked]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError("question and answer do not take turns")
    return checked
