"""Routes of OpenAI's `/v1/responses`, and the store of past responses. `localllm.api.openai.responses_api` has the
formats."""

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.api.openai.responses import ResponseHeader
from localllm.api.openai.responses_api.requests import ResponseBody, parse_response_body, parse_response_request
from localllm.api.openai.responses_api.stream import ResponseStream
from localllm.errors import BadField, LocalLLMError, UnknownResponse
from localllm.request import Request as Prepared
from localllm.request import SamplingParams
from localllm.server.answers import AnswerReader
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.routing import JsonObject, RouteDocs, Router, read_model_body
from localllm.server.streaming import EVENT_STREAM, StreamResponse, run_until_disconnect, sse_event

EXAMPLE = {"model": "demo", "input": "Hello", "max_output_tokens": 8}
MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20  # of JSON in total; each response includes its conversation


def router(models: ModelPool) -> Router:
    routes = Router("/v1/responses")
    store = ResponseStore()

    @routes.post("", RouteDocs(ResponseBody, EXAMPLE, stream_type=EVENT_STREAM))
    async def create_response(request: Request) -> Response:
        body = store.expand(await read_model_body(request, models))
        # Parsed twice: an invalid body must not load a model, whose own parameters are the defaults.
        lease = await models.lease(parse_response_request(body, SamplingParams()).model)
        with lease:
            lease.ensure_chat_template()
            parsed = parse_response_request(body, lease.llm.default_params)
            header = ResponseHeader(f"resp_{secrets.token_hex(12)}", int(time.time()), lease.name)
            stream = ResponseStream(header, parse_response_body(body), parsed, lease.token_texts)
            prepared = await asyncio.to_thread(parsed.prepare, lease.llm)
            if parsed.stream:
                events = stream_response(lease, stream, prepared)
                return StreamResponse(store_at_end(store, body, stream, events), lease.renew())
            response = await run_until_disconnect(request, complete_response(lease, stream, prepared))
            store.add_response(body, response)
            return JSONResponse(response)

    @routes.get("/{response_id}")
    async def get_response(request: Request) -> JsonObject:
        return store.get(request.path_params["response_id"]).response

    @routes.delete("/{response_id}")
    async def delete_response(request: Request) -> JsonObject:
        response_id = request.path_params["response_id"]
        store.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.get("/{response_id}/input_items")
    async def input_items(request: Request) -> JsonObject:
        """The conversation before the response, newest item first."""
        response_id = request.path_params["response_id"]
        items = [
            {"id": f"item_{response_id}_{index}", "type": "message", **item}
            for index, item in enumerate(store.get(response_id).items)
        ][::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return {"object": "list", "data": items, "has_more": False, **ends}

    return routes


@dataclass(frozen=True)
class StoredResponse:
    items: list[Any]  # the whole conversation before the response
    response: JsonObject
    size: int  # bytes of JSON


class ResponseStore:
    """The newest responses, in memory, for `previous_response_id` and `item_reference`. Evicts the least recently
    used."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def get(self, response_id: str) -> StoredResponse:
        """Raises UnknownResponse."""
        if response_id not in self.by_id:
            remedy = "only recent responses are kept, in memory: send the whole conversation as input"
            raise UnknownResponse(f"there is no response {response_id[:80]!r}", remedy)
        self.by_id.move_to_end(response_id)
        return self.by_id[response_id]

    def remove(self, response_id: str) -> None:
        """Raises UnknownResponse."""
        self.bytes -= self.get(response_id).size
        del self.by_id[response_id]

    def add(self, items: list[Any], response: JsonObject) -> None:
        size = len(json.dumps([items, response]))
        self.by_id[response["id"]] = StoredResponse(items, response, size)
        self.bytes += size
        while len(self.by_id) > self.max_responses or (self.bytes > self.max_bytes and len(self.by_id) > 1):
            self.remove(next(iter(self.by_id)))

    def add_response(self, body: Mapping[str, Any], response: JsonObject) -> None:
        """Store a response, unless it failed or the body's `store` is false."""
        if body.get("store") is not False and response["status"] in ("completed", "incomplete"):
            self.add(input_as_items(body["input"]), response)

    def expand(self, body: Mapping[str, Any]) -> JsonObject:
        """The body with the whole conversation as its input: after that of `previous_response_id`, with items in
        place of each `item_reference`. Raises BadField and UnknownResponse."""
        fields = dict(body)
        previous, items = fields.get("previous_response_id"), input_as_items(fields.get("input"))
        if not isinstance(items, list):
            return fields
        references = [item for item in items if isinstance(item, Mapping) and item.get("type") == "item_reference"]
        if not references and not isinstance(previous, str):
            return fields
        earlier: list[Any] = []
        if isinstance(previous, str):
            stored = self.get(previous)
            earlier = [*stored.items, *stored.response["output"]]
        by_id: JsonObject = {}
        if references:
            by_id = {item["id"]: item for stored in self.by_id.values() for item in stored.response["output"]}
        if missing := next((item for item in references if item.get("id") not in by_id), None):
            raise BadField("input", f"there is no item {str(missing.get('id'))[:80]!r}", "send the item itself")
        resolved = [by_id[item["id"]] if item in references else item for item in items]
        return fields | {"input": [*earlier, *resolved]}


def input_as_items(given: Any) -> Any:
    """A text as a list with one message; anything else as it is."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


async def store_at_end(
    store: ResponseStore, body: Mapping[str, Any], stream: ResponseStream, events: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """The events. The response is stored before the last of them is sent."""
    async with aclosing(events):
        async for event in events:
            if stream.status != "in_progress" and stream.header.id not in store.by_id:
                store.add_response(body, stream.response())
            yield event


async def complete_response(lease: Lease, stream: ResponseStream, prepared: Sequence[Prepared]) -> JsonObject:
    """Raises OutputInvalid for an answer that does not match its grammar, unless it was cut off."""
    with AnswerReader(lease.llm, prepared) as answers:
        await answers.completions(lambda _, event: stream.events_for(event))
    return stream.response()


async def stream_response(
    lease: Lease, stream: ResponseStream, prepared: Sequence[Prepared]
) -> AsyncGenerator[bytes]:
    """Events up to the one with the final status. Raises LocalLLMError if the answer cannot start."""
    with AnswerReader(lease.llm, prepared) as answers:
        yield join_events(stream.start_events())
        try:
            while events := await answers.next_events():
                if chunks := [each for _, event in events for each in stream.events_for(event)]:
                    yield join_events(chunks)
        except LocalLLMError as error:
            yield join_events(stream.fail(error))


def join_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(sse_event(event, event["type"]) for event in events)
