"""What one HTTP request came to, for its line in the log and for the sums of `/metrics`: noted where answers are
read (`Answers`), whichever API was asked.

Knows nothing of HTTP or of formats.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from localllm.metrics import Metrics

CANCELLED, FAILED = "cancelled", "error"  # finish reasons of answers that did not come to their end


class Sums(Protocol):
    """What adds up answers."""

    def ended(self, model: str, why: str, prompt: int, metrics: Metrics | None, tokens: int) -> None: ...


@dataclass
class Account:
    """One request. Its answers may be several, or none."""

    id: str
    sums: Sums
    with_prompts: bool = False
    model: str | None = None
    prompts: list[str] = field(default_factory=list)
    measured: list[Metrics] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """What the client was told went wrong."""

    def ended(self, model: str, why: str, prompt: int, metrics: Metrics | None = None, tokens: int = 0) -> None:
        """prompt: its tokens; tokens: of an answer without measurements, as it was left."""
        self.model = model
        self.reasons.append(why)
        self.measured += [metrics] if metrics else []
        self.prompt_tokens += prompt
        self.output_tokens += metrics.output_tokens if metrics else tokens
        self.sums.ended(model, why, prompt, metrics, tokens)


CURRENT: ContextVar[Account | None] = ContextVar("account", default=None)


def current() -> Account | None:
    """That of the request that is being answered."""
    return CURRENT.get()
