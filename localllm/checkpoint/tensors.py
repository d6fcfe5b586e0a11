"""A checkpoint's tensors, read one at a time from a memory map, by their names in `arch.layout`."""

import mmap
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from localllm.checkpoint.header import Header, TensorHeader
from localllm.errors import DamagedModel, UnsupportedModel
from localllm.files import damaged_file
from localllm.hardware.device import dtype_name
from localllm.hub.gguf import is_gguf
from localllm.quant.formats.gguf import PLAIN_DTYPES

TORCH_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}


def decode_tensor(raw: Tensor, entry: TensorHeader) -> Tensor:
    """Convert raw [entry.nbytes] uint8 to a tensor in its dtype and shape; blocks of GGUF stay uint8 [..., row
    bytes].

    It is a view unless elements have to be reordered.
    """
    if entry.offset is None:
        shape = tuple(reversed(entry.shape)) if entry.transposed else entry.shape
        return arrange(raw.view(TORCH_DTYPES[entry.dtype]).view(shape), entry)
    dtype = PLAIN_DTYPES.get(entry.dtype.lower())
    tensor = raw.view(dtype).view(entry.shape) if dtype else raw.view(*entry.shape[:-1], -1)
    if entry.heads is None:
        return tensor
    return tensor.index_select(0, half_split_order(*entry.heads, len(tensor)).to(tensor.device))


def select_part(raw: Tensor, entry: TensorHeader) -> Tensor:
    """Return the bytes of a tensor's part, [entry.nbytes] uint8: a view if they are adjacent, otherwise a copy."""
    assert entry.part
    rows = raw.view(entry.file_shape[0], entry.row_bytes)
    if entry.file_dim == 0:
        pieces = [rows[begin:end] for begin, end in entry.part.segments]
    else:
        borders = [tuple(map(entry.row_offset, segment)) for segment in entry.part.segments]
        pieces = [rows[:, begin:end] for begin, end in borders]
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, entry.file_dim)
    return joined.contiguous().view(-1)


def arrange(tensor: Tensor, entry: TensorHeader) -> Tensor:
    """Convert a tensor in the file's layout to the runtime's: [out, in], gate before up."""
    if entry.transposed:
        tensor = tensor.T
    return torch.cat((tensor[::2], tensor[1::2])) if entry.interleaved else tensor


def half_split_order(heads: int, size: int, rows: int) -> Tensor:
    """Return the order of rows that puts each head's even rows first, then the odd ones; rows after the heads
    stay.
    """
    order = torch.arange(rows)
    heads_order = order[: heads * size].view(heads, -1, 2).transpose(1, 2).flatten()
    return torch.cat((heads_order, order[heads * size :]))


class GGUFFile:
    """A mapped GGUF file. Tensors are views of it, except reordered rows of q and k, which are copies.

    The private mapping is writable because torch has no read-only tensors, but it is never written to.
    """

    def __init__(self, file: Path):
        with file.open("rb") as stream:
            self.mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.content = torch.frombuffer(self.mapping, dtype=torch.uint8)  # [bytes of the file]

    def read(self, entry: TensorHeader) -> Tensor:
        """Return a tensor or its part. Dense: in its dtype and shape; packed: uint8 [..., bytes of a row]"""
        raw = self.content[entry.begin : entry.begin + entry.whole_nbytes]
        return decode_tensor(select_part(raw, entry) if entry.part else raw, entry)

    def release(self) -> None:
        """Drop the pages that were read from this process; they are read again from the system's cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")


class TensorReader(Protocol):
    def read(self, entry: TensorHeader) -> Tensor:
        """Return an entire tensor in the runtime's layout. Raises OSError and DamagedModel."""
        ...


class Weights:
    """The tensors of a checkpoint, each to be taken once with the shape that the model expects.

    Missing and extra tensors, or other shapes, raise errors that name the tensor. `scoped(name)` is a view of the
    names below a prefix.
    """

    def __init__(
        self,
        header: Header,
        prefix: str = "",
        shared: "Weights | None" = None,
        reader: TensorReader | None = None,
        on_read: Callable[[int], object] = lambda count: None,
    ):
        """reader: reads tensors to a device instead of mapping them; on_read: called with the bytes of each tensor
        before it is taken.
        """
        self.header = header
        self.prefix = prefix
        self.shared = shared
        self.reader = shared.reader if shared else reader
        self.on_read = shared.on_read if shared else on_read
        self.remaining: set[str] = shared.remaining if shared else set(header.tensors)
        self.files: dict[Path, SafetensorsFile | GGUFFile] = shared.files if shared else {}

    def scoped(self, name: str) -> "Weights":
        return Weights(self.header, f"{self.prefix}{name}.", self)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.remaining

    def stored_name(self, name: str) -> str:
        """Return the tensor's name in its file."""
        full = self.prefix + name
        return self.header.tensors[full].name if full in self.header.tensors else full

    def stored_header(self, name: str) -> TensorHeader | None:
        """Return the tensor's header; None if it does not exist or has been taken."""
        return self.header.tensors[self.prefix + name] if self.has(name) else None

    def take(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        """Return the tensor as stored, mapped from the file. Blocks of GGUF are uint8 [..., bytes of a row].

        Raises DamagedModel if it is missing or has another shape, and UnsupportedModel if its dtype is not one of
        `dtypes`.
        """
        full = self.prefix + name
        if full not in self.remaining:
            raise DamagedModel(
                f"{self.header.path} lacks the tensor {full!r} (the runtime's name) of shape {list(shape)}",
                "fetch the model again",
            )
        entry = self.header.tensors[full]
        if entry.shape != shape:
            raise DamagedModel(
                f"the tensor {entry.name!r} has shape {list(entry.shape)}, but config.json implies {list(shape)}",
                "fetch the model again",
            )
        if entry.dtype not in dtypes and entry.dtype in INTEGERS and self.header.quantization:
            raise DamagedModel(
                f"the tensor {entry.name!r} is stored as {entry.dtype}, and the scale to read it by is missing "
                f"from {self.header.path}, or has another name",
                "fetch the model again",
            )
        if entry.dtype not in dtypes:
            raise UnsupportedModel(
                f"the tensor {entry.name!r} is stored as {entry.dtype}",
                f"it must be one of {', '.join(dtypes)}",
            )
        self.remaining.remove(full)
        self.on_read(entry.nbytes)
        return self.read(entry)

    def skip(self, module: str) -> None:
        """Take all tensors of a matrix without reading them, but not its bias."""
        suffixes = self.suffixes.get(self.prefix + module, ())
        for full in (f"{self.prefix}{module}.{suffix}" for suffix in suffixes if suffix != "bias"):
            self.remaining.discard(full)
            self.on_read(self.header.tensors[full].nbytes)

    @cached_property
    def suffixes(self) -> dict[str, list[str]]:
        """Suffixes of all tensors by module, both by the runtime's names."""
        if self.shared:
            return self.shared.suffixes
        suffixes: dict[str, list[str]] = {}
        for name in self.header.tensors:
            module, _, suffix = name.rpartition(".")
            suffixes.setdefault(module, []).append(suffix)
        return suffixes

    def read(self, entry: TensorHeader) -> Tensor:
        try:
            if self.reader:
                return self.reader.read(entry)
            if entry.file not in self.files:
                self.files[entry.file] = (GGUFFile if is_gguf(entry.file) else SafetensorsFile)(entry.file)
            return self.files[entry.file].read(entry)
        except (SafetensorError, OSError) as error:
            raise damaged_file(entry.file, str(error)) from None

    def take_any(self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        """Take a tensor in whichever of several shapes it is stored; an error names the first."""
        stored = self.stored_header(name)
        return self.take(name, stored.shape if stored and stored.shape in shapes else shapes[0], dtypes)

    def release(self) -> None:
        """Drop pages of files that were read so far; they can be read again."""
        for file in self.files.values():
            file.release()

    def finish(self, expected: Iterable[str] = ()) -> None:
        """Check that the model has taken all tensors. expected: names that may be left."""
        unused = [name for name in self.remaining - set(expected) if not self.is_unused_bias(name)]
        extra = sorted(self.header.tensors[name].name for name in unused)
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise DamagedModel(
                f"the checkpoint contains the tensor {extra[0]!r}{more}, which config.json does not describe",
                "fetch the model again",
            )

    def is_unused_bias(self, name: str) -> bool:
        """Return whether it is one of the zero biases that early GPTQ writers added to every matrix."""
        matrix, _, suffix = name.rpartition(".")
        packed = suffix == "bias" and f"{matrix}.qweight" in self.header.tensors
        return packed and not self.read(self.header.tensors[name]).any()


class SafetensorsFile:
    def __init__(self, file: Path):
        self.file = safe_open(file, framework="pt")

    def read(self, entry: TensorHeader) -> Tensor:
        """Return the tensor, one expert of it, or a part, in the runtime's layout: [out, in], gate before up."""
        if entry.part:
            return arrange(self.read_part(entry), entry)
        is_single = entry.expert is None
        tensor = self.file.get_tensor(entry.name) if is_single else self.file.get_slice(entry.name)[entry.expert]
        return arrange(tensor, entry)

    def read_part(self, entry: TensorHeader) -> Tensor:
        """Read the segments of a part, and nothing between them."""
        assert entry.part
        stored, pieces = self.file.get_slice(entry.name), []
        for begin, end in entry.part.segments:
            index = [slice(None)] * entry.file_dim + [slice(begin, end)]
            if entry.expert is None:
                pieces.append(stored[tuple(index)])
            else:
                pieces.append(stored[(slice(entry.expert, entry.expert + 1), *index)][0])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, entry.file_dim)

    def release(self) -> None:
        """Do nothing: each tensor's mapping ends with the tensor."""


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise DamagedModel if a value is NaN or infinite.

    Both propagate to minimum and maximum, which torch computes at memory speed: 14 times faster than a sum and 30
    times faster than isfinite, on bfloat16.
    """
    if tensor.numel() == 0 or torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
        return
    invalid = int((~torch.isfinite(tensor)).sum())
    dtype = dtype_name(tensor.dtype)
    raise DamagedModel(
        f"the tensor {name!r} is NaN or infinite in {invalid} of {tensor.numel()} elements in {dtype}",
        "fetch the model again" if dtype == "float32" else "fetch the model again, or try --dtype float32",
    )
