"""GGUF editions of encoders give the embeddings of their safetensors editions, and of llama.cpp if installed."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import localllm
from localllm.errors import DamagedModel, LocalLLMError, UnsupportedModel
from tests.gguf_writer import write_gguf
from tests.llm.encoder_checkpoints import CLS, LAST, MEAN, VOCABULARY, make_encoder, sentence_transformer
from tests.llm.encoder_gguf import linear, tokenizer_keys, write_encoder
from tests.llm.test_embedder import TEXTS
from tests.tiny import make_checkpoint

POOLINGS = {"mean": MEAN, "cls": CLS, "last": LAST}
AWKWARD = [
    "The cats sat on the RED mat.",
    "cat,dog! under",
    "un able unable cats running",
    "中文 cat中dog",
    "é éclair the",
    "[CLS] the [SEP] [MASK]",
    "ﬁ ½ \u200b the\u00a0cat\ttab\nline",
    "supercalifragilistic " * 3,
    "🙂 the",
]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", ["BERT", "NomicBert", "EmbeddingGemma"])
def test_vectors_are_those_of_safetensors(family: str, pooling: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, family)
    dense = (linear(48, 100), linear(100, 32)) if family == "EmbeddingGemma" else ()
    sentence_transformer(tmp_path, POOLINGS[pooling], dense)
    write_encoder(tmp_path, tmp_path / "model.gguf", pooling)
    with localllm.load_embedder(tmp_path) as one, localllm.load_embedder(tmp_path / "model.gguf") as other:
        assert np.abs(one.embed(TEXTS).vectors - other.embed(TEXTS).vectors).max() < 1e-6
        assert one.dimension == other.dimension == (32 if dense else 48)


def test_word_pieces_are_those_of_the_published_tokenizer(tmp_path: Path) -> None:
    make_encoder(tmp_path, "BERT")
    write_encoder(tmp_path, tmp_path / "model.gguf", "mean")
    with localllm.load_embedder(tmp_path) as one, localllm.load_embedder(tmp_path / "model.gguf") as other:
        for text in AWKWARD:
            assert one.tokenizer.encode(text) == other.tokenizer.encode(text)


def test_a_decoder_whose_file_names_a_pooling_is_an_embedder(tmp_path: Path) -> None:
    """Covers the format of Qwen3-Embedding: a decoder's architecture with last-token pooling."""
    make_checkpoint(tmp_path, "Qwen3", vocab_size=len(VOCABULARY))
    write_gguf(tmp_path, tmp_path / "chat.gguf", changed=tokenizer_keys())
    write_gguf(tmp_path, tmp_path / "last.gguf", changed=tokenizer_keys() | {"qwen3.pooling_type": 3})
    with localllm.load(tmp_path / "chat.gguf") as llm, localllm.load_embedder(tmp_path / "last.gguf") as embedder:
        assert np.abs(llm.embed(TEXTS).vectors - embedder.embed(TEXTS).vectors).max() < 1e-5
        assert embedder.memory.cache_bytes == 0


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"bert.pooling_type": 4}, UnsupportedModel),
        ({"bert.attention.layer_norm_epsilon": None}, DamagedModel),
        ({"tokenizer.ggml.unknown_token_id": None}, DamagedModel),
        ({"tokenizer.ggml.seperator_token_id": 10**6}, DamagedModel),
    ],
)
def test_invalid_files_are_refused(changed: Any, error: type[LocalLLMError], tmp_path: Path) -> None:
    make_encoder(tmp_path, "BERT")
    write_encoder(tmp_path, tmp_path / "model.gguf", "mean", changed)
    with pytest.raises(error):
        localllm.load_embedder(tmp_path / "model.gguf")


@pytest.mark.parametrize("family", ["BERT, tanh GELU", "NomicBert", "EmbeddingGemma"])
def test_vectors_and_word_pieces_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    """llama.cpp approximates GELU, and rounds intermediate values."""
    llama_cpp = pytest.importorskip("llama_cpp")
    make_encoder(tmp_path, family)
    sentence_transformer(tmp_path, MEAN)
    write_encoder(tmp_path, tmp_path / "model.gguf", "mean")
    texts = [text for text in AWKWARD if "[CLS]" not in text]  # which it reads as text there
    with localllm.load_embedder(tmp_path) as embedder:
        expected = embedder.embed(texts).vectors
        ids = [embedder.tokenizer.encode(text) for text in texts]
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), embedding=True, n_ctx=64, n_threads=1, verbose=False)
    assert [theirs.tokenize(text.encode()) for text in texts] == ids
    assert np.abs(np.array([theirs.embed(text, normalize=True) for text in texts]) - expected).max() < 1e-3


@pytest.mark.parametrize("family", ["BERT", "NomicBert"])
def test_a_file_of_blocks_stays_packed_and_close(family: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, family, hidden_size=96, intermediate_size=128)
    write_encoder(tmp_path, tmp_path / "whole.gguf", "mean")
    write_encoder(tmp_path, tmp_path / "packed.gguf", "mean", kind=gguf.GGMLQuantizationType.Q8_0)
    with (
        localllm.load_embedder(tmp_path / "whole.gguf", dtype="float32") as one,
        localllm.load_embedder(tmp_path / "packed.gguf", dtype="float32") as other,
    ):
        assert other.weight_bytes < 0.5 * one.weight_bytes
        assert (one.embed(TEXTS).vectors * other.embed(TEXTS).vectors).sum(1).min() > 0.99
