"""Ollama's `/api/embed`, and `/api/embeddings` of before it: their bodies, and what answers them. Knows nothing of
HTTP, nor of models.

A text that is too long is cut, unless the body says otherwise, as Ollama documents. The answer says so:
`truncated` is how many tokens of each text were left out, where any were. Of `options` only `num_ctx`
says anything of a vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from localllm.api.body import BadField, Strict, validated
from localllm.api.ollama.bodies import seconds
from localllm.embedding import Embeddings

MOST_INPUTS = 2048  # of one body


class Options(Strict):
    num_ctx: int | None = Field(None, ge=1)


class EmbedBody(Strict):
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class OldBody(Strict):
    model: str
    prompt: str | None = None
    truncate: bool | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Asked:
    """What either body asks."""

    model: str
    texts: tuple[str, ...]  # none: the model is to be loaded
    truncate: bool
    dimensions: int | None
    keep_alive: float | None  # seconds; None: as ever
    context: int | None  # tokens


def read_embed(body: Mapping[str, Any]) -> Asked:
    """Raises BadField."""
    asked = validated(EmbedBody, dict(body))
    texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
    if len(texts) > MOST_INPUTS:
        raise BadField("input", f"input has {len(texts)} texts", f"send up to {MOST_INPUTS} at once")
    return of(asked, [] if texts == [""] else texts, asked.dimensions)


def read_old(body: Mapping[str, Any]) -> Asked:
    """Raises BadField."""
    asked = validated(OldBody, dict(body))
    return of(asked, [asked.prompt] if asked.prompt else [], None)


def of(asked: EmbedBody | OldBody, texts: list[str], dimensions: int | None) -> Asked:
    known = {name: value for name, value in (asked.options or {}).items() if name in Options.model_fields}
    context = validated(Options, known, "options").num_ctx
    truncate = asked.truncate is not False
    return Asked(asked.model, tuple(texts), truncate, dimensions or None, seconds(asked.keep_alive), context)


def embed_object(asked: Asked, found: Embeddings | None, total_s: float, load_s: float) -> dict[str, Any]:
    """found: None where the body had no text. Durations are whole nanoseconds."""
    left_out = list(found.left_out) if found else []
    return {
        "model": asked.model,
        "embeddings": found.vectors.tolist() if found else [],
        "total_duration": round(total_s * 1e9),
        "load_duration": round(load_s * 1e9),
        "prompt_eval_count": sum(found.tokens) if found else 0,
        **({"truncated": left_out} if any(left_out) else {}),
    }


def old_object(found: Embeddings | None) -> dict[str, Any]:
    left_out = found.left_out[0] if found else 0
    cut = {"truncated": left_out} if left_out else {}
    return {"embedding": found.vectors[0].tolist() if found else [], **cut}
