"""Models on several devices: memory, rates and the time of exchanges."""

from dataclasses import replace
from typing import Any

import pytest

from localllm.arch.describe import parse_config
from localllm.errors import UnsupportedModel, UsageError
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.plan.parallel import JoinedRates, Link, Parallel, default_link, parse_link, predict_divided_speed
from localllm.runtime.step import StepShape
from localllm.simulate.target import Target, roofline_target
from tests.plan.published import LLAMA_70B, MIXTRAL, header_of

H100 = find_device("h100")
LINK = Link(450e9, 1e-5)
DECODE = StepShape(8, 8, 8000, 0, 0, 0, 0)


def target(
    tensor: int,
    pipeline: int = 1,
    link: Link = LINK,
    *,
    whole_experts: bool = False,
    model: dict[str, Any] = LLAMA_70B,
) -> Target:
    parallel = Parallel(tensor, pipeline, link, whole_experts=whole_experts)
    options = LoadOptions(None, 1, None, "auto", "auto")
    return roofline_target(header_of(model), H100, options, name="model", parallel=parallel)


def test_tensor_parallel() -> None:
    """Twice as many devices halve the time to read, and exchanges take what the link says."""
    config = parse_config(header_of(LLAMA_70B).config)
    instant = Link(1e30)
    four, eight = (target(ranks, link=instant).cost.seconds(DECODE, 0) for ranks in (4, 8))
    overhead = 5e-6 * 80
    assert (four - overhead) / (eight - overhead) == pytest.approx(2, rel=1e-6)
    exchanged = target(8).cost.seconds(DECODE, 0) - eight
    activations = 8 * config.hidden_size * 2
    all_reduce = 1e-5 + 2 * 7 / 8 * activations / 450e9
    logits = 1e-5 + 7 / 8 * 8 * config.vocab_size * 2 / 450e9
    assert exchanged == pytest.approx(160 * all_reduce + logits, rel=1e-6)


def test_pipeline_parallel_adds_memory_and_no_speed() -> None:
    one, two = target(4), target(4, 2)
    assert two.setup.blocks > 2 * one.setup.blocks
    passed = 1e-5 + 8 * 8192 * 2 / 450e9
    added = two.cost.seconds(DECODE, 0) - one.cost.seconds(DECODE, 0)
    assert added == pytest.approx(2 * passed, rel=1e-6)  # to the second stage and back to the first, with the head
    assert two.devices == 8 and two.device == "8 x H100 SXM"


@pytest.mark.parametrize("users", [1, 3, 8])
def test_whole_experts_take_as_long_as_in_a_plan(users: int) -> None:
    """A step waits for the device that has most of the experts that its tokens select."""
    of_columns, of_experts = (target(4, whole_experts=whole, model=MIXTRAL) for whole in (False, True))
    fit = of_experts.fit
    speed = predict_divided_speed(
        parse_config(header_of(MIXTRAL).config),
        replace(fit.needs, weights=fit.weights),
        Parallel(4, 1, LINK, whole_experts=True),
        JoinedRates(0.7 * H100.bandwidth, 0.55 * H100.flops),
        context=1000,
        prompt=1,
        users=users,
        step_s=5e-6 * 32,
    )
    cost, shape = of_experts.cost, StepShape(users, users, 1000 * users, 0, 0, 0, 0)
    seconds = cost.seconds(shape, 0)
    assert users / seconds == pytest.approx(speed.all_tokens_per_s, rel=1e-3)
    columns = of_columns.cost
    assert seconds > 1.1 * columns.seconds(shape, 0)
    assert cost.totals() == columns.totals()  # waiting reads nothing


@pytest.mark.parametrize(
    ("tensor", "model", "message"), [(4, LLAMA_70B, "no experts"), (3, MIXTRAL, "8 experts")], ids=str
)
def test_experts_that_cannot_be_divided(tensor: int, model: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        target(tensor, whole_experts=True, model=model)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"), [(3, 1, "does not divide"), (16, 1, "does not"), (1, 81, "80 layers")]
)
def test_models_that_cannot_be_divided(tensor: int, pipeline: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        target(tensor, pipeline)


def test_links() -> None:
    assert default_link(H100).bandwidth == 450e9  # half of 900 GB/s in both directions
    assert default_link(find_device("l4")).bandwidth == 32e9
    assert parse_link("50GB/s,5us") == Link(50e9, 5e-6)
    assert parse_link("64MB/s").bandwidth == 64e6
    for text in ("", "50", "0GB/s", "50GB/s,5", "fast"):
        with pytest.raises(UsageError, match="--link"):
            parse_link(text)
