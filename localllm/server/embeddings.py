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

from localllm.api.ollama.embeddings import (
    Asked,
    EmbedBody,
    OldBody,
    embed_object,
    old_object,
    read_embed,
    read_old,
)
from localllm.api.openai.embeddings import EmbeddingsBody, embeddings_object, read_embeddings
from localllm.embedding import Embeddings
from localllm.server.body import body_of
from localllm.server.inventory import Inventory
from localllm.server.lease import Lease
from localllm.server.models import Models
from localllm.server.ollama import leased
from localllm.server.openapi import documented
from localllm.server.sse import unless_gone

EXAMPLE = {"model": "demo", "input": ["a cat", "a dog"]}
AT_ONCE = 4  # requests whose texts are tokenized and computed, batch by batch in turns; others wait


def router(models: Models, inventory: Inventory) -> APIRouter:
    routes = APIRouter()
    # Threads of their own: those that prepare the prompts of chats need not wait for vectors.
    threads = ThreadPoolExecutor(AT_ONCE, "localllm-embeddings")

    async def room_for(asked: Asked) -> Lease:
        return await leased(models, inventory, asked.model, asked.keep_alive, asked.context)

    @routes.post("/v1/embeddings", **documented(EmbeddingsBody, EXAMPLE))
    async def embeddings(request: Request) -> Response:
        asked = read_embeddings(await body_of(request))
        with await models.lease(asked.model) as lease:
            embed = partial(lease.embeds.embed, asked.input, dimensions=asked.dimensions)
            found = await unless_gone(request, embedded(threads, embed))
        return JSONResponse(await asyncio.to_thread(embeddings_object, asked, asked.model, found))

    @routes.post("/api/embed", **documented(EmbedBody, EXAMPLE))
    async def embed(request: Request) -> Response:
        came = time.perf_counter()
        asked = read_embed(await body_of(request))
        with await room_for(asked) as lease:
            load_s = time.perf_counter() - came
            found = await answered(request, threads, lease, asked)
        return JSONResponse(
            await asyncio.to_thread(embed_object, asked, found, time.perf_counter() - came, load_s)
        )

    @routes.post("/api/embeddings", **documented(OldBody, {"model": "demo", "prompt": "a cat"}))
    async def old(request: Request) -> Response:
        asked = read_old(await body_of(request))
        with await room_for(asked) as lease:
            return JSONResponse(old_object(await answered(request, threads, lease, asked)))

    return routes


async def answered(request: Request, threads: ThreadPoolExecutor, lease: Lease, asked: Asked) -> Embeddings | None:
    """None where there is no text, and the model was only to be loaded."""
    if not asked.texts:
        return None
    how: Mapping[str, Any] = {"dimensions": asked.dimensions, "truncate": asked.truncate}
    return await unless_gone(request, embedded(threads, partial(lease.embeds.embed, asked.texts, **how)))


async def embedded(threads: ThreadPoolExecutor, embed: Callable[..., Embeddings]) -> Embeddings:
    """Ends after the batch that is computed where nobody waits for it any more."""
    gone = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, partial(embed, gone=gone.is_set))
    finally:
        gone.set()
