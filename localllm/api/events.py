"""Events, metrics and errors of an answer as JSON and back without loss, between localllm's server and client.

Default values are left out. Null stands for a time that was not measured, and for a log probability of -inf, as
JSON has neither NaN nor infinity.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from localllm import errors
from localllm.errors import LocalLLMError
from localllm.metrics import Candidate, Metrics, StepReads, StepReport
from localllm.request import EventType, FinishReason, GenerationEvent, TokenLogprob, ToolCall

JsonObject = dict[str, Any]
TokenText = Callable[[int], str]
SERVER_NAME = "localllm"  # `server` in answers, which identifies a localllm server


def event_to_json(event: GenerationEvent, token_text: TokenText) -> JsonObject:
    """token_text: text of a token, for those that log probabilities and steps name."""
    fields: JsonObject = {}
    for name in ("text", "seed", "drafted", "accepted", "stop_string"):
        if value := getattr(event, name):
            fields[name] = value
    if event.seed is not None:
        fields["seed"] = event.seed
    if event.token_ids:
        fields["token_ids"] = event.token_ids
    if event.kind is not EventType.CONTENT:
        fields["kind"] = event.kind
    if event.finish_reason:
        fields["finish_reason"] = event.finish_reason
    if event.metrics:
        fields["metrics"] = metrics_to_json(event.metrics)
    if event.tool_call:
        fields["tool_call"] = dataclasses.asdict(event.tool_call)
    for name in ("logprobs", "prompt_logprobs"):
        if entries := getattr(event, name):
            fields[name] = [_logprob_to_json(entry) for entry in entries]
    named = {token for entry in (*event.logprobs, *event.prompt_logprobs) for token in _tokens_of(entry)}
    if event.step:
        fields["step"] = step_to_json(event.step)
        named |= {each.token_id for candidates in event.step.candidates for each in candidates}
        named |= {*event.step.drafts}
    if named:
        fields["texts"] = {str(token): token_text(token) for token in named}
    return fields


def event_from_json(fields: Mapping[str, Any]) -> tuple[GenerationEvent, dict[int, str]]:
    """The event, and the texts of the tokens that it names. Raises LookupError, TypeError, ValueError or
    AttributeError for malformed fields."""
    reason, metrics, call = fields.get("finish_reason"), fields.get("metrics"), fields.get("tool_call")
    step = fields.get("step")
    event = GenerationEvent(
        0,
        str(fields.get("text", "")),
        tuple(map(int, fields.get("token_ids", ()))),
        tuple(map(_logprob_from_json, fields.get("logprobs", ()))),
        tuple(map(_logprob_from_json, fields.get("prompt_logprobs", ()))),
        None if reason is None else FinishReason(reason),
        None if metrics is None else metrics_from_json(metrics),
        fields.get("seed"),
        EventType(fields.get("kind", EventType.CONTENT)),
        None if call is None else ToolCall(**call),
        int(fields.get("drafted", 0)),
        bool(fields.get("accepted", False)),
        fields.get("stop_string"),
        None if step is None else step_from_json(step),
    )
    return event, {int(token): str(text) for token, text in fields.get("texts", {}).items()}


def step_to_json(step: StepReport) -> JsonObject:
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    fields: JsonObject = {name: value for name, value in values.items() if value}
    if step.candidates:
        fields["candidates"] = [list(map(candidate_to_json, candidates)) for candidates in step.candidates]
    return fields


def step_from_json(fields: Mapping[str, Any]) -> StepReport:
    times = {name: float(fields.get(name, 0)) for name in ("began_s", "ended_s")}
    names = ("tokens", "computed", "blocks", "found", "running", "waiting", "accepted", "place", "prompt")
    counts = {name: int(fields.get(name, 0)) for name in names}
    drafts = tuple(map(int, fields.get("drafts", ())))
    candidates = tuple(tuple(map(candidate_from_json, each)) for each in fields.get("candidates", ()))
    return StepReport(**times, **counts, drafts=drafts, candidates=candidates)


def step_reads_from_json(fields: Mapping[str, Any]) -> StepReads:
    """The inverse of `dataclasses.asdict`. Raises LookupError, TypeError or ValueError for malformed fields."""
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


def metrics_to_json(metrics: Metrics) -> JsonObject:
    fields = dataclasses.asdict(metrics)
    return {name: _number_to_json(value) for name, value in fields.items()}


def metrics_from_json(fields: Mapping[str, Any]) -> Metrics:
    times = {name: math.nan if value is None else value for name, value in fields.items()}
    return Metrics(**{**times, "itl_s": tuple(fields["itl_s"])})


def error_to_json(error: LocalLLMError) -> JsonObject:
    """`{"error": {...}}` with the name of the nearest class in `errors`, which determines the exit code."""
    names = (cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return {"error": {"kind": next(names), "message": error.message, "remedy": error.remedy}}


def error_from_json(body: Any) -> LocalLLMError:
    """The error with its class, or as LocalLLMError if this version does not have the class."""
    fields = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(fields, Mapping) or not isinstance(fields.get("message"), str):
        return LocalLLMError("the server's answer is in an unknown format", "update the older version of localllm")
    cls = getattr(errors, str(fields.get("kind")), None)
    if not (isinstance(cls, type) and issubclass(cls, LocalLLMError)):
        cls = LocalLLMError
    error = cls.__new__(cls)  # without `__init__`, whose arguments differ between classes
    LocalLLMError.__init__(error, fields["message"], fields.get("remedy"))
    return error


def _number_to_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tokens_of(entry: TokenLogprob) -> tuple[int, ...]:
    return (entry.token_id, *(token for token, _ in entry.top))


def _logprob_to_json(entry: TokenLogprob) -> list[Any]:
    top = [[token, _number_to_json(value)] for token, value in entry.top]
    return [entry.token_id, _number_to_json(entry.logprob), top]


def _logprob_from_json(fields: Any) -> TokenLogprob:
    token, value, top = fields
    pairs = tuple((int(other), _logprob(logprob)) for other, logprob in top)
    return TokenLogprob(int(token), _logprob(value), pairs)


def _logprob(value: Any) -> float:
    return -math.inf if value is None else float(value)
