from unicodedata import category

import pytest

from localllm.checkpoint.gguf.header import read_gguf
from localllm.text.pretokenizers import PRE_TOKENIZERS
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.text.vocabularies import digest, random_texts

# The ids of llama-cpp-python 0.3.36 for 400 texts in GPT-2's vocabulary, each cut by these pre-tokenizers.
EXPECTED = {
    "0a82de12e53697b0": "bloom gpt3-finnish poro-chat",
    "1efd922dac0852ec": "codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder",
    "32c7cc4f0d08ba08": "default",
    "343a8d52a0a81fa8": "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
    "4027e3f2f43cb198": "viking",
    "44cd746c04fc895f": "chatglm-bpe dbrx falcon-h1 falcon3 glm4 glm5 lfm2 llama-bpe llama-v3 llama3 midm-2.0"
    " minicpm5 pixtral smaug-bpe",
    "6af21faaf187e89e": "kimi-k2",
    "7c3bfbd34714eff2": "gpt-4o kanana2 llama4 minimax-m2",
    "8193832753421883": "exaone-moe",
    "939fa8bf6c512cac": "falcon",
    "96f744dd7e114b4d": "deepseek-coder",
    "996f5ed522ac0f9f": "bailingmoe bailingmoe2 deepseek-r1-qwen grok-2 hunyuan kormo laguna llada-moe megrez"
    " qwen2 qwen35 seed-coder solar-open stablelm2",
    "b33564fa106a291f": "tekken",
    "d4e0d0dffc558a08": "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais mellum mpt olmo phi-2 trillion",
    "ebe87616d79a28e6": "deepseek-llm",
    "ec9cef86dbc6b091": "youtu",
}


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("expected", EXPECTED)
def test_words_are_cut_as_llama_cpp_cuts_them(expected: str):
    """Without wide spaces, and without combining marks, which are not letters for llama.cpp in `tekken` and
    `gpt-4o`.
    """
    texts = [
        text
        for text in random_texts(20261121, 2000)
        if not any(category(letter).startswith("M") or letter in "\u2003\u3000" for letter in text)
    ]
    file = shared("vocabs/ggml-vocab-gpt-2.gguf")
    metadata = read_gguf(file).metadata
    names = {PRE_TOKENIZERS[name].patterns: name for name in EXPECTED[expected].split()}
    for name in names.values():
        tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": name}, file)
        assert digest([tokenizer.encode(text, special=False) for text in texts[:400]]) == expected, name


def test_every_name_is_among_them():
    assert sorted(" ".join(EXPECTED.values()).split()) == sorted(PRE_TOKENIZERS)
