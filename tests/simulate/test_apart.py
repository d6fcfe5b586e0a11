"""Whether processes for prompts pay is simulated; where they do not, a sentence with numbers says so."""

from dataclasses import replace

import pytest

from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.simulate.apart import IDLE_RATE, compare_apart
from localllm.simulate.fleet import Link
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.target import Target, roofline_target
from tests.plan.published import LLAMA_1B, LLAMA_8B, header_of


def load(target: Target, prompt: int, answer: int) -> LoadPlan:
    return LoadPlan(
        rate=IDLE_RATE, prompt=Lengths(prompt, 0.8), output=Lengths(answer, 0.6), max_len=target.setup.capacity
    )


def test_a_cpu_is_not_divided() -> None:
    cpu = replace(find_device("h100"), name="CPU", device_type="cpu", bandwidth=20e9, flops=2e11)
    target = roofline_target(header_of(LLAMA_1B), cpu, LoadOptions(4096), name="llama-1b")
    comparison = compare_apart(target, load(target, 512, 128), 1, requests=60)
    assert not comparison.pays and comparison.together > 0 == comparison.apart
    sentence = comparison.sentence()
    assert "on the CPU, one engine would serve 0." in sentence and "with --prefill 1 none (simulated" in sentence


def test_machines_do_not_share_their_cores() -> None:
    cpu = replace(find_device("h100"), name="CPU", device_type="cpu", bandwidth=20e9, flops=2e11)
    target = roofline_target(header_of(LLAMA_1B), cpu, LoadOptions(4096), name="llama-1b")
    slow, fast = (
        compare_apart(target, load(target, 512, 128), 1, link=Link(rate), on_machines=True, requests=30)
        for rate in (1e6, 1.25e9)
    )
    assert not slow.pays and fast.apart > slow.apart
    assert fast.together > compare_apart(target, load(target, 512, 128), 1, requests=30).together
    assert "2 engines on a machine each" in (sentence := slow.sentence())
    assert "with a worker for prompts and a link of 1.00 MB/s none" in sentence


@pytest.mark.slow
def test_long_prompts_pay_on_gpus_with_a_fast_link() -> None:
    target = roofline_target(header_of(LLAMA_8B), find_device("h100"), LoadOptions(), name="llama-8b")
    assert target.link
    comparison = compare_apart(target, load(target, 4000, 200), 1, link=target.link, requests=80)
    assert comparison.pays and "2 engines with a GPU each" in comparison.sentence()
    assert not compare_apart(target, load(target, 4000, 200), 1, link=Link(1e9), requests=80).pays
    several = compare_apart(target, load(target, 4000, 200), 1, 2, link=target.link, requests=80)
    assert several.together > comparison.together  # but the one engine for prompts is the limit:
    assert comparison.apart <= several.apart < 1.2 * comparison.apart
    assert (
        compare_apart(target, load(target, 4000, 200), 2, 1, link=target.link, requests=80).apart > several.apart
    )
    assert "3 engines with a GPU each" in (sentence := several.sentence()) and "--prefill 1 --decode 2" in sentence
