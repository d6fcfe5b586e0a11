"""A model loaded with a draft model: the same texts, and one memory plan for both."""

from dataclasses import replace

import pytest

import localllm
from localllm.checkpoint.header import read_header
from localllm.errors import DoesNotFit
from localllm.hub.resolve import resolve_model
from localllm.llm.find import DraftModelPlan
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit
from localllm.request import SamplingParams
from tests.shared import shared

PROMPT = "Once upon a time, there was a"


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}], ids=str)
def test_a_draft_model_leaves_greedy_and_seeded_texts(params: dict[str, float]) -> None:
    folder = str(shared("stories260K"))
    asked = SamplingParams(max_tokens=60, **params)  # pyright: ignore[reportArgumentType]
    with localllm.load(folder, draft="off", device="cpu") as alone:
        expected = alone.generate(PROMPT, asked)
    with localllm.load(folder, draft="off", draft_model=folder, device="cpu") as llm:
        got = llm.generate(PROMPT, asked)
        stopped = llm.generate(PROMPT, replace(asked, stop=("big",)))
        assert llm.memory.draft_bytes == llm.weight_bytes
        assert llm.memory.block_bytes == 2 * alone.memory.block_bytes
    assert got.text == expected.text
    assert stopped.text == expected.text.partition("big")[0]


def test_a_draft_model_that_does_not_fit_is_refused_with_numbers() -> None:
    header = read_header(shared("stories260K"))
    beside = DraftModelPlan.find(resolve_model(str(shared("stories260K"))), "cpu", LoadOptions())
    alone = check_fit(header, FreeMemory("cpu", 2**40), LoadOptions(), name="large")
    weights = alone.weights.total
    with pytest.raises(DoesNotFit, match=r"large and its draft model .* need 2") as refused:
        check_fit(header, FreeMemory("cpu", 2 * weights - 1), LoadOptions(), name="large", draft=beside.needs)
    assert refused.value.exit_code == 3
    both = check_fit(header, FreeMemory("cpu", 2**40), LoadOptions(), name="large", draft=beside.needs)
    assert both.memory and alone.memory
    assert both.memory.total == alone.memory.total + weights + alone.memory.cache_bytes
