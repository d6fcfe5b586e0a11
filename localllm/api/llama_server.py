"""The native bodies of llama.cpp's server, and the objects that answer them: `/completion`, `/infill`,
`/tokenize`, `/detokenize`, `/apply-template`, `/embedding`, `/props`, `/slots`. Knows nothing of HTTP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from localllm.api.body import BadField, StrictModel, ignore_field, validate
from localllm.api.openai.bodies import NEUTRAL_FIELDS, ToolList, drop_neutral_samplers
from localllm.api.openai.messages import MessageList
from localllm.api.openai.requests import parse_completion_request
from localllm.api.openai.responses import MIN_LOGPROB
from localllm.api.openai.streams import Timings
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.llm.embedding_inputs import Embeddings
from localllm.metrics import Slot
from localllm.request import FinishReason, GenerationEvent, Request, SamplingParams, TokenLogprob

JsonObject = dict[str, Any]

MAX_TOKENS = 2**20  # of a body of /detokenize
LOGIT_BIAS_OFF = -10_000.0  # of a token that `false` forbids


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


# How its own page and clients send what they leave as it is; the answer is the same without.
SERVER_FIELDS = (
    *("samplers", "n_keep", "n_discard", "n_cache_reuse", "min_keep", "lora", "response_fields", "n_indent"),
    *("t_max_predict_ms", "t_max_prompt_ms", "post_sampling_probs", "return_progress", "backend_sampling"),
)
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "grammar")
SAMPLING_FIELDS += ("frequency_penalty", "seed", "stop", "ignore_eos", "json_schema", "stream", "min_tokens")


def parse_llama_completion(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/completion`, or of `/infill`, which has an `input_suffix`; defaults: the model's own. Raises
    UsageError."""
    fields = drop_neutral_samplers(
        {
            name: value
            for name, value in body.items()
            if value is not None and name not in (*SERVER_FIELDS, *NEUTRAL_FIELDS)
        }
    )
    fills = not fields.keys().isdisjoint(("input_prefix", "input_suffix"))
    asked = validate(InfillBody if fills else LlamaCompletionBody, fields)
    limit = asked.n_predict if asked.n_predict is not None else asked.max_tokens
    wanted: JsonObject = {name: value for name in SAMPLING_FIELDS if (value := getattr(asked, name)) is not None}
    wanted |= {"model": asked.model, "max_tokens": -1 if limit is None or limit < 0 else limit}
    wanted |= {} if asked.logit_bias is None else {"logit_bias": _biases(asked.logit_bias)}
    wanted |= {} if not asked.n_probs else {"logprobs": asked.n_probs}
    prompt = asked.prompt
    if isinstance(asked, InfillBody):
        if not isinstance(prompt, str):
            raise BadField(
                "prompt", "the prompt of a gap is no text", "send input_prefix, input_suffix and a text"
            )
        if asked.input_extra:
            ignore_field("input_extra", "texts of other files are not read")
        prompt, wanted["suffix"] = asked.input_prefix + prompt, asked.input_suffix
    parsed = parse_completion_request({**wanted, "prompt": prompt}, defaults)
    if isinstance(asked, InfillBody) and parsed.suffix is None:  # an empty one is a gap at the end of a file
        parsed = replace(parsed, suffix="")
    if asked.repeat_last_n is not None:
        parsed = replace(parsed, params=replace(parsed.params, repeat_last_n=asked.repeat_last_n))
    return replace(parsed, timings_per_token=bool(asked.timings_per_token))


def _biases(given: Any) -> dict[str, float]:
    """Pairs of a token and a number, or false, which forbids it; or an object of them."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise BadField("logit_bias", "logit_bias is no list of pairs", "send [[TOKEN, NUMBER], ...]")
    return {str(token): LOGIT_BIAS_OFF if bias is False else bias for token, bias in pairs}


class LlamaStream:
    """The pieces of one answer, which is number `index`."""

    def __init__(
        self, parsed: ParsedRequest, request: Request, texts: TokenTexts, settings: JsonObject, index: int = 0
    ):
        """settings: what `/props` tells of sampling, for this answer."""
        self.parsed = parsed
        self.request = request
        self.texts = texts
        self.settings = settings
        self.index = index
        self.text = ""
        self.tokens: list[int] = []
        self.probabilities: list[JsonObject] = []
        self.timings = Timings()

    def chunk_for(self, event: GenerationEvent) -> JsonObject | None:
        """None for a piece of the prompt."""
        timings = self.timings.fields_for(event)
        if not (event.text or event.token_ids or event.finish_reason):
            return None
        self.text += event.text
        self.tokens += event.token_ids
        probabilities = [self._probability(entry) for entry in event.logprobs]
        self.probabilities += probabilities
        chunk: JsonObject = {
            "index": self.index,
            "content": event.text,
            "tokens": list(event.token_ids),
            "stop": event.finish_reason is not None,
            "id_slot": -1,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": len(self.request.prompt_ids),
        }
        if self.parsed.params.logprobs is not None:
            chunk["completion_probabilities"] = probabilities
        if event.finish_reason is not None:
            chunk |= self._end(event, timings)
        elif self.parsed.timings_per_token:
            chunk["timings"] = timings
        return chunk

    def whole(self, last: JsonObject, *, with_tokens: bool) -> JsonObject:
        """The answer in one object, by its last chunk."""
        told = {**last, "content": self.text, "tokens": self.tokens if with_tokens else []}
        if self.parsed.params.logprobs is not None:
            told["completion_probabilities"] = self.probabilities
        return told

    def _end(self, event: GenerationEvent, timings: JsonObject) -> JsonObject:
        cut = event.finish_reason is FinishReason.LENGTH
        metrics = event.metrics
        return {
            "model": self.parsed.model,
            "generation_settings": self.settings,
            "prompt": self.texts.tokenizer.decode(self.request.prompt_ids),
            "has_new_line": "\n" in self.text,
            "truncated": False,
            "stop_type": "limit" if cut else "word" if event.stop_string is not None else "eos",
            "stopping_word": event.stop_string or "",
            "tokens_cached": metrics.prompt_tokens + metrics.output_tokens if metrics else 0,
            "timings": timings,
        }

    def _probability(self, entry: TokenLogprob) -> JsonObject:
        own = self._named(entry.token_id, entry.logprob)
        return {**own, "top_logprobs": [self._named(token, value) for token, value in entry.top]}

    def _named(self, token: int, value: float) -> JsonObject:
        text, raw = self.texts(token)
        logprob = max(value, MIN_LOGPROB)
        return {"id": token, "token": text, "bytes": list(raw or text.encode()), "logprob": logprob}


def sampling_settings(params: SamplingParams, context: int) -> JsonObject:
    """`generation_settings` of an answer, and those of `/props`."""
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


def slot_object(slot: Slot, context: int) -> JsonObject:
    """One request that a model has, as `/slots` tells of it."""
    return {
        "id": slot.id,
        "n_ctx": context,
        "speculative": False,
        "is_processing": not slot.waiting,
        "n_prompt_tokens": slot.prompt_tokens,
        "n_prompt_tokens_cache": slot.found,
        "next_token": [{"has_next_token": True, "n_decoded": slot.output_tokens}],
    }


def llama_embeddings_object(result: Embeddings) -> list[JsonObject]:
    return [{"index": index, "embedding": [vector.tolist()]} for index, vector in enumerate(result.vectors)]
