"""One question and its answer, as a part of the tree that a conversation is."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.conversation.attach import Attachment, prompt_with_files
from localllm.metrics import Metrics
from localllm.request import FinishReason

Message = dict[str, str]


@dataclass(eq=False)
class Turn:
    """Turns with one parent are other ways to go on from there: another question, or another answer."""

    question: str  # as it was written
    parent: "Turn | None"  # None: of the root, which stands before the first question and says nothing
    answer: str = ""
    thoughts: str = ""
    model: str = ""  # who answered
    finish_reason: FinishReason | None = None  # None: stopped, or still under way
    metrics: Metrics | None = None  # if the answer came to its end
    attachments: tuple[Attachment, ...] = ()
    asked_at: float | None = None  # in seconds since 1970; None: not known
    children: list["Turn"] = field(default_factory=list)
    chosen_child: "Turn | None" = None  # of the children, the one that was last gone on with

    @property
    def siblings(self) -> list["Turn"]:
        """This turn and what stands in its place on other branches, in the order in which they were asked."""
        return self.parent.children if self.parent else [self]

    @property
    def depth(self) -> int:
        """The number of its question on its branch, from 1; 0 of the root."""
        return len(self.path)

    @property
    def descendants(self) -> "Iterator[Turn]":
        """All turns behind this one, each after its parent, in the order in which they were asked."""
        left = self.children[::-1]
        while left:
            turn = left.pop()
            yield turn
            left.extend(turn.children[::-1])

    @property
    def branch_end(self) -> "Turn":
        """The end of the branch that was last gone on with."""
        turn = self
        while turn.chosen_child:
            turn = turn.chosen_child
        return turn

    @property
    def path(self) -> "list[Turn]":
        """From the first question to this turn; nothing for the root."""
        turns, turn = [], self
        while turn.parent:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def messages(self) -> list[Message]:
        """As templates read them. What the model thought stays with its answer: templates say how much of it they
        want."""
        thoughts = {"reasoning_content": self.thoughts} if self.thoughts else {}
        answer = {"role": "assistant", "content": self.answer, **thoughts}
        return [{"role": "user", "content": prompt_with_files(self.question, self.attachments)}, answer]
