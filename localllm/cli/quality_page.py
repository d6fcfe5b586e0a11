"""Quality report of a model compared with its reference, as text of at most 80 columns; `diff`, `quantize` and
`show` print it. Does not import torch."""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.formatting import format_bytes, format_columns, format_rate, format_table
from localllm.quality.report import Answers, Error, Estimate, Quality, Side
from localllm.quantize.source import Recipe

VALUE_WIDTH = 62  # columns of values beside the longest label
MAX_WORST = 5  # rows in the tables of layers and matrices

Rows = list[tuple[str, str]]


def format_quality(quality: Quality) -> str:
    """The report without a final line break."""
    errors = [
        _worst_table("WORST MATRICES", quality.matrices),
        _worst_table("WORST LAYERS", quality.layers),
    ]
    answers = [_answers(pair) for pair in quality.answers]
    return "\n\n".join(
        [_subject_rows(quality), _model_table(quality), _distance(quality), *filter(None, errors), *answers]
    )


def _subject_rows(quality: Quality) -> str:
    text, recipe = quality.text, quality.recipe or {}
    return format_columns(
        [
            *_wrapped("reference", quality.reference.name),
            *_wrapped("compared", quality.other.name),
            *(_wrapped("recipe", _recipe(recipe)) if recipe else []),
            *_wrapped(
                "text",
                f"{text.name}: {text.tokens} tokens in windows of {text.window}, {text.scored} of them scored",
            ),
        ]
    )


def _recipe(fields: Mapping[str, Any]) -> str:
    """Recipe such as `gptq, INT4 in groups of 128, head in INT8`; fields of another version are listed as they
    are."""
    try:
        recipe = Recipe(**fields)
    except TypeError:
        return ", ".join(f"{name} {value}" for name, value in fields.items())
    scales = f"in groups of {recipe.group}" if recipe.group else "with a scale per row"
    parts = [recipe.method, f"INT{recipe.bits} {scales}"]
    parts += [] if recipe.symmetric else ["zero points"]
    parts += ["activations in INT8"] if recipe.activations else []
    parts += [f"head in INT{recipe.head_bits}" if recipe.head_bits < 16 else "head not quantized"]
    return ", ".join(parts)


def _model_table(quality: Quality) -> str:
    sides, distance = (quality.reference, quality.other), quality.distance

    def speeds(name: str, rates: Sequence[float | None]) -> list[tuple[str, ...]]:
        if all(rate is None for rate in rates):
            return []
        return [(name, *(format_rate(math.nan if rate is None else rate) for rate in rates))]

    def cache(side: Side) -> str:
        return side.kv_dtype or side.dtype

    return format_table(
        [
            ("", "REFERENCE", "COMPARED"),
            ("weights", *(format_bytes(side.weight_bytes) for side in sides)),
            ("dtype", *(side.dtype for side in sides)),
            *([("KV cache in", *map(cache, sides))] if any(side.kv_dtype for side in sides) else []),
            ("perplexity", *map(_estimate, (distance.reference_perplexity, distance.other_perplexity))),
            *speeds("prefill, one run", [side.text_tokens_per_s for side in sides]),
            *speeds("decode, one run", [side.decode_tokens_per_s for side in sides]),
        ]
    )


def _distance(quality: Quality) -> str:
    distance = quality.distance
    ratio, divergence = distance.log_ratio, distance.divergence
    growth = math.expm1(ratio.value)
    return format_columns(
        [
            ("perplexity change", f"{_signed(growth)} ± {_percent(math.exp(ratio.value) * ratio.error)}"),
            ("KL divergence, nats", f"{_estimate(divergence.mean)} on average"),
            ("", f"{_number(divergence.median)} median, {_number(divergence.p99)} at 99%"),
            ("", f"{_number(divergence.max)} at most"),
            ("same top token", f"{_percent(distance.same_top.value)} ± {_percent(distance.same_top.error)}"),
            (
                "token probability",
                f"{_signed(distance.right_token.value)} ± {_percent(distance.right_token.error)} on average",
            ),
            ("", f"{_percent(distance.right_token_rms)} root mean square"),
        ]
    )


def _worst_table(head: str, errors: Sequence[Error]) -> str:
    worst = sorted(errors, key=lambda error: -error.relative)[:MAX_WORST]
    rows = [(head, "OUTPUT ERROR"), *((error.name, _percent(error.relative)) for error in worst)]
    return format_table(rows) if any(error.relative for error in worst) else ""


def _answers(answers: Answers) -> str:
    differ = answers.same < answers.tokens
    first = f"{answers.same} of {answers.tokens} tokens are identical before the first difference"
    same = first if differ else f"all {answers.tokens} tokens are identical"
    return format_columns(
        [
            *_wrapped("prompt", _quoted(answers.prompt)),
            ("answers", same),
            *(_wrapped("both", _quoted(answers.common)) if answers.common else []),
            *(
                [*_wrapped("reference", _quoted(answers.reference)), *_wrapped("compared", _quoted(answers.other))]
                if differ
                else []
            ),
        ]
    )


def _estimate(estimate: Estimate) -> str:
    return f"{_number(estimate.value)} ± {_number(estimate.error, digits=3)}"


def _number(value: float, digits: int = 4) -> str:
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 10**digits:
        return f"{value:.{digits - 1}e}"
    return f"{value:#.{digits}g}".rstrip(".")


def _percent(share: float) -> str:
    """Percentage with two decimals, or two significant digits if it is below 0.1%."""
    return f"{share:.2%}" if abs(share) >= 1e-3 or share == 0 else f"{100 * share:#.2g}%"


def _signed(share: float) -> str:
    return ("+" if share > 0 else "") + _percent(share)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrapped(name: str, text: str) -> Rows:
    lines = textwrap.wrap(text, VALUE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]
