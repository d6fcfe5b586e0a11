"""Logits are equal bit for bit alone, in a verified draft and in a batch; with `--deterministic` also for any
chunks, budget, cache and threads."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.quant.grid import Grid, quantize_rtn
from localllm.quant.tensor import QuantizedTensor
from localllm.quant.vectors import KV_DTYPES, KVDtype
from localllm.runtime.engine import Engine
from localllm.runtime.kernels.registry import KERNELS
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.layers.linear import Linear
from tests.models.families import FAMILIES
from tests.models.proofs import extend, token_ids
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

SOME = ("Llama 2", "Qwen3", "Gemma 2", "gpt-oss", "DeepSeek-V3", "Mixtral", "Qwen3.5", "LFM2")
TEXT = token_ids(70)
OWN = ("cpu-rows", "cpu-tokens", "cpu-numbers")


@pytest.fixture(scope="module", params=SOME)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes)
    return path


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def begun(engine: Engine, text: list[int]) -> SequenceState:
    """Compute a text in one step, and return its state."""
    state = SequenceState(engine.pool)
    extend(engine, [state], [text])
    return state


def one_by_one(engine: Engine, known: list[int], new: list[int]) -> Tensor:
    state = begun(engine, known)
    found = torch.cat([extend(engine, [state], [[token]]) for token in new])
    state.free()
    return found


def verified(engine: Engine, known: list[int], new: list[int]) -> Tensor:
    """Logits of all new tokens, computed in one step."""
    state = begun(engine, known)
    found = extend(engine, [state], [new])
    state.free()
    return found


def check_verification(engine: Engine) -> None:
    alone = one_by_one(engine, TEXT[:40], TEXT[40:56])
    for count in (2, 3, 5, 16):
        assert torch.equal(verified(engine, TEXT[:40], TEXT[40 : 40 + count]), alone[:count])


def check_neighbours(engine: Engine, most: int) -> None:
    """Compare sequences with one or several new tokens in a batch with each alone."""
    rng = random.Random(0)
    for counts in ([1] * most, [1, 4, 2, 1], [3] * (most // 3)):
        known = [token_ids(rng.randrange(1, 40), seed) for seed in range(len(counts))]
        new = [token_ids(count, 100 + seed) for seed, count in enumerate(counts)]
        alone = torch.cat([one_by_one(engine, text, tail) for text, tail in zip(known, new, strict=True)])
        states = [begun(engine, text) for text in known]
        assert torch.equal(extend(engine, states, new), alone)
        for state in states:
            state.free()


def small(folder: Path, dtype: torch.dtype, **others: Any) -> Engine:
    return make_engine(folder, dtype, blocks=200, rows=40, **others)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_tokens_have_the_logits_that_each_has_alone(folder: Path, dtype: torch.dtype) -> None:
    engine = small(folder, dtype)
    check_verification(engine)
    check_neighbours(engine, 16)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_also_over_a_quantized_cache(tmp_path: Path, kv_dtype: KVDtype) -> None:
    make_checkpoint(tmp_path, *FAMILIES["Gemma 2"][:1], **FAMILIES["Gemma 2"][1])
    engine = small(tmp_path, torch.float32, kv_dtype=kv_dtype)
    check_verification(engine)
    check_neighbours(engine, 16)


@pytest.mark.parametrize("bits", [4, 8])
def test_also_with_packed_weights(tmp_path: Path, bits: int) -> None:
    make_checkpoint(tmp_path, "Llama", hidden_size=96, intermediate_size=128)
    engine = small(tmp_path, torch.float32)
    pack(engine, bits)
    check_verification(engine)
    check_neighbours(engine, 16)


def pack(engine: Engine, bits: int) -> None:
    for layer in engine.runner.model.layers:
        mixer: Any = layer.mixer
        for owner, name in ((mixer, "qkv"), (layer.ffn, "gate_up"), (layer.ffn, "down")):
            [weight] = getattr(owner, name).weights
            made = Linear(quantize_rtn(weight, Grid(bits, 32, True, torch.float32)), dtype=torch.float32)
            assert isinstance(made.weights[0], QuantizedTensor)
            setattr(owner, name, made)


def test_without_the_compiled_kernels_they_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "Qwen3")
    for operation in ("plain_linear", "attention", "gated"):
        left = [kernel for kernel in KERNELS[operation] if kernel.name not in OWN]
        assert len(left) < len(KERNELS[operation])
        monkeypatch.setitem(KERNELS, operation, left)
    with pytest.raises(AssertionError):
        check_verification(small(tmp_path, torch.float32))


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_logits_are_those_of_any_chunks(folder: Path, dtype: torch.dtype) -> None:
    engine = small(folder, dtype, deterministic=True, block_size=16)
    expected = verified(engine, TEXT[:1], TEXT[1:])
    for chunk in (1, 7, 16):
        state = SequenceState(engine.pool)
        parts = [extend(engine, [state], [TEXT[i : i + chunk]]) for i in range(0, len(TEXT), chunk)]
        assert torch.equal(torch.cat(parts)[1:], expected)
        state.free()
    check_neighbours(engine, 24)


def test_deterministic_packed_weights_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", hidden_size=96, intermediate_size=128)
    engine = small(tmp_path, torch.float32, deterministic=True)
    pack(engine, 4)
    assert torch.equal(verified(engine, TEXT[:1], TEXT[1:]), one_by_one(engine, TEXT[:1], TEXT[1:]))


@pytest.mark.quick_every(2)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", ["Qwen3.5", "DeepSeek-V3"])
def test_two_threads_compute_what_one_does(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    engine = small(tmp_path, torch.float32, deterministic=True)
    two = verified(engine, TEXT[:30], TEXT[30:])
    torch.set_num_threads(1)
    assert torch.equal(verified(engine, TEXT[:30], TEXT[30:]), two)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("seed", range(2))
def test_any_mix_budget_and_cache_gives_the_same_tokens_and_log_probabilities(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    base = token_ids(24, seed)
    prompts = [base[: rng.randrange(24)] + token_ids(rng.randrange(1, 30), 50 + i) for i in range(4)]
    asked = {"temperature": 0.8, "max_tokens": 5, "logprobs": 2}

    def told(engine: Engine, texts: list[list[int]]) -> list[Any]:
        sequences = [sequence(text, seed, **asked) for text in texts]
        events = run(engine, sequences)
        return [(tokens(events[s.request.id]), [e.logprob for e in events[s.request.id]]) for s in sequences]

    roomy = make_engine(folder, deterministic=True)
    alone = [told(roomy, [text])[0] for text in prompts]
    engine = make_engine(
        folder,
        deterministic=True,
        blocks=rng.randrange(8, 40),
        rows=rng.randrange(2, 12),
        token_budget=rng.choice([1, 5, 16, 512]),
        max_running=rng.choice([1, 3, 16]),
    )
    assert told(engine, prompts) == alone
    assert told(engine, prompts[::-1]) == alone[::-1]  # now their beginnings are in the cache
