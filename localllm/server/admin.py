"""For whoever runs the server, and for programs that count tokens: `/health`, `/metrics`, `/v1/tokenize`,
`/v1/detokenize`, `/v1/apply-template`."""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.api.body import StrictModel, validate
from localllm.api.openai.bodies import ToolList, parse_tools
from localllm.api.openai.messages import MessageList, parse_messages
from localllm.errors import BadField, EngineFailed
from localllm.request import ChatRequest
from localllm.server.body import read_model_body
from localllm.server.guard import UNAUTHENTICATED
from localllm.server.models import ModelPool
from localllm.server.openapi import route_docs
from localllm.server.prometheus import CONTENT_TYPE, ServerMetrics

JsonObject = dict[str, Any]
MAX_DETOKENIZE_TOKENS = 2**20  # of a body of /v1/detokenize
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


def router(models: ModelPool, sums: ServerMetrics) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", **route_docs())
    async def health(request: Request) -> JsonObject:
        """Which models there are is for those who have a key, where one is asked for. Raises BrokenOff."""
        if any(one.has_failed for one in models.loaded.values()):
            raise EngineFailed("a model has broken off and cannot answer any more", "start the server again")
        if UNAUTHENTICATED in request.scope:
            return {"status": "ok"}
        loading = [load.name for load in models.pending_loads.values()]
        loaded = [loaded.name for loaded in models.loaded.values()]
        return {"status": "ok", "version": __version__, "models": loaded, "loading": loading}

    @routes.get("/metrics", **route_docs(media_type="text/plain"))
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(sums.exposition), media_type=CONTENT_TYPE)

    @routes.post("/v1/tokenize", **route_docs(TokenizeBody, {"model": "demo", "prompt": "Hello"}))
    async def tokenize(request: Request) -> JsonObject:
        """As vLLM has it: a prompt, or messages through the chat template."""
        asked = validate(TokenizeBody, drop_nulls(await read_model_body(request, models)))
        if (asked.prompt is None) == (asked.messages is None):
            raise BadField("prompt", "give a prompt or messages, and one of them", "leave out the other")
        if asked.prompt is not None and asked.tools is not None:
            parse_tools(asked.tools)  # a prompt has no use for them, but what is wrong is refused
        with await models.lease(asked.model) as lease:
            if asked.prompt is None:
                lease.ensure_chat_template()
                tokens = await asyncio.to_thread(lease.llm.encode, to_chat_request(asked))
            else:
                special, encode = asked.add_special_tokens is not False, lease.loaded.llm.tokenizer.encode
                tokens = await asyncio.to_thread(encode, asked.prompt, special=special)
            texts = [lease.token_texts(token)[0] for token in tokens] if asked.return_token_strs else None
            found: JsonObject = {"count": len(tokens), "max_model_len": lease.loaded.llm.context, "tokens": tokens}
            return found | {"token_strs": texts}

    @routes.post("/v1/detokenize", **route_docs(DetokenizeBody, {"model": "demo", "tokens": [1, 2]}))
    async def detokenize(request: Request) -> JsonObject:
        asked = validate(DetokenizeBody, await read_model_body(request, models))
        with await models.lease(asked.model) as lease:
            llm = lease.loaded.llm
            size = llm.config.vocab_size
            if (beyond := next((t for t in asked.tokens if not 0 <= t < size), None)) is not None:
                raise BadField("tokens", f"{beyond} is not a token of this model", f"its ids are 0 to {size - 1}")
            return {"prompt": await asyncio.to_thread(llm.tokenizer.decode, asked.tokens, skip_special=False)}

    @routes.post("/v1/apply-template", **route_docs(TemplateBody, TEMPLATE_EXAMPLE))
    async def apply_template(request: Request) -> JsonObject:
        """The text that a model reads for messages, and the ids of its tokens."""
        asked = validate(TemplateBody, drop_nulls(await read_model_body(request, models)))
        with await models.lease(asked.model) as lease:
            lease.ensure_chat_template()
            llm = lease.llm
            tokens = await asyncio.to_thread(llm.encode, to_chat_request(asked))
            text = await asyncio.to_thread(llm.tokenizer.decode, tokens, skip_special=False)
            return {"prompt": text, "tokens": tokens}

    return routes


def to_chat_request(body: TokenizeBody | TemplateBody) -> ChatRequest:
    tools = None if body.tools is None else parse_tools(body.tools)
    return ChatRequest(
        parse_messages(body.messages), tools=tools, template_arguments=body.chat_template_kwargs or {}
    )


def drop_nulls(body: Mapping[str, Any]) -> JsonObject:
    return {name: value for name, value in body.items() if value is not None}
