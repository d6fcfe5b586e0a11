"""Turns a checkpoint's tensors into a model's weights: one at a time, checked, fused, converted and on the device.

Fused matrices are copied, so that the system can drop the mapped pages of the file.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from localllm.checkpoint.quantized import check_blocks, has_matrix, take_blocks, take_quantized
from localllm.checkpoint.tensors import Weights, check_finite
from localllm.errors import DamagedModel
from localllm.hardware.device import dtype_name
from localllm.hardware.processor import matrix_dtype_for
from localllm.metrics import PhaseTimer
from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gguf
from localllm.quant.packing import FP8, INTERLEAVED_BITS, W8A8, stays_packed
from localllm.quant.tensor import QuantizedTensor, concat_quantized
from localllm.runtime.kept_weights import KeptLayout
from localllm.runtime.ranks import Ranks

STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class WeightSource:
    """The weights of a layer: the tensors of a checkpoint below one prefix.

    Raises what `Weights` raises, and DamagedModel for a weight that is NaN or infinite in the model's dtype.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        phases: PhaseTimer | None = None,
        activation_bits: int | None = None,
        layout: KeptLayout | None = None,
        ranks: Ranks | None = None,
    ):
        """phases: records the time for repacking weights for kernels as `repack`; layout: has laid-out weights, or
        takes those that are laid out; ranks: of which this process is one, if the tensors are
        those of one."""
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.phases = phases or PhaseTimer()
        self.activation_bits = activation_bits
        self.layout = layout
        self.ranks = ranks
        self.tensor_ranks = ranks if ranks and ranks.shard.size > 1 else None  # that divide the tensors

    def under(self, name: str) -> "WeightSource":
        weights = self.weights.scoped(name)
        return WeightSource(
            weights, self.device, self.dtype, self.phases, self.activation_bits, self.layout, self.ranks
        )

    def has_matrix(self, name: str) -> bool:
        return has_matrix(self.weights, name)

    def kept_matrices(self, names: dict[str, int], columns: int) -> tuple[QuantizedTensor, ...] | None:
        """Return what `matrices` would return, as laid out by an earlier load; None if that was not kept."""
        shape = sum(names.values()), columns
        weights = self.layout.find(self.layout_key(names), shape) if self.layout else None
        for name in names if weights else ():
            self.weights.skip(name)
        return weights

    def keep_matrices(self, names: dict[str, int], weights: Sequence[Tensor | QuantizedTensor]) -> None:
        """Keep matrices as they were laid out, if this load keeps any."""
        if self.layout:
            self.layout.add(self.layout_key(names), weights)

    def layout_key(self, names: Iterable[str]) -> str:
        return self.weights.prefix + "+".join(names)

    def norm_weight(self, name: str, size: int) -> Tensor:
        """Return the norm's factors, [size] float32, with the offset added that some checkpoints subtract."""
        return self.float32_tensor(name, size) + self.weights.header.layout.norm_offset

    def float32_tensor(self, name: str, *shape: int) -> Tensor:
        """Return a small tensor that stays in float32, whatever the model's dtype."""
        return self.checked_finite(name, self.weights.take(name, shape).to(self.device, torch.float32))

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor that is never quantized: a norm, a bias, the embedding."""
        return self.checked_finite(name, self.weights.take(name, shape).to(self.device, self.dtype))

    def lookup_table(self, name: str, rows: int, columns: int) -> Tensor | QuantizedTensor:
        """Return a matrix for lookups by row, as stored; on a CPU mapped from the file, so that only used rows are
        read.

        It is not checked for NaN, which shows in the logits and ends the answer there.
        """
        stored = self.weights.stored_header(f"{name}.weight")
        if stored and stored.offset is not None:
            return self.matrix(name, rows, columns)
        return self.weights.take(f"{name}.weight", (rows, columns)).to(self.device)

    def concatenated_vectors(self, names: dict[str, int], suffix: str) -> Tensor:
        """Return several vectors, given by name and size, as one."""
        return torch.cat([self.tensor(f"{name}.{suffix}", size) for name, size in names.items()])

    def matrices(
        self,
        names: dict[str, int],
        columns: int,
        order: Callable[[], Tensor] | None = None,
        *,
        checked: bool = True,
    ) -> tuple[Tensor | QuantizedTensor, ...]:
        """Return the matrices, given by name and rows, in as few tensors as possible, so that qkv is one product.

        They are stacked, or separate if a GGUF file holds them in blocks, which stay mapped, or if they differ in
        format, groups or column order.

        order: makes [rows] int64, the new order of a single matrix's rows; None keeps their order; checked: see
        `matrix`
        """
        if order is not None:
            [(name, rows)] = names.items()
            matrix = self.matrix(name, rows, columns, checked=checked)  # its size, before the order
            index = order().to(self.device)
            return (matrix[index] if isinstance(matrix, Tensor) else matrix.select_rows(index),)
        stored = [self.weights.stored_header(f"{name}.weight") for name in names]
        if len(names) == 1 or any(entry and entry.offset is not None for entry in stored):
            return tuple(self.matrix(name, rows, columns, checked=checked) for name, rows in names.items())
        quantized = {name: take_quantized(self.weights, name, (rows, columns)) for name, rows in names.items()}
        packed = [weight for weight in quantized.values() if weight]
        if not packed:
            return (self.stack_matrices(names, columns),)
        if len(packed) == len(names) and (stacked := concat_quantized(packed)):
            return (self.packed_or_dequantized(stacked, next(iter(names))),)
        return tuple(
            self.packed_or_dequantized(weight, name)
            if weight
            else self.dense_matrix(f"{name}.weight", names[name], columns)
            for name, weight in quantized.items()
        )

    def matrix(self, name: str, rows: int, columns: int, *, checked: bool = True) -> Tensor | QuantizedTensor:
        """Return [rows, columns], in its stored format if kernels support it.

        checked: check the scales of GGUF's blocks; otherwise `check_laid_out` must be called
        """
        stored = self.weights.stored_header(f"{name}.weight")
        plain = STORED_DTYPES[self.matrix_dtype(stored.dtype if stored else "")]
        if blocks := take_blocks(self.weights, name, (rows, columns), plain=plain):
            if checked or blocks.format == "mxfp4_gguf":  # whose NaN is a finite scale when laid out
                self.check_scales(name, blocks)
            return self.to_device(blocks)
        if packed := take_quantized(self.weights, name, (rows, columns)):
            return self.packed_or_dequantized(packed, name)
        return self.dense_matrix(f"{name}.weight", rows, columns)

    def check_laid_out(
        self,
        names: Iterable[str],
        stored: Sequence[Tensor | QuantizedTensor],
        laid_out: Sequence[Tensor | QuantizedTensor],
    ) -> None:
        """Check the scales of GGUF matrices that were not checked yet, if possible in the laid-out weights.

        Scales are adjacent in a kernel's layout; in a file they are so far apart that reading them reads all of
        it.
        """
        if all(map(has_finite_scales, laid_out)):
            return
        for name, weight in zip(names, stored, strict=False):  # others than blocks may be stacked
            if isinstance(weight, QuantizedTensor) and weight.format in gguf.FORMATS:
                self.check_scales(name, weight)

    def check_scales(self, name: str, blocks: QuantizedTensor) -> None:
        check_blocks(self.weights.stored_name(f"{name}.weight"), blocks)

    def matrix_dtype(self, stored: str) -> torch.dtype:
        """Return the dtype in which a dense matrix is kept. stored: its own, by safetensors' name"""
        return getattr(torch, matrix_dtype_for(stored, dtype_name(self.dtype), self.device.type))

    def dense_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix in the dtype in which products read it."""
        stored = self.weights.take(name, (rows, columns))
        dtype = self.matrix_dtype(STORED_DTYPES.get(stored.dtype, ""))
        return self.checked_finite(name, stored.to(self.device, dtype))

    def dequantized_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """Return [rows, columns] dequantized, for a matrix that is used in slices."""
        weight = self.matrix(name, rows, columns)
        if isinstance(weight, Tensor):
            return weight.to(torch.promote_types(weight.dtype, self.dtype))
        return dequantize(weight, self.dtype)

    def stack_matrices(self, names: dict[str, int], columns: int) -> Tensor:
        """Return the unquantized matrices as one, stacked by rows."""
        # All are checked before memory is allocated: config.json may claim any size.
        mapped = {name: self.weights.take(f"{name}.weight", (rows, columns)) for name, rows in names.items()}
        dtypes = {self.matrix_dtype(STORED_DTYPES.get(matrix.dtype, "")) for matrix in mapped.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.dtype
        stacked = torch.empty(sum(names.values()), columns, dtype=dtype, device=self.device)
        offset = 0
        for name, rows in names.items():
            stacked[offset : offset + rows] = mapped[name]
            self.checked_finite(f"{name}.weight", stacked[offset : offset + rows])
            offset += rows
        return stacked

    def packed_or_dequantized(self, weight: QuantizedTensor, name: str) -> Tensor | QuantizedTensor:
        """Return the weight as it is if a kernel reads its format, otherwise dequantized once to the model's
        dtype.
        """
        if not stays_packed(weight.format, self.device.type):
            return self.checked_finite(f"{name}.weight", dequantize(weight, self.dtype).to(self.device))
        on_device = self.to_device(weight)
        if weight.format == FP8 and (on_device.parts["q"].view(torch.uint8).bitwise_and(127) == 127).any():
            raise DamagedModel(
                f"the tensor {self.weights.stored_name(f'{name}.weight')!r} holds values that are NaN",
                "fetch the model again",
            )
        if weight.format != W8A8:
            return on_device
        # Copied for alignment, which a mapped file does not guarantee and torch's kernel needs.
        return replace(on_device, parts={part: packed.clone() for part, packed in on_device.parts.items()})

    def to_device(self, weight: QuantizedTensor) -> QuantizedTensor:
        """Return the weight on the device; on a CPU it stays mapped."""
        return replace(weight, parts={part: packed.to(self.device) for part, packed in weight.parts.items()})

    def checked_finite(self, name: str, tensor: Tensor) -> Tensor:
        check_finite(self.weights.stored_name(name), tensor)
        return tensor


def has_finite_scales(weight: Tensor | QuantizedTensor) -> bool:
    """Return whether the weight is interleaved, and none of its scales is NaN or infinite."""
    if isinstance(weight, Tensor) or weight.format not in INTERLEAVED_BITS:
        return False
    scales = [part for part in weight.parts.values() if part.is_floating_point()]
    return all(torch.isfinite(torch.stack(torch.aminmax(part))).all() for part in scales)
