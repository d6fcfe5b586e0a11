"""What a person reads about an answer: the block that `--verbose` prints, and facts in columns."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from localllm.formatting import format_bytes, format_columns, format_rate, format_seconds
from localllm.metrics import Metrics

if TYPE_CHECKING:
    from localllm.plan.memory import MemoryPlan


def metrics_block(metrics: Metrics, seed: int | None) -> str:
    """Every measurement of one answer, in the words and definitions of `metrics.py`."""
    itl = "  ".join(f"p{percent} {format_seconds(metrics.itl_percentile(percent))}" for percent in (50, 95, 99))
    return format_columns(
        [
            ("load", format_seconds(metrics.load_s)),
            ("queue", format_seconds(metrics.queue_s)),
            ("prompt", f"{metrics.prompt_tokens} tokens ({metrics.cached_tokens} cached)"),
            ("prefill", f"{format_seconds(metrics.prefill_s)}  {format_rate(metrics.prefill_tokens_per_s)}"),
            ("TTFT", format_seconds(metrics.ttft_s)),
            ("output", f"{metrics.output_tokens} tokens"),
            ("ITL", itl),
            ("TPOT", format_seconds(metrics.tpot_s)),
            ("TPS", format_rate(metrics.tokens_per_s)),
            ("drafts", f"{metrics.draft_tokens} tokens ({metrics.accepted_tokens} accepted)"),
            ("tokens/step", "-" if math.isnan(metrics.tokens_per_step) else f"{metrics.tokens_per_step:.2f}"),
            ("E2E", format_seconds(metrics.e2e_s)),
            ("peak memory", format_bytes(metrics.peak_bytes)),
            ("seed", "-" if seed is None else str(seed)),
        ]
    )


def load_block(
    device: str,
    memory: "MemoryPlan",
    phases: Mapping[str, float],
    bytes_per_s: float | None,
    without_graphs: str = "",
) -> str:
    """What a loaded model takes of its device, and how long each phase of loading it took. without_graphs: why a
    GPU's steps are not captured, where it is so."""
    from localllm.plan.memory import BLOCK_SIZE  # what is said of answers need not wait for it

    parts = [
        ("weights", memory.weights.total, ""),
        ("draft model", memory.draft_bytes, " of weights"),
        ("cache", memory.cache_bytes, f" for {memory.blocks * BLOCK_SIZE} tokens"),
        ("states", memory.state_bytes, f" for {memory.state_slots} of recurrent layers"),
        ("workspace", memory.workspace, " for a step"),
        ("put aside", memory.host_bytes, " of main memory at most, for what the cache has no room for"),
    ]
    read = {"read": f"  {format_bytes(bytes_per_s)}/s"} if bytes_per_s else {}
    return format_columns(
        [
            ("device", device),
            *((name, format_bytes(taken) + note) for name, taken, note in parts if taken),
            *((f"load {name}", format_seconds(took) + read.get(name, "")) for name, took in phases.items()),
            *([("graphs", f"no: {without_graphs}")] if without_graphs else []),
        ]
    )
