"""The delta rule and the convolution under Triton's interpreter against their formulas, token by token: results
and every state."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localllm.arch.config import DeltaNetConfig
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.delta_net import MAX_STEP_TOKENS
from localllm.runtime.kernels.registry import KERNELS
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import RecurrentCache
from tests.runtime.kernels.harness import check_on_gpu
from tests.tiny import CPU

pytestmark = pytest.mark.usefixtures("interpreter")
ROWS = 12
SINGLE = [[(1, 1)], [(9, 1), (1, 1), (70, 1)]]
SPANS = [[(5, 4), (4, 4)], [(90, 70)], [(7, 1), (64, 64), (5, 3), (MAX_STEP_TOKENS + 1, MAX_STEP_TOKENS + 1)]]


def step(spans: list[tuple[int, int]], saved: bool) -> Batch:
    """Batch with one sequence per span (context length, new tokens), each saved twice in its span if `saved`."""
    pool = BlockPool(60, 8, ROWS)
    states = [SequenceState(pool) for _ in spans]
    for state in reversed(states):
        state.extend(1)  # rows in another order
    for state, (context, count) in zip(states, spans, strict=True):
        state.extend(context - 1)
        if saved and count > 2:
            state.plan_save(context - count // 2)
            state.plan_save(context - count + 1)
    return Batch.from_states(states, [[0] * count for _, count in spans], [], CPU)


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16()


def delta_arguments(spans: list[tuple[int, int]], saved: bool, fading: float, config: DeltaNetConfig):
    batch, tokens = step(spans, saved), sum(count for _, count in spans)
    keys, width = config.key_heads, config.key_dim
    qk = torch.nn.functional.normalize(numbers(tokens, 2 * keys, width).float(), dim=-1)
    v = numbers(tokens, config.value_heads, config.value_dim)
    decay = -fading * numbers(tokens, config.value_heads).double().square()
    beta = numbers(tokens, config.value_heads, 1)[..., 0].double().sigmoid()
    matrix = numbers(ROWS, *config.state_shape)

    def make(d: torch.dtype):
        exact = d if d == torch.float64 else torch.float32
        cache = RecurrentCache(ROWS, config, d, CPU)
        cache.matrix = matrix.to(exact)
        q, k = qk.to(exact).chunk(2, 1)
        return q, k, v.to(d), decay.to(exact), beta.to(exact), cache, batch

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", SINGLE, ids=str)
def test_single_tokens(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    config = DeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=40, kernel_size=4)
    make = delta_arguments(spans, False, 1.0, config)
    assert check_on_gpu("delta_net", make, dtype) == ["triton-chunks", "torch-chunks"]
    compare_rows(make)


@pytest.mark.parametrize(("saved", "fading"), [(False, 0.01), (True, 30.0)])
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_spans(spans: list[tuple[int, int]], fading: float, saved: bool) -> None:
    config = DeltaNetConfig(key_heads=1, value_heads=1, key_dim=24, value_dim=12, kernel_size=4)
    make = delta_arguments(spans, saved, fading, config)
    assert check_on_gpu("delta_net", make, torch.bfloat16) == ["triton-chunks", "torch-chunks"]
    compare_rows(make)


def compare_rows(make) -> None:
    kept = []
    for kernel in (KERNELS["delta_net"][0], KERNELS["delta_net"][-1]):
        arguments = make(torch.float32)
        kernel.run(*arguments)
        kept.append(arguments[5].matrix)
    torch.testing.assert_close(kept[0], kept[1], atol=2e-5, rtol=2e-5)


def test_repeated_keys_lose_no_digits() -> None:
    """The system is ill-conditioned if all keys are equal and nothing decays."""
    config = DeltaNetConfig(key_heads=1, value_heads=1, key_dim=16, value_dim=16, kernel_size=4)
    make = delta_arguments([(64, 64)], False, 0.0, config)

    def alike(d: torch.dtype):
        q, k, v, decay, beta, cache, batch = make(d)
        return q, k[:1].expand_as(k), v, decay, torch.ones_like(beta), cache, batch

    assert "triton-chunks" in check_on_gpu("delta_net", alike, torch.bfloat16)
    compare_rows(alike)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    config = DeltaNetConfig(key_heads=1, value_heads=2, key_dim=16, value_dim=16, kernel_size=4)
    make = delta_arguments([(7, 1), (40, 40), (3, 3)], False, 0.1, config)
    q, k, v, decay, beta, cache, batch = make(torch.float32)
    together = KERNELS["delta_net"][0].run(q, k, v, decay, beta, cache, batch)
    _, _, _, _, _, cache, _ = make(torch.float32)
    for t in (0, 41, 42, 43):
        row = batch.state_slots[:1] if t == 0 else batch.state_slots[2:]
        start = torch.tensor([0, 1], dtype=torch.int32)
        alone = replace(batch, query_start=start, state_slots=row, max_query_len=1, uniform_query_len=1, spans=())
        each = (x[t : t + 1] for x in (q, k, v, decay, beta))
        assert torch.equal(KERNELS["delta_net"][0].run(*each, cache, alone)[0], together[t])


@pytest.mark.parametrize(("kernel", "silu"), [(1, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("spans", [SINGLE[1], SPANS[0], [(9, 1), (40, 39)]], ids=str)
def test_convolution(spans: list[tuple[int, int]], saved: bool, kernel: int, silu: bool) -> None:
    config = DeltaNetConfig(1, 1, 100, 60, kernel)  # 260 channels: more than a program has
    batch, tokens = step(spans, saved), sum(count for _, count in spans)
    held = torch.full((tokens, config.channels + 5), torch.nan)
    held[:, 2:-3] = numbers(tokens, config.channels)
    taps, kept, got = numbers(kernel, config.channels).float(), [], []
    for each in KERNELS["causal_conv"]:
        cache = RecurrentCache(ROWS, config, torch.float32, CPU)
        cache.conv = numbers(ROWS, kernel - 1, config.channels).float()
        got.append(each.run(held[:, 2:-3], taps, cache, batch, silu))
        kept.append(cache.conv)
    torch.testing.assert_close(*got, atol=2e-6, rtol=2e-6)
    assert torch.equal(*kept)


def test_token_by_token_equals_the_full_scan() -> None:
    config = DeltaNetConfig(1, 1, 8, 8, 4)
    x, taps = numbers(9, config.channels), numbers(4, config.channels).float()
    whole = RecurrentCache(ROWS, config, torch.bfloat16, CPU)
    whole.conv.zero_()
    together = KERNELS["causal_conv"][0].run(x, taps, whole, step([(9, 9)], False), True)
    single = RecurrentCache(ROWS, config, torch.bfloat16, CPU)
    single.conv.zero_()
    for t in range(9):
        y = KERNELS["causal_conv"][0].run(x[t : t + 1], taps, single, step([(t + 1, 1)], False), True)
        assert torch.equal(y[0], together[t])
    assert torch.equal(whole.conv, single.conv)
