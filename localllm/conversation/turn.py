"""One question and its answer: a node in the tree of a conversation."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.conversation.attach import Attachment, prompt_with_files
from localllm.metrics import Metrics
from localllm.request import FinishReason

Message = dict[str, str]


@dataclass(eq=False)
class Turn:
    """Turns with the same parent are alternatives: another question, or another answer."""

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
