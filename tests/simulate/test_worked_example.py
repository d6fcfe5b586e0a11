"""A worked example: users of Llama 70B whose contexts 8 x H100 hold, naively and quantized.

Naively, 16-bit weights of about 140 GB leave 500 of 640 GB; each user occupies a whole context of 8,000 tokens at
about 0.32 MB: 195 users. With INT4 weights, INT8 keys and values, and blocks for the 2,000 tokens that a user has
on average: about 1,781. The example rounds; the numbers here are exact, with the embedding in 16 bits and scales.
"""

from dataclasses import replace

import pytest

from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.simulation import Simulated, simulate
from localllm.simulate.target import roofline_target
from tests.plan.published import LLAMA_70B, header_of
from tools import disaggregation_docs

NODE_BYTES, CONTEXT = 640 * 10**9, 8000
PART = 8  # the run has an eighth of the node's cache, which takes an eighth of the time


def run(options: LoadOptions, load: LoadPlan, **changes: object) -> tuple[int, Simulated]:
    """Return the tokens that the node's memory holds beside the weights, and a run with an eighth of them."""
    h100 = find_device("h100")
    node = replace(h100, memory_bytes=NODE_BYTES, bandwidth=8 * h100.bandwidth, flops=8 * h100.flops)
    target = roofline_target(header_of(LLAMA_70B), node, options, name="llama-70b")
    needs = target.fit.needs
    blocks = (NODE_BYTES - needs.weights.total) // needs.block_bytes
    setup = replace(target.setup, blocks=blocks // PART, max_running=4096, **changes)
    return blocks * 16, simulate(load, setup, target.cost)


@pytest.mark.slow
def test_users_of_a_node() -> None:
    load = LoadPlan(rate=1e5, requests=600, prompt=Lengths(1500), output=Lengths(1000), max_len=CONTEXT)
    whole = LoadOptions(CONTEXT, 1, None, "auto", "auto")
    small = LoadOptions(CONTEXT, 1, "int4", "auto", "int8")
    tokens, naive = run(whole, load, batching="static", batch_size=4096)
    assert tokens // CONTEXT == 190 == pytest.approx(195, rel=0.03)
    assert naive.most_running == tokens // CONTEXT // PART
    tokens, paged = run(small, load)
    assert tokens // 2000 == 1807 == pytest.approx(1781, rel=0.02)
    # Each request is admitted if there are blocks for its whole answer, 2,500 tokens in all.
    assert paged.most_running * PART == pytest.approx(tokens / 2500, rel=0.02)
    # Without this reservation, as many run as have blocks now; some are preempted later.
    _, overcommitted = run(small, load, admission=False)
    assert overcommitted.most_running > 1.2 * paged.most_running and overcommitted.preemptions > 0
    speed = [each.output_tokens / each.duration_s for each in (naive, paged)]
    assert speed[1] > 4 * speed[0]


@pytest.mark.slow
def test_table_of_prompts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in docs/simulate.md is what the simulation computes."""
    monkeypatch.setattr("sys.argv", ["disaggregation_docs", "--check"])
    assert disaggregation_docs.main() == 0
