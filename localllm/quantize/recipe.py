"""How a model is to be quantized. Needs no torch."""

from dataclasses import dataclass
from typing import Literal

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant")


@dataclass(frozen=True)
class Recipe:
    """rtn: round to nearest, with scales of the least squared error; it alone needs no calibration text."""

    method: Method = "rtn"
    bits: int = 4  # of the layers' matrices: 4 or 8
    group: int | None = 128  # columns that share a scale; None: a whole row
    symmetric: bool = True
    activations: bool = False  # multiplied as INT8, too, scaled for each token (W8A8)
    head_bits: int = 8  # of the head, with a scale for each row; 16: left as it is
