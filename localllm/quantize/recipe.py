"""Quantization recipes. Needs no torch."""

from dataclasses import dataclass
from typing import Literal

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant")


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized.

    rtn: round to nearest, with scales of the smallest squared error; the only method without calibration text.
    """

    method: Method = "rtn"
    bits: int = 4  # of the layers' matrices: 4 or 8
    group: int | None = 128  # columns that share a scale; None: an entire row
    symmetric: bool = True
    activations: bool = False  # quantize activations to INT8 with a scale per token (W8A8)
    head_bits: int = 8  # of the head, with a scale per row; 16: unquantized
