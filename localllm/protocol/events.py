"""An answer on its way from a server of localllm to its own client: pieces, measurements and errors as JSON and
back, without a loss. Other programs are better served by the APIs that others have made usual.

JSON has no NaN and no infinity: null stands for a time that was not measured and for the log probability of what
cannot be.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from localllm import errors
from localllm.errors import LocalLLMError
from localllm.metrics import Candidate, Metrics, StepReads, StepReport
from localllm.request import EventType, FinishReason, GenerationEvent, TokenLogprob, ToolCall


# What the engine did for a request, and what its steps read, as JSON and back, without a loss: the part of an
# answer that only those who watch it ask for.
def step_to_json(step: StepReport) -> dict[str, Any]:
    """Without what is as it mostly is."""
    fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    found: dict[str, Any] = {name: value for name, value in fields.items() if value}
    if step.candidates:
        found["candidates"] = [[candidate_to_json(each) for each in one] for one in step.candidates]
    return found


def step_from_json(fields: Mapping[str, Any]) -> StepReport:
    times = {name: float(fields.get(name, 0)) for name in ("began_s", "ended_s")}
    counted = ("tokens", "computed", "blocks", "found", "running", "waiting", "accepted", "place", "prompt")
    counts = {name: int(fields.get(name, 0)) for name in counted}
    drafts = tuple(map(int, fields.get("drafts", ())))
    candidates = tuple(tuple(map(candidate_from_json, one)) for one in fields.get("candidates", ()))
    return StepReport(**times, **counts, drafts=drafts, candidates=candidates)


def step_reads_from_json(fields: Mapping[str, Any]) -> StepReads:
    """What `dataclasses.asdict` gives. Raises LookupError, TypeError or ValueError where it is none."""
    bandwidth = fields["bandwidth"]
    return StepReads(
        float(fields["weights"]),
        float(fields["per_token"]),
        float(fields["kept_per_token"]),
        None if bandwidth is None else float(bandwidth),
        tuple((int(window), float(size)) for window, size in fields["windows"]),
    )


def candidate_to_json(candidate: Candidate) -> list[Any]:
    return [
        candidate.token_id,
        candidate.logprob if math.isfinite(candidate.logprob) else None,
        candidate.chance,
        candidate.cut_by,
    ]


def candidate_from_json(fields: Any) -> Candidate:
    token, logprob, chance, cut_by = fields
    return Candidate(int(token), -math.inf if logprob is None else float(logprob), float(chance), str(cut_by))


JsonObject = dict[str, Any]
TokenText = Callable[[int], str]
SERVER_NAME = "localllm"  # by which a server says what it is


def event_to_json(event: GenerationEvent, token_text: TokenText) -> JsonObject:
    """Without what is as it mostly is. token_text: of a token that a log probability names."""
    found: JsonObject = {}
    for name in ("text", "seed", "drafted", "accepted", "stop_string"):
        if value := getattr(event, name):
            found[name] = value
    if event.seed is not None:
        found["seed"] = event.seed
    if event.token_ids:
        found["token_ids"] = event.token_ids
    if event.kind is not EventType.CONTENT:
        found["kind"] = event.kind
    if event.finish_reason:
        found["finish_reason"] = event.finish_reason
    if event.metrics:
        found["metrics"] = metrics_to_json(event.metrics)
    if event.tool_call:
        found["tool_call"] = dataclasses.asdict(event.tool_call)
    for name in ("logprobs", "prompt_logprobs"):
        if entries := getattr(event, name):
            found[name] = [_logprob_to_json(entry) for entry in entries]
    named = {token for e in (*event.logprobs, *event.prompt_logprobs) for token in _tokens_of(e)}
    if event.step:
        pass  # only those who ask for steps wait for it

        found["step"] = step_to_json(event.step)
        named |= {each.token_id for one in event.step.candidates for each in one} | {*event.step.drafts}
    if named:
        found["texts"] = {str(token): token_text(token) for token in named}
    return found


def event_from_json(fields: Mapping[str, Any]) -> tuple[GenerationEvent, dict[int, str]]:
    """The piece, and the texts of the tokens that it names. Raises LookupError, TypeError, ValueError or
    AttributeError where it is none."""
    reason, measured, call = fields.get("finish_reason"), fields.get("metrics"), fields.get("tool_call")
    step = fields.get("step")
    if step is not None:
        pass  # as above

        step = step_from_json(step)
    event = GenerationEvent(
        0,
        str(fields.get("text", "")),
        tuple(map(int, fields.get("token_ids", ()))),
        tuple(map(_logprob_from_json, fields.get("logprobs", ()))),
        tuple(map(_logprob_from_json, fields.get("prompt_logprobs", ()))),
        None if reason is None else FinishReason(reason),
        None if measured is None else metrics_from_json(measured),
        fields.get("seed"),
        EventType(fields.get("kind", EventType.CONTENT)),
        None if call is None else ToolCall(**call),
        int(fields.get("drafted", 0)),
        bool(fields.get("accepted", False)),
        fields.get("stop_string"),
        step,
    )
    return event, {int(token): str(text) for token, text in fields.get("texts", {}).items()}


def metrics_to_json(metrics: Metrics) -> JsonObject:
    fields = dataclasses.asdict(metrics)
    return {name: _number_to_json(value) for name, value in fields.items()}


def metrics_from_json(fields: Mapping[str, Any]) -> Metrics:
    times = {name: math.nan if value is None else value for name, value in fields.items()}
    return Metrics(**{**times, "itl_s": tuple(fields["itl_s"])})


def error_to_json(error: LocalLLMError) -> JsonObject:
    """`{"error": {...}}`, with the name of its class, which says the exit code."""
    names = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return {"error": {"kind": next(names), "message": error.message, "remedy": error.remedy}}


def error_from_json(body: Any) -> LocalLLMError:
    """The same error as far as this version knows it; a fault of the server where it is none."""
    said = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(said.get("message"), str):
        return LocalLLMError(
            "the server answers in a way that this localllm does not know", "update the older one"
        )
    kind = getattr(errors, str(said.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, LocalLLMError)):
        kind = LocalLLMError
    error = kind.__new__(kind)  # some are made of other words than these two
    LocalLLMError.__init__(error, said["message"], said.get("remedy"))
    return error


def _number_to_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tokens_of(entry: TokenLogprob) -> tuple[int, ...]:
    return (entry.token_id, *(token for token, _ in entry.top))


def _logprob_to_json(entry: TokenLogprob) -> list[Any]:
    top = [[token, _number_to_json(value)] for token, value in entry.top]
    return [entry.token_id, _number_to_json(entry.logprob), top]


def _logprob_from_json(found: Any) -> TokenLogprob:
    token, value, top = found
    pairs = tuple((int(other), _logprob(logprob)) for other, logprob in top)
    return TokenLogprob(int(token), _logprob(value), pairs)


def _logprob(value: Any) -> float:
    return -math.inf if value is None else float(value)
