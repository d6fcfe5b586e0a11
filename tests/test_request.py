from typing import Any

import pytest

from localllm.errors import UsageError
from localllm.request import SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"repeat_last_n": -2},
        {"presence_penalty": float("inf")},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": -1},
        {"logprobs": 65},
        {"prompt_logprobs": -1},
        {"stop": "one string"},
        {"stop": ("",)},
        {"stop": (3,)},
        {"stop": None},
        {"stop_ids": 5},
        {"logit_bias": None},
        {"ignore_eos": 1},
        {"temperature": 1e-6},
        {"temperature": 1001},
        {"top_k": 10**400},
        {"max_tokens": 2**31},
        {"repetition_penalty": 1000},
        {"presence_penalty": 101},
        {"frequency_penalty": -101},
        {"logit_bias": {1: 1e30}},
        {"logit_bias": {1: True}},
        {"stop_ids": (-1,)},
        {"stop_ids": ("a",)},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {-1: 2.0}},
        {"logit_bias": {"a": 2.0}},
    ],
    ids=str,
)
def test_a_value_outside_its_range_is_named_with_the_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**wrong)
    assert next(iter(wrong)) in str(caught.value)
    assert caught.value.remedy


def test_values_at_the_borders_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1, seed=2**63 - 1, max_tokens=0, logprobs=0, repeat_last_n=0)
    assert SamplingParams(stop=["a"]).stop == ("a",)  # pyright: ignore[reportArgumentType]


def test_recommended_parameters() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 3, "do_sample": True}
    assert SamplingParams.from_generation_config(config) == SamplingParams(temperature=0.6, top_k=20)
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).temperature == 0
