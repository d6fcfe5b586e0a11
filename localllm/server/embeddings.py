"""Vectors over HTTP: OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and `/api/embeddings`. `localllm.api` reads
and writes the bodies."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.embeddings import (
    EmbedBody,
    EmbeddingsBody,
    EmbedRequest,
    LegacyEmbeddingsBody,
    embed_object,
    legacy_embedding_object,
    openai_embeddings_object,
    parse_embed_request,
    parse_legacy_embeddings,
    parse_openai_embeddings,
)
from localllm.llm.embedding_inputs import Embeddings
from localllm.server.body import read_model_body
from localllm.server.inventory import Inventory
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.ollama import lease_model
from localllm.server.openapi import route_docs
from localllm.server.sse import run_until_disconnect

EXAMPLE = {"model": "demo", "input": ["a cat", "a dog"]}
MAX_CONCURRENT = 4  # requests whose texts are tokenized and computed, batch by batch in turns; others wait


def router(models: ModelPool, inventory: Inventory) -> APIRouter:
    routes = APIRouter()
    # Threads of their own: those that prepare the prompts of chats need not wait for vectors.
    threads = ThreadPoolExecutor(MAX_CONCURRENT, "localllm-embeddings")

    async def room_for(asked: EmbedRequest) -> Lease:
        return await lease_model(models, inventory, asked.model, asked.keep_alive, asked.num_ctx)

    @routes.post("/v1/embeddings", **route_docs(EmbeddingsBody, EXAMPLE))
    async def embeddings(request: Request) -> Response:
        asked = parse_openai_embeddings(await read_model_body(request, models))
        with await models.lease(asked.model) as lease:
            embed = partial(lease.embedder.embed, asked.input, dimensions=asked.dimensions)
            found = await run_until_disconnect(request, run_embed(threads, embed))
        return JSONResponse(await asyncio.to_thread(openai_embeddings_object, asked, asked.model, found))

    @routes.post("/api/embed", **route_docs(EmbedBody, EXAMPLE))
    async def embed(request: Request) -> Response:
        came = time.perf_counter()
        asked = parse_embed_request(await read_model_body(request, models))
        with await room_for(asked) as lease:
            load_s = time.perf_counter() - came
            found = await embed_inputs(request, threads, lease, asked)
        return JSONResponse(
            await asyncio.to_thread(embed_object, asked, found, time.perf_counter() - came, load_s)
        )

    @routes.post("/api/embeddings", **route_docs(LegacyEmbeddingsBody, {"model": "demo", "prompt": "a cat"}))
    async def old(request: Request) -> Response:
        asked = parse_legacy_embeddings(await read_model_body(request, models))
        with await room_for(asked) as lease:
            return JSONResponse(legacy_embedding_object(await embed_inputs(request, threads, lease, asked)))

    return routes


async def embed_inputs(
    request: Request, threads: ThreadPoolExecutor, lease: Lease, body: EmbedRequest
) -> Embeddings | None:
    """None where there is no text, and the model was only to be loaded."""
    if not body.inputs:
        return None
    how: Mapping[str, Any] = {"dimensions": body.dimensions, "truncate": body.truncate}
    return await run_until_disconnect(
        request, run_embed(threads, partial(lease.embedder.embed, body.inputs, **how))
    )


async def run_embed(threads: ThreadPoolExecutor, embed: Callable[..., Embeddings]) -> Embeddings:
    """Ends after the batch that is computed where nobody waits for it any more."""
    gone = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, partial(embed, gone=gone.is_set))
    finally:
        gone.set()
