"""OpenAI's `/v1/responses`. `localllm.api.openai.responses_api` reads, writes and keeps it."""

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.openai.responses import ResponseHeader
from localllm.api.openai.responses_api.requests import ResponseBody, parse_response_body, parse_response_request
from localllm.api.openai.responses_api.stream import ResponseStream
from localllm.errors import BadField, LocalLLMError, UnknownResponse
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

# Responses that are kept for a while in memory, so that a later one may follow them by `previous_response_id`.

JsonObject = dict[str, Any]

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20  # of JSON, of all together; each holds the conversation up to it


@dataclass(frozen=True)
class KeptResponse:
    items: list[Any]  # the input, behind what came before it
    response: JsonObject
    size: int  # bytes of JSON


class KeptResponses:
    """The newest; the ones that were used the longest ago give way."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.by_id: OrderedDict[str, KeptResponse] = OrderedDict()
        self.bytes = 0

    def get(self, response_id: str) -> KeptResponse:
        """Raises UnknownResponse."""
        if response_id not in self.by_id:
            remedy = "responses are kept in memory, the newest alone: send the whole conversation as input"
            raise UnknownResponse(f"there is no response {response_id[:80]!r}", remedy)
        self.by_id.move_to_end(response_id)
        return self.by_id[response_id]

    def remove(self, response_id: str) -> None:
        """Raises UnknownResponse."""
        self.bytes -= self.get(response_id).size
        del self.by_id[response_id]

    def add(self, items: list[Any], response: JsonObject) -> None:
        size = len(json.dumps([items, response]))
        self.by_id[response["id"]] = KeptResponse(items, response, size)
        self.bytes += size
        while len(self.by_id) > self.max_responses or (self.bytes > self.max_bytes and len(self.by_id) > 1):
            self.remove(next(iter(self.by_id)))

    def expand(self, body: Mapping[str, Any]) -> JsonObject:
        """The body with the whole conversation as its input: behind that of `previous_response_id`, and with items
        for those that are named by `item_reference`. Raises BadField and UnknownResponse."""
        fields = dict(body)
        previous, given = fields.get("previous_response_id"), fields.get("input")
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list):
            return fields
        references = [item for item in given if isinstance(item, Mapping) and item.get("type") == "item_reference"]
        if not references and not isinstance(previous, str):
            return fields
        before = self.get(previous) if isinstance(previous, str) else None
        earlier = [*before.items, *before.response["output"]] if before else []
        ids = (
            {item["id"]: item for kept in self.by_id.values() for item in kept.response["output"]}
            if references
            else {}
        )
        if missing := next((item for item in references if item.get("id") not in ids), None):
            raise BadField("input", f"there is no item {str(missing.get('id'))[:80]!r}", "send the item itself")
        return fields | {"input": [*earlier, *(ids[item["id"]] if item in references else item for item in given)]}


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
