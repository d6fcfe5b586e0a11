"""Worker threads use the settings of the thread that calls them."""

from collections.abc import Iterator

import pytest
import torch

from localllm.quant.formats import gguf
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels import linear
from localllm.runtime.kernels.batch_invariance import batch_invariance, batch_invariant
from localllm.runtime.kernels.threads import run_in_parts
from tests.runtime.kernels.harness import needs_compiled


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_each_thread_inherits_batch_invariance() -> None:
    for wanted in (True, False):
        seen: list[bool] = []
        with batch_invariance(wanted):
            run_in_parts(lambda part, parts, seen=seen: seen.append(batch_invariant()))
        assert seen == [wanted] * 2


@needs_compiled
def test_gguf_rows_have_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = 1100, 512
    # Bytes below 60 make scales that are small and finite.
    packed = torch.randint(
        0, 60, (rows, BLOCK_TYPE_BY_NAME["q8_0"].row_bytes(columns)), generator=generator
    ).byte()
    weight, x = QuantizedTensor("q8_0", (rows, columns), {gguf.BLOCKS_PART: packed}), torch.randn(40, columns)
    with batch_invariance(True):
        assert torch.equal(linear(x, weight), torch.cat([linear(row[None], weight) for row in x]))
