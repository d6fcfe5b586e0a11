"""Routes of embeddings: OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and `/api/embeddings`.
`localllm.api.embeddings` has the formats."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
from localllm.server.inventory import Inventory
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.ollama import lease_model
from localllm.server.routing import RouteDocs, Router, read_model_body
from localllm.server.streaming import run_until_disconnect

EXAMPLE = {"model": "demo", "input": ["a cat", "a dog"]}
MAX_CONCURRENT = 4  # requests that are tokenized and computed, batch by batch in turns; others wait


def router(models: ModelPool, inventory: Inventory) -> Router:
    routes = Router()
    # Own threads, so that embeddings do not delay the prompts of chats.
    threads = ThreadPoolExecutor(MAX_CONCURRENT, "localllm-embeddings")

    async def lease_for(body: EmbedRequest) -> Lease:
        return await lease_model(models, inventory, body.model, body.keep_alive, body.num_ctx)

    @routes.post("/v1/embeddings", RouteDocs(EmbeddingsBody, EXAMPLE))
    async def embeddings(request: Request) -> Response:
        body = parse_openai_embeddings(await read_model_body(request, models))
        with await models.lease(body.model) as lease:
            embed = partial(lease.embedder.embed, body.input, dimensions=body.dimensions)
            result = await run_until_disconnect(request, run_embed(threads, embed))
        return JSONResponse(await asyncio.to_thread(openai_embeddings_object, body, body.model, result))

    @routes.post("/api/embed", RouteDocs(EmbedBody, EXAMPLE))
    async def embed(request: Request) -> Response:
        arrived_at = time.perf_counter()
        body = parse_embed_request(await read_model_body(request, models))
        with await lease_for(body) as lease:
            load_s = time.perf_counter() - arrived_at
            result = await embed_inputs(request, threads, lease, body)
        total_s = time.perf_counter() - arrived_at
        return JSONResponse(await asyncio.to_thread(embed_object, body, result, total_s, load_s))

    @routes.post("/api/embeddings", RouteDocs(LegacyEmbeddingsBody, {"model": "demo", "prompt": "a cat"}))
    async def legacy_embeddings(request: Request) -> Response:
        body = parse_legacy_embeddings(await read_model_body(request, models))
        with await lease_for(body) as lease:
            return JSONResponse(legacy_embedding_object(await embed_inputs(request, threads, lease, body)))

    return routes


async def embed_inputs(
    request: Request, threads: ThreadPoolExecutor, lease: Lease, body: EmbedRequest
) -> Embeddings | None:
    """None without inputs: the request only loads the model."""
    if not body.inputs:
        return None
    embed = partial(lease.embedder.embed, body.inputs, dimensions=body.dimensions, truncate=body.truncate)
    return await run_until_disconnect(request, run_embed(threads, embed))


async def run_embed(threads: ThreadPoolExecutor, embed: Callable[..., Embeddings]) -> Embeddings:
    """Run `embed` in a thread. If cancelled, it stops after the current batch."""
    cancelled = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, partial(embed, gone=cancelled.is_set))
    finally:
        cancelled.set()
