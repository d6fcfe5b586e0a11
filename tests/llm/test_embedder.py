"""Encoders give the embeddings of `transformers` in any batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import localllm
from localllm.checkpoint.facts import summarize_model
from localllm.errors import (
    ContextOverflow,
    DamagedModel,
    LocalLLMError,
    ModelNotFound,
    UnsupportedModel,
    UsageError,
)
from tests.llm.encoder_checkpoints import (
    CLS,
    FAMILIES,
    LAST,
    MEAN,
    VOCABULARY,
    make_encoder,
    sentence_transformer,
    write,
)

POOLINGS = {"mean": MEAN, "cls": CLS, "last": LAST}
TOLERANCE = 1e-5


def ids_of(length: int, seed: int) -> list[int]:
    return torch.randint(5, len(VOCABULARY), (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TEXTS = [ids_of(length, seed) for seed, length in enumerate([17, 1, 40, 17, 5, 40, 2, 60])]


@torch.inference_mode()
def theirs(model: Any, ids: list[int], pooling: str) -> np.ndarray:
    """Pool the hidden states of one text without padding, with transformers."""
    x = model(torch.tensor([ids])).last_hidden_state[0]
    return {"mean": x.mean(0), "cls": x[0], "last": x[-1]}[pooling].numpy()


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, family)
    for name, pooling in POOLINGS.items():
        sentence_transformer(tmp_path, pooling)
        with localllm.load_embedder(tmp_path) as embedder:
            got = embedder.embed(TEXTS)
        expected = unit(np.stack([theirs(model, ids, name) for ids in TEXTS]))
        assert np.abs(got.vectors - expected).max() < TOLERANCE
        assert np.abs(expected[0] - expected[2]).max() > 0.03  # a dead model would agree with anything
        assert got.tokens == tuple(map(len, TEXTS))


@pytest.mark.parametrize("family", ["BERT", "NomicBert", "EmbeddingGemma", "Qwen3"])
def test_embeddings_do_not_depend_on_the_batch(family: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, family)
    with localllm.load_embedder(tmp_path) as embedder:
        together = embedder.embed(TEXTS).vectors
        alone = np.concatenate([embedder.embed([ids]).vectors for ids in TEXTS])
        again = embedder.embed(list(reversed(TEXTS))).vectors[::-1]
    assert np.abs(together - alone).max() < 1e-6
    assert np.abs(together - again).max() < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted(family: str, tmp_path: Path) -> None:
    """Compares with `transformers`, without poolers that are not used."""
    model = make_encoder(tmp_path, family)
    counted = sum(weight.numel() for name, weight in model.named_parameters() if "pooler" not in name)
    assert summarize_model(tmp_path).parameters == counted


def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "EmbeddingGemma")
    dense = torch.nn.Linear(48, 100, bias=False), torch.nn.Linear(100, 32)
    sentence_transformer(tmp_path, MEAN, dense)
    with localllm.load_embedder(tmp_path) as embedder:
        got = embedder.embed(TEXTS).vectors
        assert embedder.dimension == 32
    pooled = torch.from_numpy(np.stack([theirs(model, ids, "mean") for ids in TEXTS]))
    with torch.inference_mode():
        expected = F.normalize(dense[1](dense[0](pooled)), dim=-1).numpy()
    assert np.abs(got - expected).max() < TOLERANCE


def test_texts_are_tokenized_with_special_tokens(tmp_path: Path) -> None:
    """Published tokenizers enable truncation and padding; neither applies unless requested."""
    make_encoder(tmp_path, "BERT")
    text = "The cats sat on the red mat, running slowly under the blue sky."
    with localllm.load_embedder(tmp_path) as embedder:
        ids = embedder.tokenizer.encode(text)
        got, same = embedder.embed(text), embedder.embed([ids])
    assert len(ids) > 16 and [VOCABULARY[ids[0]], VOCABULARY[ids[-1]]] == ["[CLS]", "[SEP]"]
    assert got.tokens == (len(ids),)
    assert np.array_equal(got.vectors, same.vectors)


def test_too_long_texts_are_refused_or_truncated_with_a_note(tmp_path: Path) -> None:
    make_encoder(tmp_path, "BERT")
    sentence_transformer(tmp_path, MEAN, longest=20)
    long = "the cat sat on the mat " * 5
    with localllm.load_embedder(tmp_path) as embedder:
        assert embedder.context == 20  # what it was trained for, though it has positions for 64
        with pytest.raises(ContextOverflow):
            embedder.embed(["a cat", long])
        cut = embedder.embed(["a cat", long], truncate=True)
        ids = embedder.tokenizer.encode(long)
        kept = embedder.embed([[*ids[:19], ids[-1]]])
    assert cut.tokens == (4, 20)
    assert cut.left_out == (0, len(ids) - 20)
    assert np.abs(cut.vectors[1] - kept.vectors[0]).max() < 1e-6
    with localllm.load_embedder(tmp_path, context=64) as embedder:
        assert embedder.embed([long]).left_out == (0,)


def test_fewer_dimensions_are_the_first_of_length_one(tmp_path: Path) -> None:
    make_encoder(tmp_path, "NomicBert")
    with localllm.load_embedder(tmp_path) as embedder:
        whole, short = embedder.embed(TEXTS).vectors, embedder.embed(TEXTS, dimensions=7).vectors
        for wrong in (0, -1, 49, True):
            with pytest.raises(UsageError, match="dimensions"):
                embedder.embed(TEXTS, dimensions=wrong)
    assert short.shape == (len(TEXTS), 7) and short.dtype == np.float32
    assert np.abs(short - unit(whole[:, :7])).max() < 1e-6


def test_prompts_of_the_model_go_before_texts(tmp_path: Path) -> None:
    make_encoder(tmp_path, "NomicBert")
    prompts = {"prompts": {"query": "the cat ", "document": ""}, "default_prompt_name": "query"}
    sentence_transformer(tmp_path, MEAN, settings=prompts)
    with localllm.load_embedder(tmp_path) as embedder:
        usual, named = embedder.embed("dog"), embedder.embed("dog", prompt="document")
        assert np.array_equal(usual.vectors, embedder.embed("the cat dog", prompt="document").vectors)
        assert usual.tokens == (5,) and named.tokens == (3,)
        with pytest.raises(UsageError, match=r"no prompt 'passage'; it has query, document"):
            embedder.embed("dog", prompt="passage")


@pytest.mark.parametrize("nothing", ["", "  \n", [], [""], [[]], ["a cat", ""]])
def test_empty_input_is_rejected(nothing: Any, bert: localllm.Embedder) -> None:
    with pytest.raises(UsageError):
        bert.embed(nothing)


@pytest.mark.parametrize(
    "strange", [[len(VOCABULARY)], [[-1]], [[1.5]], [b"cat"], [["a", "b"]], [True], [None], [{}]]
)
def test_invalid_input_is_rejected(strange: Any, bert: localllm.Embedder) -> None:
    with pytest.raises(UsageError):
        bert.embed(strange)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bert")
    make_encoder(folder, "BERT")
    with localllm.load_embedder(folder) as embedder:
        yield embedder


def test_a_list_of_ids_is_one_text(bert: localllm.Embedder) -> None:
    assert np.array_equal(bert.embed(TEXTS[0]).vectors, bert.embed([TEXTS[0]]).vectors)
    assert np.array_equal(bert.embed(np.array(TEXTS[0])).vectors, bert.embed([TEXTS[0]]).vectors)


def test_an_encoder_does_not_chat_and_a_decoder_is_no_encoder(bert: localllm.Embedder) -> None:
    with pytest.raises(UnsupportedModel, match="does not support chat"):
        localllm.load(bert.path)
    with pytest.raises(UnsupportedModel, match="is not an embedding model"):
        localllm.load_embedder("demo")


def test_a_closed_embedder_raises_an_error(tmp_path: Path) -> None:
    make_encoder(tmp_path, "BERT")
    embedder = localllm.load_embedder(tmp_path)
    embedder.close()
    embedder.close()
    with pytest.raises(LocalLLMError, match="closed"):
        embedder.embed("cat")


@pytest.mark.parametrize(
    ("modules", "error"),
    [
        ({"0": "Transformer"}, DamagedModel),
        ([], DamagedModel),
        ([{"type": "x.Transformer"}], DamagedModel),
        ([{"type": "x.Transformer", "path": "0_Transformer"}], UnsupportedModel),
        ([{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "../1"}], DamagedModel),
        ([{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "/etc"}], DamagedModel),
        ([{"type": "x.Transformer", "path": ""}, {"type": "x.WordWeights", "path": "1_W"}], UnsupportedModel),
        ([{"type": "x.Transformer", "path": ""}], UnsupportedModel),
    ],
)
def test_invalid_modules_are_refused(modules: Any, error: type[LocalLLMError], tmp_path: Path) -> None:
    make_encoder(tmp_path, "BERT")
    write(tmp_path / "modules.json", modules)
    with pytest.raises(error):
        localllm.load_embedder(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "error"),
    [
        ({"pooling_mode_max_tokens": True}, UnsupportedModel),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, UnsupportedModel),
        ({}, UnsupportedModel),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, UnsupportedModel),
        ({"pooling_mode_mean_tokens": "yes"}, DamagedModel),
    ],
)
def test_poolings_that_do_not_run_are_refused(pooling: Any, error: type[LocalLLMError], tmp_path: Path) -> None:
    make_encoder(tmp_path, "BERT")
    sentence_transformer(tmp_path, pooling)
    with pytest.raises(error):
        localllm.load_embedder(tmp_path)


def test_a_dense_layer_that_is_missing_or_of_another_size_is_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path, "BERT")
    sentence_transformer(tmp_path, MEAN, (torch.nn.Linear(48, 32),))
    write(tmp_path / "2_Dense" / "config.json", {"in_features": 48, "out_features": 64})
    with pytest.raises(DamagedModel, match="shape"):
        localllm.load_embedder(tmp_path)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="2_Dense/model"):
        localllm.load_embedder(tmp_path)
