"""A weight stored in fewer bits: its packed parts by name, its format and the shape it stands for."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class QuantizedTensor:
    """`group`: how many neighbours in a row share a scale; None where the format itself says it, as GGUF's do. The
    last group of a row may be shorter."""

    format: str  # `int8`, `q4_k`: see localllm/quant/formats
    shape: tuple[int, int]  # (out, in) of the weight it stands for
    parts: dict[str, Tensor]
    group: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())
