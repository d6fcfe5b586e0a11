"""Routes of llama.cpp's server beside those of OpenAI. `localllm.api.llama_server` has the formats."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm import __version__
from localllm.api.body import drop_nulls, parse_json_object, validate
from localllm.api.embeddings import MAX_INPUTS, check_input_type
from localllm.api.llama_server import (
    InfillBody,
    LlamaCompletionBody,
    LlamaDetokenizeBody,
    LlamaEmbeddingBody,
    LlamaStream,
    LlamaTemplateBody,
    LlamaTokenizeBody,
    llama_embeddings_object,
    parse_llama_completion,
    sampling_settings,
    slot_object,
)
from localllm.api.openai.bodies import parse_tools
from localllm.api.openai.messages import parse_messages
from localllm.api.openai.responses import error_object
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField, LocalLLMError
from localllm.llm.llm import LLM
from localllm.request import CLIENT, ChatRequest, GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server import slots
from localllm.server.answers import AnswerReader
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.routing import (
    JsonObject,
    RouteDocs,
    Router,
    only_model,
    read_json_body,
    read_model_body,
)
from localllm.server.slots import SlotFileBody, SlotFiles
from localllm.server.streaming import EVENT_STREAM, StreamResponse, run_until_disconnect, sse_event

EXAMPLE = {"model": "demo", "prompt": "Once upon a time", "n_predict": 8}
ONE_OR_MORE = ["object", "array"]  # an array for several prompts
COMPLETION_DOCS = RouteDocs(LlamaCompletionBody, EXAMPLE, stream_type=EVENT_STREAM, json_type=ONE_OR_MORE)
EMBEDDING_DOCS = RouteDocs(LlamaEmbeddingBody, {"model": "demo", "content": "a cat"}, json_type="array")
SLOT_DOCS = RouteDocs(
    SlotFileBody,
    {"filename": "slot.bin"},
    query=("action", "model"),
    errors={501: "The server runs without --slot-save-path."},
)
RERANK_PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")


class NoReranker(LocalLLMError):
    http_status = 501

    def __init__(self) -> None:
        super().__init__("reranking models are not supported", "request embeddings and compare those")


def router(models: ModelPool, slot_files: SlotFiles | None) -> Router:
    """slot_files: where slots are saved; None: nowhere."""
    routes = Router()

    @routes.post("/completion", COMPLETION_DOCS)
    @routes.post("/completions", COMPLETION_DOCS)
    async def completion(request: Request) -> Response:
        return await answer(models, request)

    @routes.post("/infill", RouteDocs(InfillBody, stream_type=EVENT_STREAM, json_type=ONE_OR_MORE))
    async def infill(request: Request) -> Response:
        return await answer(models, request, infill=True)

    @routes.post("/tokenize", RouteDocs(LlamaTokenizeBody, {"model": "demo", "content": "Hello"}))
    async def tokenize(request: Request) -> JsonObject:
        body = validate(LlamaTokenizeBody, await read_model_body(request, models))
        with await models.lease(body.model) as lease:
            tokenizer = lease.loaded.llm.tokenizer
            if body.parse_special is False:
                prefix = tokenizer.encode("")[:1] if body.add_special else []
                tokens = prefix + await asyncio.to_thread(tokenizer.encode_continuation, body.content)
            else:
                special = bool(body.add_special)
                tokens = await asyncio.to_thread(tokenizer.encode, body.content, special=special)
            if body.with_pieces:
                return {"tokens": [{"id": token, "piece": lease.token_texts(token)[0]} for token in tokens]}
            return {"tokens": tokens}

    @routes.post("/detokenize", RouteDocs(LlamaDetokenizeBody, {"model": "demo", "tokens": [1, 2]}))
    async def detokenize(request: Request) -> JsonObject:
        body = validate(LlamaDetokenizeBody, await read_model_body(request, models))
        with await models.lease(body.model) as lease:
            return {"content": await lease.detokenize(body.tokens)}

    @routes.post("/apply-template", RouteDocs(LlamaTemplateBody, {"model": "demo", "messages": []}))
    async def apply_template(request: Request) -> JsonObject:
        body = validate(LlamaTemplateBody, await read_model_body(request, models))
        tools = None if body.tools is None else parse_tools(body.tools)
        arguments = body.chat_template_kwargs or {}
        chat = ChatRequest(parse_messages(body.messages), tools=tools, template_arguments=arguments)
        with await models.lease(body.model) as lease:
            text, _ = await lease.render(chat)
            return {"prompt": text}

    @routes.post("/embedding", EMBEDDING_DOCS)
    @routes.post("/embeddings", EMBEDDING_DOCS)
    async def embedding(request: Request) -> Response:
        fields = drop_nulls(await read_model_body(request, models))
        for name in ("content", "input"):
            check_input_type(fields.get(name) or "")
        body = validate(LlamaEmbeddingBody, fields)
        inputs = body.input if body.content is None else body.content
        if not inputs:
            raise BadField("content", "content is missing", "send a text or several")
        if isinstance(inputs, list) and not isinstance(inputs[0], int) and len(inputs) > MAX_INPUTS:
            raise BadField("content", f"content has {len(inputs)} texts", f"send at most {MAX_INPUTS}")
        with await models.lease(body.model) as lease:
            result = await run_until_disconnect(request, asyncio.to_thread(lease.embedder.embed, inputs))
        return JSONResponse(await asyncio.to_thread(llama_embeddings_object, result))

    @routes.get("/props", RouteDocs(query=("model",)))
    async def props(request: Request) -> JsonObject:
        with await models.lease(queried_model(request)) as lease:
            return properties(lease.llm, lease.name)

    @routes.get("/slots", RouteDocs(json_type="array", query=("model",)))
    async def list_slots(request: Request) -> Response:
        """Slots of this client's requests, with those that remember tokens of earlier ones; at least slot 0."""
        with await models.lease(queried_model(request)) as lease:
            requests = {each.id: each for each in lease.llm.slots()}
            table, context = lease.llm.worker.slot_table, lease.llm.context
            return JSONResponse(
                [slot_object(s, requests.get(s.request_id), context) for s in table.of_client(CLIENT.get())]
            )

    @routes.post("/slots/{id_slot}", SLOT_DOCS)
    async def slot_action(request: Request) -> JsonObject:
        """Save the tokens of a slot to a file, restore them, or erase them."""
        folder = slots.require_files(slot_files)
        number, action = slots.parse_number(request.path_params["id_slot"]), request.query_params.get("action")
        if action == "erase":
            model = request.query_params.get("model")
            body = parse_json_object(content) if (content := await request.body()) else {}
            with await models.lease(model or body.get("model") or only_model(models)) as lease:
                return await asyncio.to_thread(slots.erase, lease.llm, number)
        if action not in ("save", "restore"):
            raise BadField("action", f"the action is {str(action)[:20]!r}", "send save, restore or erase")
        fields = await read_json_body(request)
        fields["model"] = request.query_params.get("model") or fields.get("model") or only_model(models)
        body = validate(SlotFileBody, fields)
        with await models.lease(body.model) as lease:
            act = folder.save if action == "save" else folder.restore
            return await asyncio.to_thread(act, lease.llm, number, body.filename)

    async def rerank(_: Request) -> Response:
        raise NoReranker

    for path in RERANK_PATHS:
        routes.post(path, in_schema=False)(rerank)

    def queried_model(request: Request) -> str:
        return request.query_params.get("model") or only_model(models)

    return routes


def properties(llm: LLM, name: str) -> JsonObject:
    """Answer of `/props`."""
    special = llm.tokenizer.special_tokens
    return {
        "default_generation_settings": {
            "n_ctx": llm.context,
            "params": sampling_settings(llm.default_params, llm.context),
        },
        "total_slots": len(llm.worker.slot_table.of_client(CLIENT.get())),
        "model_alias": name,
        "model_path": name,  # the real path is not for clients
        "chat_template": llm.tokenizer.chat_templates.get("default", ""),
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"localllm {__version__}",
        "is_sleeping": False,
    }


async def answer(models: ModelPool, request: Request, *, infill: bool = False) -> Response:
    """Raises LocalLLMError for an invalid body, and for any failure before the first event is sent."""
    body = await read_model_body(request, models)
    if infill:
        body = {"input_prefix": "", **body}
    lease = await models.lease(parse_llama_completion(body, SamplingParams()).model)
    with lease:
        parsed = parse_llama_completion(body, lease.llm.default_params)
        prepared = await asyncio.to_thread(parsed.prepare, lease.llm)
        slot_table = lease.llm.worker.slot_table
        streams = [
            LlamaStream(
                parsed,
                each,
                lease.token_texts,
                sampling_settings(each.params, lease.llm.context),
                index,
                partial(slot_table.number_of, each),
            )
            for index, each in enumerate(prepared)
        ]
        if parsed.stream:
            return StreamResponse(stream_answers(lease, parsed, prepared, streams), lease.renew())
        last_chunks = await run_until_disconnect(request, complete_answers(lease, parsed, prepared, streams))
        with_tokens = body.get("return_tokens") is True
        objects = [
            stream.completion_object(last, with_tokens=with_tokens)
            for stream, last in zip(streams, last_chunks, strict=True)
        ]
        return JSONResponse(objects if len(objects) > 1 else objects[0])


async def complete_answers(
    lease: Lease, parsed: ParsedRequest, prepared: Sequence[Prepared], streams: Sequence[LlamaStream]
) -> list[JsonObject]:
    """The last chunk of each answer. Raises OutputInvalid for an answer that does not match its grammar."""
    last_chunks: list[JsonObject] = [{} for _ in prepared]

    def write(index: int, event: GenerationEvent) -> None:
        last_chunks[index] = streams[index].chunk_for(event) or last_chunks[index]

    with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
        await answers.completions(write)
    return last_chunks


async def stream_answers(
    lease: Lease, parsed: ParsedRequest, prepared: Sequence[Prepared], streams: Sequence[LlamaStream]
) -> AsyncGenerator[bytes]:
    """Events up to the last of all answers, or up to an error. Raises LocalLLMError if no answer can start."""
    started = False
    try:
        with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
            while events := await answers.next_events():
                chunks = [chunk for index, event in events if (chunk := streams[index].chunk_for(event))]
                if chunks:
                    started = True
                    yield b"".join(map(sse_event, chunks))
    except LocalLLMError as error:
        if not started:
            raise
        yield sse_event(error_object(error))
