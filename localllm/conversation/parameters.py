"""Parameters as a user writes them: `/set parameter NAME VALUE`."""

import dataclasses
import difflib

from localllm.errors import UsageError
from localllm.request import SamplingParams
from localllm.sampling import parse_logit_bias

# A conversation shows only text, so requesting log probabilities would have no visible effect; and a grammar
# applies
# to one answer only.
PARAMETER_NAMES = [
    f.name for f in dataclasses.fields(SamplingParams) if not f.name.endswith(("logprobs", "grammar"))
]


def with_parameter(params: SamplingParams, name: str, words: list[str]) -> SamplingParams:
    """words: of the value; `none` resets it. Raises UsageError with a remedy."""
    if name not in PARAMETER_NAMES:
        similar = difflib.get_close_matches(name, PARAMETER_NAMES, n=2, cutoff=0.5)
        suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise UsageError(f"there is no parameter {name}", f"{suggestion}/set parameter shows all")
    if [word.lower() for word in words] == ["none"]:
        return dataclasses.replace(params, **{name: getattr(SamplingParams(), name)})
    if name in ("stop", "stop_ids", "logit_bias"):
        values = {"stop": tuple, "stop_ids": _parse_token_ids, "logit_bias": parse_logit_bias}[name](words)
        return dataclasses.replace(params, **{name: values})
    if len(words) > 1:
        raise UsageError(f"{name} takes one value", f"/set parameter {name} VALUE")
    return dataclasses.replace(params, **{name: _parse_value(words[0])})


def _parse_token_ids(words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise UsageError(f"{' '.join(words)} are not token ids", "use whole numbers") from error


def _parse_value(word: str) -> object:
    """Parse a number or boolean; anything else remains text, which SamplingParams rejects by name."""
    words = {"true": True, "false": False}
    if word.lower() in words:
        return words[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
