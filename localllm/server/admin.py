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
from localllm.api.body import BadField, Strict, validated
from localllm.api.openai.functions import Tools, read_tools
from localllm.api.openai.messages import Messages, read_messages
from localllm.errors import LocalLLMError
from localllm.server.body import body_of
from localllm.server.guard import STRANGER
from localllm.server.models import Models
from localllm.server.openapi import documented
from localllm.server.sums import CONTENT_TYPE, Sums

Object = dict[str, Any]
MOST_TOKENS = 2**20  # of a body of /v1/detokenize
TEMPLATE_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


class BrokenOff(LocalLLMError):
    """A GPU has failed, and with it all that this process has on it."""

    http_status = 503


class TokenizeBody(Strict):
    model: str
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TemplateBody(Strict):
    model: str
    messages: Messages
    tools: Tools = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Strict):
    model: str
    tokens: list[int] = Field(max_length=MOST_TOKENS)


def router(models: Models, sums: Sums) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", **documented())
    async def health(request: Request) -> Object:
        """Which models there are is for those who have a key, where one is asked for. Raises BrokenOff."""
        if any(one.is_broken for one in models.loaded.values()):
            raise BrokenOff("a model has broken off and cannot answer any more", "start the server again")
        if STRANGER in request.scope:
            return {"status": "ok"}
        loading = [load.name for load in models.loads.values()]
        loaded = [loaded.name for loaded in models.loaded.values()]
        return {"status": "ok", "version": __version__, "models": loaded, "loading": loading}

    @routes.get("/metrics", **documented(media="text/plain"))
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(sums.text), media_type=CONTENT_TYPE)

    @routes.post("/v1/tokenize", **documented(TokenizeBody, {"model": "demo", "prompt": "Hello"}))
    async def tokenize(request: Request) -> Object:
        """As vLLM has it: a prompt, or messages through the chat template."""
        asked = validated(TokenizeBody, without_nulls(await body_of(request)))
        if (asked.prompt is None) == (asked.messages is None):
            raise BadField("prompt", "give a prompt or messages, and one of them", "leave out the other")
        with await models.lease(asked.model) as lease:
            if asked.prompt is None:
                tokens = await asyncio.to_thread(lease.llm.encode, *rendering(asked))
            else:
                special, encode = asked.add_special_tokens is not False, lease.loaded.llm.tokenizer.encode
                tokens = await asyncio.to_thread(encode, asked.prompt, special=special)
            texts = [lease.texts(token)[0] for token in tokens] if asked.return_token_strs else None
            found: Object = {"count": len(tokens), "max_model_len": lease.loaded.llm.context, "tokens": tokens}
            return found | {"token_strs": texts}

    @routes.post("/v1/detokenize", **documented(DetokenizeBody, {"model": "demo", "tokens": [1, 2]}))
    async def detokenize(request: Request) -> Object:
        asked = validated(DetokenizeBody, await body_of(request))
        with await models.lease(asked.model) as lease:
            llm = lease.loaded.llm
            size = llm.config.vocab_size
            if (beyond := next((t for t in asked.tokens if not 0 <= t < size), None)) is not None:
                raise BadField("tokens", f"{beyond} is no token of this model", f"its ids are 0 to {size - 1}")
            return {"prompt": await asyncio.to_thread(llm.tokenizer.decode, asked.tokens, skip_special=False)}

    @routes.post("/v1/apply-template", **documented(TemplateBody, TEMPLATE_EXAMPLE))
    async def apply_template(request: Request) -> Object:
        """The text that a model reads for messages, and the ids of its tokens."""
        asked = validated(TemplateBody, without_nulls(await body_of(request)))
        with await models.lease(asked.model) as lease:
            llm = lease.llm
            tokens = await asyncio.to_thread(llm.encode, *rendering(asked))
            text = await asyncio.to_thread(llm.tokenizer.decode, tokens, skip_special=False)
            return {"prompt": text, "tokens": tokens}

    return routes


def rendering(asked: TokenizeBody | TemplateBody) -> tuple[Any, Any, Mapping[str, Any]]:
    """What `LLM.encode` takes."""
    tools = None if asked.tools is None else read_tools(asked.tools)
    return read_messages(asked.messages), tools, asked.chat_template_kwargs or {}


def without_nulls(body: Mapping[str, Any]) -> Object:
    return {name: value for name, value in body.items() if value is not None}
