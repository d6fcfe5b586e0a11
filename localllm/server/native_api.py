"""What localllm's own client asks (`localllm run`, `stop`): `/localllm/...`. It may change with any version,
as both are of one."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.api.asked import ParsedRequest
from localllm.api.body import validate
from localllm.api.own import ArgumentsBody, NameBody, OpenBody, parse_answer_request
from localllm.errors import LocalLLMError, ModelNotFound, UsageError
from localllm.llm.llm import LLM
from localllm.protocol.events import SERVER_NAME, error_to_json, event_to_json
from localllm.request import Request as Prepared
from localllm.sampling import params_to_json
from localllm.server.answers import AnswerReader
from localllm.server.body import read_json_body
from localllm.server.lease import Lease, LoadedModel
from localllm.server.models import ModelPool
from localllm.server.sse import StreamResponse

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
