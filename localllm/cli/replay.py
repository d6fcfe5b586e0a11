"""`localllm replay`: recompute an answer from its receipt and compare the two."""

import json
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from localllm.cli import io, options
from localllm.cli.loading import load_model
from localllm.errors import NoSuchDevice, NotReproduced
from localllm.hardware.device import resolve_device
from localllm.receipts.receipt import read

if TYPE_CHECKING:  # these import torch
    from localllm.comparison.replay import Replayed, Said
    from localllm.llm.llm import LLM


def replay(
    receipt: Annotated[str, typer.Argument(metavar="RECEIPT", hidden=True)],
    model: Annotated[
        str | None,
        options.option(
            "--model",
            text="Model to use, if it has moved since the receipt was written.",
            metavar="MODEL",
            panel=options.Panel.MODEL,
        ),
    ] = None,
    draft_model: options.DraftModel = None,
    context: options.Context = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Recompute an answer from a receipt and compare the two.

    RECEIPT is a file written by `localllm run --receipt`, or the output of `localllm run --json`; - is stdin. The
    prompt tokens are recomputed with the same seed, data types, threads and processes. Changes of machine,
    versions and kernels are reported on stderr. Exits with code 10 if the answer differs, and with 8 if the model
    differs.
    """
    out = io.StdoutWriter()
    original = read(io.read_bytes(receipt), io.display_name(receipt))
    setup = original.setup
    with closing(
        load_model(
            model or original.model.source,
            device=device or _device_or_auto(setup.device),
            dtype=setup.dtype,
            kv_dtype=setup.kv_dtype,
            activations=str(setup.activation_bits),
            quant=original.model.quant,
            context=context or setup.context,
            threads=setup.threads * setup.tensor_parallel,  # which share them
            tensor_parallel=setup.tensor_parallel,
            pipeline_parallel=str(setup.pipeline_parallel),
            expert_parallel=setup.expert_parallel,
            draft=setup.draft,
            draft_model=draft_model or setup.draft_model,
            # None keeps it where it is supported; otherwise the change is reported.
            deterministic=None if setup.deterministic else False,
        )
    ) as llm:
        from localllm.comparison.replay import replay as replay_answer

        with io.status("recomputing the answer"):
            result = replay_answer(cast("LLM", llm), original, lambda change: io.note(f"note: {change}"))
    text = json.dumps(_result_json(result), ensure_ascii=False) if as_json else _format_result(result)
    out.write(text + "\n")
    if not result.identical:
        raise NotReproduced("the answer differs", "docs/receipts.md lists possible causes")


def _device_or_auto(name: str) -> str:
    """The device of the receipt, or `auto` if this machine does not have it."""
    try:
        resolve_device(name)
    except NoSuchDevice:
        return "auto"
    return name


def _format_result(result: "Replayed") -> str:
    if result.identical:
        return f"identical: {result.same_tokens} tokens"
    if result.ends:
        return "\n".join([f"the same {result.same_tokens} tokens, but", *map(str, result.ends)])
    then, now = (_format_token(token) for token in (result.then, result.now))
    return f"differs from token {result.same_tokens} on: {then} then, {now} now{_format_margin(result)}"


def _format_margin(result: "Replayed") -> str:
    if not (result.then and result.now) or result.margin is None:
        return ""
    values = f"{result.then.logprob:.4f} and {result.now.logprob:.4f}"
    return f" (log probabilities of this model now: {values}, {abs(result.margin):.2g} apart)"


def _format_token(token: "Said | None") -> str:
    return "the end" if token is None else f"{token.token_id} {token.text!r}"


def _result_json(result: "Replayed") -> dict[str, Any]:
    """Object that `--json` prints; docs/receipts.md describes its fields."""
    return {"identical": result.identical, **asdict(result), "margin": result.margin}
