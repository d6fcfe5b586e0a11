"""Formats of embeddings: OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and the older `/api/embeddings`.

OpenAI's API refuses a text that is too long; Ollama's truncates it unless the body says otherwise, and `truncated`
in the answer has the number of dropped tokens per text. OpenAI's clients request base64 of little-endian float32.
"""

import base64
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from localllm.api.body import StrictModel, drop_nulls, validate
from localllm.api.ollama.bodies import parse_keep_alive
from localllm.errors import BadField
from localllm.llm.embedding_inputs import Embeddings

MAX_INPUTS = 2048  # texts per request, as in OpenAI's API
NEUTRAL_FIELDS = ("user",)


class EmbeddingsBody(StrictModel):
    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


def parse_openai_embeddings(body: Mapping[str, Any]) -> EmbeddingsBody:
    """A body of `/v1/embeddings`. Raises BadField."""
    fields = drop_nulls(body, NEUTRAL_FIELDS)
    check_input_type(fields.get("input", ""))
    request = validate(EmbeddingsBody, fields)
    if not request.input:
        raise BadField("input", "input is empty", "send a text, a list of texts, or token ids")
    if isinstance(request.input, list) and not isinstance(request.input[0], int):
        check_input_count(request.input)
    return request


def check_input_type(value: Any) -> None:
    """Raises BadField unless the value is a valid input. pydantic would only report the first type of the
    union."""
    types = {type(item) for item in value} if isinstance(value, list) else {str}
    nested_types = {type(token) for item in value for token in item} if types == {list} else set[type]()
    if not isinstance(value, str | list) or types not in (set(), {str}, {int}, {list}) or nested_types - {int}:
        remedy = "send a text, a list of texts, a list of token ids, or lists of them"
        raise BadField("input", "input has the wrong type", remedy)


def check_input_count(texts: Sized) -> None:
    """Raises BadField for more than MAX_INPUTS texts."""
    if len(texts) > MAX_INPUTS:
        raise BadField("input", f"input has {len(texts)} texts", f"send at most {MAX_INPUTS}")


def openai_embeddings_object(body: EmbeddingsBody, model: str, result: Embeddings) -> dict[str, Any]:
    """model: its name in the request."""
    tokens = sum(result.tokens)
    encode = encode_base64 if body.encoding_format == "base64" else np.ndarray.tolist
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(result.vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def encode_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class EmbedOptions(StrictModel):
    """The only option that matters to an embedding."""

    num_ctx: int | None = Field(None, ge=1)


class EmbedBody(StrictModel):
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class LegacyEmbeddingsBody(StrictModel):
    model: str
    prompt: str | None = None
    truncate: bool | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


@dataclass(frozen=True)
class EmbedRequest:
    """A body of `/api/embed` or `/api/embeddings`."""

    model: str
    inputs: tuple[str, ...]  # empty to only load the model
    truncate: bool
    dimensions: int | None
    keep_alive: float | None  # seconds; None for the default
    num_ctx: int | None  # tokens


def parse_embed_request(body: Mapping[str, Any]) -> EmbedRequest:
    """A body of `/api/embed`. Raises BadField."""
    request = validate(EmbedBody, body)
    texts = [request.input] if isinstance(request.input, str) else request.input or []
    check_input_count(texts)
    return _embed_request(request, [] if texts == [""] else texts, request.dimensions)


def parse_legacy_embeddings(body: Mapping[str, Any]) -> EmbedRequest:
    """A body of `/api/embeddings`. Raises BadField."""
    request = validate(LegacyEmbeddingsBody, body)
    return _embed_request(request, [request.prompt] if request.prompt else [], None)


def _embed_request(
    body: EmbedBody | LegacyEmbeddingsBody, inputs: list[str], dimensions: int | None
) -> EmbedRequest:
    known = {name: value for name, value in (body.options or {}).items() if name in EmbedOptions.model_fields}
    context = validate(EmbedOptions, known, "options").num_ctx
    truncate = body.truncate is not False
    return EmbedRequest(
        body.model, tuple(inputs), truncate, dimensions or None, parse_keep_alive(body.keep_alive), context
    )


def embed_object(
    request: EmbedRequest, result: Embeddings | None, total_s: float, load_s: float
) -> dict[str, Any]:
    """Answer of `/api/embed`. result: None without inputs. Durations are in nanoseconds."""
    truncated = list(result.left_out) if result else []
    return {
        "model": request.model,
        "embeddings": result.vectors.tolist() if result else [],
        "total_duration": round(total_s * 1e9),
        "load_duration": round(load_s * 1e9),
        "prompt_eval_count": sum(result.tokens) if result else 0,
        **({"truncated": truncated} if any(truncated) else {}),
    }


def legacy_embedding_object(result: Embeddings | None) -> dict[str, Any]:
    """Answer of `/api/embeddings`. result: None without a prompt."""
    truncated = result.left_out[0] if result else 0
    embedding = result.vectors[0].tolist() if result else []
    return {"embedding": embedding, **({"truncated": truncated} if truncated else {})}
