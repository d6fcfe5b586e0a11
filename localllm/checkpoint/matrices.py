"""Which matrices of a checkpoint are quantized, and how: what headers alone tell. Needs no torch."""

from dataclasses import dataclass

from localllm.checkpoint.header import Header, TensorHeader
from localllm.checkpoint.layouts import WORD_BITS, Quantization
from localllm.quant.packing import FP8, INT4, INT8, W8A8

AWQ_ROWS = 8  # of a word
CODES = ("qweight", "weight_packed", "weight")  # the tensor of a matrix that holds its elements
SCALES = ("scales", "weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class PackedMatrix:
    """Of whole numbers or FP8; parts as localllm/quant/formats/groups.py has them."""

    format: str  # as a QuantizedTensor has it
    rows: int
    columns: int
    groups: int  # of a row
    scale: str  # the dtype of scales, as safetensors spells it
    zeros: bool  # groups have zero points
    ordered: bool  # columns are in an order of their own

    @property
    def code_bytes(self) -> int:
        return self.rows * (-(-self.columns // 2) if self.format == INT4 else self.columns)


def packed_matrix(header: Header, name: str) -> PackedMatrix | None:
    """The matrix whose tensors begin with `name`; None where it is not quantized so, or its shapes are none."""
    quantization, tensors = header.stored_as, header.tensors
    codes = next((tensors[at] for kind in CODES if (at := f"{name}.{kind}") in tensors), None)
    scale = next((tensors[at] for kind in SCALES if (at := f"{name}.{kind}") in tensors), None)
    if quantization is None or codes is None or scale is None or len(codes.shape) != 2:
        return None
    if codes.dtype in ("I8", "F8_E4M3"):
        whole = W8A8 if quantization.activations else INT8
        form = FP8 if codes.dtype == "F8_E4M3" else whole
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        zeros = f"{name}.weight_zero_point" in tensors and not all(s.symmetric for s in quantization.schemes)
        return PackedMatrix(form, *codes.shape, groups, scale.dtype, zeros, ordered=False)
    return words(quantization, name, codes, scale, header) if len(scale.shape) == 2 else None


def words(
    quantization: Quantization, name: str, codes: TensorHeader, scale: TensorHeader, header: Header
) -> PackedMatrix | None:
    """Of codes in int32 words."""
    compressed = quantization.method == "compressed-tensors"
    groups = scale.shape[1] if compressed else scale.shape[0]
    for scheme in quantization.schemes:
        run = WORD_BITS // scheme.bits
        if compressed:
            rows, columns = codes.shape[0], codes.shape[1] * run
        elif quantization.method == "awq":
            rows, columns = codes.shape[1] * AWQ_ROWS, codes.shape[0]
        else:
            rows, columns = codes.shape[1], codes.shape[0] * run
        if scheme.words and scheme.groups(columns) == groups:
            form = INT4 if scheme.bits == 4 else INT8
            ordered = quantization.ordered and any(
                f"{name}.{kind}" in header.tensors for kind in ("g_idx", "weight_g_idx")
            )
            return PackedMatrix(form, rows, columns, groups, scale.dtype, not scheme.symmetric, ordered)
    return None
