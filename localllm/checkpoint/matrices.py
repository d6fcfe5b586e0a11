"""Determines from headers alone which matrices of a checkpoint are quantized, and how. Needs no torch."""

from dataclasses import dataclass

from localllm.checkpoint.header import Header, TensorHeader
from localllm.checkpoint.layouts import WORD_BITS, Quantization
from localllm.quant.packing import FP8, INT4, INT8, W8A8

AWQ_ROWS_PER_WORD = 8  # rows whose codes share a word
CODE_SUFFIXES = ("qweight", "weight_packed", "weight")  # the tensor with a matrix's elements
SCALE_SUFFIXES = ("scales", "weight_scale", "weight_scale_inv")
ORDER_SUFFIXES = ("g_idx", "weight_g_idx")


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of integers or FP8, with the parts described in localllm/quant/formats/groups.py."""

    format: str  # a QuantizedTensor's format
    rows: int
    columns: int
    group_count: int  # per row
    group_size: int | None  # columns that share a scale; None: all
    scale_dtype: str  # dtype of scales, by safetensors' name
    has_zeros: bool = False  # groups have zero points
    act_order: bool = False  # columns are stored in another order

    @property
    def code_bytes(self) -> int:
        return self.rows * (-(-self.columns // 2) if self.format == INT4 else self.columns)


def find_packed_matrix(header: Header, name: str) -> PackedMatrix | None:
    """Return the matrix whose tensors' names begin with `name`; None if it is not quantized or has invalid
    shapes.
    """
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
    integer_format = W8A8 if quantization.activations else INT8
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    fitting = [scheme for scheme in quantization.schemes if scheme.group_count(codes.shape[1]) == groups]
    return PackedMatrix(
        format=FP8 if codes.dtype == "F8_E4M3" else integer_format,
        rows=codes.shape[0],
        columns=codes.shape[1],
        group_count=groups,
        group_size=fitting[0].group_size if fitting and groups > 1 else None,
        scale_dtype=scale.dtype,
        has_zeros=not all(scheme.symmetric for scheme in quantization.schemes),
    )


def first_tensor(header: Header, name: str, suffixes: tuple[str, ...]) -> TensorHeader | None:
    """Return the first existing tensor of a matrix with one of these suffixes."""
    return next(
        (header.tensors[f"{name}.{suffix}"] for suffix in suffixes if f"{name}.{suffix}" in header.tensors), None
    )


def matrix_in_words(
    quantization: Quantization, codes: TensorHeader, scale: TensorHeader, *, ordered: bool
) -> PackedMatrix | None:
    """Return the matrix whose codes are packed in int32 words."""
    if len(scale.shape) != 2:
        return None
    along_rows = quantization.method == "compressed-tensors"  # words are along rows, as in the weight
    height, width = codes.shape
    for scheme in quantization.schemes:
        codes_per_word = WORD_BITS // scheme.bits
        rows, columns = (height, width * codes_per_word) if along_rows else (width, height * codes_per_word)
        if quantization.method == "awq":
            rows, columns = width * AWQ_ROWS_PER_WORD, height
        groups = scale.shape[1 if along_rows else 0]
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
