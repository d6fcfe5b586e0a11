"""Parameters by the words that a person writes: `/set parameter NAME VALUE`."""

import dataclasses
import difflib

from localllm.errors import UsageError
from localllm.request import SamplingParams
from localllm.sampling import parse_logit_bias

# A conversation shows text alone, so asking for log probabilities would change nothing that can be seen; and a
# grammar is for one answer.
PARAMETER_NAMES = [
    f.name for f in dataclasses.fields(SamplingParams) if not f.name.endswith(("logprobs", "grammar"))
]


def with_parameter(params: SamplingParams, name: str, words: list[str]) -> SamplingParams:
    """words: of its value; `none` takes it back. Raises UsageError with a remedy."""
    if name not in PARAMETER_NAMES:
        near = difflib.get_close_matches(name, PARAMETER_NAMES, n=2, cutoff=0.5)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"there is no parameter {name}", f"{guess}/set parameter shows all")
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
        raise UsageError(f"{' '.join(words)} are not token ids", "give whole numbers") from error


def _parse_value(word: str) -> object:
    """A number or a truth value; anything else stays text, which SamplingParams refuses by name."""
    words = {"true": True, "false": False}
    if word.lower() in words:
        return words[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
