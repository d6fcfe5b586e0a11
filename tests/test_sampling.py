import dataclasses
import json
from dataclasses import dataclass, fields

import pytest

from localllm import sampling
from localllm.request import SamplingParams
from localllm.sampling import PARAMETER_HELP, params_from_json, params_to_json

EVERY = SamplingParams(
    temperature=0.1,
    top_k=3,
    stop=("a", "b"),
    stop_ids=(3,),
    logit_bias={5: float("-inf"), 7: 1.5},
    seed=4,
    max_tokens=9,
    min_tokens=2,
    ignore_eos=True,
    logprobs=0,
)


@pytest.mark.parametrize("given", [SamplingParams(), EVERY], ids=["defaults", "others"])
def test_parameters_come_back_from_json(given: SamplingParams) -> None:
    written = json.dumps(params_to_json(given), allow_nan=False)
    assert params_from_json(json.loads(written)) == given


def test_a_field_that_came_with_a_later_version_has_its_default() -> None:
    written = params_to_json(EVERY)
    del written["top_k"]
    assert params_from_json(written) == dataclasses.replace(EVERY, top_k=0)


def test_nested_fields_are_serialized(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Shape:
        kind: str

    @dataclass(frozen=True)
    class Later(SamplingParams):
        shape: Shape | None = None

    Later.__annotations__["shape"] = Shape | None
    monkeypatch.setattr(sampling, "SamplingParams", Later)
    monkeypatch.setattr(sampling, "_NESTED", sampling._nested_dataclasses())
    for given in (Later(shape=Shape("a")), Later()):
        assert params_from_json(json.loads(json.dumps(params_to_json(given)))) == given


def test_every_parameter_of_a_conversation_has_a_meaning():
    of_one_answer = {"logprobs", "prompt_logprobs", "grammar"}
    assert PARAMETER_HELP.keys() == {field.name for field in fields(SamplingParams)} - of_one_answer
