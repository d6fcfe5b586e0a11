"""Routes of localllm's own client (`localllm run`, `stop`, `ps`, `top`), `/localllm/...`, and their bodies.

Not a public API: client and server are of the same version, and the routes may change with any release. Sampling
parameters of a request are complete.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import asdict
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.api.body import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_IDS,
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TOOLS,
    StrictModel,
    check_count,
    check_stop_strings,
    parse_json_object,
    validate,
)
from localllm.api.events import SERVER_NAME, error_to_json, event_to_json
from localllm.api.openai.messages import MessageList, parse_messages
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import AccessDenied, BadField, LocalLLMError, ModelNotFound, UsageError
from localllm.hardware.device import free_bytes, resolve_device
from localllm.llm.kv_transfer import StateExport, StateImport
from localllm.llm.llm import LLM
from localllm.metrics import EngineStats
from localllm.request import CACHE_SCOPE, CLIENT, ChatRequest, SamplingParams
from localllm.request import Request as Prepared
from localllm.sampling import params_from_json, params_to_json
from localllm.server.access import AccessPolicy
from localllm.server.answers import AnswerReader
from localllm.server.lease import Lease, LoadedModel
from localllm.server.models import ModelPool
from localllm.server.request_stats import RecentLatencies
from localllm.server.routing import JsonObject, Router, only_model, read_json_body
from localllm.server.slots import parse_number as parse_slot_number
from localllm.server.slots import remember as remember_tokens
from localllm.server.streaming import NDJSON, StreamResponse, ndjson_line

MAX_STATE_TOKENS = 2**20
ENGINE_COUNTS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "host_tokens",
    "disk_tokens",
    "lookups",
    "hits",
    "output_tokens",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "cancelled",
    "finished",
)


class OpenBody(StrictModel):
    """The model to open, by name, or by the path of a loaded model."""

    model: str | None = None
    path: str | None = None
    load: bool = False


class NameBody(StrictModel):
    model: str


class ArgumentsBody(StrictModel):
    model: str
    given: dict[str, Any]
    think: bool | None
    with_tools: bool


class StateBody(StrictModel):
    """The conversation whose KV cache contents to send, if the query names no slot."""

    model: str | None = None
    tokens: list[int] | None = Field(None, max_length=MAX_STATE_TOKENS)
    prompt: str | None = None
    messages: MessageList | None = None


class AnswerBody(StrictModel):
    model: str
    prompt: str | list[int] | list[dict[str, Any]]
    params: dict[str, Any]
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any]
    think: bool | None = None
    inspect: int | None = None


def router(models: ModelPool, recent: RecentLatencies, access: AccessPolicy) -> Router:
    routes = Router("/localllm", in_schema=False)

    @routes.post("/open")
    async def open_model(request: Request) -> JsonObject:
        """Properties of a model that a client needs before its first request. Loads the model only if `load` is
        set."""
        body = validate(OpenBody, await read_json_body(request))
        loaded = find_loaded(models, body)
        name = body.model if body.model is not None else loaded and loaded.name
        if name is None or not (loaded or body.load):
            raise ModelNotFound(f"{name or body.path} is not loaded", "`localllm ps` lists loaded models")
        with await models.lease(name) as lease:
            return await asyncio.to_thread(model_fields, lease.name, lease.llm)

    @routes.post("/template-arguments")
    async def template_arguments(request: Request) -> JsonObject:
        body = validate(ArgumentsBody, await read_json_body(request))
        with await models.lease(body.model) as lease:
            flags = {"think": body.think, "with_tools": body.with_tools}
            return {"arguments": await asyncio.to_thread(lease.llm.template_arguments, body.given, **flags)}

    @routes.post("/answer")
    async def answer(request: Request) -> Response:
        parsed = parse_answer_request(await read_json_body(request))
        with await models.lease(parsed.model) as lease:
            [prepared] = await asyncio.to_thread(parsed.prepare, lease.llm)
            return StreamResponse(stream_answer(lease, prepared), lease.renew(), NDJSON)

    @routes.post("/provenance")
    async def provenance(request: Request) -> JsonObject:
        """The parts of a receipt that only the computing process has."""
        body = validate(NameBody, await read_json_body(request))
        with await models.lease(body.model) as lease:
            model, setup = await asyncio.to_thread(lease.llm.provenance)
            return {"model": asdict(model), "setup": asdict(setup), "kernels": lease.llm.kernels()}

    @routes.post("/stop")
    async def stop(request: Request) -> JsonObject:
        """Unload a model, now or when its running requests have ended."""
        return {"users": models.stop(validate(NameBody, await read_json_body(request)).model)}

    @routes.get("/ps")
    async def ps(_: Request) -> JsonObject:
        """Loaded models, and recent events."""
        return server_fields(models) | {
            "models": [model_status(loaded) for loaded in oldest_first(models)],
            "events": [asdict(event) for event in models.events],
        }

    @routes.get("/top")
    async def top(_: Request) -> JsonObject:
        """Current activity, made to be polled; counts are since each model was loaded."""
        activity = await asyncio.to_thread(server_activity, oldest_first(models), recent)
        return server_fields(models) | {"at": time.time()} | activity

    @routes.get("/state")
    async def send_state(request: Request) -> Response:
        """The KV cache contents of a conversation, as `POST /localllm/state` of another server accepts them."""
        require_keys(access)
        body = validate(StateBody, parse_json_object(content) if (content := await request.body()) else {})
        query = request.query_params
        with await models.lease(query.get("model") or body.model or only_model(models)) as lease:
            tokens = await asyncio.to_thread(state_tokens, lease.llm, body, query.get("slot"))
            export = await asyncio.to_thread(StateExport, lease.llm, tokens, CACHE_SCOPE.get(), CLIENT.get())
            if not export.length:
                raise UsageError(
                    "the KV cache has none of these tokens", "send the prompt first, with max_tokens 0"
                )
            return StreamResponse(stream_state(export), lease.renew(), "application/octet-stream")

    @routes.post("/state")
    async def receive_state(request: Request) -> JsonObject:
        """Add a state to the prefix cache, where a prompt that continues it finds its tokens."""
        require_keys(access)
        if not access.accepts_states:
            message = "a state could change the answers to other API keys, as this server has --cache-shared"
            raise AccessDenied(message, "start it without --cache-shared, or with one key")
        began, query = time.perf_counter(), request.query_params
        number = parse_slot_number(slot) if (slot := query.get("slot")) is not None else None
        with await models.lease(query.get("model") or only_model(models)) as lease:
            state = StateImport(lease.llm, CACHE_SCOPE.get(), None)
            async for content in request.stream():
                for snapshot in state.add(content):
                    await asyncio.to_thread(state.install, snapshot)
            await asyncio.to_thread(state.finish)
            if not state.token_ids:
                raise UsageError("the state is empty", "send the answer of GET /localllm/state")
            number = await asyncio.to_thread(remember_tokens, lease.llm, number, state)
            seconds = time.perf_counter() - began
            return {"slot": number, "tokens": len(state.token_ids), "bytes": state.nbytes, "seconds": seconds}

    return routes


def parse_answer_request(body: Mapping[str, Any]) -> ParsedRequest:
    """A body of `/localllm/answer`. Raises UsageError."""
    request = validate(AnswerBody, body)
    prompt: Any = request.prompt
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    if is_chat:
        check_count(MAX_MESSAGES, "prompt", prompt)
    check_count(MAX_TOOLS, "tools", request.tools or ())
    check_count(MAX_TEMPLATE_ARGUMENTS, "template_arguments", request.template_arguments)
    return ParsedRequest(
        request.model,
        (prompt,),
        parse_params(request.params),
        is_chat=is_chat,
        tools=request.tools,
        template_arguments=request.template_arguments,
        think=request.think,
        stream=True,
        inspect=request.inspect,
    )


def parse_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters in the JSON format of saved chats and receipts. Raises BadField."""
    try:
        params = params_from_json(fields)
    except UsageError as error:
        raise BadField("params", error.message, error.remedy) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadField("params", f"params is malformed ({error!r})", "use a client of this version") from None
    check_stop_strings("params.stop", list(params.stop))
    check_count(MAX_STOP_IDS, "params.stop_ids", params.stop_ids)
    check_count(MAX_LOGIT_BIASES, "params.logit_bias", params.logit_bias)
    return params


def require_keys(access: AccessPolicy) -> None:
    """Raise AccessDenied on a server without API keys: a state contains what was said."""
    if not access.keys:
        message = "/localllm/state needs an API key, and this server has none"
        raise AccessDenied(message, "start both servers with --api-key-file FILE")


def state_tokens(llm: LLM, body: StateBody, slot: str | None) -> ListLike[int]:
    """Tokens whose state a client requests: those of a slot, token ids, a text or messages. Raises UsageError."""
    given = [name for name in ("tokens", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) + (slot is not None) != 1:
        raise UsageError("exactly one of slot, tokens, prompt and messages is required", "send one of them")
    if slot is not None:
        remembered = llm.worker.slot_table.find(CLIENT.get(), parse_slot_number(slot))
        return list(remembered.token_ids) if remembered else ()
    if body.tokens is not None:
        return body.tokens
    prompt = body.prompt if body.messages is None else parse_messages(body.messages)
    return llm.encode(ChatRequest(prompt or ""))


async def stream_state(export: StateExport) -> AsyncGenerator[bytes]:
    """Bytes of a state, a snapshot at a time."""
    while chunks := await asyncio.to_thread(next, export, None):
        for chunk in chunks:
            yield bytes(chunk)


def find_loaded(models: ModelPool, body: OpenBody) -> LoadedModel | None:
    """The loaded model that a client means, by name or by path. A path is compared with those of loaded models,
    without looking at files, and means the model without an edition. Raises ModelNotFound for an unknown name."""
    if (body.model is None) == (body.path is None):
        raise UsageError("exactly one of model and path is required", "send one of them")
    if body.model is not None:
        return models.find(body.model)
    loaded = models.loaded.get(body.path or "")
    return loaded if loaded and models.is_unedited_name_of(loaded.name, loaded) else None


def model_fields(name: str, llm: LLM) -> JsonObject:
    """Answer of `/localllm/open`."""
    return {
        "server": SERVER_NAME,
        "version": __version__,
        "name": name,
        "device": llm.device,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "context": llm.context,
        "max_context": llm.max_context,
        "weight_bytes": llm.weight_bytes,
        "deterministic": llm.deterministic,
        "has_chat_template": llm.has_chat_template,
        "default_params": params_to_json(llm.default_params),
        "blocks": llm.blocks,
        "block_tokens": llm.block_tokens,
        "reads": asdict(llm.reads),
    }


async def stream_answer(lease: Lease, prepared: Prepared) -> AsyncGenerator[bytes]:
    """Lines of JSON: the prompt's token ids, then events up to the last, or up to an error. Raises LocalLLMError
    if the answer cannot start."""

    def token_text(token: int) -> str:
        return lease.llm.tokenizer.decode([token], skip_special=False)

    with AnswerReader(lease.llm, [prepared]) as answers:
        yield ndjson_line({"prompt_ids": prepared.prompt_ids})
        try:
            while events := await answers.next_events():
                yield b"".join(ndjson_line(event_to_json(event, token_text)) for _, event in events)
        except LocalLLMError as error:
            yield ndjson_line(error_to_json(error))


def oldest_first(models: ModelPool) -> list[LoadedModel]:
    return sorted(models.loaded.values(), key=lambda loaded: loaded.loaded_at)


def server_fields(models: ModelPool) -> JsonObject:
    loading = [load.name for load in models.pending_loads.values()]
    return {"server": SERVER_NAME, "version": __version__, "loading": loading}


def model_status(loaded: LoadedModel) -> JsonObject:
    """A model in the answers of `/localllm/ps` and `/localllm/top`."""
    llm, stats = loaded.llm, loaded.llm.stats()
    return {
        "name": loaded.name,
        "path": str(llm.path),
        "device": llm.device,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "context": llm.context,
        "bytes": llm.weight_bytes + llm.memory.cache_bytes,
        "since": loaded.loaded_at,
        "until": None if loaded.keep_alive == math.inf else loaded.expires_at,
        "users": loaded.users,
        "running": stats.running,
        "waiting": stats.waiting,
        "blocks": stats.blocks,
        "used_blocks": stats.used_blocks,
        "cached_blocks": stats.cached_blocks,
    }


def server_activity(models: Iterable[LoadedModel], recent: RecentLatencies) -> JsonObject:
    """Free memory, and activity by model. Blocks on the engines."""
    return {
        "free_bytes": free_memory(models),
        "models": [model_status(loaded) | model_activity(loaded, recent) for loaded in models],
    }


def model_activity(loaded: LoadedModel, recent: RecentLatencies) -> JsonObject:
    """Counts, recent latencies, and running requests, oldest first; those of embedding models are too short."""
    slots = loaded.llm.slots() if isinstance(loaded.llm, LLM) else []
    return {
        "counts": engine_counts(loaded.llm.stats()),
        "recent": recent.percentiles(loaded.llm.name),
        "slots": [asdict(slot) for slot in sorted(slots, key=lambda slot: -slot.age_s)],
    }


def engine_counts(stats: EngineStats) -> dict[str, Any]:
    moves = {name: move._asdict() for name, move in stats.moves.items()}
    return {name: getattr(stats, name) for name in ENGINE_COUNTS} | {"moves": moves}


def free_memory(models: Iterable[LoadedModel]) -> dict[str, int]:
    """Free bytes of main memory, and of each device that has a model."""
    return {
        device: free_bytes(resolve_device(device))
        for device in sorted({"cpu"} | {loaded.llm.device for loaded in models})
    }
