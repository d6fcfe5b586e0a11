"""An answer computed again from its receipt: the same tokens, or where the first other one stands."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

from localllm.errors import LocalLLMError, ModelNotFound
from localllm.llm.llm import LLM, collect_completion
from localllm.receipts.receipt import Kernels, Model, Question, Receipt, Setup
from localllm.request import MAX_LOGIT_BIAS, ChatRequest, GenerationEvent, Request, SamplingParams

SHOWN_CHARS = 40  # characters of a text that differs


@dataclass(frozen=True)
class Change:
    """What is not as it was."""

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
    logprob: float | None  # by this model's own distribution, here and now; None: it has no such token


@dataclass(frozen=True)
class Replayed:
    changes: tuple[Change, ...]  # of what the answer was computed on, with and in
    same_tokens: int  # from the first on
    then: Said | None  # the first that differs; None: the answer had ended there, or none differs
    now: Said | None
    ends: tuple[Change, ...]  # where all tokens are the same: another reason to end, other texts

    @property
    def identical(self) -> bool:
        return not (self.then or self.now or self.ends)

    @property
    def margin(self) -> float | None:
        """How much likelier the token of then is, here and now, in natural logarithms."""
        if not (self.then and self.now) or self.then.logprob is None or self.now.logprob is None:
            return None
        return self.then.logprob - self.now.logprob


def replay(llm: LLM, receipt: Receipt, on_change: Callable[[Change], object] = lambda change: None) -> Replayed:
    """Computes the answer until a token differs. on_change: what has changed meanwhile, as soon as it is known.

    The tokens of the prompt are the receipt's, whatever template and tokenizer make of its text today.
    Raises ModelNotFound where the model is another, and as `LLM.prepare`.
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
            begin = len(now)
            now += event.token_ids
            events.append(event)
            if tuple(now[begin:]) != then[begin : len(now)]:
                break
    kernels = list(compare_kernels(receipt.kernels, llm.kernels()))
    for change in kernels:
        on_change(change)
    changes += kernels
    same = first_difference(then, now)
    if same < max(len(then), len(now)):
        before = [*request.prompt_ids, *then[:same]]
        old, new = (describe_token(llm, before, ids[same]) if same < len(ids) else None for ids in (then, now))
        return Replayed(tuple(changes), same, old, new, ())
    done, before = collect_completion(request, events), receipt.answer
    ends = [
        *list_changes("finish_reason", before.finish_reason, done.finish_reason),
        *list_text_changes("text", before.text, done.text),
        *list_text_changes("reasoning", before.reasoning, done.reasoning),
    ]
    return Replayed(tuple(changes), same, None, None, tuple(ends))


def make_request(llm: LLM, question: Question) -> tuple[Request, list[Change]]:
    """The request, and whether its text would be another prompt today."""
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
    at = first_difference(ids, request.prompt_ids)
    return request, [Change("prompt", count, f"{len(ids)} with others from {at} on")]


def compare_models(then: Model, now: Model) -> Iterator[Change]:
    """Files other than weights and config.json that have changed.

    Raises ModelNotFound where those have: nothing could be said of another model's answers.
    """
    before, after = ({file.path: file for file in model.files} for model in (then, now))
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old and new and old.matches(new):
            continue
        if any(file and file.affects_logits for file in (old, new)):
            how = "another" if old and new else "in one of them alone"
            raise ModelNotFound(
                f"{now.source} is not the model of the receipt: {path} is {how}",
                f"that was {then.source}; --model says where it lies now",
            )
        yield Change(path, *(file.label if file else "none" for file in (old, new)))


def compare_setups(then: Setup, now: Setup) -> Iterator[Change]:
    for field in fields(Setup):
        yield from list_changes(field.name, getattr(then, field.name), getattr(now, field.name))


def compare_kernels(then: Kernels, now: Kernels) -> Iterator[Change]:
    """Operations that another kernel ran than any of then: an answer that broke off may have needed fewer."""
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
        at = first_difference(then, now)
        yield Change(
            f"{what} from character {at} on", *(repr(text[at : at + SHOWN_CHARS]) for text in (then, now))
        )


def format_value(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else "none" if value is None else str(value)


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """The first position where one of them is other, or has ended."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def describe_token(llm: LLM, prefix_ids: list[int], token_id: int) -> Said:
    """A token after others, with its log probability: forced by a bias, which that is told without."""
    if token_id >= llm.config.vocab_size:
        return Said(token_id, "", None)
    forced = SamplingParams(temperature=0, max_tokens=1, logit_bias={token_id: MAX_LOGIT_BIAS}, logprobs=0)
    logprob = llm.generate(prefix_ids, forced).logprobs[0].logprob
    text = llm.tokenizer.decode([token_id], skip_special=False)
    return Said(token_id, text, logprob if math.isfinite(logprob) else None)
