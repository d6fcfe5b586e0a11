"""Frames of a run: few enough, complete, and without influence on it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localllm.simulate.frames import MAX_FRAMES, Frames
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.report import format_time
from localllm.simulate.simulation import EngineSetup, Simulated, simulate
from tests.simulate.engines import LinearCost

SETUP = EngineSetup(300, 16, 512, 32, 1024, asynchronous=True)
LOADS = {
    "open": LoadPlan(rate=20.0, requests=200, prompt=Lengths(60, 0.8), output=Lengths(40, 0.9), max_len=1000),
    "overloaded": LoadPlan(rate=400.0, requests=300, prompt=Lengths(60), output=Lengths(40, 0.9), max_len=1000),
    "users": LoadPlan(users=9, think_s=2.0, turns=3, requests=150, prompt=Lengths(40), output=Lengths(20, 0.5)),
}


def watch(load: LoadPlan, setup: EngineSetup = SETUP) -> tuple[Simulated, list[dict[str, Any]]]:
    frames: list[dict[str, Any]] = []
    observer = Frames(load.requests, {"ttft": 0.05}, frames.append)
    return simulate(load, setup, LinearCost(jitter=True), observer=observer), frames


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_frames_do_not_change_a_run(name: str, drafts: int) -> None:
    setup = replace(SETUP, drafts=drafts, acceptance=0.6)
    watched, _ = watch(LOADS[name], setup)
    alone = simulate(LOADS[name], setup, LinearCost(jitter=True))
    assert replace(watched, timeline=alone.timeline, gaps=alone.gaps, wall_s=0) == replace(alone, wall_s=0)
    assert watched.percentiles("itl") == alone.percentiles("itl")


@pytest.mark.parametrize("name", LOADS)
def test_frames_tell_every_request(name: str) -> None:
    """The last row of each request has the times that the run recorded; its first comes when it has arrived."""
    simulated, frames = watch(LOADS[name])
    rows: dict[int, Any] = {}
    for frame in frames:
        for row in frame["requests"]:
            times = [time for time in row[1:5] if time is not None]
            assert times == sorted(times) and times[-1] <= frame["t"]
            rows[row[0]] = row
    records = simulated.records
    times = (records.arrival, records.scheduled, records.first, records.last)
    recorded = zip(*times, records.prompt, records.cached, records.output, strict=True)
    assert sorted(tuple(row[1:]) for row in rows.values()) == sorted(recorded)


@pytest.mark.parametrize("name", LOADS)
def test_number_of_frames(name: str) -> None:
    simulated, frames = watch(LOADS[name])
    assert MAX_FRAMES / 3 < len(frames) < 3 * MAX_FRAMES
    longest = float(np.diff([frame["t"] for frame in frames]).max())
    assert longest < simulated.duration_s / 5  # in which the last request decodes alone


@pytest.mark.parametrize("name", LOADS)
def test_last_frame_is_the_report(name: str) -> None:
    simulated, frames = watch(LOADS[name])
    last = frames[-1]
    assert last["done"] == simulated.requests and last["waiting"] == last["decode"] == last["prefill"] == 0
    assert last["output_tokens_per_s"] == pytest.approx(simulated.output_tokens / simulated.duration_s)
    assert last["goodput"] == pytest.approx(simulated.met({"ttft": 0.05}) / simulated.duration_s)
    for measure in ("queue", "ttft", "tpot", "e2e"):
        assert last[measure] == [format_time(value) for value in simulated.percentiles(measure)]
    assert last["used_blocks"] == 0
    assert max(frame["used_blocks"] for frame in frames) > 5


def test_cached_blocks() -> None:
    """Blocks of earlier turns are kept, and do not count as used."""
    _, frames = watch(LOADS["users"])
    assert frames[-1]["cached_blocks"] > 10
    assert all(frame["used_blocks"] + frame["cached_blocks"] <= SETUP.blocks for frame in frames)


def test_a_second_run_voids_the_frames_of_the_first() -> None:
    """Without common prefixes, blocks are only counted until a request is preempted and finds its own again."""
    load = LoadPlan(rate=200.0, requests=60, prompt=Lengths(40), output=Lengths(200), max_len=1000)
    setup = replace(SETUP, blocks=60, admission=False)
    simulated, frames = watch(load, setup)
    assert simulated.preemptions
    [begin] = [index for index, frame in enumerate(frames) if "restart" in frame]
    assert begin > 0 and "t" in frames[begin + 1]
    assert frames[begin + 1]["t"] <= frames[begin - 1]["t"]


def test_an_observer_ends_a_run() -> None:
    def refuse(frame: dict[str, Any]) -> None:
        if frame["done"] > 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        simulate(LOADS["open"], SETUP, LinearCost(), observer=Frames(200, {}, refuse))
