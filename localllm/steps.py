"""What the engine did for a request, and what its steps read, as JSON and back, without a loss: the part of an
answer that only those who watch it ask for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from localllm.inspection import Candidate, Reads, StepReport


def step_to_json(step: StepReport) -> dict[str, Any]:
    """Without what is as it mostly is."""
    fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    found: dict[str, Any] = {name: value for name, value in fields.items() if value}
    if step.candidates:
        found["candidates"] = [[candidate_to_json(each) for each in one] for one in step.candidates]
    return found


def step_from_json(found: Mapping[str, Any]) -> StepReport:
    times = {name: float(found.get(name, 0)) for name in ("began_s", "ended_s")}
    counted = ("tokens", "computed", "blocks", "found", "running", "waiting", "accepted", "place", "prompt")
    counts = {name: int(found.get(name, 0)) for name in counted}
    drafts = tuple(map(int, found.get("drafts", ())))
    candidates = tuple(tuple(map(candidate_from_json, one)) for one in found.get("candidates", ()))
    return StepReport(**times, **counts, drafts=drafts, candidates=candidates)


def reads_from_json(found: Mapping[str, Any]) -> Reads:
    """What `dataclasses.asdict` gives. Raises LookupError, TypeError or ValueError where it is none."""
    bandwidth = found["bandwidth"]
    return Reads(
        float(found["weights"]),
        float(found["per_token"]),
        float(found["kept_per_token"]),
        None if bandwidth is None else float(bandwidth),
        tuple((int(window), float(size)) for window, size in found["windows"]),
    )


def candidate_to_json(each: Candidate) -> list[Any]:
    return [each.token_id, each.logprob if math.isfinite(each.logprob) else None, each.chance, each.cut_by]


def candidate_from_json(found: Any) -> Candidate:
    token, logprob, chance, cut_by = found
    return Candidate(int(token), -math.inf if logprob is None else float(logprob), float(chance), str(cut_by))
