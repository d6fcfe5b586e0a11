"""The routes of llama.cpp's server that are none of OpenAI's, for programs that are written for it.
`localllm.api.llama_server` reads and writes the bodies."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm import __version__
from localllm.api.body import BadField, validate
from localllm.api.embeddings import MAX_INPUTS, check_input_type
from localllm.api.llama_server import (
    InfillBody,
    JsonObject,
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
from localllm.errors import LocalLLMError
from localllm.llm.llm import LLM, collect_completion
from localllm.request import ChatRequest, GenerationEvent, SamplingParams
from localllm.request import Request as Prepared
from localllm.server.answers import AnswerReader
from localllm.server.body import only_model, read_model_body
from localllm.server.lease import Lease
from localllm.server.models import ModelPool
from localllm.server.openapi import route_docs
from localllm.server.sse import StreamResponse, run_until_disconnect, sse_event
from localllm.text.grammar.result import check_answer

EXAMPLE = {"model": "demo", "prompt": "Once upon a time", "n_predict": 8}
EVENT_STREAM = "text/event-stream"
ONE_OR_MORE = ["object", "array"]  # an answer to each prompt
COMPLETION_DOCS = route_docs(LlamaCompletionBody, EXAMPLE, stream_type=EVENT_STREAM, json_type=ONE_OR_MORE)
EMBEDDING_DOCS = route_docs(LlamaEmbeddingBody, {"model": "demo", "content": "a cat"}, json_type="array")
RERANK_PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")


class NoReranker(LocalLLMError):
    http_status = 501

    def __init__(self) -> None:
        super().__init__("models that rank texts do not run here", "ask for embeddings, and compare those")


def router(models: ModelPool) -> APIRouter:
    routes = APIRouter()

    @routes.post("/completion", **COMPLETION_DOCS)
    @routes.post("/completions", **COMPLETION_DOCS)
    async def completion(request: Request) -> Response:
        return await answer(models, request)

    @routes.post("/infill", **route_docs(InfillBody, stream_type=EVENT_STREAM, json_type=ONE_OR_MORE))
    async def infill(request: Request) -> Response:
        return await answer(models, request, fills=True)

    @routes.post("/tokenize", **route_docs(LlamaTokenizeBody, {"model": "demo", "content": "Hello"}))
    async def tokenize(request: Request) -> JsonObject:
        asked = validate(LlamaTokenizeBody, await read_model_body(request, models))
        with await models.lease(asked.model) as lease:
            tokenizer = lease.loaded.llm.tokenizer
            if asked.parse_special is False:
                begin = tokenizer.encode("")[:1] if asked.add_special else []
                tokens = begin + await asyncio.to_thread(tokenizer.encode_continuation, asked.content)
            else:
                special = bool(asked.add_special)
                tokens = await asyncio.to_thread(tokenizer.encode, asked.content, special=special)
            if asked.with_pieces:
                return {"tokens": [{"id": token, "piece": lease.token_texts(token)[0]} for token in tokens]}
            return {"tokens": tokens}

    @routes.post("/detokenize", **route_docs(LlamaDetokenizeBody, {"model": "demo", "tokens": [1, 2]}))
    async def detokenize(request: Request) -> JsonObject:
        asked = validate(LlamaDetokenizeBody, await read_model_body(request, models))
        with await models.lease(asked.model) as lease:
            tokenizer, size = lease.loaded.llm.tokenizer, lease.loaded.llm.config.vocab_size
            if not all(0 <= token < size for token in asked.tokens):
                raise BadField("tokens", "tokens has one that is none of this model's", f"send 0 to {size - 1}")
            decode = partial(tokenizer.decode, asked.tokens, skip_special=False)
            return {"content": await asyncio.to_thread(decode)}

    @routes.post("/apply-template", **route_docs(LlamaTemplateBody, {"model": "demo", "messages": []}))
    async def apply_template(request: Request) -> JsonObject:
        asked = validate(LlamaTemplateBody, await read_model_body(request, models))
        tools = None if asked.tools is None else parse_tools(asked.tools)
        with await models.lease(asked.model) as lease:
            lease.ensure_chat_template()
            messages, arguments = parse_messages(asked.messages), asked.chat_template_kwargs or {}
            chat = ChatRequest(messages, tools=tools, template_arguments=arguments)
            tokens = await asyncio.to_thread(lease.llm.encode, chat)
            decode = partial(lease.llm.tokenizer.decode, tokens, skip_special=False)
            return {"prompt": await asyncio.to_thread(decode)}

    @routes.post("/embedding", **EMBEDDING_DOCS)
    @routes.post("/embeddings", **EMBEDDING_DOCS)
    async def embedding(request: Request) -> Response:
        body = await read_model_body(request, models)
        for name in ("content", "input"):
            check_input_type(body.get(name) or "")
        asked = validate(LlamaEmbeddingBody, {name: value for name, value in body.items() if value is not None})
        texts = asked.input if asked.content is None else asked.content
        if not texts:
            raise BadField("content", "content is missing", "send a text, or several")
        if isinstance(texts, list) and not isinstance(texts[0], int) and len(texts) > MAX_INPUTS:
            raise BadField("content", f"content has {len(texts)} texts", f"send up to {MAX_INPUTS} at once")
        with await models.lease(asked.model) as lease:
            embed = asyncio.to_thread(lease.embedder.embed, texts)
            made = await run_until_disconnect(request, embed)
        return JSONResponse(await asyncio.to_thread(llama_embeddings_object, made))

    @routes.get("/props", **route_docs())
    async def props(model: str = "") -> JsonObject:
        with await models.lease(model or only_model(models)) as lease:
            return properties(lease.llm, lease.name)

    @routes.get("/slots", **route_docs(json_type="array"))
    async def slots(model: str = "") -> Response:
        """Its requests; llama.cpp has a fixed number of slots, and tells of those that are free as well."""
        with await models.lease(model or only_model(models)) as lease:
            return JSONResponse([slot_object(slot, lease.llm.context) for slot in lease.llm.slots()])

    async def rerank() -> None:
        raise NoReranker

    for path in RERANK_PATHS:
        routes.add_api_route(path, rerank, methods=["POST"], include_in_schema=False)
    return routes


def properties(llm: LLM, name: str) -> JsonObject:
    params = llm.default_params
    special = llm.tokenizer.special_tokens
    return {
        "default_generation_settings": {
            "n_ctx": llm.context,
            "params": sampling_settings(params, llm.context),
        },
        "total_slots": max(1, len(llm.slots())),
        "model_alias": name,
        "model_path": name,  # where it lies is nobody's business
        "chat_template": llm.tokenizer.chat_templates.get("default", ""),
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"localllm {__version__}",
        "is_sleeping": False,
    }


async def answer(models: ModelPool, request: Request, *, fills: bool = False) -> Response:
    """Raises LocalLLMError for a body that makes no sense, and what goes wrong before the first piece is sent."""
    body = await read_model_body(request, models)
    if fills:
        body = {"input_prefix": "", **body}
    lease = await models.lease(parse_llama_completion(body, SamplingParams()).model)
    with lease:
        asked = parse_llama_completion(body, lease.llm.default_params)
        prepared = await asyncio.to_thread(asked.prepare, lease.llm)
        settings = [sampling_settings(one.params, lease.llm.context) for one in prepared]
        streams = [
            LlamaStream(asked, one, lease.token_texts, setting, index)
            for index, (one, setting) in enumerate(zip(prepared, settings, strict=True))
        ]
        if asked.stream:
            return StreamResponse(stream_answers(lease, asked, prepared, streams), lease.renew())
        answers = await run_until_disconnect(request, complete_answers(lease, asked, prepared, streams))
        whole = [
            stream.whole(last, with_tokens=body.get("return_tokens") is True)
            for stream, last in zip(streams, answers, strict=True)
        ]
        return JSONResponse(whole if len(whole) > 1 else whole[0])


async def complete_answers(
    lease: Lease, parsed: ParsedRequest, prepared: Sequence[Prepared], streams: Sequence[LlamaStream]
) -> list[JsonObject]:
    """The last chunk of each."""
    pieces: list[list[GenerationEvent]] = [[] for _ in prepared]
    last: list[JsonObject] = [{} for _ in prepared]
    with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
        async for index, piece in answers:
            pieces[index].append(piece)
            last[index] = streams[index].chunk_for(piece) or last[index]
    for one, events in zip(prepared, pieces, strict=True):
        await asyncio.to_thread(check_answer, one, collect_completion(one, events), untrusted=True)
    return last


async def stream_answers(
    lease: Lease, parsed: ParsedRequest, prepared: Sequence[Prepared], streams: Sequence[LlamaStream]
) -> AsyncGenerator[bytes]:
    """Events up to those that end the answers, or to an error. Raises what keeps it from beginning."""
    begun = False
    try:
        with AnswerReader(lease.llm, prepared, parsed.answers_per_prompt) as answers:
            async for index, piece in answers:
                if chunk := streams[index].chunk_for(piece):
                    begun = True
                    yield sse_event(chunk)
    except LocalLLMError as error:
        if not begun:
            raise
        yield sse_event(error_object(error))
