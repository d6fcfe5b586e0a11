"""Recomputes an answer from its receipt, and finds the first token that differs, if any."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

from localllm.errors import LocalLLMError, ModelNotFound
from localllm.llm.llm import LLM, collect_completion
from localllm.receipts.receipt import Kernels, Model, Question, Receipt, Setup
from localllm.request import MAX_LOGIT_BIAS, ChatRequest, GenerationEvent, Request, SamplingParams

SHOWN_CHARS = 40  # shown of a differing text


@dataclass(frozen=True)
class Change:
    """Something that differs from the receipt."""

    what: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.what}: {self.then} then, {self.now} now"


@dataclass(frozen=True)
class Said:
    """A token of an answer."""

    token_id: int
    text: str
    logprob: float | None  # under this model's own distribution, now; None if it has no such token


@dataclass(frozen=True)
class Replayed:
    changes: tuple[Change, ...]  # of the model, setup and kernels
    same_tokens: int  # from the first on
    then: Said | None  # the first that differs; None if the answer had ended, or none differs
    now: Said | None
    ends: tuple[Change, ...]  # if all tokens are the same: differing finish reason or texts

    @property
    def identical(self) -> bool:
        return not (self.then or self.now or self.ends)

    @property
    def margin(self) -> float | None:
        """How much more likely the original token is now, as a difference of natural logarithms."""
        if not (self.then and self.now) or self.then.logprob is None or self.now.logprob is None:
            return None
        return self.then.logprob - self.now.logprob


def replay(llm: LLM, receipt: Receipt, on_change: Callable[[Change], object] = lambda change: None) -> Replayed:
    """Recompute the answer until a token differs. on_change: receives each change as soon as it is known.

    The prompt's tokens are the receipt's, regardless of what the template and tokenizer would produce now. Raises
    ModelNotFound for a different model, and like `LLM.prepare`.
    """
    model, setup = llm.provenance()
    request, prompt = make_request(llm, receipt.question)
    changes = [*compare_models(receipt.model, model), *compare_setups(receipt.setup, setup), *prompt]
    for change in changes:
        on_change(change)  # before the answer is computed, which may take long
    then, events = receipt.answer.token_ids, list[GenerationEvent]()
    now: list[int] = []
    with closing(llm.submit(request)) as stream:
        for event in stream:
            start = len(now)
            now += event.token_ids
            events.append(event)
            if tuple(now[start:]) != then[start : len(now)]:
                break
    kernels = list(compare_kernels(receipt.kernels, llm.kernels()))
    for change in kernels:
        on_change(change)
    changes += kernels
    same_count = first_difference(then, now)
    if same_count < max(len(then), len(now)):
        original = [*request.prompt_ids, *then[:same_count]]
        old, new = (
            describe_token(llm, original, ids[same_count]) if same_count < len(ids) else None
            for ids in (then, now)
        )
        return Replayed(tuple(changes), same_count, old, new, ())
    completion, original = collect_completion(request, events), receipt.answer
    ends = [
        *list_changes("finish_reason", original.finish_reason, completion.finish_reason),
        *list_text_changes("text", original.text, completion.text),
        *list_text_changes("reasoning", original.reasoning, completion.reasoning),
    ]
    return Replayed(tuple(changes), same_count, None, None, tuple(ends))


def make_request(llm: LLM, question: Question) -> tuple[Request, list[Change]]:
    """Return the request, and whether its text would give a different prompt now."""
    request = llm.prepare(ChatRequest(question.token_ids, question.sampling_params))
    if question.prompt is None:
        return request, []
    tools, arguments = question.tools, question.template_arguments
    if not isinstance(question.prompt, str):
        request = replace(request, is_chat=True, tools=tools or ())
    count = f"{len(question.token_ids)} tokens"
    try:
        chat = ChatRequest(question.prompt, question.sampling_params, tools, arguments or {})
        ids = llm.prepare(chat).prompt_ids
    except LocalLLMError as error:
        return request, [Change("prompt", count, f"none ({error.message})")]
    if ids == request.prompt_ids:
        return request, []
    position = first_difference(ids, request.prompt_ids)
    return request, [Change("prompt", count, f"{len(ids)} with others from {position} on")]


def compare_models(then: Model, now: Model) -> Iterator[Change]:
    """Yield changed files other than weights and config.json.

    Raises ModelNotFound if those changed: another model's answers cannot be compared.
    """
    old_files, new_files = ({file.path: file for file in model.files} for model in (then, now))
    for path in sorted(old_files.keys() | new_files.keys()):
        old_file, new_file = old_files.get(path), new_files.get(path)
        if old_file and new_file and old_file.matches(new_file):
            continue
        if any(file and file.affects_logits for file in (old_file, new_file)):
            difference = "another" if old_file and new_file else "in one of them alone"
            raise ModelNotFound(
                f"{now.source} is not the model of the receipt: {path} is {difference}",
                f"that was {then.source}; use --model to give its current location",
            )
        yield Change(path, *(file.label if file else "none" for file in (old_file, new_file)))


def compare_setups(then: Setup, now: Setup) -> Iterator[Change]:
    for field in fields(Setup):
        yield from list_changes(field.name, getattr(then, field.name), getattr(now, field.name))


def compare_kernels(then: Kernels, now: Kernels) -> Iterator[Change]:
    """Yield operations that used kernels not in the receipt; a truncated answer may have needed fewer."""
    for operation, kernels in now.items():
        if not set(kernels) <= set(then.get(operation, ())):
            yield from list_changes(f"kernels of {operation}", then.get(operation), kernels)


def list_changes(what: str, then: Any, now: Any) -> Iterator[Change]:
    if isinstance(then, dict):
        for name in sorted(then.keys() | now.keys()):
            yield from list_changes(name, then.get(name), now.get(name))
    elif then != now:
        yield Change(what, format_value(then), format_value(now))


def list_text_changes(what: str, then: str, now: str) -> Iterator[Change]:
    if then != now:
        position = first_difference(then, now)
        yield Change(
            f"{what} from character {position} on",
            *(repr(text[position : position + SHOWN_CHARS]) for text in (then, now)),
        )


def format_value(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else "none" if value is None else str(value)


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first position where the two differ or one has ended."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def describe_token(llm: LLM, prefix_ids: list[int], token_id: int) -> Said:
    """Return a token with its log probability after others: forced by a bias that the log probability excludes."""
    if token_id >= llm.config.vocab_size:
        return Said(token_id, "", None)
    forced = SamplingParams(temperature=0, max_tokens=1, logit_bias={token_id: MAX_LOGIT_BIAS}, logprobs=0)
    logprob = llm.generate(prefix_ids, forced).logprobs[0].logprob
    text = llm.tokenizer.decode([token_id], skip_special=False)
    return Said(token_id, text, logprob if math.isfinite(logprob) else None)
