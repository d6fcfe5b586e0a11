"""gpt-oss's MXFP4: `X.blocks` uint8 [out, in / 32, 16], `X.scales` uint8 [out, in / 32]."""

from torch import Tensor

from localllm.checkpoint.safetensors import Weights
from localllm.errors import DamagedModel
from localllm.quant.formats import mxfp4
from localllm.quant.tensor import QuantizedTensor


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor:
    rows, groups = shape[0], -(-shape[1] // mxfp4.MXFP4_GROUP)
    blocks = weights.take(f"{name}.blocks", (rows, groups, mxfp4.MXFP4_GROUP // 2), dtypes=("U8",))
    scales = weights.take(f"{name}.scales", (rows, groups), dtypes=("U8",))
    check_exponents(weights.stored_name(f"{name}.scales"), scales)
    return QuantizedTensor(mxfp4.MXFP4_FORMAT, shape, {"q": blocks, "scale": scales})


def check_exponents(name: str, exponents: Tensor) -> None:
    """Raise DamagedModel if a scale is NaN. MXFP4 has no infinite scale."""
    if (exponents == mxfp4.MXFP4_NAN_SCALE).any():
        raise DamagedModel(f"the tensor {name!r} has a scale that is NaN", "fetch the model again")
