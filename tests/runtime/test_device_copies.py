"""A step on a GPU copies nothing from pageable memory: such a copy waits for the device and cannot be captured.

Tensors here are on device `meta`, which is not the host's either, so that no GPU is needed.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from localllm.quant.dequantize import DEQUANTIZERS
from localllm.quant.formats import gguf
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.formats.groups import MXFP4_GROUP
from localllm.quant.tensor import QuantizedTensor, device_table
from localllm.runtime.layers.linear import Embedding

ROWS, COLUMNS = 32, 512
DEVICE = torch.device("meta")


class Uploads(TorchFunctionMode):
    """Notes the calls that make a tensor of the device from numbers or a tensor of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        from_host = func in (torch.tensor, torch.as_tensor) or any(t.device.type == "cpu" for t in given)
        if from_host and isinstance(result, Tensor) and result.device == DEVICE:
            self.calls.append(func.__name__)
        return result


@pytest.fixture(autouse=True)
def nothing_uploaded_yet() -> Iterator[None]:
    device_table.cache_clear()
    yield
    device_table.cache_clear()


def stored(tensor_format: str) -> QuantizedTensor:
    """A table in a format of checkpoints."""

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    if tensor_format in gguf.FORMATS:
        width = BLOCK_TYPE_BY_NAME[tensor_format].row_bytes(COLUMNS)
        return QuantizedTensor(tensor_format, (ROWS, COLUMNS), {gguf.BLOCKS_PART: empty(ROWS, width)})
    groups = COLUMNS // MXFP4_GROUP
    if tensor_format == "mxfp4":
        parts = {"q": empty(ROWS, groups, MXFP4_GROUP // 2), "scale": empty(ROWS, groups)}
        return QuantizedTensor(tensor_format, (ROWS, COLUMNS), parts)
    codes = {"int4": empty(ROWS, COLUMNS // 2), "fp8": empty(ROWS, COLUMNS, dtype=torch.float8_e4m3fn)}
    q = codes.get(tensor_format, empty(ROWS, COLUMNS, dtype=torch.int8))
    scale = empty(ROWS, groups, dtype=torch.bfloat16)
    return QuantizedTensor(tensor_format, (ROWS, COLUMNS), {"q": q, "scale": scale}, MXFP4_GROUP)


@pytest.mark.parametrize("tensor_format", [*sorted(gguf.FORMATS), "int4", "int8", "w8a8", "fp8", "mxfp4"])
def test_looking_up_an_embedding_uploads_nothing_after_the_first_step(tensor_format: str) -> None:
    assert tensor_format in DEQUANTIZERS
    embedding = Embedding.__new__(Embedding)
    embedding.weight, embedding.dtype, embedding.ranks = stored(tensor_format), torch.bfloat16, None
    ids = torch.empty(4, dtype=torch.int64, device=DEVICE)
    assert embedding(ids).shape == (4, COLUMNS)
    with Uploads() as uploads:
        vectors = embedding(ids)
    assert vectors.device == DEVICE and vectors.dtype == torch.bfloat16
    assert not uploads.calls


def test_an_upload_is_noticed() -> None:
    with Uploads() as uploads:
        torch.tensor([1, 2], device=DEVICE)
        torch.zeros(2).to(DEVICE)
    assert uploads.calls == ["tensor", "to"]
