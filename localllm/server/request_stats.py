"""What one HTTP request came to, for its line in the log and for the sums of `/metrics`: noted where answers are
read (`Answers`), whichever API was asked.

Knows nothing of HTTP or of formats.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from localllm.api.body import IgnoredFields
from localllm.metrics import Metrics

CANCELLED, FAILED = "cancelled", "error"  # finish reasons of answers that did not come to their end


class AnswerCounter(Protocol):
    """What adds up answers."""

    def answer_ended(
        self, model: str, why: str, prompt_tokens: int, metrics: Metrics | None, output_tokens: int
    ) -> None: ...


@dataclass
class RequestStats:
    """One request. Its answers may be several, or none."""

    id: str
    counter: AnswerCounter
    log_prompts: bool = False
    model: str | None = None
    prompts: list[str] = field(default_factory=list)
    metrics_list: list[Metrics] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """What the client was told went wrong."""

    template: str | None = None
    """The chat template that stands in for the one that the model lacks."""

    ignored: IgnoredFields = field(default_factory=IgnoredFields)

    def answer_ended(
        self, model: str, why: str, prompt_tokens: int, metrics: Metrics | None = None, output_tokens: int = 0
    ) -> None:
        """prompt_tokens: its tokens; output_tokens: of an answer without measurements, as it was left."""
        self.model = model
        self.finish_reasons.append(why)
        self.metrics_list += [metrics] if metrics else []
        self.prompt_tokens += prompt_tokens
        self.output_tokens += metrics.output_tokens if metrics else output_tokens
        self.counter.answer_ended(model, why, prompt_tokens, metrics, output_tokens)


CURRENT_REQUEST: ContextVar[RequestStats | None] = ContextVar("account", default=None)


def current_request_stats() -> RequestStats | None:
    """That of the request that is being answered."""
    return CURRENT_REQUEST.get()
