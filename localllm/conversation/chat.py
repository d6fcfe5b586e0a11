"""One conversation with a model: a tree of turns, the parameters, and the use of the context.

Editing, regenerating and undoing create branches, so nothing is lost; the prefix that branches share is in the
prefix cache and not recomputed. Independent of terminals and files.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from localllm.conversation.attach import Attachment, prompt_with_files
from localllm.conversation.model import ChatModel, Stream
from localllm.errors import UsageError
from localllm.metrics import Metrics
from localllm.request import ChatRequest, EventType, FinishReason, GenerationEvent, SamplingParams

Message = dict[str, str]
AnswerEvents = Generator[GenerationEvent, None, None]

CHECKPOINT_INTERVAL_S = 1.0


@dataclass(eq=False)
class Turn:
    """One question and its answer. Turns with the same parent are alternatives: another question, or another
    answer."""

    question: str  # as written by the user
    parent: "Turn | None"  # None for the root, which precedes the first question and is empty
    answer: str = ""
    thoughts: str = ""
    model: str = ""  # that answered
    finish_reason: FinishReason | None = None  # None: stopped, or in progress
    metrics: Metrics | None = None  # if the answer was completed
    attachments: tuple[Attachment, ...] = ()
    asked_at: float | None = None  # in seconds since 1970; None if unknown
    children: list["Turn"] = field(default_factory=list)
    chosen_child: "Turn | None" = None  # the child of the last active branch

    @property
    def siblings(self) -> list["Turn"]:
        """This turn and its alternatives on other branches, in the order in which they were asked."""
        return self.parent.children if self.parent else [self]

    @property
    def depth(self) -> int:
        """The number of its question on its branch, from 1; 0 for the root."""
        return len(self.path)

    @property
    def descendants(self) -> "Iterator[Turn]":
        """All turns below this one, each after its parent, in the order in which they were asked."""
        remaining = self.children[::-1]
        while remaining:
            turn = remaining.pop()
            yield turn
            remaining.extend(turn.children[::-1])

    @property
    def branch_end(self) -> "Turn":
        """The end of the last active branch from this turn."""
        turn = self
        while turn.chosen_child:
            turn = turn.chosen_child
        return turn

    @property
    def path(self) -> "list[Turn]":
        """Turns from the first question to this one; empty for the root."""
        turns, turn = [], self
        while turn.parent:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def messages(self) -> list[Message]:
        """Messages for the chat template.

        Reasoning stays with its answer: the template decides how much to use.
        """
        thoughts = {"reasoning_content": self.thoughts} if self.thoughts else {}
        answer = {"role": "assistant", "content": self.answer, **thoughts}
        return [{"role": "user", "content": prompt_with_files(self.question, self.attachments)}, answer]


class Chat:
    """`turns` are the questions and answers of the current branch; the system prompt is added when the model is
    called.
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
        self.root = self.current = Turn("", None)  # newest turn of the current branch
        self.inspect: int | None = None  # for the next question, as in ChatRequest
        self.stream: Stream | None = None
        # Called when a question is asked, about every second of its answer, and if it gets none.
        self.checkpoint: Callable[[], object] = lambda: None

    @property
    def turns(self) -> list[Turn]:
        """Turns of the current branch, oldest first."""
        return self.current.path

    @property
    def branches(self) -> list[Turn]:
        """The newest turn of each branch, in the order in which they were asked."""
        return [turn for turn in self.root.descendants if not turn.children]

    @property
    def messages(self) -> list[Message]:
        return [message for turn in self.turns for message in turn.messages]

    @property
    def last_metrics(self) -> Metrics | None:
        """Measurements of the last answer, if it was completed."""
        return self.current.metrics

    def ask(self, text: str, after: Turn | None = None, attachments: tuple[Attachment, ...] = ()) -> AnswerEvents:
        """Stream the answer to `text`, which becomes the newest turn; after: its parent, None for the newest turn;
        attachments: files that the model reads before it.

        Closing the iterator stops the answer and keeps its text so far. A question without any answer (after an
        error, or stopped before the first text) is removed again. Raises UsageError for a system prompt without a
        chat template, and whatever the model raises.
        """
        previous, parent = self.current, after or self.current
        turn = self.current = Turn(
            text, parent, model=self.model.name, attachments=attachments, asked_at=time.time()
        )
        parent.children.append(turn)
        previous_choice, parent.chosen_child = parent.chosen_child, turn
        texts, finished = dict.fromkeys(EventType, ""), False
        saved_at = self._checkpoint()
        try:
            stream = self.model.answer(
                ChatRequest(
                    self._prompt(),
                    self.params,
                    template_arguments=self.template_arguments,
                    inspect=self.inspect,
                    keep=True,
                )
            )
            with closing(stream) as events:
                self.stream = stream
                for event in events:
                    texts[event.kind] += event.text
                    turn.answer, turn.thoughts = texts[EventType.CONTENT], texts[EventType.REASONING]
                    turn.finish_reason, turn.metrics = event.finish_reason, event.metrics
                    finished = finished or event.finish_reason is not None
                    if time.monotonic() > saved_at + CHECKPOINT_INTERVAL_S:
                        saved_at = self._checkpoint()
                    yield event
        finally:
            self.stream = None
            if not (turn.answer or finished):
                parent.children.remove(turn)
                self.current, parent.chosen_child = previous, previous_choice
                self._checkpoint()

    def _checkpoint(self) -> float:
        """Call `checkpoint`; return the time from which the interval to the next one counts.

        It is later after a slow checkpoint, so that checkpoints take at most a twentieth of the time.
        """
        began = time.monotonic()
        self.checkpoint()
        return began + 20 * (time.monotonic() - began)

    def stop(self) -> None:
        """Stop the current answer immediately, from any thread: its reader reaches the end, and its text so far is
        kept. No effect without one.
        """
        if stream := self.stream:
            stream.close()

    def edit(self, turn: Turn, text: str, attachments: tuple[Attachment, ...] = ()) -> AnswerEvents:
        """Replace a turn's question, on a new branch from there. Events and errors: see `ask`."""
        return self.ask(text, turn.parent, attachments)

    def regenerate(self, turn: Turn) -> AnswerEvents:
        """Generate another answer to a turn's question, on a new branch from there. Events and errors: see
        `ask`."""
        return self.ask(turn.question, turn.parent, turn.attachments)

    def undo(self) -> str | None:
        """Remove the last question and its answer from the branch; `redo` restores them. Return the question, or
        None if there is none.
        """
        if self.current.parent is None:
            return None
        question, self.current = self.current.question, self.current.parent
        return question

    def redo(self) -> bool:
        """Restore what was undone last; return False if there is nothing."""
        if self.current.chosen_child is None:
            return False
        self.current = self.current.chosen_child
        return True

    def switch_to(self, turn: Turn) -> None:
        """Continue with the branch of this turn, from its last position."""
        for step in turn.path:
            assert step.parent
            step.parent.chosen_child = step
        self.current = turn.branch_end

    def clear(self) -> None:
        """Remove all turns; the system prompt and parameters are kept."""
        self.root = self.current = Turn("", None)

    @property
    def used_tokens(self) -> int | None:
        """Tokens of the conversation after the last answer; None without one, or if it was stopped."""
        return self.last_metrics.prompt_tokens + self.last_metrics.output_tokens if self.last_metrics else None

    def _prompt(self) -> str | list[Message]:
        if self.model.has_chat_template:
            system = [{"role": "system", "content": self.system}] if self.system else []
            question = self.current.messages[:1]
            return [*system, *(m for turn in self.turns[:-1] for m in turn.messages), *question]
        if self.system:
            raise UsageError(f"{self.model.name} has no chat template for a system prompt", "write it as text")
        # A base model gets the text so far.
        return "\n".join(message["content"] for message in self.messages[:-1])


def reached_max_tokens(model: ChatModel, params: SamplingParams, metrics: Metrics) -> bool:
    """Return whether max_tokens, and not the context, limited an answer that ended for its length.

    A grammar closes an answer some tokens before the nearer of the two limits.
    """
    if params.max_tokens is None:
        return False
    is_nearer = metrics.prompt_tokens + params.max_tokens <= model.context
    return metrics.output_tokens >= params.max_tokens or (params.grammar is not None and is_nearer)


def length_limit(
    model: ChatModel, params: SamplingParams, metrics: Metrics | None, *, flag: str = "/set max_tokens"
) -> tuple[str, str]:
    """Return the limit that ended an answer, and the remedy. flag: sets max_tokens in this interface"""
    if metrics and reached_max_tokens(model, params, metrics):
        how = "" if flag.startswith("--") else f" with {flag}"
        return f"{flag.removeprefix('/set ')} ({params.max_tokens})", f"raise it{how} for a longer answer"
    larger = f"load the model with a larger --context, up to {model.max_context}"
    remedy = larger if model.context < model.max_context else "the model supports no more"
    return f"the context ({model.context} tokens)", remedy
