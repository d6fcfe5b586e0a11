"""SamplingParams as JSON and back, for saved chats and receipts. A field that is added there travels by itself."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from localllm.errors import UsageError
from localllm.request import SamplingParams

PARAMETER_HELP = {
    "temperature": "0 takes the likeliest token; more varies more.",
    "top_k": "Keep the K likeliest tokens; 0 keeps all.",
    "top_p": "Keep the likeliest tokens that add up to P.",
    "min_p": "Keep tokens at least P times as likely as the likeliest.",
    "repetition_penalty": "Make tokens seen before X times less likely; 1 is off.",
    "repeat_last_n": "How many last tokens that looks at; -1 is all.",
    "presence_penalty": "Subtract X from tokens already in the answer.",
    "frequency_penalty": "Subtract X for each time a token is in the answer.",
    "logit_bias": "Add BIAS to the logit of token ID; -inf forbids it. Repeatable.",
    "seed": "Same seed, same text.",
    "max_tokens": "Most tokens of the answer; else until the context is full.",
    "stop": "End before this text. Repeatable.",
    "stop_ids": "End at this token. Repeatable.",
    "ignore_eos": "Go on past the model's end tokens.",
}
THINK_HELP = "Let the model think first, or not, if its template has a switch."


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """As JSON gives it back: it has no tuples and no infinity, and its keys are text."""
    fields = dataclasses.asdict(params)
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return fields | lists | {"logit_bias": {str(token): str(bias) for token, bias in params.logit_bias.items()}}


def params_from_json(fields: Mapping[str, Any]) -> SamplingParams:
    """Raises KeyError, TypeError, ValueError, AttributeError or UsageError where these are no parameters; a field
    that is not there has its default, as it came with a later version."""
    bias: dict[str, str] = fields["logit_bias"]
    parts = {name: kind(**fields[name]) for name, kind in _NESTED.items() if fields.get(name) is not None}
    return SamplingParams(
        **{**fields, **parts, "logit_bias": {int(token): float(value) for token, value in bias.items()}}
    )


def parse_logit_bias(pairs: Iterable[str]) -> dict[int, float]:
    """`["42=-inf", "7=1.5"]` as a mapping. Raises UsageError where one is not ID=BIAS."""
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise UsageError(f"logit bias {pair!r} is not ID=BIAS", "write for example 42=-inf") from error
    return biases


def _nested_dataclasses() -> dict[str, type]:
    """Fields that are made of fields themselves."""
    hints = get_type_hints(SamplingParams).items()
    found = ((name, kind) for name, hint in hints for kind in (hint, *get_args(hint)))
    return {name: kind for name, kind in found if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


_NESTED = _nested_dataclasses()
