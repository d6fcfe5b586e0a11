"""Report of `localllm plan`: as text of at most 80 columns, and as the object of --json."""

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localllm.formatting import (
    format_bytes,
    format_columns,
    format_flops,
    format_rate,
    format_seconds,
    format_table,
)
from localllm.plan.advice import Advice, Arrangement
from localllm.plan.estimated import Estimate, EstimatedRate
from localllm.plan.plan import Choice, Plan
from localllm.plan.speed import Speed
from localllm.plan.weights import GGUF_BITS, QUANTS

if TYPE_CHECKING:
    from localllm.simulate.serving import ServingPlan  # imports torch

PAGE_WIDTH = 80
VALUE_WIDTH = 62  # columns of values beside the longest label, so that lines have at most 80
BOUND_NAMES = {"memory": "reading memory", "compute": "computing"}
PUBLISHED_NOTE = "a GGUF file, if one is published; --quant makes the others"
CONTEXTS_DIFFER_NOTE = "decoding speed is at each row's own context; --context N makes rows comparable"

WHOLE_EXPERTS_NOTE = (
    "experts: each device has whole ones, and computes them one by one, whose launches are not counted here"
)

Rows = list[tuple[str, str]]


def format_plan(plan: Plan) -> str:
    """The report as text of at most 80 columns, without a final line break."""
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
        *_wrapped(
            "device", f"{plan.parallel.devices} x {hardware.name}" if plan.parallel.devices > 1 else hardware.name
        ),
        ("", f"{rates} each" if plan.parallel.devices > 1 else rates),
        *_wrapped("", hardware.source),
    ]


def _memory_rows(plan: Plan) -> Rows:
    fit = plan.fit
    users = f" for {plan.users} users" if plan.users > 1 else ""
    states = [("states", f"{format_bytes(plan.state_bytes)}{users}, of recurrent layers")]
    verdict = f"no: {fit.refusal.message}; {plan.remedy}" if fit.refusal else "yes"
    return [
        (
            "weights",
            format_bytes(fit.weights.total) + (" in the largest process" if plan.parallel.devices > 1 else ""),
        ),
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
    """Size of the KV cache, and what a decode step reads of it if that differs."""
    one_user = f"{format_bytes(plan.kv_bytes_per_sequence)} for {plan.context} tokens"
    all_users = f"{format_bytes(plan.kv_bytes)} for {plan.users} users, " if plan.users > 1 else ""
    dtype = f" in {plan.fit.kv_dtype}" if plan.fit.kv_dtype != plan.fit.dtype else ""
    per_token = f"{format_bytes(plan.kv_bytes_per_token)} per token{dtype}"
    rows = _wrapped("KV cache", f"{all_users}{one_user}, {per_token}")
    full_bytes = plan.context * plan.kv_bytes_per_token
    if plan.kv_bytes_read < full_bytes:
        rows.append(("", f"{format_bytes(plan.kv_bytes_read)} read per token: some layers use a sliding window"))
    elif plan.kv_bytes_read > full_bytes:
        rows.append(("", f"{format_bytes(plan.kv_bytes_read)} read per token: some layers share their cache"))
    return rows


def _capacity_rows(plan: Plan) -> Rows:
    """Largest context and number of users that fit into memory, if any."""
    fit = plan.fit
    if not fit.max_context:
        return []
    rows = [("largest context", f"{fit.max_context} tokens for one user, the model supports {plan.max_context}")]
    if fit.fits:
        limit = f"; localllm runs {fit.concurrent_users}" if fit.max_users > fit.concurrent_users else ""
        rows.append(("users", f"{fit.max_users} at once with {plan.context} tokens each{limit}"))
    return rows


def _speed_table(plan: Plan) -> str:
    """Table of the highest possible speed, and of the expected or estimated speed if it is known."""
    if plan.estimate:
        return _estimate_table(plan, plan.estimate)
    columns = [("AT MOST", plan.chosen.ceiling), *([("EXPECTED", plan.expected)] if plan.expected else [])]

    def total(speed: Speed) -> str:
        return f"{format_rate(speed.all_tokens_per_s)} of {speed.users}"

    speeds = [speed for _, speed in columns]
    rows = [
        ("SPEED", *(head for head, _ in columns)),
        (f"TTFT of {plan.prompt} tokens", *(format_seconds(speed.ttft_s) for speed in speeds)),
        ("decoding, empty cache", *(format_rate(speed.first_tokens_per_s) for speed in speeds)),
        (
            f"decoding, {plan.context} tokens cached",
            *(format_rate(speed.tokens_per_s) for speed in speeds),
        ),
        *([("all users", *map(total, speeds))] if plan.users > 1 else []),
        ("bound by", *(BOUND_NAMES[speed.bound] for speed in speeds)),
    ]
    source = textwrap.fill(f"expected from {plan.expectation.source}", PAGE_WIDTH) if plan.expectation else ""
    return "\n".join([format_table(rows), *([source] if source else [])])


def _estimate_table(plan: Plan, estimate: Estimate) -> str:
    """Table of the highest possible speed, and of the estimate of decoding for a single user."""
    ceiling, unknown = plan.chosen.ceiling, "-"

    def span(rate: EstimatedRate) -> str:
        return f"{format_rate(rate.slowest).partition(' ')[0]} to {format_rate(rate.fastest)}"

    rows = [
        ("SPEED", "AT MOST", "ESTIMATED"),
        (f"TTFT of {plan.prompt} tokens", format_seconds(ceiling.ttft_s), unknown),
        ("decoding, empty cache", format_rate(ceiling.first_tokens_per_s), span(estimate.first_tokens_per_s)),
        (
            f"decoding, {plan.context} tokens cached",
            format_rate(ceiling.tokens_per_s),
            span(estimate.tokens_per_s),
        ),
    ]
    if plan.users > 1:
        rows.append(("all users", f"{format_rate(ceiling.all_tokens_per_s)} of {ceiling.users}", unknown))
    rows.append(("bound by", BOUND_NAMES[ceiling.bound], ""))
    source = textwrap.fill(f"estimated from {estimate.source}", PAGE_WIDTH)
    return f"{format_table(rows)}\n{source}"


def _quantization_tables(plan: Plan) -> list[str]:
    """Table of quantizations, and notes on it; empty for a model that is stored quantized."""
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
    notes = [f"best that fits: {best}", f"* {PUBLISHED_NOTE}"]
    if len({choice.fit.context for choice in plan.choices}) > 1:
        notes.insert(0, CONTEXTS_DIFFER_NOTE)
    return [format_table([head, *rows]), "\n".join(notes)]


def _quantization_name(choice: Choice, plan: Plan) -> str:
    quant = choice.fit.quant
    if quant is None:
        return f"as stored ({plan.stored_as or choice.fit.dtype})"
    return f"GGUF {quant.upper()}, about" if quant in GGUF_BITS else quant.upper()


def _mark_published(choice: Choice, plan: Plan) -> str:
    """Name of the quantization, with a mark if it needs a published file."""
    return _quantization_name(choice, plan) + (" *" if choice.fit.quant in GGUF_BITS else "")


def _wrapped(name: str, text: str) -> Rows:
    lines = textwrap.wrap(text, VALUE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def plan_json(plan: Plan) -> dict[str, Any]:
    """Object that `--json` prints; docs/plan.md describes its fields."""
    fit, hardware = plan.fit, plan.hardware
    return {
        "model": plan.name,
        "device": {
            "name": hardware.name,
            "kind": hardware.device_type,
            "memory_bytes": hardware.memory_bytes,
            "bandwidth": hardware.bandwidth,
            "flops": hardware.flops,
            "measured": hardware.measured,
            "source": hardware.source,
        },
        "stored_as": plan.stored_as,
        "quant": fit.quant,
        "dtype": fit.dtype,
        "kv_dtype": fit.kv_dtype,
        "context": plan.context,
        "max_context": plan.max_context,
        "users": plan.users,
        "prompt": plan.prompt,
        "tensor_parallel": plan.parallel.tensor,
        "pipeline_parallel": plan.parallel.pipeline,
        "expert_parallel": plan.parallel.whole_experts,
        "weight_bytes": fit.weights.total,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_token_in_8_bits": plan.kv_bytes_per_token_in_8_bits,
        "kv_bytes_per_token_in_4_bits": plan.kv_bytes_per_token_in_4_bits,
        "kv_bytes_per_sequence": plan.kv_bytes_per_sequence,
        "kv_bytes_read": plan.kv_bytes_read,
        "kv_bytes": plan.kv_bytes,
        "state_bytes_per_sequence": plan.state_bytes_per_sequence,
        "state_bytes": plan.state_bytes,
        "activation_bytes": plan.activation_bytes,
        "total_bytes": plan.total_bytes,
        "allocated_bytes": fit.memory.total if fit.memory else None,
        "fits": fit.fits,
        "refusal": fit.refusal.message if fit.refusal else None,
        "remedy": plan.remedy,
        "most_context": fit.max_context,
        "most_users": fit.max_users,
        "engine_users": fit.concurrent_users,
        "ceiling": vars(plan.chosen.ceiling),
        "expected": vars(plan.expected) if plan.expected else None,
        "expectation": plan.expectation.source if plan.expectation else None,
        "estimate": asdict(plan.estimate) if plan.estimate else None,
        "quantizations": [_choice_json(choice) for choice in plan.choices],
        "best": _quant_name(plan.best, plan),
    }


def _quant_name(choice: Choice | None, plan: Plan) -> str | None:
    """Quantization such as `int8`, or the stored format."""
    return (choice.fit.quant or plan.stored_as or choice.fit.dtype) if choice else None


def _choice_json(choice: Choice) -> dict[str, Any]:
    fit = choice.fit
    return {
        "quant": fit.quant,
        "dtype": fit.dtype,
        "weight_bytes": fit.weights.total,
        "fits": fit.fits,
        "most_context": fit.max_context,
        "ceiling": vars(choice.ceiling),
    }


def format_serving(serving: "ServingPlan") -> str:
    """Table of the settings that were simulated, and a sentence with the answer."""
    from localllm.simulate.report import LABELS, describe_load

    head = ("SETTINGS", "USERS SERVED", f"MET BY {serving.users}", "TTFT p95", "TPOT p95")
    rows = [
        (option.flags or "as planned", "does not fit", "-", "-", "-")
        if option.refusal
        else (
            option.flags or "as planned",
            str(option.capacity),
            "-" if option.met is None else f"{option.met:.0%}",
            "-" if option.ttft_p95_s is None else format_seconds(option.ttft_p95_s),
            "-" if option.tpot_p95_s is None else format_seconds(option.tpot_p95_s),
        )
        for option in serving.options
    ]
    objective = serving.objective
    limits = ", ".join(f"{LABELS[name]} <= {limit * 1e3:g} ms" for name, limit in objective.limits.items())
    promise = f"within {limits} for {objective.attainment:.0%} of the requests"
    choice, best, devices = serving.choice, serving.best, serving.devices
    if choice:
        settings = f" with {choice.flags}" if choice.flags else ""
        answer = f"{serving.users} users are served{settings} {promise}; this device serves {choice.capacity}"
    elif best:
        settings = f" with {best.flags}" if best.flags else ""
        answer = (
            f"this device serves {best.capacity} users{settings} {promise}: {serving.users} need {devices} of it"
        )
    else:
        answer = f"no user is served {promise}"
    source = next((option.step_times for option in serving.options if option.step_times), "")
    lines = [describe_load(serving.load, None), f"step times: {source}", answer]
    if serving.not_compared:
        others = ", ".join(serving.not_compared)
        lines.append(f"not compared, because no steps to fit to were recorded with them (see `bench`): {others}")
    return "\n".join([format_table([head, *rows]), *(textwrap.fill(line, PAGE_WIDTH) for line in lines)])


def format_advice(advice: Advice, plan: Plan, model: str) -> str:
    """Table of the ways to run the model on several devices, and a sentence with the one to take. model: as in
    `advised_command`"""
    head = ("TENSOR", "STAGES", "ENGINES", "WEIGHTS", "CACHE TOKENS", "SENT/TOKEN", "TTFT", "TPOT")
    rows = [head, *(_arrangement_row(each) for each in advice.arrangements)]
    refusals = {each.refusal: None for each in advice.arrangements if each.refusal and each.fit is None}
    lines = [*refusals, f"expected from {advice.source}"]
    if any(each.parallel.whole_experts for each in advice.arrangements):
        lines.append(WHOLE_EXPERTS_NOTE)
    lines += [advice.prefill.reason] if advice.prefill else []
    lines.append(advice_sentence(advice, plan))
    command = advised_command(advice, plan, model)
    texts = [textwrap.fill(line, PAGE_WIDTH) for line in lines]
    return "\n".join([format_table(rows), *texts, *([f"  {command}"] if command else [])])


def _arrangement_row(each: Arrangement) -> tuple[str, ...]:
    experts = " experts" if each.parallel.whole_experts else ""
    counts = f"{each.parallel.tensor}{experts}", str(each.parallel.pipeline)
    if each.fit is None or each.speed is None:
        return (*counts, "-", "-", "not divisible", "-", "-", "-")
    return (
        *counts,
        str(each.engines) if each.fits else "-",
        format_bytes(each.fit.weights.total),
        str(each.cached_tokens) if each.fits else "does not fit",
        format_bytes(each.sent_bytes) if each.parallel.devices > 1 else "-",
        format_seconds(each.speed.ttft_s),
        format_seconds(1 / each.speed.tokens_per_s),
    )


def advice_sentence(advice: Advice, plan: Plan) -> str:
    """The way to take, with a colon where the command follows; what would be needed if there is none."""
    chosen, needed = advice.chosen, advice.needed
    name = "machine" if advice.pool.device.device_type == "cpu" else advice.pool.device.name
    if chosen is None:
        sentences = ["it does not fit a machine"]
        if needed:
            sentences.append(f"{needed.parallel.devices} x {name} in one machine would:")
        elif plan.remedy:
            sentences.append(plan.remedy)
        return "; ".join(sentences)
    if chosen.options.workers:
        among = (
            f"{chosen.parallel.pipeline} machines" if name == "machine" else f"{chosen.parallel.devices} x {name}"
        )
        among += f", {chosen.parallel.tensor} in each stage" if chosen.parallel.tensor > 1 else ""
        other = f"use {needed.parallel.devices} x {name} in one machine, or " if needed else ""
        return (
            f"it does not fit one machine, so {other}divide it among {among}, with a worker for each further one:"
        )
    if chosen.parallel.devices > 1:
        return f"it does not fit one {name}, so divide it within a machine:"
    if chosen.engines == 1:
        return f"it fits one {name}, so no second one is needed:"
    if advice.prefill:
        counts = f"{advice.prefill.prefill} for prompts and {advice.prefill.decode} for answers"
        return f"it fits one {name}, so use {counts}:"
    return f"it fits one {name}, so run an engine on each:"


def advised_command(advice: Advice, plan: Plan, model: str) -> str | None:
    """The command that serves the model as advised; None if it fits nowhere.

    model: the name or path by which the user can load it
    """
    arrangement = advice.chosen or advice.needed
    if arrangement is None:
        return None
    options = arrangement.options
    words = ["localllm serve", model, arrangement.flags]
    if plan.fit.quant in QUANTS:
        words.append(f"--quant {plan.fit.quant}")
    words.append(f"--context {options.context}" if options.context else "")
    given = {"--dtype": options.dtype, "--kv-dtype": options.kv_dtype}
    words += [f"{flag} {dtype}" for flag, dtype in given.items() if dtype != "auto"]
    if advice.prefill:
        words.append(f"--prefill {advice.prefill.prefill}")
        words.append(f"--decode {advice.prefill.decode}" if advice.prefill.decode > 1 else "")
    elif arrangement.parallel.pipeline == 1 and arrangement.engines > 1:
        words.append(f"--replicas {arrangement.engines}" + (" --cluster" if advice.pool.machines > 1 else ""))
    return " ".join(filter(None, words))


def advice_json(advice: Advice | None, plan: Plan, model: str) -> dict[str, Any] | None:
    """Object of `--json` with the ways to use several devices; None for a model that fits the only one. model: as
    in `advised_command`"""
    if advice is None:
        return None
    pool, needed = advice.pool, advice.needed

    def arrangement_json(each: Arrangement) -> dict[str, Any]:
        return {
            "tensor_parallel": each.parallel.tensor,
            "pipeline_parallel": each.parallel.pipeline,
            "expert_parallel": each.parallel.whole_experts,
            "engines": each.engines,
            "fits": each.fits,
            "refusal": each.refusal,
            "weight_bytes": each.fit.weights.total if each.fit else None,
            "cached_tokens": each.cached_tokens,
            "sent_bytes_per_token": each.sent_bytes,
            "ttft_s": each.speed.ttft_s if each.speed else None,
            "tpot_s": 1 / each.speed.tokens_per_s if each.speed else None,
        }

    return {
        "devices": pool.device.count,
        "machines": pool.machines,
        "arrangements": [arrangement_json(each) for each in advice.arrangements],
        "needed": arrangement_json(needed) if needed else None,
        "prefill": asdict(advice.prefill) if advice.prefill else None,
        "command": advised_command(advice, plan, model),
        "source": advice.source,
    }


def serving_json(serving: "ServingPlan | None") -> dict[str, Any] | None:
    """Object of `--json` for `--slo`; None without it."""
    if serving is None:
        return None
    load = serving.load

    return {
        "users": serving.users,
        "think_s": load.think_s,
        "prompt": str(load.prompt),
        "output": str(load.output),
        "objectives_s": serving.objective.limits,
        "attainment": serving.objective.attainment,
        "options": [asdict(option) for option in serving.options],
        "choice": serving.choice.flags if serving.choice else None,
        "devices": serving.devices,
        "not_compared": serving.not_compared,
    }
