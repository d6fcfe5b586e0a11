"""What a server has and does, for `localllm ps` and `localllm top`: `/localllm/ps`, `/localllm/top`."""

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from localllm import __version__
from localllm.device import free_bytes, resolve_device
from localllm.llm import LLM
from localllm.metrics import EngineStats
from localllm.server.lease import Loaded
from localllm.server.models import Models
from localllm.server.recent import Recent
from localllm.wire import NAME

Object = dict[str, Any]
COUNTS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "lookups",
    "hits",
    "output_tokens",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "cancelled",
    "finished",
)


def router(models: Models, recent: Recent) -> APIRouter:
    routes = APIRouter(prefix="/localllm", include_in_schema=False)

    @routes.get("/ps")
    async def ps() -> Object:
        loaded = sorted(models.loaded.values(), key=lambda one: one.since)
        return {
            "server": NAME,
            "version": __version__,
            "models": [state_of(one) for one in loaded],
            "loading": [load.name for load in models.loads.values()],
            "events": [asdict(event) for event in models.events],
        }

    @routes.get("/top")
    async def top() -> Object:
        """What it does now, for who asks again and again; counts are since each model was loaded."""
        loaded = sorted(models.loaded.values(), key=lambda one: one.since)
        loading = [load.name for load in models.loads.values()]
        found = {"server": NAME, "version": __version__, "at": time.time(), "loading": loading}
        return found | await asyncio.to_thread(at_work, loaded, recent)

    return routes


def state_of(one: Loaded) -> Object:
    stats = one.llm.stats()
    return {
        "name": one.name,
        "path": str(one.llm.path),
        "device": one.llm.device,
        "dtype": one.llm.dtype,
        "kv_dtype": one.llm.kv_dtype,
        "context": one.llm.context,
        "bytes": one.llm.weight_bytes + one.llm.memory.cache_bytes,
        "since": one.since,
        "until": None if one.keep_alive == math.inf else one.expires_at,
        "users": one.users,
        "running": stats.running,
        "waiting": stats.waiting,
        "blocks": stats.blocks,
        "used_blocks": stats.used_blocks,
        "cached_blocks": stats.cached_blocks,
    }


def at_work(loaded: Iterable[Loaded], recent: Recent) -> Object:
    return {"free_bytes": free_memory(loaded), "models": [state_of(one) | work_of(one, recent) for one in loaded]}


def work_of(one: Loaded, recent: Recent) -> Object:
    """Counts, what the newest answers took, and its requests, oldest first; those for vectors do not last."""
    slots = one.llm.slots() if isinstance(one.llm, LLM) else []
    return {
        "counts": counts_of(one.llm.stats()),
        "recent": recent.of(one.llm.name),
        "slots": [asdict(slot) for slot in sorted(slots, key=lambda slot: -slot.age_s)],
    }


def counts_of(stats: EngineStats) -> Object:
    fields = asdict(stats)
    return {name: fields[name] for name in COUNTS}


def free_memory(loaded: Iterable[Loaded]) -> dict[str, int]:
    """Bytes of main memory, and of each device that has a model."""
    return {
        device: free_bytes(resolve_device(device))
        for device in sorted({"cpu"} | {one.llm.device for one in loaded})
    }
