"""Who guesses tokens, so that one step can verify several of them. A guess changes how many tokens a step brings,
never which."""

from typing import Protocol

from localllm.runtime.sequence import Sequence


class Drafter(Protocol):
    def may_draft(self, sequence: Sequence) -> bool:
        """Might it draft behind a token that is being computed? Then that is read before the next step begins."""
        ...

    def draft(self, sequences: list[Sequence]) -> None:
        """Set the drafts of some: at most `room` tokens each. None has an unread token."""
        ...

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A step has brought 1 + accepted tokens, of which one was computed for each of `drafted` guesses."""
        ...

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        """So long after the step before it a step was done in which each brought one token and its drafts."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...
