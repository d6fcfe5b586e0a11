"""Counts and rates of a batch. Tokens and times are of this run; lines are of the whole file."""

import math
from dataclasses import dataclass
from typing import Any

from localllm.formatting import format_rate, format_seconds


@dataclass
class BatchCounts:
    """Counters of a running batch."""

    total: int | None = None  # lines of the input, if known
    resumed: int = 0  # answered by an earlier run
    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, found in the cache
    answer_tokens: int = 0
    other_model_lines: int = 0  # lines of this run that request another model
    other_model: str = ""  # one of those models

    @property
    def lines(self) -> int:
        return self.ok + self.failed

    def add(self, *, ok: bool) -> None:
        self.ok += ok
        self.failed += not ok

    def add_resumed(self, *, ok: bool) -> None:
        self.resumed += 1
        self.add(ok=ok)


@dataclass(frozen=True)
class BatchSummary:
    """Results of a finished batch. steps: engine steps that produced answer tokens."""

    counts: BatchCounts
    seconds: float
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.counts.answer_tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def lines_per_s(self) -> float:
        return (self.counts.lines - self.counts.resumed) / self.seconds if self.seconds > 0 else math.nan

    @property
    def tokens_per_step(self) -> float:
        return self.counts.answer_tokens / self.steps if self.steps else math.nan

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in the cache."""
        return self.counts.cached_tokens / self.counts.prompt_tokens if self.counts.prompt_tokens else math.nan

    def as_dict(self) -> dict[str, Any]:
        counts = self.counts
        values: dict[str, Any] = {
            "lines": counts.lines,
            "ok": counts.ok,
            "failed": counts.failed,
            "kept": counts.resumed,
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "hit_rate": self.hit_rate,
            "answer_tokens": counts.answer_tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "lines_per_s": self.lines_per_s,
            "steps": self.steps,
            "tokens_per_step": self.tokens_per_step,
        }
        return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}

    def __str__(self) -> str:
        counts = self.counts
        resumed = f", {counts.resumed:,} of them by an earlier run" if counts.resumed else ""
        noun = "line" if counts.lines == 1 else "lines"
        lines = f"{counts.lines:,} {noun}: {counts.ok:,} ok, {counts.failed:,} failed{resumed}"
        if counts.lines == counts.resumed:
            return f"{lines}; nothing remained to do"
        hits = "" if math.isnan(self.hit_rate) else f" ({self.hit_rate:.0%} found in the cache)"
        per_step = "" if math.isnan(self.tokens_per_step) else f", {self.tokens_per_step:.1f} tokens per step"
        return (
            f"{lines}\n{counts.prompt_tokens:,} tokens of prompts{hits}, {counts.answer_tokens:,} of answers\n"
            f"{format_seconds(self.seconds)}: {format_rate(self.tokens_per_s)}, "
            f"{self.lines_per_s:.3g} lines/s{per_step}"
        )
