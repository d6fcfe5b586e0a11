"""Packed GGUF rows dequantize bit for bit as by the `gguf` package."""

import gguf
import numpy as np
import pytest
import torch

from localllm.quant.formats.gguf import FORMATS, dequantize_rows
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME, BLOCK_TYPES, UNSUPPORTED_TYPES


def test_every_type_has_the_number_and_the_block_of_the_format() -> None:
    for number, kind in BLOCK_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert kind.name.removesuffix("_gguf") == theirs.name.lower()
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_elements, kind.block_bytes)
    known = {int(t): t.name.lower() for t in gguf.GGMLQuantizationType}
    assert BLOCK_TYPES.keys() | UNSUPPORTED_TYPES.keys() == known.keys()
    assert all(known[number] == name for number, name in UNSUPPORTED_TYPES.items())
    assert BLOCK_TYPE_BY_NAME.keys() == FORMATS


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 2)], ids=["matrix", "experts"])
def test_random_bytes_are_read_as_the_package_reads_them(name: str, shape: tuple[int, ...]) -> None:
    kind = BLOCK_TYPE_BY_NAME[name]
    generator = np.random.default_rng(1)
    packed = generator.integers(0, 256, (*shape[:-1], shape[-1] * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are NaN and infinite, too
        expected = gguf.dequantize(packed, gguf.GGMLQuantizationType[name.removesuffix("_gguf").upper()])
    got = dequantize_rows(torch.from_numpy(packed), name, torch.float32).numpy()
    assert got.shape == (*shape[:-1], shape[-1] * kind.block_elements)
    np.testing.assert_array_equal(got, expected.reshape(got.shape))


def test_other_dtypes_are_the_rounded_float32() -> None:
    packed = torch.randint(0, 100, (4, 288), dtype=torch.uint8)
    exact = dequantize_rows(packed, "q4_k", torch.float32)
    assert torch.equal(dequantize_rows(packed, "q4_k", torch.bfloat16), exact.bfloat16())
