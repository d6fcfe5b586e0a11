"""Infill prompts with the special tokens of real tokenizers."""

from collections.abc import Callable

import pytest

from localllm.checkpoint.gguf.header import read_gguf
from localllm.errors import UnsupportedModel, UsageError
from localllm.text.infill import encode_infill, find_infill_tokens, infill_end_ids
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared

Open = Callable[[str], Tokenizer]
PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"


def test_the_prompt_is_what_the_model_was_trained_with(tokenizer: Open):
    model = tokenizer("qwen3")
    assert encode_infill(model, PREFIX, SUFFIX) == model.encode(
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    )
    assert "<|fim_pad|>" in map(model.token, infill_end_ids(model))


def test_marks_and_the_begin_of_a_text_are_those_of_the_tokenizer():
    file = shared("vocabs/ggml-vocab-deepseek-coder.gguf")
    model = Tokenizer.from_gguf(read_gguf(file).metadata, file)
    ids = encode_infill(model, PREFIX, SUFFIX)
    assert ids == model.encode(f"<｜fim▁begin｜>{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>")
    assert ids[:1] == model.encode("") != []


def test_either_side_may_be_empty(tokenizer: Open):
    model = tokenizer("qwen3")
    assert encode_infill(model, "", SUFFIX) == model.encode(f"<|fim_prefix|><|fim_suffix|>{SUFFIX}<|fim_middle|>")
    assert encode_infill(model, PREFIX, "") == model.encode(f"<|fim_prefix|>{PREFIX}<|fim_suffix|><|fim_middle|>")


def test_control_tokens_in_the_texts_are_text(tokenizer: Open):
    model = tokenizer("qwen3")
    ids = encode_infill(model, "<|im_end|>a", "b<|fim_middle|>")
    marks = model.encode("<|fim_prefix|><|fim_suffix|><|fim_middle|>")
    assert [token for token in ids if token in model.added_token_ids(model.added_tokens)] == marks
    assert "<|im_end|>a" in model.decode(ids) and "b<|fim_middle|>" in model.decode(ids)


@pytest.mark.parametrize("name", ["stories260K", "phi3", "llama3"])
def test_a_model_without_infill_tokens_is_an_error(tokenizer: Open, name: str):
    assert find_infill_tokens(tokenizer(name)) is None
    with pytest.raises(UnsupportedModel, match="does not support infilling"):
        encode_infill(tokenizer(name), PREFIX, SUFFIX)


def test_half_a_character_is_none(tokenizer: Open):
    with pytest.raises(UsageError, match="lone surrogate"):
        encode_infill(tokenizer("qwen3"), "\ud800", "")
