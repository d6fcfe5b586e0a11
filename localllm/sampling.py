"""Converts SamplingParams to and from JSON, for saved chats and receipts.

New fields are included automatically.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from localllm.errors import UsageError
from localllm.request import SamplingParams

# One-line descriptions of the fields of SamplingParams, for `--help` and the settings of the app.
PARAMETER_HELP = {
    "temperature": "Sampling temperature; 0 is greedy.",
    "top_k": "Sample from the K most likely tokens; 0 turns it off.",
    "top_p": "Sample from the smallest set of tokens with total probability P.",
    "min_p": "Drop tokens less than P times as likely as the most likely one.",
    "repetition_penalty": "Penalty on tokens seen before; 1 turns it off.",
    "repeat_last_n": "Number of last tokens that the repetition penalty covers; -1 is all.",
    "presence_penalty": "Subtract X from the logit of tokens already in the answer.",
    "frequency_penalty": "Subtract X from a token's logit for each time it is in the answer.",
    "logit_bias": "Add BIAS to the logit of token ID; -inf bans it. Repeatable.",
    "seed": "Random seed; the same seed gives the same answer.",
    "max_tokens": "Maximum answer length in tokens; default: until the context is full.",
    "min_tokens": "Minimum answer length in tokens; end tokens and stop strings are ignored before.",
    "stop": "Stop before this text. Repeatable.",
    "stop_ids": "Stop at this token ID. Repeatable.",
    "ignore_eos": "Continue past the model's end-of-sequence tokens.",
}
THINK_HELP = "Turn reasoning on or off, if the chat template supports it."


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the JSON representation, which has no tuples and no infinity, and only string keys."""
    fields = dataclasses.asdict(params)
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return fields | lists | {"logit_bias": {str(token): str(bias) for token, bias in params.logit_bias.items()}}


def params_from_json(fields: Mapping[str, Any]) -> SamplingParams:
    """Raises KeyError, TypeError, ValueError, AttributeError or UsageError for invalid parameters; missing fields
    get their defaults, since later versions may add some.
    """
    bias: dict[str, str] = fields["logit_bias"]
    parts = {name: kind(**fields[name]) for name, kind in _NESTED.items() if fields.get(name) is not None}
    return SamplingParams(
        **{**fields, **parts, "logit_bias": {int(token): float(value) for token, value in bias.items()}}
    )


def parse_logit_bias(pairs: Iterable[str]) -> dict[int, float]:
    """Parse `["42=-inf", "7=1.5"]` into a mapping. Raises UsageError if one is not ID=BIAS."""
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise UsageError(f"logit bias {pair!r} is not ID=BIAS", "write for example 42=-inf") from error
    return biases


def _nested_dataclasses() -> dict[str, type]:
    """Return fields that are dataclasses themselves."""
    hints = get_type_hints(SamplingParams).items()
    candidates = ((name, kind) for name, hint in hints for kind in (hint, *get_args(hint)))
    return {name: kind for name, kind in candidates if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


_NESTED = _nested_dataclasses()
