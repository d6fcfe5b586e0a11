"""A short run of `bench/soak.py`, with a check of the engine afterwards."""

import asyncio

import psutil
import pytest

from bench.soak import soak
from localllm import LLM

STREAMS, SECONDS = 24, 6


@pytest.mark.slow
def test_many_streams_at_once_are_right_and_leave_nothing_behind(stories: LLM, stories_url: str) -> None:
    found = asyncio.run(soak(stories_url, stories.name, STREAMS, SECONDS, psutil.Process()))
    assert found["wrong_texts"] == 0, found["first_wrong"]
    assert not [kind for kind in found["requests"] if kind.startswith("failed")], found["requests"]
    assert all(found["requests"][kind] > 5 for kind in ("whole", "left", "senseless")), "too little was asked"
    engine = stories.worker.engine
    stories.worker.call(engine.pool.check_all_free)
    assert not stories.worker.outputs and not engine.has_unfinished_requests
    assert len(engine.free_token_slots) == engine.scheduler.max_running
