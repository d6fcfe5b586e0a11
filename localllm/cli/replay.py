"""`localllm replay`: an answer computed again, and whether it is the same."""

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

if TYPE_CHECKING:  # they need torch
    from localllm.comparison.replay import Replayed, Said
    from localllm.llm.llm import LLM


def replay(
    receipt: Annotated[str, typer.Argument(metavar="RECEIPT", hidden=True)],
    model: Annotated[
        str | None, options.option("--model", text="Where the model lies, if not where it was.", metavar="MODEL")
    ] = None,
    draft_model: options.DraftModel = None,
    context: options.Context = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Compute an answer again, and say whether it is the same.

    RECEIPT is a file that `localllm run` wrote by --receipt, or its --json output; - is stdin. What has changed of
    machine, versions and kernels is told on stderr; then the prompt's tokens are computed as they were, with the
    same seed, dtypes and threads. Exits with 10 if the answer is another, and with 8 if the model is.
    """
    out = io.StdoutWriter()
    paper = read(io.read_bytes(receipt), io.display_name(receipt))
    setup = paper.setup
    with closing(
        load_model(
            model or paper.model.source,
            device=device or _device_or_auto(setup.device),
            dtype=setup.dtype,
            kv_dtype=setup.kv_dtype,
            quant=paper.model.quant,
            context=context or setup.context,
            threads=setup.threads,
            draft=setup.draft,
            draft_model=draft_model or setup.draft_model,
            deterministic=None if setup.deterministic else False,  # where it holds no more, that is told
        )
    ) as llm:
        from localllm.comparison.replay import replay as compute

        with io.status("computing the answer again"):
            found = compute(cast("LLM", llm), paper, lambda change: io.note(f"note: {change}"))
    out.write((json.dumps(_replay_json(found), ensure_ascii=False) if as_json else _format_replay(found)) + "\n")
    if not found.identical:
        raise NotReproduced("the answer is another", "docs/receipts.md says what that may come from")


def _device_or_auto(name: str) -> str:
    """That of the receipt, where such a one is here."""
    try:
        resolve_device(name)
    except NoSuchDevice:
        return "auto"
    return name


def _format_replay(found: "Replayed") -> str:
    if found.identical:
        return f"identical: {found.same_tokens} tokens"
    if found.ends:
        return "\n".join([f"the same {found.same_tokens} tokens, but", *map(str, found.ends)])
    then, now = (_format_token(said) for said in (found.then, found.now))
    return f"differs from token {found.same_tokens} on: {then} then, {now} now{_format_margin(found)}"


def _format_margin(found: "Replayed") -> str:
    if not (found.then and found.now) or found.margin is None:
        return ""
    values = f"{found.then.logprob:.4f} and {found.now.logprob:.4f}"
    return f" (log probabilities by this model, here: {values}, {abs(found.margin):.2g} apart)"


def _format_token(said: "Said | None") -> str:
    return "the end" if said is None else f"{said.token_id} {said.text!r}"


def _replay_json(found: "Replayed") -> dict[str, Any]:
    """The object of `--json`; its fields are described in docs/receipts.md."""
    return {"identical": found.identical, **asdict(found), "margin": found.margin}
