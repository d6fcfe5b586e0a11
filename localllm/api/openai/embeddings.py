"""OpenAI's `/v1/embeddings`: its body, and the object that answers it. Knows nothing of HTTP, nor of models.

What is too long is refused, as OpenAI does. Vectors go out as numbers, or as base64 of float32 in little endian,
which is what OpenAI's own clients ask for.
"""

import base64
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from localllm.api.body import StrictModel, validate
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
