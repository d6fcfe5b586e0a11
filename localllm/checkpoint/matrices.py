"""Which matrices of a checkpoint are quantized, and how: what headers alone tell. Needs no torch."""

from dataclasses import dataclass

from localllm.checkpoint.header import Header, TensorHeader
from localllm.checkpoint.layouts import WORD_BITS, Quantization
from localllm.quant.packing import FP8, INT4, INT8, W8A8

AWQ_ROWS_PER_WORD = 8  # of a word
CODE_SUFFIXES = ("qweight", "weight_packed", "weight")  # the tensor of a matrix that holds its elements
SCALE_SUFFIXES = ("scales", "weight_scale", "weight_scale_inv")
ORDER_SUFFIXES = ("g_idx", "weight_g_idx")


@dataclass(frozen=True)
class PackedMatrix:
    """Of whole numbers or FP8, in the parts that localllm/quant/formats/groups.py tells of."""

    format: str  # as a QuantizedTensor has it
    rows: int
    columns: int
    group_count: int  # of a row
    group_size: int | None  # columns that share a scale; None: all
    scale_dtype: str  # the dtype of scales, as safetensors spells it
    has_zeros: bool = False  # groups have zero points
    act_order: bool = False  # columns are in an order of their own

    @property
    def code_bytes(self) -> int:
        return self.rows * (-(-self.columns // 2) if self.format == INT4 else self.columns)


def find_packed_matrix(header: Header, name: str) -> PackedMatrix | None:
    """The matrix whose tensors begin with `name`; None where it is not quantized so, or its shapes are none."""
    quantization = header.quantization_config
    codes, scale = first_tensor(header, name, CODE_SUFFIXES), first_tensor(header, name, SCALE_SUFFIXES)
    if quantization is None or codes is None or scale is None or len(codes.shape) != 2:
        return None
    if codes.dtype == "I32":
        return matrix_in_words(
            quantization, codes, scale, ordered=first_tensor(header, name, ORDER_SUFFIXES) is not None
        )
    if codes.dtype not in ("I8", "F8_E4M3"):
        return None
    whole = W8A8 if quantization.activations else INT8
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    fitting = [scheme for scheme in quantization.schemes if scheme.group_count(codes.shape[1]) == groups]
    return PackedMatrix(
        format=FP8 if codes.dtype == "F8_E4M3" else whole,
        rows=codes.shape[0],
        columns=codes.shape[1],
        group_count=groups,
        group_size=fitting[0].group_size if fitting and groups > 1 else None,
        scale_dtype=scale.dtype,
        has_zeros=not all(scheme.symmetric for scheme in quantization.schemes),
    )


def first_tensor(header: Header, name: str, kinds: tuple[str, ...]) -> TensorHeader | None:
    """Of a matrix, the tensor of the first of these kinds that is there."""
    return next((header.tensors[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in header.tensors), None)


def matrix_in_words(
    quantization: Quantization, codes: TensorHeader, scale: TensorHeader, *, ordered: bool
) -> PackedMatrix | None:
    """The matrix of codes in int32 words."""
    if len(scale.shape) != 2:
        return None
    across = quantization.method == "compressed-tensors"  # words lie in rows, as the weight does
    tall, wide = codes.shape
    for scheme in quantization.schemes:
        run = WORD_BITS // scheme.bits
        rows, columns = (tall, wide * run) if across else (wide, tall * run)
        if quantization.method == "awq":
            rows, columns = wide * AWQ_ROWS_PER_WORD, tall
        groups = scale.shape[1 if across else 0]
        if scheme.words and scheme.group_count(columns) == groups:
            return PackedMatrix(
                format=INT4 if scheme.bits == 4 else INT8,
                rows=rows,
                columns=columns,
                group_count=groups,
                group_size=scheme.group_size if groups > 1 else None,
                scale_dtype=scale.dtype,
                has_zeros=not scheme.symmetric,
                act_order=quantization.act_order and ordered,
            )
    return None
