"""`localllm plan`: whether a model fits this machine or a GPU, and how fast it would run there."""

import json
from typing import Annotated, Any

import typer

from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.cli import options
from localllm.cli.io import StdoutWriter, note, status
from localllm.cli.plan_page import format_plan
from localllm.errors import DoesNotFit, UsageError
from localllm.hardware.catalog import find_device
from localllm.hub.resolve import missing_repo, resolve_model
from localllm.plan.expected import expect_on_device
from localllm.plan.fit import LoadOptions
from localllm.plan.plan import Choice, Plan
from localllm.plan.plan import plan_model as make_plan
from localllm.plan.weights import check_quant
from localllm.settings import Settings


def plan(
    model: options.ModelName,
    gpu: Annotated[
        str | None, options.option("--gpu", text="Plan for this GPU: h100, 4090, ...", metavar="NAME")
    ] = None,
    context: Annotated[
        int | None, options.option(text="Prompt and answer of each user, in tokens.", metavar="TOKENS")
    ] = None,
    users: Annotated[int, typer.Option(help="Who are answered at once.", metavar="N")] = 1,
    prompt: Annotated[
        int | None,
        options.option("--prompt", text="TTFT of a prompt of so many tokens, else of 512.", metavar="TOKENS"),
    ] = None,
    quant: Annotated[
        str | None,
        options.option("--quant", text="As if it were quantized: int8, int4, q8_0, q4_k_m.", metavar="QUANT"),
    ] = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    as_json: options.Json = False,
) -> None:
    """Tell whether a model fits, and how fast it would run.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Reads no weights,
    also of a model that is still on the Hub: memory and speed follow from its description, for this machine or a
    GPU that is named. Exits with 3 if the model does not fit.
    """
    out = StdoutWriter()
    settings = Settings.from_environment()
    if gpu and device:
        raise UsageError("--gpu names a device that is not here, --device one that is", "leave one of them out")
    check_quant(quant)  # before a header is fetched
    wish = LoadOptions(context, users, quant, dtype or settings.dtype, kv_dtype or settings.kv_dtype)
    name, header = _read_or_fetch_header(model)
    check_quantization(header.config)
    if gpu:
        found = make_plan(header, find_device(gpu), wish, name=name, prompt=prompt)
    else:
        with status(f"measuring this machine for {name}"):
            hardware, expectation = expect_on_device(
                header, wish, device or "auto", settings, name=name, note=note
            )
        found = make_plan(header, hardware, wish, name=name, prompt=prompt, expectation=expectation)
    out.write((json.dumps(plan_json(found), indent=1) if as_json else format_plan(found)) + "\n")
    if not found.fit.fits:
        raise typer.Exit(DoesNotFit.exit_code)


def _read_or_fetch_header(model: str) -> tuple[str, Header]:
    """Of a model that is not here, what ranged requests give."""
    if repo := missing_repo(model):
        from localllm.checkpoint.remote import remote_header  # the Hub's library takes 0.1 s to import
        from localllm.hub.pull import plan_pull

        with status(f"reading the header of {repo}"):
            return model, remote_header(plan_pull(repo, note), note)
    ref = resolve_model(model)
    return ref.name, read_header(ref.path)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The object that docs/plan.md describes."""
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
        "weight_bytes": fit.weights.total,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_token_in_8_bits": plan.kv_bytes_per_token_in_8_bits,
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
        "quantizations": [_choice_json(choice) for choice in plan.choices],
        "best": _quant_name(plan.best, plan),
    }


def _quant_name(choice: Choice | None, plan: Plan) -> str | None:
    """`int8`, or what the weights are stored as."""
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
