"""What a server has and does, for `localllm ps` and `localllm top`: `/localllm/ps`, `/localllm/top`."""

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from localllm import __version__
from localllm.hardware.device import free_bytes, resolve_device
from localllm.llm.llm import LLM
from localllm.metrics import EngineStats
from localllm.protocol.events import SERVER_NAME
from localllm.server.lease import LoadedModel
from localllm.server.models import ModelPool
from localllm.server.request_log import RecentLatencies

Status = dict[str, Any]
ENGINE_COUNTS = (
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


def status_router(models: ModelPool, recent: RecentLatencies) -> APIRouter:
    routes = APIRouter(prefix="/localllm", include_in_schema=False)

    @routes.get("/ps")
    async def ps() -> Status:
        loaded = sorted(models.loaded.values(), key=lambda one: one.loaded_at)
        return {
            "server": SERVER_NAME,
            "version": __version__,
            "models": [model_status(one) for one in loaded],
            "loading": [load.name for load in models.pending_loads.values()],
            "events": [asdict(event) for event in models.events],
        }

    @routes.get("/top")
    async def top() -> Status:
        """What it does now, for who asks again and again; counts are since each model was loaded."""
        loaded = sorted(models.loaded.values(), key=lambda one: one.loaded_at)
        loading = [load.name for load in models.pending_loads.values()]
        found = {"server": SERVER_NAME, "version": __version__, "at": time.time(), "loading": loading}
        return found | await asyncio.to_thread(server_activity, loaded, recent)

    return routes


def model_status(one: LoadedModel) -> Status:
    stats = one.llm.stats()
    return {
        "name": one.name,
        "path": str(one.llm.path),
        "device": one.llm.device,
        "dtype": one.llm.dtype,
        "kv_dtype": one.llm.kv_dtype,
        "context": one.llm.context,
        "bytes": one.llm.weight_bytes + one.llm.memory.cache_bytes,
        "since": one.loaded_at,
        "until": None if one.keep_alive == math.inf else one.expires_at,
        "users": one.users,
        "running": stats.running,
        "waiting": stats.waiting,
        "blocks": stats.blocks,
        "used_blocks": stats.used_blocks,
        "cached_blocks": stats.cached_blocks,
    }


def server_activity(loaded: Iterable[LoadedModel], recent: RecentLatencies) -> Status:
    return {
        "free_bytes": free_memory(loaded),
        "models": [model_status(one) | model_activity(one, recent) for one in loaded],
    }


def model_activity(one: LoadedModel, recent: RecentLatencies) -> Status:
    """Counts, what the newest answers took, and its requests, oldest first; those for vectors do not last."""
    slots = one.llm.slots() if isinstance(one.llm, LLM) else []
    return {
        "counts": engine_counts(one.llm.stats()),
        "recent": recent.percentiles(one.llm.name),
        "slots": [asdict(slot) for slot in sorted(slots, key=lambda slot: -slot.age_s)],
    }


def engine_counts(stats: EngineStats) -> Status:
    fields = asdict(stats)
    return {name: fields[name] for name in ENGINE_COUNTS}


def free_memory(loaded: Iterable[LoadedModel]) -> dict[str, int]:
    """Bytes of main memory, and of each device that has a model."""
    return {
        device: free_bytes(resolve_device(device))
        for device in sorted({"cpu"} | {one.llm.device for one in loaded})
    }
