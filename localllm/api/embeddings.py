"""OpenAI's `/v1/embeddings`: its body, and the object that answers it. Knows nothing of HTTP, nor of models.

What is too long is refused, as OpenAI does. Vectors go out as numbers, or as base64 of float32 in little endian,
which is what OpenAI's own clients ask for.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from localllm.api.body import StrictModel, validate
from localllm.api.ollama.bodies import parse_keep_alive
from localllm.errors import BadField
from localllm.llm.embedding_inputs import Embeddings

MAX_INPUTS = 2048  # of one body, as OpenAI documents
NEUTRAL_FIELDS = ("user",)


class EmbeddingsBody(StrictModel):
    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


def parse_openai_embeddings(body: Mapping[str, Any]) -> EmbeddingsBody:
    """Raises BadField."""
    fields = {name: value for name, value in body.items() if value is not None and name not in NEUTRAL_FIELDS}
    check_input_type(fields.get("input", ""))
    asked = validate(EmbeddingsBody, fields)
    if not asked.input:
        raise BadField("input", "input is empty", "send a text, a list of texts, or token ids")
    several = isinstance(asked.input, list) and not isinstance(asked.input[0], int)
    if several and len(asked.input) > MAX_INPUTS:
        raise BadField("input", f"input has {len(asked.input)} texts", f"send up to {MAX_INPUTS} at once")
    return asked


def check_input_type(given: Any) -> None:
    """Of several kinds pydantic would tell what is wrong with the first alone."""
    kinds = {type(each) for each in given} if isinstance(given, list) else {str}
    of_ids = [type(token) for each in given for token in each] if kinds == {list} else []
    if not isinstance(given, str | list) or kinds not in (set(), {str}, {int}, {list}) or {*of_ids} - {int}:
        raise BadField(
            "input",
            "input is of the wrong kind",
            "send a text, a list of texts, a list of token ids, or lists of them",
        )


def openai_embeddings_object(body: EmbeddingsBody, model: str, result: Embeddings) -> dict[str, Any]:
    """model: as it was asked for."""
    tokens = sum(result.tokens)
    written = encode_base64 if body.encoding_format == "base64" else np.ndarray.tolist
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": place, "embedding": written(vector)}
            for place, vector in enumerate(result.vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def encode_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# Ollama's `/api/embed`, and `/api/embeddings` of before it: their bodies, and what answers them. Knows nothing of
# HTTP, nor of models.
#
# A text that is too long is cut, unless the body says otherwise, as Ollama documents. The answer says so:
# `truncated` is how many tokens of each text were left out, where any were. Of `options` only `num_ctx`
# says anything of a vector.

MAX_OLLAMA_INPUTS = 2048  # of one body


class EmbedOptions(StrictModel):
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
    """What either body asks."""

    model: str
    inputs: tuple[str, ...]  # none: the model is to be loaded
    truncate: bool
    dimensions: int | None
    keep_alive: float | None  # seconds; None: as ever
    num_ctx: int | None  # tokens


def parse_embed_request(body: Mapping[str, Any]) -> EmbedRequest:
    """Raises BadField."""
    asked = validate(EmbedBody, dict(body))
    texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
    if len(texts) > MAX_OLLAMA_INPUTS:
        raise BadField("input", f"input has {len(texts)} texts", f"send up to {MAX_OLLAMA_INPUTS} at once")
    return _embed_request(asked, [] if texts == [""] else texts, asked.dimensions)


def parse_legacy_embeddings(body: Mapping[str, Any]) -> EmbedRequest:
    """Raises BadField."""
    asked = validate(LegacyEmbeddingsBody, dict(body))
    return _embed_request(asked, [asked.prompt] if asked.prompt else [], None)


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
    """result: None where the body had no text. Durations are whole nanoseconds."""
    left_out = list(result.left_out) if result else []
    return {
        "model": request.model,
        "embeddings": result.vectors.tolist() if result else [],
        "total_duration": round(total_s * 1e9),
        "load_duration": round(load_s * 1e9),
        "prompt_eval_count": sum(result.tokens) if result else 0,
        **({"truncated": left_out} if any(left_out) else {}),
    }


def legacy_embedding_object(result: Embeddings | None) -> dict[str, Any]:
    left_out = result.left_out[0] if result else 0
    cut = {"truncated": left_out} if left_out else {}
    return {"embedding": result.vectors[0].tolist() if result else [], **cut}
