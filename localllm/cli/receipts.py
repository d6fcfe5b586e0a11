"""What `localllm run` makes of an answer for those who want it computed again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.files import explain_disk_errors, write_atomic
from localllm.protocol.model import Model
from localllm.receipts import receipt
from localllm.receipts.receipt import Receipt
from localllm.request import EventType, GenerationEvent, Request
from localllm.sampling import params_to_json


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
    prompt: str | list[dict[str, str]],
    template_arguments: Mapping[str, Any],
    request: Request,
    answer: receipt.Answer,
    seed: int | None,
) -> Receipt:
    """seed: that was drawn where the request names none."""
    question = receipt.Question(
        prompt if isinstance(prompt, str) else tuple(prompt),
        tuple(dict(tool) for tool in request.tools) or None,
        dict(template_arguments),
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
