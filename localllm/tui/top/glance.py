"""What a server says of itself at one moment, and what two moments tell of its speed. Plain data from JSON."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.client.model import version_mismatch
from localllm.client.server import ServerClient, check_server_name
from localllm.metrics import Slot

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
