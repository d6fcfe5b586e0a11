"""The cost of a step is learned from steps that a busy machine disturbs."""

import random

import pytest

from localllm.runtime.speculation.step_cost import StepCost


def guess(rows: int) -> float:
    return 1 + 0.27 * (rows - 1)


def test_without_measurements_the_estimate_holds() -> None:
    assert StepCost(guess).cost_table(1, 3) == pytest.approx([1, 1.27, 1.54, 1.81])
    assert StepCost(guess).cost_table(4, 1) == pytest.approx([1, 1 + 0.27 / 1.81])


def test_a_few_steps_of_a_kind_count_in_spite_of_noise() -> None:
    price, rng = StepCost(guess), random.Random(0)
    for _ in range(40):
        for drafts, seconds in {0: 0.010, 1: 0.011, 3: 0.0125}.items():
            disturbed = seconds * (5 if rng.random() < 0.2 else rng.uniform(0.98, 1.05))
            price.record_step(1, drafts, disturbed)
    table = price.cost_table(1, 6)
    assert table[1] == pytest.approx(1.1, abs=0.06)
    assert table[3] == pytest.approx(1.25, abs=0.06)
    # Between and beyond what was measured it goes on, and beyond the guess comes back.
    assert table[1] <= table[2] <= table[3] < table[6] < guess(7)


def test_one_step_proves_nothing() -> None:
    price = StepCost(guess)
    price.record_step(1, 0, 0.01)
    price.record_step(1, 1, 1.0)
    assert price.cost_table(1, 1) == pytest.approx([1, 1.27])


def test_old_measurements_are_forgotten() -> None:
    price = StepCost(guess)
    for _ in range(15):
        price.record_step(1, 0, 0.01)
        price.record_step(1, 1, 0.05)
    assert price.cost_table(1, 1)[1] == pytest.approx(5)
    for _ in range(600):
        price.record_step(1, 0, 0.01)
    assert price.cost_table(1, 1)[1] == pytest.approx(1.27)


def test_more_drafts_never_cost_less() -> None:
    price, rng = StepCost(guess), random.Random(1)
    for _ in range(300):
        price.record_step(2, rng.randrange(8), rng.uniform(0.5, 2))
    table = price.cost_table(2, 20)
    assert table == sorted(table) and table[0] == 1
