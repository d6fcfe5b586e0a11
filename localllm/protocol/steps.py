"""What the engine did for a request, and what its steps read, as JSON and back, without a loss: the part of an
answer that only those who watch it ask for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from localllm.inspection import Candidate, StepReads, StepReport


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
