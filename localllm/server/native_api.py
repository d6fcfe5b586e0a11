"""What localllm's own client asks (`localllm run`, `stop`): `/localllm/...`. It may change with any version,
as both are of one."""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.api.body import validate
from localllm.api.native import ArgumentsBody, NameBody, OpenBody, parse_answer_request
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import LocalLLMError, ModelNotFound, UsageError
from localllm.hardware.device import free_bytes, resolve_device
from localllm.llm.llm import LLM
from localllm.metrics import EngineStats
from localllm.protocol.events import SERVER_NAME, error_to_json, event_to_json
from localllm.request import Request as Prepared
from localllm.sampling import params_to_json
from localllm.server.answers import AnswerReader
from localllm.server.body import read_json_body
from localllm.server.lease import Lease, LoadedModel
from localllm.server.models import ModelPool
from localllm.server.request_stats import RecentLatencies
from localllm.server.sse import StreamResponse

# What a server has and does, for `localllm ps` and `localllm top`: `/localllm/ps`, `/localllm/top`.

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


JsonObject = dict[str, Any]


def router(models: ModelPool) -> APIRouter:
    routes = APIRouter(prefix="/localllm", include_in_schema=False)

    @routes.post("/open")
    async def open_model(request: Request) -> JsonObject:
        """What the client must know of a model before it asks. One that is not loaded is only on demand."""
        asked = validate(OpenBody, await read_json_body(request))
        loaded = find_loaded(models, asked)
        name = asked.model if asked.model is not None else loaded and loaded.name
        if name is None or not (loaded or asked.load):
            raise ModelNotFound(f"{name or asked.path} is not loaded here", "`localllm ps` shows what is")
        with await models.lease(name) as lease:
            return await asyncio.to_thread(model_fields, lease.name, lease.llm)

    @routes.post("/template-arguments")
    async def template_arguments(request: Request) -> JsonObject:
        asked = validate(ArgumentsBody, await read_json_body(request))
        with await models.lease(asked.model) as lease:
            find = lease.llm.template_arguments
            flags = {"think": asked.think, "with_tools": asked.with_tools}
            return {"arguments": await asyncio.to_thread(find, asked.given, **flags)}

    @routes.post("/answer")
    async def answer(request: Request) -> Response:
        asked = parse_answer_request(await read_json_body(request))
        with await models.lease(asked.model) as lease:
            prepared = await asyncio.to_thread(asked.prepare, lease.llm)
            return StreamResponse(stream_answer(lease, asked, prepared[0]), lease.renew(), "application/x-ndjson")

    @routes.post("/provenance")
    async def provenance(request: Request) -> JsonObject:
        """The parts of a receipt that only who computes knows."""
        asked = validate(NameBody, await read_json_body(request))
        with await models.lease(asked.model) as lease:
            model, setup = await asyncio.to_thread(lease.llm.provenance)
            return {"model": asdict(model), "setup": asdict(setup), "kernels": lease.llm.kernels()}

    @routes.post("/stop")
    async def stop(request: Request) -> JsonObject:
        """Unload it, at once or when its answers have ended."""
        return {"users": models.stop(validate(NameBody, await read_json_body(request)).model)}

    return routes


def find_loaded(models: ModelPool, body: OpenBody) -> LoadedModel | None:
    """The loaded model that a client means. A path is compared, and no file is looked at; it means no edition of
    the model. Raises ModelNotFound for a name that nobody knows."""
    if (body.model is None) == (body.path is None):
        raise UsageError("a model is meant by its name or by its path", "send one of them")
    if body.model is not None:
        return models.find(body.model)
    loaded = models.loaded.get(body.path or "")
    return loaded if loaded and models.is_unedited_name_of(loaded.name, loaded) else None


def model_fields(name: str, llm: LLM) -> JsonObject:
    return {
        "server": SERVER_NAME,
        "version": __version__,
        "name": name,
        "device": llm.device,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "context": llm.context,
        "weight_bytes": llm.weight_bytes,
        "deterministic": llm.deterministic,
        "has_chat_template": llm.has_chat_template,
        "default_params": params_to_json(llm.default_params),
        "blocks": llm.blocks,
        "block_tokens": llm.block_tokens,
        "reads": asdict(llm.reads),
    }


def strict_json_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


async def stream_answer(lease: Lease, parsed: ParsedRequest, prepared: Prepared) -> AsyncGenerator[bytes]:
    """The prompt as the model reads it, then the pieces; or up to an error, which is the last line. Raises what
    keeps it from beginning."""

    def text_of(token: int) -> str:
        return lease.llm.tokenizer.decode([token], skip_special=False)

    with AnswerReader(lease.llm, [prepared]) as answers:
        yield strict_json_line({"prompt_ids": prepared.prompt_ids})
        try:
            async for _, piece in answers:
                yield strict_json_line(event_to_json(piece, text_of))
        except LocalLLMError as error:
            yield strict_json_line(error_to_json(error))
