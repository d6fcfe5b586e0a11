"""The measured distance between two models, and its JSON, which is stored with the weights of a quantized model.

Needs no torch. `measure.py` computes and defines the numbers, docs/quality.md explains them.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from localllm.errors import DamagedModel, UnsupportedModel
from localllm.files import read_json, write_atomic

REPORT_FILE = "quality.json"
VERSION = 1
JsonScalar = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over the scored tokens, and its standard error assuming independent tokens."""

    value: float
    error: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence of the other model's next-token probabilities from the reference's, in nats."""

    mean: Estimate
    median: float
    p99: float
    max: float


@dataclasses.dataclass(frozen=True)
class Distance:
    """Results computed from the logits of two models over one text."""

    reference_perplexity: Estimate
    other_perplexity: Estimate
    log_ratio: Estimate  # ln(other's perplexity / reference's), from the differences by token
    divergence: Divergence
    same_top: Estimate  # share of positions with the same most likely token
    right_token: Estimate  # change in the probability of the actual next token
    right_token_rms: float  # root mean square of that change


@dataclasses.dataclass(frozen=True)
class Scored:
    """The text that models were evaluated on."""

    name: str
    tokens: int  # number given to the models
    scored: int  # number of tokens whose probability counts
    window: int  # maximum tokens in one window


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two models."""

    name: str
    weight_bytes: int  # as stored in its files
    dtype: str  # of its computation
    kv_dtype: str | None = None  # of the KV cache; None if the same as `dtype`
    text_tokens_per_s: float | None = None  # for the text, with the logits of every token: a single run
    decode_tokens_per_s: float | None = None  # of an answer: a single run


@dataclasses.dataclass(frozen=True)
class Answers:
    """Both models' greedy answers to one prompt."""

    prompt: str
    tokens: int  # of each answer
    same: int  # tokens before the first difference
    common: str  # text of those tokens
    reference: str  # the reference's text after them
    other: str


@dataclasses.dataclass(frozen=True)
class Error:
    """|other - reference| / |reference| of an output, averaged as described at its source."""

    name: str  # runtime name of a matrix, or `layer 3`
    relative: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """A model compared with a reference, which may be the model it was made from."""

    reference: Side
    other: Side
    text: Scored
    distance: Distance
    answers: tuple[Answers, ...] = ()
    layers: tuple[Error, ...] = ()  # after each layer, in order; empty if the layers differ
    matrices: tuple[Error, ...] = ()  # quantized ones, in descending order of error
    recipe: Mapping[str, JsonScalar] | None = None  # how it was quantized


def as_dict(quality: Quality) -> dict[str, Any]:
    """Return the object described in docs/quality.md."""
    return {"version": VERSION, **dataclasses.asdict(quality)}


def write_report(quality: Quality, folder: Path) -> None:
    write_atomic(folder / REPORT_FILE, json.dumps(as_dict(quality), indent=1, allow_nan=False) + "\n")


def read_report(folder: Path) -> Quality | None:
    """Return the report in a model's folder; None if there is none, as for a GGUF file.

    Raises DamagedModel for an invalid file, UnsupportedModel for another version.
    """
    file = folder / REPORT_FILE
    if not file.is_file():
        return None
    fields = read_json(file)
    version = fields.pop("version", None)
    if version != VERSION or type(version) is not int:
        raise UnsupportedModel(
            f"{file} has version {version!r}, but this localllm reads {VERSION}", "measure again"
        )
    try:
        return _read(Quality, fields, "the report")
    except _Wrong as wrong:
        raise DamagedModel(f"{file} cannot be used: {wrong}", "measure again, or remove it") from None


class _Wrong(ValueError):
    pass


def _read(kind: Any, value: Any, name: str) -> Any:
    """Convert parsed JSON to a `kind` of the dataclasses above. Raises _Wrong, naming the field."""
    choices = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if value is None and NoneType in choices:
        return None
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(kind, value, name)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_read(get_args(kind)[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    mapping = next((choice for choice in choices if get_origin(choice) is Mapping), None)
    if mapping and isinstance(value, dict):
        return {key: _read(get_args(mapping)[1], item, f"{name}.{key}") for key, item in value.items()}
    if type(value) in choices or (float in choices and type(value) is int):
        if isinstance(value, float) and not math.isfinite(value):
            raise _Wrong(f"{name} is {value}")
        return value
    raise _Wrong(f"{name} is {json.dumps(value)[:40]}")


def _read_fields(kind: Any, values: dict[str, Any], name: str) -> Any:
    hints = get_type_hints(kind)
    if unknown := values.keys() - hints.keys():
        raise _Wrong(f"{name} has an unknown field {min(unknown)!r}")
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    if missing := needed - values.keys():
        raise _Wrong(f"{name} has no {min(missing)}")
    return kind(**{field: _read(hints[field], value, f"{name}.{field}") for field, value in values.items()})
