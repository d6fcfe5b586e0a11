"""OpenAI's `/v1/responses`. `localllm.api.openai.responses_api` reads and writes it; nothing is kept."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.openai.responses import Stamp
from localllm.api.openai.responses_api.bodies import ResponseBody
from localllm.api.openai.responses_api.requests import read_body, read_response
from localllm.api.openai.responses_api.stream import ResponseStream
from localllm.errors import LocalLLMError
from localllm.llm import collect
from localllm.request import GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import Answers
from localllm.server.body import body_of
from localllm.server.lease import Lease
from localllm.server.models import Models
from localllm.server.openapi import documented
from localllm.server.sse import EventStream, event, unless_gone
from localllm.text.grammar.result import check_answer

EXAMPLE = {"model": "demo", "input": "Hello", "max_output_tokens": 8}


def router(models: Models) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post("/responses", **documented(ResponseBody, EXAMPLE, streams="text/event-stream"))
    async def respond(request: Request) -> Response:
        body = await body_of(request)
        # What makes no sense loads no model.
        lease = await models.lease(read_response(body, SamplingParams()).model)
        with lease:
            asked = read_response(body, lease.llm.default_params)
            stamp = Stamp(f"resp_{secrets.token_hex(12)}", int(time.time()), lease.name)
            answer = ResponseStream(stamp, read_body(body), asked, lease.texts)
            prepared = await asyncio.to_thread(asked.prepare, lease.llm)
            if asked.stream:
                return EventStream(streamed(lease, answer, prepared), lease.kept())
            making = whole(lease, answer, prepared)
            return JSONResponse(await unless_gone(request, making))

    return routes


async def whole(lease: Lease, answer: ResponseStream, prepared: Sequence[Prepared]) -> dict[str, Any]:
    said: list[GenerationEvent] = []
    with Answers(lease.llm, prepared) as answers:
        async for _, piece in answers:
            said.append(piece)
            answer.push(piece)
    await asyncio.to_thread(check_answer, prepared[0], collect(prepared[0], said), of_stranger=True)
    return answer.response()


async def streamed(lease: Lease, answer: ResponseStream, prepared: Sequence[Prepared]) -> AsyncGenerator[bytes]:
    """Events up to the one that says how the response ended. Raises what keeps it from beginning."""
    made: list[dict[str, Any]] = []
    with Answers(lease.llm, prepared) as answers:
        yield sent(answer.begin())
        try:
            async for _, piece in answers:
                made += answer.push(piece)
                if made and not answers.more:
                    yield sent(made)
                    made.clear()
        except LocalLLMError as error:
            yield sent([*made, *answer.fail(error)])


def sent(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(event(made, made["type"]) for made in events)
