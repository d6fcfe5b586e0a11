"""One model of a server as lines of text: the same on a terminal that is drawn anew and in a pipe."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.client.model import version_mismatch
from localllm.client.server import ServerClient, check_server_name
from localllm.formatting import format_bytes, format_rate, format_seconds, format_table, one_line
from localllm.metrics import Slot
from localllm.tui.drawing import bar

# What a server says of itself at one moment, and what two moments tell of its speed. Plain data from JSON.

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class ModelSnapshot:
    """One model at one moment."""

    name: str
    device: str
    dtype: str
    context: int
    bytes: int
    until: float | None  # when it is unloaded, in seconds since 1970; None: never
    users: int
    running: int
    waiting: int
    blocks: int
    used_blocks: int
    cached_blocks: int
    counts: Mapping[str, Any]  # since it was loaded
    recent: Mapping[str, Any]  # percentiles of the newest answers
    slots: tuple[Slot, ...]

    @property
    def used_fraction(self) -> float:
        """The share of the cache that answers use."""
        return self.used_blocks / self.blocks if self.blocks else 0.0

    def percentiles(self, of: str) -> tuple[float, ...]:
        """p50, p95 and p99 in seconds, NaN where there was no answer; of: `ttft`, `itl` or `queue`."""
        found = self.recent[of]
        return tuple(math.nan if found[f"p{p}_s"] is None else found[f"p{p}_s"] for p in PERCENTS)


@dataclass(frozen=True)
class ServerSnapshot:
    """A server at one moment."""

    version: str
    at: float  # seconds since 1970, by the server's clock
    free_bytes: Mapping[str, int]  # of each device
    models: tuple[ModelSnapshot, ...]
    loading: tuple[str, ...]


@dataclass(frozen=True)
class Throughput:
    """What a model did between two moments; shares are None where nothing happened."""

    output_per_s: float
    prefill_per_s: float  # prompt tokens that were computed, not found in the cache
    found: float | None  # the share of prompt tokens that was found
    accepted: float | None  # the share of draft tokens that was right


def fetch_snapshot(server: ServerClient) -> ServerSnapshot:
    """Raises NoServer, OtherServer and what the server says; LocalLLMError for one of another version."""
    found = check_server_name(server.request_json("/localllm/top"), server.url)
    try:
        return ServerSnapshot(
            str(found["version"]),
            float(found["at"]),
            {str(device): int(count) for device, count in found["free_bytes"].items()},
            tuple(map(_model_snapshot, found["models"])),
            tuple(map(str, found["loading"])),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        raise version_mismatch(server.url) from None


def _model_snapshot(found: Mapping[str, Any]) -> ModelSnapshot:
    fields = {field.name: found[field.name] for field in dataclasses.fields(ModelSnapshot)}
    fields["slots"] = tuple(Slot(**slot) for slot in found["slots"])
    return ModelSnapshot(**fields)


def throughput_between(before: ServerSnapshot | None, now: ServerSnapshot, name: str) -> Throughput | None:
    """None where there is nothing to compare with: a first look, or a model that was loaded meanwhile."""
    old = next((one for one in before.models if one.name == name), None) if before else None
    new = next(one for one in now.models if one.name == name)
    if before is None or old is None or now.at <= before.at:
        return None
    if new.counts["steps"] < old.counts["steps"]:  # it was loaded anew
        return None

    def more(count: str) -> int:
        return new.counts[count] - old.counts[count]

    seconds = now.at - before.at
    prompt, found = more("prompt_tokens"), more("cached_tokens")
    return Throughput(
        more("output_tokens") / seconds,
        (prompt - found) / seconds,
        _fraction(found, prompt),
        _fraction(more("accepted_tokens"), more("draft_tokens")),
    )


def _fraction(part: float, whole: float) -> float | None:
    return part / whole if whole else None


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
