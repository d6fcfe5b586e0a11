"""Any decoder computes embeddings, also while it answers."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import localllm
from localllm import LLM, SamplingParams
from localllm.arch.pooling import POOLING_TYPES, Pooling
from localllm.errors import ContextOverflow, DoesNotFit, LocalLLMError, UsageError
from localllm.llm.decoder_embeddings import embed_in_chunks
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks
from localllm.runtime.pooling import Pooler
from tests.models.families import FAMILIES
from tests.models.proofs import logits_of_transformers, token_ids
from tests.shared import shared
from tests.tiny import make_checkpoint, make_engine

TEXTS = [token_ids(length, seed) for seed, length in enumerate([17, 1, 70, 17, 5, 2])]
# Whose rope depends on the length of a text in transformers, and on the longest that was planned for here.
BY_LENGTH = ("Phi-4-mini", "Phi-4-mini, beyond its original context")


@torch.inference_mode()
def vectors(engine: Engine, texts: list[list[int]], pool: Pooler) -> Tensor:
    *pieces, last = embed_in_chunks(engine, texts, pool)
    assert all(piece is None for piece in pieces) and last is not None
    assert len(pieces) == -(-sum(map(len, texts)) // engine.scheduler.token_budget) - 1
    engine.pool.check_all_free()
    return last


@torch.inference_mode()
def last_layer(model: Any, ids: list[int]) -> Tensor:
    """Input of the head [T, hidden], computed as for logits."""
    heard: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: heard.append(given[0][0]))
    logits_of_transformers(model, ids)
    hook.remove()
    return torch.cat(heard)


@pytest.mark.quick_every(12)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - BY_LENGTH))
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[family]
    model = make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path, token_budget=32)  # so that texts come in pieces, and several in one
    layers = [last_layer(model, ids) for ids in TEXTS]
    for name, pick in {"last": lambda x: x[-1], "mean": lambda x: x.mean(0), "cls": lambda x: x[0]}.items():
        expected = F.normalize(torch.stack([pick(x) for x in layers]), dim=-1)
        assert (vectors(engine, TEXTS, Pooler(Pooling(POOLING_TYPES[name]))) - expected).abs().max() < 1e-5


def test_a_text_that_does_not_fit_leaks_no_blocks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    engine = make_engine(tmp_path, blocks=8, token_budget=32)
    with pytest.raises(OutOfBlocks):
        vectors(engine, [token_ids(70)], Pooler(Pooling("last")))
    engine.pool.check_all_free()


@pytest.fixture(scope="module")
def stories() -> Any:
    with localllm.load(shared("stories260K")) as llm:
        yield llm


def test_texts_become_vectors_of_length_one(stories: LLM) -> None:
    found = stories.embed(["Once upon a time", "Lily went to the park", "Once upon a time"])
    assert found.vectors.shape == (3, 64) and found.vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(found.vectors, axis=1), 1, atol=1e-6)
    assert np.abs(found.vectors[0] - found.vectors[2]).max() < 1e-6
    once, lily = (len(stories.tokenizer.encode(text)) for text in ("Once upon a time", "Lily went to the park"))
    assert found.tokens == (once, lily, once)
    mean = stories.embed("Once upon a time", pooling="mean", dimensions=10).vectors
    assert mean.shape == (1, 10) and abs(np.linalg.norm(mean) - 1) < 1e-6


def test_invalid_options_are_rejected(stories: LLM) -> None:
    with pytest.raises(ContextOverflow):
        stories.embed([[5] * 600])
    assert stories.embed([[5] * 600], truncate=True).left_out == (600 - stories.context,)
    for wrong in ({"dimensions": 65}, {"prompt": "query"}, {"pooling": "max"}):
        with pytest.raises(UsageError):
            stories.embed("a", **wrong)
    for inputs in ("", [], [[]], [[512]]):
        with pytest.raises(UsageError):
            stories.embed(inputs)


@pytest.mark.slow
def test_answers_go_on_and_are_the_same_while_texts_are_embedded(stories: LLM) -> None:
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    expected = stories.generate("Once upon a time", params).token_ids
    alone = stories.embed([[7] * 500, [8] * 3]).vectors
    ended, seen = threading.Event(), list[np.ndarray]()

    def embed() -> None:
        while not ended.is_set():
            seen.append(stories.embed([[7] * 500, [8] * 3]).vectors)

    thread = threading.Thread(target=embed)
    thread.start()
    try:
        answers = [stories.generate("Once upon a time", params).token_ids for _ in range(3)]
    finally:
        ended.set()
        thread.join()
    assert answers == [expected] * 3
    assert len(seen) > 1
    assert max(np.abs(found - alone).max() for found in seen) < 1e-6
    stories.worker.call(stories.worker.engine.pool.check_invariants)


def test_a_closed_model_raises_an_error() -> None:
    llm = localllm.load(shared("stories260K"))
    llm.close()
    with pytest.raises(LocalLLMError, match="closed"):
        llm.embed("a")


def test_texts_are_refused_while_others_fill_the_cache(stories: LLM) -> None:
    pool = stories.worker.engine.pool
    taken = [stories.worker.call(pool.allocate) for _ in range(pool.free_count)]
    with pytest.raises(DoesNotFit, match="full of other sequences"):
        stories.embed("Once")
    for block in taken:
        stories.worker.call(lambda block=block: pool.release(block))
    assert stories.embed("Once").vectors.shape == (1, 64)
