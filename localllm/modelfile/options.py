"""Parameters as Ollama names them, in `options` of a request and behind PARAMETER in a Modelfile: checked, and
what they ask of a model.

An option of another type than Ollama's, one that nobody knows, and one that would change the answer in a way that
is not there are refused by name. What only says how Ollama is to run a model is taken and has no effect.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.errors import UsageError, did_you_mean
from localllm.request import SamplingParams

Options = Mapping[str, Any]

INTEGER, NUMBER, BOOLEAN, STRINGS = "integer", "float32", "boolean", "array"
SAMPLING_OPTIONS = {
    "temperature": NUMBER,
    "top_k": INTEGER,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "repeat_penalty": NUMBER,
    "repeat_last_n": INTEGER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "seed": INTEGER,
    "num_predict": INTEGER,
    "stop": STRINGS,
    "num_ctx": INTEGER,
}
NEUTRAL = {"typical_p": 1, "tfs_z": 1, "mirostat": 0, "vocab_only": False, "embedding_only": False}
IGNORED_OPTIONS = {
    **dict.fromkeys(("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict"), INTEGER),
    **dict.fromkeys(("use_mmap", "use_mlock", "numa", "low_vram", "f16_kv", "logits_all"), BOOLEAN),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), NUMBER),
    "penalize_newline": BOOLEAN,
}
OPTION_TYPES = {
    **SAMPLING_OPTIONS,
    **IGNORED_OPTIONS,
    **{name: BOOLEAN if value is False else NUMBER for name, value in NEUTRAL.items()},
}
DEFAULT_REPEAT_WINDOW = 64  # tokens that repeat_penalty looks back at, where nothing else is said


def check_options(options: Options) -> dict[str, Any]:
    """Without those that are null. Raises UsageError for what is not to be had, and for a number out of range."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTION_TYPES:
            raise UsageError(f'there is no option "{name[:80]}"', did_you_mean(name, OPTION_TYPES))
        if value is not None:
            found[name] = _typed(name, value)
            if name in NEUTRAL and found[name] != NEUTRAL[name]:
                raise UsageError(
                    f'option "{name}" is not supported', f"leave it out, or send {NEUTRAL[name]}".lower()
                )
    if found.get("num_ctx", 1) < 1:
        raise UsageError(f"num_ctx is {found['num_ctx']}", "send a number of tokens")
    if found.get("num_predict", 0) < -2:
        raise UsageError(f"num_predict is {found['num_predict']}", "send a number of tokens, or -1 for no limit")
    to_sampling_params(found, SamplingParams())
    return found


def _typed(name: str, value: Any) -> Any:
    kind = OPTION_TYPES[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "integer" if number and value == int(value):  # JSON's 64.0 is 64
            return int(value)
        case "float32" if number:
            return value
        case "boolean" if isinstance(value, bool):
            return value
        case "array" if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return list(value)
    raise UsageError(f'option "{name}" must be of type {kind}', "send one")


def to_sampling_params(options: Options, defaults: SamplingParams) -> SamplingParams:
    """How to draw tokens; defaults: where `options`, which are checked, say nothing. Raises UsageError."""
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    found = {name: options[name] for name in names if name in options}
    if "top_k" in options:
        found["top_k"] = max(0, options["top_k"])
    if "repeat_penalty" in options:
        found |= {"repetition_penalty": options["repeat_penalty"], "repeat_last_n": DEFAULT_REPEAT_WINDOW}
    if "repeat_last_n" in options:
        found["repeat_last_n"] = options["repeat_last_n"]
    if found.get("repeat_last_n") == 0:
        found |= {"repetition_penalty": 1.0}
    if "seed" in options:
        found["seed"] = options["seed"] if options["seed"] >= 0 else None
    if "num_predict" in options:
        found["max_tokens"] = options["num_predict"] if options["num_predict"] >= 0 else None
    if "stop" in options:
        found["stop"] = tuple(options["stop"])
    return replace(defaults, **found)
