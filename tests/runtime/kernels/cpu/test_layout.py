"""The compiled kernels interleave blocks as torch does."""

import pytest
import torch

from localllm.quant.formats.interleaved import interleave
from localllm.runtime.kernels.cpu import interleave as kernel
from tests.quant.formats.test_interleaved import blocks, integers


@pytest.mark.parametrize("form", kernel.CONVERSIONS)
def test_blocks_are_interleaved_as_torch_does(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 20_000)  # several pieces
    weights, read = [blocks(form, rows, 512) for rows in (64, 16, 128)], []
    found, expected = kernel.interleave_weights(*weights, on_read=lambda: read.append(1)), interleave(*weights)
    assert found and expected and len(read) > len(weights)
    assert (found.format, found.shape, found.group) == (expected.format, expected.shape, expected.group)
    assert found.parts.keys() == expected.parts.keys()
    assert all(torch.equal(found.parts[name], part) for name, part in expected.parts.items())


@pytest.mark.parametrize(
    "weights", [[blocks("q4_0", 37, 64)], [blocks("q3_k", 16, 256)], [integers("int4", 16, 64, 32)]]
)
def test_the_rest_is_laid_by_torch(weights) -> None:
    found, expected = kernel.interleave_weights(*weights), interleave(*weights)
    assert found and expected and torch.equal(found.parts["q"], expected.parts["q"])


def test_different_formats_stay_separate() -> None:
    assert kernel.interleave_weights(blocks("q4_0", 16, 64), blocks("q4_0", 16, 128)) is None
    assert kernel.interleave_weights(blocks("q4_0", 16, 64), blocks("q8_0", 16, 64)) is None
