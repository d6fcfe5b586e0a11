"""Formats of llama.cpp's server: `/completion`, `/infill`, `/tokenize`, `/detokenize`, `/apply-template`,
`/embedding`, `/props`, `/slots`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from localllm.api.body import StrictModel, drop_nulls, ignore_field, validate
from localllm.api.openai.bodies import NEUTRAL_FIELDS, ToolList, drop_neutral_samplers
from localllm.api.openai.messages import MessageList
from localllm.api.openai.requests import parse_completion_request
from localllm.api.openai.responses import MIN_LOGPROB, Timings
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.errors import BadField
from localllm.llm.embedding_inputs import Embeddings
from localllm.llm.slots import RequestSlot
from localllm.metrics import Slot
from localllm.request import FinishReason, GenerationEvent, Request, SamplingParams, TokenLogprob

JsonObject = dict[str, Any]

MAX_TOKENS = 2**20  # token ids per /detokenize request
LOGIT_BIAS_OFF = -10_000.0  # bias of a token that `false` forbids
# Fields that do not change the answer; llama.cpp's own clients send all of them with their defaults.
SERVER_FIELDS = (
    *("samplers", "n_keep", "n_discard", "n_cache_reuse", "min_keep", "lora", "response_fields", "n_indent"),
    *("t_max_predict_ms", "t_max_prompt_ms", "post_sampling_probs", "return_progress", "backend_sampling"),
)
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "grammar")
SAMPLING_FIELDS += ("frequency_penalty", "seed", "stop", "ignore_eos", "json_schema", "stream", "min_tokens")
SAMPLING_FIELDS += ("id_slot",)


class LlamaCompletionBody(StrictModel):
    model: str
    prompt: Any = ""
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    seed: int | None = None
    stop: list[str] | str | None = None
    ignore_eos: bool | None = None
    n_probs: int | None = None
    min_tokens: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    id_slot: int | None = None


class InfillBody(LlamaCompletionBody):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[Any] | None = None


class LlamaTokenizeBody(StrictModel):
    model: str
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class LlamaDetokenizeBody(StrictModel):
    model: str
    tokens: list[int] = Field(max_length=MAX_TOKENS)


class LlamaTemplateBody(StrictModel):
    model: str
    messages: MessageList
    tools: ToolList = None
    chat_template_kwargs: dict[str, Any] | None = None


class LlamaEmbeddingBody(StrictModel):
    model: str
    content: str | list[str] | list[int] | list[list[int]] | None = None
    input: str | list[str] | list[int] | list[list[int]] | None = None


def parse_llama_completion(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/completion`, or of `/infill`, which has an input_prefix or input_suffix. defaults: the model's
    own. Raises UsageError."""
    fields = drop_neutral_samplers(drop_nulls(body, (*SERVER_FIELDS, *NEUTRAL_FIELDS)))
    is_infill = not fields.keys().isdisjoint(("input_prefix", "input_suffix"))
    request = validate(InfillBody if is_infill else LlamaCompletionBody, fields)
    limit = request.n_predict if request.n_predict is not None else request.max_tokens
    completion: JsonObject = {
        name: value for name in SAMPLING_FIELDS if (value := getattr(request, name)) is not None
    }
    completion |= {"model": request.model, "max_tokens": -1 if limit is None or limit < 0 else limit}
    completion |= {} if request.logit_bias is None else {"logit_bias": _biases(request.logit_bias)}
    completion |= {} if not request.n_probs else {"logprobs": request.n_probs}
    prompt = request.prompt
    if isinstance(request, InfillBody):
        if not isinstance(prompt, str):
            remedy = "send input_prefix, input_suffix and a text"
            raise BadField("prompt", "the prompt of /infill is not a string", remedy)
        if request.input_extra:
            ignore_field("input_extra", "input_extra is not supported")
        prompt, completion["suffix"] = request.input_prefix + prompt, request.input_suffix
    parsed = parse_completion_request({**completion, "prompt": prompt}, defaults)
    if isinstance(request, InfillBody) and parsed.suffix is None:  # an empty suffix means the end of a file
        parsed = replace(parsed, suffix="")
    if request.repeat_last_n is not None:
        parsed = replace(parsed, params=replace(parsed.params, repeat_last_n=request.repeat_last_n))
    return replace(parsed, timings_per_token=bool(request.timings_per_token))


def _biases(value: Any) -> dict[str, float]:
    """Biases by token id, from an object or a list of pairs; `false` forbids a token."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise BadField("logit_bias", "logit_bias is not a list of pairs", "send [[TOKEN, NUMBER], ...]")
    return {str(token): LOGIT_BIAS_OFF if bias is False else bias for token, bias in pairs}


class LlamaStream:
    """Chunks of one answer, which is number `index`."""

    def __init__(
        self,
        parsed: ParsedRequest,
        request: Request,
        texts: TokenTexts,
        settings: JsonObject,
        index: int,
        find_slot: Callable[[], int],
    ):
        """settings: `generation_settings` of this answer; find_slot: returns the slot of the request, once it has
        started."""
        self.parsed = parsed
        self.request = request
        self.texts = texts
        self.settings = settings
        self.index = index
        self.find_slot = find_slot
        self.slot = -1
        self.text = ""
        self.tokens: list[int] = []
        self.probabilities: list[JsonObject] = []
        self.timings = Timings()

    def chunk_for(self, event: GenerationEvent) -> JsonObject | None:
        """The chunk of an event; None while the prompt is computed."""
        timings = self.timings.fields_for(event)
        if not (event.text or event.token_ids or event.finish_reason):
            return None
        if self.slot < 0:
            self.slot = self.find_slot()
        self.text += event.text
        self.tokens += event.token_ids
        probabilities = [self._probability(entry) for entry in event.logprobs]
        self.probabilities += probabilities
        chunk: JsonObject = {
            "index": self.index,
            "content": event.text,
            "tokens": list(event.token_ids),
            "stop": event.finish_reason is not None,
            "id_slot": self.slot,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": len(self.request.prompt_ids),
        }
        if self.parsed.params.logprobs is not None:
            chunk["completion_probabilities"] = probabilities
        if event.finish_reason is not None:
            chunk |= self._final_fields(event, timings)
        elif self.parsed.timings_per_token:
            chunk["timings"] = timings
        return chunk

    def completion_object(self, last: JsonObject, *, with_tokens: bool) -> JsonObject:
        """The whole answer as one object. last: its last chunk."""
        completion = {**last, "content": self.text, "tokens": self.tokens if with_tokens else []}
        if self.parsed.params.logprobs is not None:
            completion["completion_probabilities"] = self.probabilities
        return completion

    def _final_fields(self, event: GenerationEvent, timings: JsonObject) -> JsonObject:
        is_cut_off = event.finish_reason is FinishReason.LENGTH
        metrics = event.metrics
        return {
            "model": self.parsed.model,
            "generation_settings": self.settings,
            "prompt": self.texts.tokenizer.decode(self.request.prompt_ids),
            "has_new_line": "\n" in self.text,
            "truncated": False,
            "stop_type": "limit" if is_cut_off else "word" if event.stop_string is not None else "eos",
            "stopping_word": event.stop_string or "",
            "tokens_cached": metrics.prompt_tokens + metrics.output_tokens if metrics else 0,
            "timings": timings,
        }

    def _probability(self, entry: TokenLogprob) -> JsonObject:
        own = self._token(entry.token_id, entry.logprob)
        return {**own, "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top]}

    def _token(self, token: int, logprob: float) -> JsonObject:
        text, raw = self.texts(token)
        token_bytes = list(raw or text.encode())
        return {"id": token, "token": text, "bytes": token_bytes, "logprob": max(logprob, MIN_LOGPROB)}


def sampling_settings(params: SamplingParams, context: int) -> JsonObject:
    """Sampling parameters, as in `generation_settings` of an answer and in `/props`."""
    return {
        "n_ctx": context,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "max_tokens": -1 if params.max_tokens is None else params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "grammar": params.grammar.text if params.grammar else "",
    }


def slot_object(slot: RequestSlot, request: Slot | None, context: int) -> JsonObject:
    """A slot, as `/slots` lists it. request: its last, unless it has ended; context: the model's, in tokens."""
    running = request is not None
    return {
        "id": slot.number,
        "id_task": slot.request_id,
        "n_ctx": context,
        "speculative": False,
        "is_processing": running and not request.waiting,
        "n_prompt_tokens": request.prompt_tokens if running else len(slot.token_ids),
        "n_prompt_tokens_cache": request.found if running else 0,
        "next_token": [{"has_next_token": running, "n_decoded": request.output_tokens if running else 0}],
    }


def llama_embeddings_object(result: Embeddings) -> list[JsonObject]:
    """Answer of `/embedding`."""
    return [{"index": index, "embedding": [vector.tolist()]} for index, vector in enumerate(result.vectors)]
