import pytest

from localllm.text.folder import find_turn_end_tokens
from tests.text.output.turns import templates

TEMPLATES = templates()
TOKENS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>",
    "<start_of_turn>", "<end_of_turn>", "<turn|>", "<|turn>", "<|tool_response>", "<|start|>", "<|end|>",
    "<|return|>", "<|call|>", "<|user|>", "<|assistant|>", "<|observation|>", "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("Qwen-Qwen3-0.6B", {"<|im_end|>"}),
        ("meta-llama-Llama-3.1-8B-Instruct", {"<|eot_id|>", "<|eom_id|>"}),
        ("google-gemma-2-2b-it", {"<end_of_turn>"}),
        ("google-gemma-4-31B-it", {"<turn|>", "<|tool_response>"}),
        ("openai-gpt-oss-120b", {"<|return|>", "<|call|>"}),
        ("microsoft-Phi-3.5-mini-instruct", {"<|end|>", "<|user|>"}),
        ("GLM-4.7-Flash", {"<|user|>", "<|observation|>"}),
        ("deepseek-ai-DeepSeek-V3.1", {"<｜end▁of▁sentence｜>"}),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", {"<|END_OF_TURN_TOKEN|>"}),
    ],
)
def test_the_ends_of_a_turn_are_those_that_the_template_writes(name: str, ends: set[str]):
    if name not in TEMPLATES:
        pytest.skip("no real templates beside this checkout")
    assert find_turn_end_tokens([TEMPLATES[name]], TOKENS) == ends


def test_a_token_that_the_tokenizer_does_not_have_ends_nothing():
    assert find_turn_end_tokens(["<|im_end|><|eot_id|>"], ["<|eot_id|>"]) == {"<|eot_id|>"}
    assert find_turn_end_tokens([], ["<|eot_id|>"]) == set()
