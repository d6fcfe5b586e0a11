"""One conversation with a model: a tree of turns, the parameters, how full the context is; on disk as JSON.

Every change of mind is a branch: nothing that was said is lost by editing, asking again or undoing, and what two
branches share is found in the prefix cache, so that it is not computed again. Knows nothing of terminals.
"""

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from localllm.conversation.turn import Message, Turn
from localllm.errors import UsageError
from localllm.files import write_whole
from localllm.metrics import Metrics
from localllm.model import ChatModel, Stream
from localllm.params import params_from_json, params_to_json
from localllm.request import GenerationEvent, Kind, SamplingParams

FILE_VERSION = 1
Events = Generator[GenerationEvent, None, None]


class Chat:
    """`turns` are what was said on this branch, without the system prompt, which stands before it when asked."""

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
        self.root = self.at = Turn("", None)  # at: the newest turn of this branch
        self.inspect: int | None = None  # as Request.inspect, of what is asked next
        self.under_way: Stream | None = None

    @property
    def turns(self) -> list[Turn]:
        """Of this branch, oldest first."""
        return self.at.path

    @property
    def messages(self) -> list[Message]:
        return [message for turn in self.turns for message in turn.messages]

    @property
    def last(self) -> Metrics | None:
        """Of the last answer, if it came to its end."""
        return self.at.metrics

    def ask(self, text: str, after: Turn | None = None) -> Events:
        """Stream the answer to `text`, which becomes the newest turn; after: the turn that it follows, the newest
        where it is None.

        Closing the iterator stops the answer, and what was said so far stays. A question that got no answer
        at all (an error, or stopped before the first word) leaves the conversation as it was.
        Raises UsageError for a system prompt without a chat template, and whatever the model raises.
        """
        before, parent = self.at, after or self.at
        turn = self.at = Turn(text, parent, model=self.model.name)
        parent.children.append(turn)
        last, parent.chosen = parent.chosen, turn
        said, finished = dict.fromkeys(Kind, ""), False
        try:
            stream = self.model.stream(
                self._prompt(), self.params, template_arguments=self.template_arguments, inspect=self.inspect
            )
            with closing(stream) as events:
                self.under_way = stream
                for event in events:
                    said[event.kind] += event.text
                    turn.answer, turn.thoughts = said[Kind.CONTENT], said[Kind.REASONING]
                    turn.finish_reason, turn.metrics = event.finish_reason, event.metrics
                    finished = finished or event.finish_reason is not None
                    yield event
        finally:
            self.under_way = None
            if not (turn.answer or finished):
                parent.children.remove(turn)
                self.at, parent.chosen = before, last

    def stop(self) -> None:
        """End the answer under way at once, from any thread: whoever reads it finds its end, and what was said so
        far stays. Nothing where none is under way."""
        if stream := self.under_way:
            stream.close()

    def edit(self, turn: Turn, text: str) -> Events:
        """Ask something else in place of a turn of this branch: another branch from there. As `ask`."""
        return self.ask(text, after=turn.parent)

    def again(self, turn: Turn) -> Events:
        """Another answer to the question of a turn of this branch: another branch from there. As `ask`."""
        return self.ask(turn.question, after=turn.parent)

    def undo(self) -> str | None:
        """Take back the last question and its answer, which `redo` brings back; gives the question, or None if
        there is none."""
        if self.at.parent is None:
            return None
        question, self.at = self.at.question, self.at.parent
        return question

    def redo(self) -> bool:
        """Bring back what was taken back last; False where there is nothing."""
        if self.at.chosen is None:
            return False
        self.at = self.at.chosen
        return True

    def switch(self, turn: Turn) -> None:
        """Go on with the branch of this turn, from where it was left."""
        for step in turn.path:
            assert step.parent
            step.parent.chosen = step
        self.at = turn.last

    def clear(self) -> None:
        """Forget what was said; system prompt and parameters stay."""
        self.root = self.at = Turn("", None)

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
        self.params, self.system = params, system
        self.clear()
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            turn = Turn(question["content"], self.at, answer["content"], answer.get("reasoning_content", ""), name)
            self.at.children.append(turn)
            self.at.chosen = turn
            self.at = turn
        return name

    def _prompt(self) -> str | list[Message]:
        if self.model.has_chat_template:
            system = [{"role": "system", "content": self.system}] if self.system else []
            asked = self.at.messages[:1]
            return [*system, *(m for turn in self.turns[:-1] for m in turn.messages), *asked]
        if self.system:
            raise UsageError(f"{self.model.name} has no chat template for a system prompt", "write it as text")
        # A model that only continues text gets the text so far.
        return "\n".join(message["content"] for message in self.messages[:-1])


def _checked(messages: Any) -> list[Message]:
    """Raises ValueError unless question and answer take turns, as templates demand."""
    kept = ("role", "content", "reasoning_content")
    checked = [{name: str(m[name]) for name in kept if name in m or name != "reasoning_content"} for m in messages]
    roles = [message["role"] for message in checked]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError("question and answer do not take turns")
    return checked
