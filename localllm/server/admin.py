"""Health, metrics, and token counting as in vLLM: `/health`, `/metrics`, `/v1/tokenize`, `/v1/detokenize`,
`/v1/apply-template`."""

import asyncio
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.api.body import StrictModel, drop_nulls, validate
from localllm.api.openai.bodies import ToolList, parse_tools
from localllm.api.openai.messages import MessageList, parse_messages
from localllm.errors import BadField, EngineFailed
from localllm.request import ChatRequest
from localllm.server.guard import UNAUTHENTICATED
from localllm.server.models import ModelPool
from localllm.server.prometheus import CONTENT_TYPE, ServerMetrics
from localllm.server.routing import JsonObject, RouteDocs, Router, read_model_body

MAX_DETOKENIZE_TOKENS = 2**20  # token ids per request
TEMPLATE_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


class TokenizeBody(StrictModel):
    model: str
    prompt: str | None = None
    messages: MessageList | None = None
    tools: ToolList = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TemplateBody(StrictModel):
    model: str
    messages: MessageList
    tools: ToolList = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(StrictModel):
    model: str
    tokens: list[int] = Field(max_length=MAX_DETOKENIZE_TOKENS)


def router(models: ModelPool, server_metrics: ServerMetrics) -> Router:
    routes = Router()

    @routes.get("/health")
    async def health(request: Request) -> JsonObject:
        """Whether the server can answer, with the loaded models for clients that have a key."""
        if any(loaded.has_failed for loaded in models.loaded.values()):
            raise EngineFailed("the engine of a model has failed", "restart the server")
        if UNAUTHENTICATED in request.scope:
            return {"status": "ok"}
        loading = [load.name for load in models.pending_loads.values()]
        loaded = [loaded.name for loaded in models.loaded.values()]
        return {"status": "ok", "version": __version__, "models": loaded, "loading": loading}

    @routes.get("/metrics", RouteDocs(media_type="text/plain"))
    async def metrics(_: Request) -> Response:
        return Response(await asyncio.to_thread(server_metrics.exposition), media_type=CONTENT_TYPE)

    @routes.post("/v1/tokenize", RouteDocs(TokenizeBody, {"model": "demo", "prompt": "Hello"}))
    async def tokenize(request: Request) -> JsonObject:
        """Token ids of a prompt, or of messages rendered by the chat template, as in vLLM."""
        body = validate(TokenizeBody, drop_nulls(await read_model_body(request, models)))
        if (body.prompt is None) == (body.messages is None):
            raise BadField("prompt", "exactly one of prompt and messages is required", "send one of them")
        if body.prompt is not None and body.tools is not None:
            parse_tools(body.tools)  # unused beside a prompt, but checked
        with await models.lease(body.model) as lease:
            if body.prompt is None:
                lease.ensure_chat_template()
                tokens = await asyncio.to_thread(lease.llm.encode, to_chat_request(body))
            else:
                special, encode = body.add_special_tokens is not False, lease.loaded.llm.tokenizer.encode
                tokens = await asyncio.to_thread(encode, body.prompt, special=special)
            texts = [lease.token_texts(token)[0] for token in tokens] if body.return_token_strs else None
            context = lease.loaded.llm.context
            return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts}

    @routes.post("/v1/detokenize", RouteDocs(DetokenizeBody, {"model": "demo", "tokens": [1, 2]}))
    async def detokenize(request: Request) -> JsonObject:
        body = validate(DetokenizeBody, await read_model_body(request, models))
        with await models.lease(body.model) as lease:
            return {"prompt": await lease.detokenize(body.tokens)}

    @routes.post("/v1/apply-template", RouteDocs(TemplateBody, TEMPLATE_EXAMPLE))
    async def apply_template(request: Request) -> JsonObject:
        """The text that the chat template makes of messages, and its token ids."""
        body = validate(TemplateBody, drop_nulls(await read_model_body(request, models)))
        with await models.lease(body.model) as lease:
            text, tokens = await lease.render(to_chat_request(body))
            return {"prompt": text, "tokens": tokens}

    return routes


def to_chat_request(body: TokenizeBody | TemplateBody) -> ChatRequest:
    """The chat whose prompt is tokenized. Raises BadField for malformed messages or tools."""
    tools = None if body.tools is None else parse_tools(body.tools)
    return ChatRequest(
        parse_messages(body.messages), tools=tools, template_arguments=body.chat_template_kwargs or {}
    )
