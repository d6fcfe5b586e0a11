"""What becomes of flags: fields of SamplingParams and arguments of templates. Knows not how they are read."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from localllm.errors import UsageError
from localllm.files import parse_strict_json
from localllm.request import SamplingParams
from localllm.sampling import parse_logit_bias


def parse_sampling_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of SamplingParams that were given as flags; `flags` may hold others.

    Raises UsageError where a value is wrong, so that no model is loaded for nothing.
    """
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    fields = {name: flags[name] for name in names if flags.get(name) not in (None, [], ())}
    if "logit_bias" in fields:
        fields["logit_bias"] = parse_logit_bias(fields["logit_bias"])
    SamplingParams(**fields)
    return fields


def parse_template_args(pairs: Iterable[str]) -> dict[str, Any]:
    """`["effort=high", "depth=3"]` as a mapping, values read as JSON where they are. Raises UsageError."""
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise UsageError(
                f"template argument {pair!r} is not NAME=VALUE", "write for example enable_thinking=false"
            )
        try:
            arguments[name] = parse_strict_json(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments
