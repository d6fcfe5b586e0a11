"""One model of a server as lines of text: the same on a terminal that is drawn anew and in a pipe."""

import time
from collections.abc import Sequence

from localllm.inspection import Slot
from localllm.tui.sparkline import bar
from localllm.tui.top.glance import Glance, Pace, Seen
from localllm.units import rate, seconds, size
from localllm.visible import one_line

BAR = 20
SLOTS = ("ID", "AGE", "PROMPT", "FOUND", "ANSWER", "TOKENS/S", "STATE")


def head(glance: Glance, url: str) -> str:
    free = ", ".join(f"{size(count)} free on {device}" for device, count in glance.free_bytes.items())
    return one_line(f"localllm {glance.version} at {url}, {free}")


def title(model: Seen, now: float) -> str:
    if model.users:
        left = "in use"
    else:
        left = "kept for ever" if model.until is None else f"kept {seconds(max(0.0, model.until - now))}"
    where = f"{model.device} {model.dtype}, {size(model.bytes)}, context {model.context:,}, {left}"
    return one_line(f"{model.name}  {where}")


def speeds(now: Pace | None) -> list[str]:
    """now: None where there was no look before."""
    return [
        f"decode  {rate(now.output_per_s) if now else '-'}",
        f"prefill {rate(now.prefill_per_s) if now else '-'}",
    ]


def load(model: Seen) -> str:
    return f"running {model.running}, waiting {model.waiting}"


def times(model: Seen) -> list[str]:
    rows = [("", "p50", "p95", "p99")]
    rows += [
        (name, *map(seconds, model.percentiles(key)))
        for name, key in (("TTFT", "ttft"), ("ITL", "itl"), ("queue", "queue"))
    ]
    answers, minutes = model.recent["answers"], model.recent["window_s"] / 60
    rows[0] = (f"last {minutes:.0f} min", *rows[0][1:])
    lines = aligned(rows)
    return [f"{lines[0]}   of {answers:,} answers", *lines[1:]]


def cache(model: Seen) -> list[str]:
    """What answers use of the KV cache, and what share of all prompt tokens was found there."""
    lines = [f"KV ▕{bar(model.used, BAR)}▏ {model.used:.0%} of {model.blocks:,} blocks"]
    for name, part, whole, what in (
        ("cache", "cached_tokens", "prompt_tokens", "prompt tokens found"),
        ("drafts", "accepted_tokens", "draft_tokens", "draft tokens right"),
    ):
        if count := model.counts[whole]:
            lines.append(f"{name:<8}{model.counts[part] / count:.0%} of {count:,} {what}")
    return lines


def slots(found: Sequence[Slot], most: int) -> list[str]:
    """A row for each request, oldest first; most: rows."""
    if not found:
        return ["no requests"]
    shown = found if len(found) <= most else found[: max(1, most - 1)]
    lines = aligned([SLOTS, *map(row, shown)], last="<")
    return lines if len(shown) == len(found) else [*lines, f"and {len(found) - len(shown)} more"]


def row(slot: Slot) -> tuple[str, ...]:
    speed = slot.tokens_per_s
    return (
        str(slot.id),
        seconds(slot.age_s),
        f"{slot.prompt_tokens:,}",
        f"{slot.found:,}",
        f"{slot.output_tokens:,}",
        "-" if speed is None else f"{speed:.1f}",
        state(slot),
    )


def state(slot: Slot) -> str:
    if slot.waiting:
        return "waiting"
    if slot.output_tokens:
        return "decode"
    return f"prefill {slot.computed / slot.prompt_tokens:.0%}" if slot.prompt_tokens else "prefill"


def aligned(rows: Sequence[Sequence[str]], last: str = ">") -> list[str]:
    """The first column to the left, numbers to the right; last: where the last one stands."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *(">" for _ in widths[2:]), last]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)).rstrip()
        for cells in rows
    ]


def plain(glance: Glance, url: str, paces: Sequence[Pace | None], most: int = 20) -> str:
    """All of it, for a pipe."""
    parts = [head(glance, url)]
    for model, now in zip(glance.models, paces, strict=True):
        about = [title(model, time.time()), *speeds(now), load(model), *times(model), *cache(model)]
        parts.append("\n".join([*about, *slots(model.slots, most)]))
    if not glance.models:
        parts.append("no model is loaded")
    parts += [f"{one_line(name)}  loading" for name in glance.loading]
    return "\n\n".join(parts)
