"""One model of a server as lines of text: the same on a terminal that is drawn anew and in a pipe."""

import time
from collections.abc import Sequence

from localllm.formatting import format_bytes, format_rate, format_seconds, format_table, one_line
from localllm.metrics import Slot
from localllm.tui.sparkline import bar
from localllm.tui.top.glance import ModelSnapshot, ServerSnapshot, Throughput

BAR_CELLS = 20
SLOT_COLUMNS = ("ID", "AGE", "PROMPT", "FOUND", "ANSWER", "TOKENS/S", "STATE")


def server_line(glance: ServerSnapshot, url: str) -> str:
    free = ", ".join(f"{format_bytes(count)} free on {device}" for device, count in glance.free_bytes.items())
    return one_line(f"localllm {glance.version} at {url}, {free}")


def model_line(model: ModelSnapshot, now: float) -> str:
    if model.users:
        left = "in use"
    else:
        left = "kept for ever" if model.until is None else f"kept {format_seconds(max(0.0, model.until - now))}"
    where = f"{model.device} {model.dtype}, {format_bytes(model.bytes)}, context {model.context:,}, {left}"
    return one_line(f"{model.name}  {where}")


def speed_lines(now: Throughput | None) -> list[str]:
    """now: None where there was no look before."""
    return [
        f"decode  {format_rate(now.output_per_s) if now else '-'}",
        f"prefill {format_rate(now.prefill_per_s) if now else '-'}",
    ]


def load_line(model: ModelSnapshot) -> str:
    return f"running {model.running}, waiting {model.waiting}"


def latency_lines(model: ModelSnapshot) -> list[str]:
    rows = [("", "p50", "p95", "p99")]
    rows += [
        (name, *map(format_seconds, model.percentiles(key)))
        for name, key in (("TTFT", "ttft"), ("ITL", "itl"), ("queue", "queue"))
    ]
    answers, minutes = model.recent["answers"], model.recent["window_s"] / 60
    rows[0] = (f"last {minutes:.0f} min", *rows[0][1:])
    lines = format_table(rows, "<>>>").split("\n")
    return [f"{lines[0]}   of {answers:,} answers", *lines[1:]]


def cache_lines(model: ModelSnapshot) -> list[str]:
    """What answers use of the KV cache, and what share of all prompt tokens was found there."""
    lines = [f"KV ▕{bar(model.used_fraction, BAR_CELLS)}▏ {model.used_fraction:.0%} of {model.blocks:,} blocks"]
    for name, part, whole, what in (
        ("cache", "cached_tokens", "prompt_tokens", "prompt tokens found"),
        ("drafts", "accepted_tokens", "draft_tokens", "draft tokens right"),
    ):
        if count := model.counts[whole]:
            lines.append(f"{name:<8}{model.counts[part] / count:.0%} of {count:,} {what}")
    return lines


def slot_lines(slots: Sequence[Slot], max_rows: int) -> list[str]:
    """A row for each request, oldest first; max_rows: rows."""
    if not slots:
        return ["no requests"]
    shown = slots if len(slots) <= max_rows else slots[: max(1, max_rows - 1)]
    lines = format_table([SLOT_COLUMNS, *map(slot_row, shown)], "<>>>>><").split("\n")
    return lines if len(shown) == len(slots) else [*lines, f"and {len(slots) - len(shown)} more"]


def slot_row(slot: Slot) -> tuple[str, ...]:
    speed = slot.tokens_per_s
    return (
        str(slot.id),
        format_seconds(slot.age_s),
        f"{slot.prompt_tokens:,}",
        f"{slot.found:,}",
        f"{slot.output_tokens:,}",
        "-" if speed is None else f"{speed:.1f}",
        slot_state(slot),
    )


def slot_state(slot: Slot) -> str:
    if slot.waiting:
        return "waiting"
    if slot.output_tokens:
        return "decode"
    return f"prefill {slot.computed / slot.prompt_tokens:.0%}" if slot.prompt_tokens else "prefill"


def render_plain(
    glance: ServerSnapshot, url: str, throughputs: Sequence[Throughput | None], max_slots: int = 20
) -> str:
    """All of it, for a pipe."""
    parts = [server_line(glance, url)]
    for model, now in zip(glance.models, throughputs, strict=True):
        about = [
            model_line(model, time.time()),
            *speed_lines(now),
            load_line(model),
            *latency_lines(model),
            *cache_lines(model),
        ]
        parts.append("\n".join([*about, *slot_lines(model.slots, max_slots)]))
    if not glance.models:
        parts.append("no model is loaded")
    parts += [f"{one_line(name)}  loading" for name in glance.loading]
    return "\n\n".join(parts)
