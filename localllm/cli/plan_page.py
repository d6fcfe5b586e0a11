"""What a person reads of a plan: facts in columns, speeds and quantizations as tables, no line over 80 characters
unless a word is that long."""

import textwrap

from localllm.columns import format_columns, format_table
from localllm.formatting import format_bytes, format_flops, format_rate, format_seconds
from localllm.plan.plan import Choice, Plan
from localllm.plan.speed import Speed
from localllm.plan.weights import GGUF_BITS

VALUE_WIDTH = 62  # characters beside the longest name
BOUND_NAMES = {"memory": "reading memory", "compute": "computing"}
PUBLISHED_NOTE = "of a published GGUF file, where there is one; --quant makes the others"
CONTEXTS_DIFFER_NOTE = "decoding is with each row's own context in the cache; --context N compares them"

Rows = list[tuple[str, str]]


def format_plan(plan: Plan) -> str:
    """The whole page, without a line break at its end."""
    return "\n\n".join(
        [
            format_columns([*_device_rows(plan), ("", ""), *_memory_rows(plan)]),
            _speed_table(plan),
            *_quantization_tables(plan),
        ]
    )


def _device_rows(plan: Plan) -> Rows:
    hardware = plan.hardware
    rates = f"reads {format_bytes(hardware.bandwidth)}/s, computes {format_flops(hardware.flops)}"
    return [
        *_wrapped("model", f"{plan.name}, {_mark_published(plan.chosen, plan)}"),
        *_wrapped("device", hardware.name),
        ("", rates),
        *_wrapped("", hardware.source),
    ]


def _memory_rows(plan: Plan) -> Rows:
    fit = plan.fit
    users = f" for {plan.users} users" if plan.users > 1 else ""
    states = [("states", f"{format_bytes(plan.state_bytes)}{users}, of recurrent layers")]
    verdict = f"no: {fit.refusal.message}; {plan.remedy}" if fit.refusal else "yes"
    return [
        ("weights", format_bytes(fit.weights.total)),
        *_cache_rows(plan),
        *(states if plan.state_bytes else []),
        ("activations", format_bytes(plan.activation_bytes)),
        (
            "total",
            f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.hardware.memory_bytes)}",
        ),
        *_wrapped("fits", verdict),
        *_capacity_rows(plan),
    ]


def _cache_rows(plan: Plan) -> Rows:
    """Keys and values; what a step reads of them, where that is something else."""
    each = f"{format_bytes(plan.kv_bytes_per_sequence)} for {plan.context} tokens"
    together = f"{format_bytes(plan.kv_bytes)} for {plan.users} users, " if plan.users > 1 else ""
    kept = f" in {plan.fit.kv_dtype}" if plan.fit.kv_dtype != plan.fit.dtype else ""
    rows = _wrapped("KV cache", f"{together}{each}, {format_bytes(plan.kv_bytes_per_token)} a token{kept}")
    whole = plan.context * plan.kv_bytes_per_token
    if plan.kv_bytes_read < whole:
        rows.append(("", f"of which a token reads {format_bytes(plan.kv_bytes_read)}: some layers see a window"))
    elif plan.kv_bytes_read > whole:
        rows.append(("", f"a token reads {format_bytes(plan.kv_bytes_read)}: some layers share theirs"))
    return rows


def _capacity_rows(plan: Plan) -> Rows:
    """Contexts and users that memory holds, where it holds any."""
    fit = plan.fit
    if not fit.max_context:
        return []
    rows = [("largest context", f"{fit.max_context} tokens for one user, the model knows {plan.max_context}")]
    if fit.fits:
        kept = f"; localllm keeps {fit.concurrent_users}" if fit.max_users > fit.concurrent_users else ""
        rows.append(("users", f"{fit.max_users} at once with {plan.context} tokens each{kept}"))
    return rows


def _speed_table(plan: Plan) -> str:
    """A column of what is possible at most, and one of what is expected where that is known."""
    told = [("AT MOST", plan.chosen.ceiling), *([("EXPECTED", plan.expected)] if plan.expected else [])]

    def together(speed: Speed) -> str:
        return f"{format_rate(speed.all_tokens_per_s)} of {speed.users}"

    speeds = [speed for _, speed in told]
    rows = [
        ("SPEED", *(head for head, _ in told)),
        (f"TTFT of {plan.prompt} tokens", *(format_seconds(speed.ttft_s) for speed in speeds)),
        ("decoding at first", *(format_rate(speed.first_tokens_per_s) for speed in speeds)),
        (
            f"with {plan.context} tokens in the cache",
            *(format_rate(speed.tokens_per_s) for speed in speeds),
        ),
        *([("all users together", *map(together, speeds))] if plan.users > 1 else []),
        ("bound by", *(BOUND_NAMES[speed.bound] for speed in speeds)),
    ]
    source = f"\nexpected from {plan.expectation.source}" if plan.expectation else ""
    return format_table(rows) + source


def _quantization_tables(plan: Plan) -> list[str]:
    """A table of them, and what to make of it; nothing for a model that is stored quantized."""
    if plan.stored_as:
        return []
    head = ("QUANTIZATION", "WEIGHTS", "FITS", "LARGEST CONTEXT", "TTFT", "DECODING AT MOST")
    rows = [
        (
            _mark_published(choice, plan),
            format_bytes(choice.fit.weights.total),
            "yes" if choice.fit.fits else "no",
            str(choice.fit.max_context or "-"),
            format_seconds(choice.ceiling.ttft_s),
            format_rate(choice.ceiling.tokens_per_s),
        )
        for choice in plan.choices
    ]
    best = _quantization_name(plan.best, plan) if plan.best else "none"
    last = [f"best that fits: {best}", f"* {PUBLISHED_NOTE}"]
    if len({choice.fit.context for choice in plan.choices}) > 1:
        last.insert(0, CONTEXTS_DIFFER_NOTE)
    return [format_table([head, *rows]), "\n".join(last)]


def _quantization_name(choice: Choice, plan: Plan) -> str:
    """The quantization in words."""
    quant = choice.fit.quant
    if quant is None:
        return f"as stored ({plan.stored_as or choice.fit.dtype})"
    return f"GGUF {quant.upper()}, about" if quant in GGUF_BITS else quant.upper()


def _mark_published(choice: Choice, plan: Plan) -> str:
    """With a sign where somebody else must have made it."""
    return _quantization_name(choice, plan) + (" *" if choice.fit.quant in GGUF_BITS else "")


def _wrapped(name: str, text: str) -> Rows:
    lines = textwrap.wrap(text, VALUE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]
