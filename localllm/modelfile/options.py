"""Parameters in Ollama's names, from a request's `options` or a Modelfile's PARAMETER: validation, and conversion
to sampling parameters.

Options that are unknown, of a different type than Ollama's, or that would request unsupported behaviour are
rejected by name. Options that only affect how Ollama runs a model are accepted and ignored.
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
DEFAULT_REPEAT_WINDOW = 64  # tokens covered by repeat_penalty by default


def check_options(options: Options) -> dict[str, Any]:
    """Return the options without null values.

    Raises UsageError for unsupported options and numbers out of range.
    """
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTION_TYPES:
            raise UsageError(f'there is no option "{name[:80]}"', did_you_mean(name, OPTION_TYPES))
        if value is not None:
            checked[name] = _typed(name, value)
            if name in NEUTRAL and checked[name] != NEUTRAL[name]:
                raise UsageError(
                    f'option "{name}" is not supported', f"leave it out, or send {NEUTRAL[name]}".lower()
                )
    if checked.get("num_ctx", 1) < 1:
        raise UsageError(f"num_ctx is {checked['num_ctx']}", "send a number of tokens")
    if checked.get("num_predict", 0) < -2:
        raise UsageError(f"num_predict is {checked['num_predict']}", "send a number of tokens, or -1 for no limit")
    to_sampling_params(checked, SamplingParams())
    return checked


def _typed(name: str, value: Any) -> Any:
    kind = OPTION_TYPES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "integer" if is_number and value == int(value):  # JSON's 64.0 is 64
            return int(value)
        case "float32" if is_number:
            return value
        case "boolean" if isinstance(value, bool):
            return value
        case "array" if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return list(value)
    raise UsageError(f'option "{name}" must be of type {kind}', "send one")


def to_sampling_params(options: Options, defaults: SamplingParams) -> SamplingParams:
    """Return sampling parameters; defaults: for those missing in `options`, which are already checked.

    Raises UsageError.
    """
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    params = {name: options[name] for name in names if name in options}
    if "top_k" in options:
        params["top_k"] = max(0, options["top_k"])
    if "repeat_penalty" in options:
        params |= {"repetition_penalty": options["repeat_penalty"], "repeat_last_n": DEFAULT_REPEAT_WINDOW}
    if "repeat_last_n" in options:
        params["repeat_last_n"] = options["repeat_last_n"]
    if params.get("repeat_last_n") == 0:
        params |= {"repetition_penalty": 1.0}
    if "seed" in options:
        params["seed"] = options["seed"] if options["seed"] >= 0 else None
    if "num_predict" in options:
        params["max_tokens"] = options["num_predict"] if options["num_predict"] >= 0 else None
    if "stop" in options:
        params["stop"] = tuple(options["stop"])
    return replace(defaults, **params)
