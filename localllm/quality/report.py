"""What is known of how far one model is from another, and its JSON, which lies beside the weights of an artefact.

Needs no torch. Knows nothing of how the numbers come about: `measure.py` defines them, docs/quality.md explains
them.
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
    """A mean over the scored tokens, and its standard error if these were independent of each other."""

    value: float
    error: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence of the other model's next tokens from the reference's, in nats a token."""

    mean: Estimate
    median: float
    p99: float
    max: float


@dataclasses.dataclass(frozen=True)
class Distance:
    """All that follows from the logits of two models over one text."""

    reference_perplexity: Estimate
    other_perplexity: Estimate
    log_ratio: Estimate  # ln(other's perplexity / reference's), from the differences token by token
    divergence: Divergence
    same_top: Estimate  # share of positions at which both find the same token likeliest
    right_token: Estimate  # change of the probability that the token which does follow is given
    right_token_rms: float  # the same, root of the mean square


@dataclasses.dataclass(frozen=True)
class Scored:
    """The text that was looked at."""

    name: str
    tokens: int  # that the models were given
    scored: int  # those whose probability counts
    window: int  # tokens that are seen at once, at most


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two models."""

    name: str
    weight_bytes: int  # as its files store them
    dtype: str  # it computed in
    kv_dtype: str | None = None  # of its cache; None: as it computes
    text_tokens_per_s: float | None = None  # of the text, with the logits of every token: one run
    decode_tokens_per_s: float | None = None  # of an answer: one run


@dataclasses.dataclass(frozen=True)
class Answers:
    """What both say to one prompt where each always takes its likeliest token."""

    prompt: str
    tokens: int  # of each answer
    same: int  # tokens before the first that differs
    common: str  # their text
    reference: str  # what the reference says from there on
    other: str


@dataclasses.dataclass(frozen=True)
class Error:
    """|other - reference| / |reference| of an output, averaged as its maker says."""

    name: str  # of a matrix in the runtime's words, or `layer 3`
    relative: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """A model beside the reference that it was made of, or is compared with."""

    reference: Side
    other: Side
    text: Scored
    distance: Distance
    answers: tuple[Answers, ...] = ()
    layers: tuple[Error, ...] = ()  # after each layer, in their order; none where the two have other layers
    matrices: tuple[Error, ...] = ()  # that were quantized, the worst first
    recipe: Mapping[str, JsonScalar] | None = None  # how it was quantized


def as_dict(quality: Quality) -> dict[str, Any]:
    """The object that docs/quality.md describes."""
    return {"version": VERSION, **dataclasses.asdict(quality)}


def write_report(quality: Quality, folder: Path) -> None:
    write_atomic(folder / REPORT_FILE, json.dumps(as_dict(quality), indent=1, allow_nan=False) + "\n")


def read_report(folder: Path) -> Quality | None:
    """The report in a model's folder; None where there is none, as beside a GGUF file.

    Raises DamagedModel for a file that is no such report, UnsupportedModel for one of another version.
    """
    file = folder / REPORT_FILE
    if not file.is_file():
        return None
    fields = read_json(file)
    version = fields.pop("version", None)
    if version != VERSION or type(version) is not int:
        raise UnsupportedModel(
            f"{file} is of version {version!r} and this localllm reads {VERSION}", "measure again"
        )
    try:
        return _read(Quality, fields, "the report")
    except _Wrong as wrong:
        raise DamagedModel(f"{file} cannot be used: {wrong}", "measure again, or remove it") from None


class _Wrong(ValueError):
    pass


def _read(kind: Any, value: Any, name: str) -> Any:
    """`value` of parsed JSON as a `kind` of the dataclasses above. Raises _Wrong, naming the field."""
    choices = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if value is None and NoneType in choices:
        return None
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(kind, value, name)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_read(get_args(kind)[0], one, f"{name}[{i}]") for i, one in enumerate(value))
    mapping = next((choice for choice in choices if get_origin(choice) is Mapping), None)
    if mapping and isinstance(value, dict):
        return {key: _read(get_args(mapping)[1], one, f"{name}.{key}") for key, one in value.items()}
    if type(value) in choices or (float in choices and type(value) is int):
        if isinstance(value, float) and not math.isfinite(value):
            raise _Wrong(f"{name} is {value}")
        return value
    raise _Wrong(f"{name} is {json.dumps(value)[:40]}")


def _read_fields(kind: Any, values: dict[str, Any], name: str) -> Any:
    hints = get_type_hints(kind)
    if unknown := values.keys() - hints.keys():
        raise _Wrong(f"{name} has a field {min(unknown)!r} that is not known")
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    if missing := needed - values.keys():
        raise _Wrong(f"{name} has no {min(missing)}")
    return kind(**{field: _read(hints[field], value, f"{name}.{field}") for field, value in values.items()})
