"""Snapshots of a running server, and their text for `localllm top`, the same in a terminal and in a pipe."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.client.model import version_mismatch
from localllm.client.server import ServerClient, check_server_name
from localllm.formatting import format_bytes, format_moves, format_rate, format_seconds, format_table, one_line
from localllm.metrics import Slot
from localllm.tui.drawing import bar

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class ModelSnapshot:
    """State of one loaded model."""

    name: str
    device: str
    dtype: str
    context: int
    bytes: int
    until: float | None  # time of unloading, in seconds since 1970; None for never
    users: int
    running: int
    waiting: int
    blocks: int
    used_blocks: int
    cached_blocks: int
    counts: Mapping[str, Any]  # totals since loading
    recent: Mapping[str, Any]  # percentiles of recent answers
    slots: tuple[Slot, ...]

    @property
    def used_fraction(self) -> float:
        """Fraction of the KV cache that is in use."""
        return self.used_blocks / self.blocks if self.blocks else 0.0

    def percentiles(self, metric: str) -> tuple[float, ...]:
        """Return p50, p95 and p99 in seconds, NaN without answers. metric: `ttft`, `itl` or `queue`"""
        values = self.recent[metric]
        return tuple(math.nan if values[f"p{p}_s"] is None else values[f"p{p}_s"] for p in PERCENTS)


@dataclass(frozen=True)
class ServerSnapshot:
    """State of a server."""

    version: str
    at: float  # seconds since 1970, by the server's clock
    free_bytes: Mapping[str, int]  # by device
    models: tuple[ModelSnapshot, ...]
    loading: tuple[str, ...]  # names


@dataclass(frozen=True)
class Throughput:
    """A model's speed between two snapshots; fractions are None if there were no such tokens."""

    output_per_s: float  # tokens
    prefill_per_s: float  # prompt tokens computed, without cached ones
    found: float | None  # fraction of prompt tokens found in the cache
    accepted: float | None  # fraction of draft tokens accepted


def fetch_snapshot(server: ServerClient) -> ServerSnapshot:
    """Ask a server for its state. Raises LocalLLMError if it is unreachable or not this version of localllm."""
    fields = check_server_name(server.request_json("/localllm/top"), server.url)
    try:
        return ServerSnapshot(
            str(fields["version"]),
            float(fields["at"]),
            {str(device): int(count) for device, count in fields["free_bytes"].items()},
            tuple(map(_model_snapshot, fields["models"])),
            tuple(map(str, fields["loading"])),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        raise version_mismatch(server.url) from None


def _model_snapshot(fields: Mapping[str, Any]) -> ModelSnapshot:
    values = {field.name: fields[field.name] for field in dataclasses.fields(ModelSnapshot)}
    if "replica" in fields:  # of several with the same model
        values["name"] = f"{fields['name']} #{fields['replica']}"
    values["slots"] = tuple(Slot(**slot) for slot in fields["slots"])
    return ModelSnapshot(**values)


def throughput_between(before: ServerSnapshot | None, now: ServerSnapshot, name: str) -> Throughput | None:
    """Return a model's throughput; None for the first snapshot, or if the model was loaded in between."""
    old = next((model for model in before.models if model.name == name), None) if before else None
    new = next(model for model in now.models if model.name == name)
    if before is None or old is None or now.at <= before.at:
        return None
    if new.counts["steps"] < old.counts["steps"]:  # it was loaded again
        return None

    def increase(count: str) -> int:
        return new.counts[count] - old.counts[count]

    seconds = now.at - before.at
    prompt_tokens, cached_tokens = increase("prompt_tokens"), increase("cached_tokens")
    return Throughput(
        increase("output_tokens") / seconds,
        (prompt_tokens - cached_tokens) / seconds,
        _fraction(cached_tokens, prompt_tokens),
        _fraction(increase("accepted_tokens"), increase("draft_tokens")),
    )


def _fraction(part: float, total: float) -> float | None:
    return part / total if total else None


BAR_CELLS = 20
SLOT_COLUMNS = ("ID", "AGE", "PROMPT", "CACHED", "ANSWER", "TOKENS/S", "STATE")


def render_plain(
    snapshot: ServerSnapshot, url: str, throughputs: Sequence[Throughput | None], max_slots: int = 20
) -> str:
    """Return the whole state of a server as text, for a pipe."""
    parts = [server_line(snapshot, url)]
    for model, throughput in zip(snapshot.models, throughputs, strict=True):
        lines = [
            model_line(model, time.time()),
            *speed_lines(throughput),
            load_line(model),
            *latency_lines(model),
            *cache_lines(model),
            *slot_lines(model.slots, max_slots),
        ]
        parts.append("\n".join(lines))
    if not snapshot.models:
        parts.append("no model is loaded")
    parts += [f"{one_line(name)}  loading" for name in snapshot.loading]
    return "\n\n".join(parts)


def server_line(snapshot: ServerSnapshot, url: str) -> str:
    free = ", ".join(f"{format_bytes(count)} free on {device}" for device, count in snapshot.free_bytes.items())
    return one_line(f"localllm {snapshot.version} at {url}, {free}")


def model_line(model: ModelSnapshot, now: float) -> str:
    """Return a model's name, device and size, and when it will be unloaded. now: in seconds since 1970"""
    if model.users:
        unloads = "in use"
    elif model.until is None:
        unloads = "stays loaded"
    else:
        unloads = f"unloads in {format_seconds(max(0.0, model.until - now))}"
    details = f"{model.device} {model.dtype}, {format_bytes(model.bytes)}, context {model.context:,}, {unloads}"
    return one_line(f"{model.name}  {details}")


def speed_lines(throughput: Throughput | None) -> list[str]:
    """Return speeds since the previous snapshot, None for the first one."""
    return [
        f"decode  {format_rate(throughput.output_per_s) if throughput else '-'}",
        f"prefill {format_rate(throughput.prefill_per_s) if throughput else '-'}",
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
    """Return the use of the KV cache, the cache's hit rate, and the acceptance rate of draft tokens."""
    lines = [f"KV ▕{bar(model.used_fraction, BAR_CELLS)}▏ {model.used_fraction:.0%} of {model.blocks:,} blocks"]
    for name, part, total, description in (
        ("cache", "cached_tokens", "prompt_tokens", "prompt tokens cached"),
        ("drafts", "accepted_tokens", "draft_tokens", "draft tokens accepted"),
    ):
        if count := model.counts[total]:
            lines.append(f"{name:<8}{model.counts[part] / count:.0%} of {count:,} {description}")
            if name == "cache" and (tiers := tier_shares(model)):
                lines[-1] += f" ({tiers})"
    moves = {name: (move["bytes"], move["seconds"]) for name, move in model.counts.get("moves", {}).items()}
    return [*lines, f"moved   {text}"] if (text := format_moves(moves)) else lines


def tier_shares(model: ModelSnapshot) -> str:
    """Return the shares of prompt tokens that came from the lower tiers of the cache; "" if none did."""
    total = model.counts["prompt_tokens"]
    shares = (("host", model.counts.get("host_tokens", 0)), ("disk", model.counts.get("disk_tokens", 0)))
    return ", ".join(f"{tokens / total:.0%} from {tier}" for tier, tokens in shares if tokens)


def slot_lines(slots: Sequence[Slot], max_rows: int) -> list[str]:
    """Return a table of at most `max_rows` requests, oldest first."""
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
