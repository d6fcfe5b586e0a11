"""Models on several devices: memory, rates and the time of exchanges."""

import pytest

from localllm.arch.describe import parse_config
from localllm.errors import UsageError
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.plan.parallel import Link, Parallel, default_link, parse_link
from localllm.runtime.step import StepShape
from localllm.simulate.target import Target, roofline_target
from tests.plan.published import LLAMA_70B, header_of

H100 = find_device("h100")
LINK = Link(450e9, 1e-5)
DECODE = StepShape(8, 8, 8000, 0, 0, 0, 0)


def target(tensor: int, pipeline: int = 1, link: Link = LINK) -> Target:
    parallel = Parallel(tensor, pipeline, link)
    return roofline_target(
        header_of(LLAMA_70B), H100, LoadOptions(None, 1, None, "auto", "auto"), name="70b", parallel=parallel
    )


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
