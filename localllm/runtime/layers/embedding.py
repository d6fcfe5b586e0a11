"""Token ids to vectors. Only the packed rows of the given tokens are dequantized."""

from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.runtime.weight_source import WeightSource


class Embedding:
    """An embedding table. as_stored: convert rows when they are looked up, instead of all of them when loading."""

    def __init__(self, source: WeightSource, name: str, rows: int, columns: int, as_stored: bool = False):
        self.weight = source.lookup_table(name, rows, columns) if as_stored else source.matrix(name, rows, columns)
        self.dtype = source.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """Look up rows. ids: [T] int64 -> [T, columns] in the model's dtype"""
        if isinstance(self.weight, Tensor):
            return self.weight[ids].to(self.dtype)
        return dequantize(self.weight.select_rows(ids), self.dtype)
