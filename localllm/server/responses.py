"""OpenAI's `/v1/responses`. `localllm.api.openai.responses_api` reads, writes and keeps it."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.openai.responses import ResponseHeader
from localllm.api.openai.responses_api.bodies import ResponseBody
from localllm.api.openai.responses_api.kept import KeptResponses
from localllm.api.openai.responses_api.requests import parse_response_body, parse_response_request
from localllm.api.openai.responses_api.stream import ResponseStream
from localllm.errors import LocalLLMError
from localllm.llm.llm import collect_completion
from localllm.request import GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import AnswerReader
from localllm.server.body import read_model_body
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.openapi import route_docs
from localllm.server.sse import StreamResponse, run_until_disconnect, sse_event
from localllm.text.grammar.result import check_answer

RESPONSES_EXAMPLE = {"model": "demo", "input": "Hello", "max_output_tokens": 8}


def responses_router(models: ModelPool) -> APIRouter:
    routes = APIRouter(prefix="/v1")
    kept = KeptResponses()

    @routes.post("/responses", **route_docs(ResponseBody, RESPONSES_EXAMPLE, stream_type="text/event-stream"))
    async def respond(request: Request) -> Response:
        body = kept.expand(await read_model_body(request, models))
        # What makes no sense loads no model.
        lease = await models.lease(parse_response_request(body, SamplingParams()).model)
        with lease:
            lease.ensure_chat_template()
            asked = parse_response_request(body, lease.llm.default_params)
            stamp = ResponseHeader(f"resp_{secrets.token_hex(12)}", int(time.time()), lease.name)
            answer = ResponseStream(stamp, parse_response_body(body), asked, lease.token_texts)
            prepared = await asyncio.to_thread(asked.prepare, lease.llm)
            if asked.stream:
                events = stream_response(lease, answer, prepared)
                return StreamResponse(keep_streamed(kept, body, answer, events), lease.renew())
            made = await run_until_disconnect(request, complete_response(lease, answer, prepared))
            keep_response(kept, body, made)
            return JSONResponse(made)

    @routes.get("/responses/{response_id}", **route_docs())
    async def kept_response(response_id: str) -> dict[str, Any]:
        return kept.get(response_id).response

    @routes.delete("/responses/{response_id}", **route_docs())
    async def delete_response(response_id: str) -> dict[str, Any]:
        kept.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.get("/responses/{response_id}/input_items", **route_docs())
    async def input_items(response_id: str) -> dict[str, Any]:
        """The conversation before the response, the newest item first."""
        items = [
            {"id": f"item_{response_id}_{index}", "type": "message", **item}
            for index, item in enumerate(kept.get(response_id).items)
        ][::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return {"object": "list", "data": items, "has_more": False, **ends}

    return routes


def keep_response(kept: KeptResponses, body: Mapping[str, Any], response: dict[str, Any]) -> None:
    """Unless the body says otherwise; one that failed is nothing to go on from."""
    if body.get("store") is not False and response["status"] in ("completed", "incomplete"):
        given = body["input"]
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        kept.add(items, response)


async def keep_streamed(
    kept: KeptResponses, body: Mapping[str, Any], answer: ResponseStream, events: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """The events, the last of which tells of a response that is kept by then."""
    async with aclosing(events):
        async for event in events:
            if answer.status != "in_progress" and answer.header.id not in kept.by_id:
                keep_response(kept, body, answer.response())
            yield event


async def complete_response(lease: Lease, answer: ResponseStream, prepared: Sequence[Prepared]) -> dict[str, Any]:
    said: list[GenerationEvent] = []
    with AnswerReader(lease.llm, prepared) as answers:
        async for _, piece in answers:
            said.append(piece)
            answer.events_for(piece)
    await asyncio.to_thread(check_answer, prepared[0], collect_completion(prepared[0], said), untrusted=True)
    return answer.response()


async def stream_response(
    lease: Lease, answer: ResponseStream, prepared: Sequence[Prepared]
) -> AsyncGenerator[bytes]:
    """Events up to the one that says how the response ended. Raises what keeps it from beginning."""
    made: list[dict[str, Any]] = []
    with AnswerReader(lease.llm, prepared) as answers:
        yield join_events(answer.start_events())
        try:
            async for _, piece in answers:
                made += answer.events_for(piece)
                if made and not answers.has_more:
                    yield join_events(made)
                    made.clear()
        except LocalLLMError as error:
            yield join_events([*made, *answer.fail(error)])


def join_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(sse_event(made, made["type"]) for made in events)
