"""Lists of lengths become scenarios within the limits of a model."""

import pytest

from localllm.benchmark.scenario import Scenario, ScenarioGrid, parse_numbers, required_context, unrunnable_reason
from localllm.errors import UsageError
from localllm.plan.memory import BLOCK_SIZE, CACHED_CONTEXTS, MIN_RUNNING, RUNNING_TOKENS


def test_each_length_is_measured_with_each_depth_and_batch() -> None:
    found = ScenarioGrid((128, 512), (0, 2048), (1, 4), (64,)).scenarios(8192)
    assert found == [
        Scenario(prompt, depth, batch, 64) for prompt in (128, 512) for depth in (0, 2048) for batch in (1, 4)
    ]


def test_duplicates_are_measured_once() -> None:
    assert ScenarioGrid((5, 5), (0,), (1, 1), (2,)).scenarios(100) == [Scenario(5, 0, 1, 2)]


@pytest.mark.parametrize("context", [2, 3, 7, 64, 512, 600, 4096])
@pytest.mark.parametrize("depths", [(0,), (0, 40), (100_000,)])
def test_the_usual_lengths_fit_every_model(context: int, depths: tuple[int, ...]) -> None:
    found = ScenarioGrid(depths=depths).scenarios(context)
    within = [scenario for scenario in found if scenario.depth < context - 1]
    assert all(unrunnable_reason(scenario, context, 1) is None for scenario in within)
    assert len(within) == sum(depth < context - 1 for depth in depths)


def test_requested_lengths_are_not_shortened() -> None:
    [found] = ScenarioGrid((600,), outputs=(10,)).scenarios(512)
    assert (found.prompt, found.output) == (600, 10)
    assert unrunnable_reason(found, 512, 64) == "610 tokens per stream, but the model supports 512"
    assert unrunnable_reason(Scenario(1, 0, 64, 1), 512, 64) is None
    assert unrunnable_reason(Scenario(1, 0, 65, 1), 512, 64) == "the engine runs at most 64 streams at once"


def test_too_many_scenarios_are_refused() -> None:
    with pytest.raises(UsageError, match="give 1250 scenarios"):
        ScenarioGrid(tuple(range(1, 1251))).scenarios(10_000)


@pytest.mark.parametrize("asked", ["128, 512", "128,512"])
def test_numbers_are_read_from_a_list(asked: str) -> None:
    assert parse_numbers(asked, "--prompt") == (128, 512)


@pytest.mark.parametrize("asked", ["", "1,", "x", "1.5", "-3", "0", "²", "9" * 12])
def test_an_invalid_number_is_named(asked: str) -> None:
    with pytest.raises(UsageError, match="--batch contains"):
        parse_numbers(asked, "--batch")


def test_an_empty_list_stays_empty_and_depth_may_be_0() -> None:
    assert parse_numbers(None, "--prompt") is None
    assert parse_numbers("0,16", "--depth", 0) == (0, 16)


@pytest.mark.parametrize("batch", [1, 8, 9, 32, 64])
def test_the_cache_of_the_context_holds_all_streams(batch: int) -> None:
    scenarios = [Scenario(100, 40, batch, 17), Scenario(300, 0, 1, 1)]
    context = required_context(scenarios, 8192)
    blocks = CACHED_CONTEXTS * -(-context // BLOCK_SIZE)
    assert all(scenario.tokens <= context and scenario.blocks <= blocks for scenario in scenarios)
    assert batch <= MIN_RUNNING or blocks * BLOCK_SIZE >= batch * RUNNING_TOKENS
    assert required_context(scenarios, 310) <= 310  # what the model knows
