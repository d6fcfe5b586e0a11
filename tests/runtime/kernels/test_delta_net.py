"""The delta rule against its formula token by token, and the convolution against torch's, over long and short
spans that save states and continue from earlier ones."""

import pytest
import torch

from localllm.arch.config import DeltaNetConfig
from localllm.runtime.batch import Batch
from localllm.runtime.kernels import causal_conv
from localllm.runtime.kernels.registry import KERNELS
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import RecurrentCache
from tests.runtime.kernels.harness import COMPILED, check
from tests.tiny import CPU

ROWS = 12
SPANS = [[(1, 1)], [(90, 1)], [(64, 64)], [(130, 130)], [(150, 83)], [(7, 1), (1, 1), (70, 68), (5, 1), (3, 3)]]


def step(spans: list[tuple[int, int]], saved: bool) -> Batch:
    """Batch with one sequence per span (context length, new tokens), each saved at two lengths inside its span if
    `saved`, twice at the first.
    """
    pool = BlockPool(60, 8, ROWS)
    states = [SequenceState(pool) for _ in spans]
    for state, (context, count) in zip(states, spans, strict=True):
        state.extend(context)
        if saved and count > 2:
            state.plan_save(context - count // 2)
            state.plan_save(context - count // 2)
            state.plan_save(context - count + 1)
    return Batch.from_states(states, [[0] * count for _, count in spans], [], CPU)


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16()


@pytest.mark.quick_every(37)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(("fading", "shares"), [(0.01, 1), (1.0, 3), (30.0, 3)])
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_delta_net(
    spans: list[tuple[int, int]], fading: float, shares: int, saved: bool, dtype: torch.dtype
) -> None:
    config = DeltaNetConfig(key_heads=2, value_heads=2 * shares, key_dim=8, value_dim=12, kernel_size=4)
    batch, tokens = step(spans, saved), sum(count for _, count in spans)
    q, k = (torch.nn.functional.normalize(numbers(tokens, 2, 8 + i).float()[..., :8], dim=-1) for i in range(2))
    v = numbers(tokens, 2 * shares, 12)
    decay = -fading * numbers(tokens, 2 * shares).double().square()
    beta = numbers(tokens, 2 * shares, 1)[..., 0].double().sigmoid()
    matrix = numbers(ROWS, *config.state_shape)

    def make(d: torch.dtype) -> tuple[torch.Tensor | RecurrentCache | Batch, ...]:
        exact = d if d == torch.float64 else torch.float32
        cache = RecurrentCache(ROWS, config, d, CPU)
        cache.matrix = matrix.to(exact)
        return q.to(exact), k.to(exact), v.to(d), decay.to(exact), beta.to(exact), cache, batch

    assert check("delta_net", make, dtype) == ["cpu-tokens"] * COMPILED + ["torch-chunks"]
    kept = []
    for kernel in KERNELS["delta_net"]:
        arguments = make(torch.float32)
        kernel.run(*arguments)
        kept.append(arguments[5].matrix)  # pyright: ignore[reportAttributeAccessIssue]
    for matrix in kept[:-1]:
        torch.testing.assert_close(matrix, kept[-1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_causal_conv(spans: list[tuple[int, int]], saved: bool, kernel: int) -> None:
    config = DeltaNetConfig(1, 1, 3, 5, kernel)
    batch, tokens = step(spans, saved), sum(count for _, count in spans)
    x, taps = numbers(tokens, config.channels).float(), numbers(kernel, config.channels).float()
    cache = RecurrentCache(ROWS, config, torch.float32, CPU)
    cache.conv = before = numbers(ROWS, kernel - 1, config.channels).float()
    expected, kept = torch.empty_like(x), before.clone()
    for span in batch.spans:
        mine = slice(span.start, span.start + span.count)
        inputs = torch.cat((before[span.state_slot], x[mine]))
        expected[mine] = torch.conv1d(inputs.T, taps.T[:, None], groups=config.channels).T
        for piece, row in span.split_at_saves():
            end = piece.stop - span.start
            kept[row] = inputs[end : end + kernel - 1]
    torch.testing.assert_close(causal_conv(x, taps, cache, batch), expected)
    assert torch.equal(cache.conv, kept)


def test_singles_on_scattered_rows_are_read_and_written_back() -> None:
    pool = BlockPool(8, 8, 4)
    states = [SequenceState(pool) for _ in range(3)]
    for state in (states[2], states[0], states[1]):
        state.extend(1)
    singles = Batch.from_states(states, [[0]] * 3, [], CPU).single_token_spans
    assert singles and singles.first_state_slot is None
    cache = torch.arange(4.0)
    got = singles.gather(cache)
    assert got.tolist() == [1, 2, 0]
    singles.scatter(cache, got + 10)
    assert cache.tolist() == [10, 11, 12, 3]
