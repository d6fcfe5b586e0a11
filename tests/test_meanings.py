from dataclasses import fields

from localllm.request import SamplingParams
from localllm.sampling import PARAMETER_HELP


def test_every_parameter_of_a_conversation_has_a_meaning():
    of_one_answer = {"logprobs", "prompt_logprobs", "grammar"}
    assert PARAMETER_HELP.keys() == {field.name for field in fields(SamplingParams)} - of_one_answer
