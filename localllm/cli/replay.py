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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from localllm.files import explain_disk_errors, write_atomic
from localllm.protocol.model import Model
from localllm.receipts import receipt
from localllm.receipts.receipt import Receipt
from localllm.request import ChatRequest, EventType, GenerationEvent, Request
from localllm.sampling import params_to_json


# What `localllm run` makes of an answer for those who want it computed again.
def collect_answer(events: Sequence[GenerationEvent]) -> receipt.Answer:
    """Of a whole answer."""

    def text(kind: EventType) -> str:
        return "".join(event.text for event in events if event.kind is kind)

    return receipt.Answer(
        token_ids=tuple(token for event in events for token in event.token_ids),
        text=text(EventType.CONTENT),
        reasoning=text(EventType.REASONING),
        finish_reason=str(events[-1].finish_reason),
    )


def build_receipt(
    llm: Model,
    chat: ChatRequest,
    request: Request,
    answer: receipt.Answer,
    seed: int | None,
) -> Receipt:
    """seed: that was drawn where the request names none."""
    prompt: Any = chat.prompt
    question = receipt.Question(
        prompt if isinstance(prompt, str) else tuple(prompt),
        tuple(dict(tool) for tool in request.tools) or None,
        dict(chat.template_arguments),
        request.prompt_ids,
        params_to_json(replace(request.params, seed=seed)),
    )
    return Receipt(*llm.provenance(), llm.kernels(), question, answer)


def write_receipt(path: Path, paper: Receipt) -> None:
    """For this user alone, as it holds the prompt; whole or not at all, unless it is a pipe or a device. Raises as
    `writing`."""
    with explain_disk_errors(path.parent):
        if path.exists() and not path.is_file():
            path.write_text(receipt.to_text(paper), encoding="utf-8")
        else:
            write_atomic(path, receipt.to_text(paper))


def replay(
    receipt: Annotated[str, typer.Argument(metavar="RECEIPT", hidden=True)],
    model: Annotated[
        str | None,
        options.option(
            "--model",
            text="Model to use if it has moved since the receipt.",
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
    prompt tokens are recomputed with the same seed, data types and threads. Changes of machine, versions and
    kernels are reported on stderr. Exits with code 10 if the answer differs, and with 8 if the model differs.
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
            activations=str(setup.activation_bits),
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
