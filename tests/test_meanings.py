from dataclasses import fields

from localllm.meanings import MEANINGS
from localllm.request import SamplingParams


def test_every_parameter_of_a_conversation_has_a_meaning():
    of_one_answer = {"logprobs", "prompt_logprobs", "grammar"}
    assert MEANINGS.keys() == {field.name for field in fields(SamplingParams)} - of_one_answer
