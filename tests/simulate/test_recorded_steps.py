"""Steps that a loaded model records, and predictions from them."""

from pathlib import Path

import pytest

import localllm
from localllm.plan import step_times
from localllm.request import SamplingParams
from localllm.runtime.step import StepShape
from localllm.simulate.cost import FittedCost


@pytest.fixture(scope="module")
def llm():
    with localllm.load("demo", draft="off") as loaded:
        yield loaded


def answer(llm, prompt_len: int, answer_len: int) -> None:
    """Answer a prompt that is in no cache."""
    params = SamplingParams(temperature=0, max_tokens=answer_len, ignore_eos=True)
    llm.generate([3 + (i + prompt_len) % 500 for i in range(prompt_len)], params)
    llm.worker.call(lambda: None)  # the last step has been recorded


def test_shapes(llm, tmp_path: Path) -> None:
    """A prompt of 30 tokens and an answer of 4: one step with the prompt, and three that decode behind it."""
    llm.worker.step_times.clear()
    answer(llm, 30, 4)
    shapes = [shape for shape, _ in llm.worker.step_times]
    assert shapes[0] == StepShape(0, 0, 0, 1, 30, 30, 30 * 31 // 2)
    assert shapes[1:] == [StepShape(1, 1, 30 + n, 0, 0, 0, 0) for n in (1, 2, 3)]
    assert all(seconds > 0 for _, seconds in llm.worker.step_times)
    llm.record_steps(tmp_path, pytest.fail)
    assert not llm.worker.step_times
    rows = step_times.read(tmp_path / "steps.jsonl", pytest.fail)[llm.step_setup]
    assert [StepShape(*map(int, row[:-1])) for row in rows] == shapes


def test_fit_of_recorded_steps(llm) -> None:
    """Longer prompts are predicted to take longer."""
    llm.worker.step_times.clear()
    for length in (20, 60, 120, 200, 300):
        answer(llm, length + 1, 12)
    cost = FittedCost(list(llm.worker.step_times), "of demo", deviations=False)
    short, long = (cost.seconds(StepShape(0, 0, 0, 1, n, n, n * (n + 1) // 2), 0) for n in (20, 300))
    assert short < long
