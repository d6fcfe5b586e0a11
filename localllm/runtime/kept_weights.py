"""Laid-out weights on disk: mapped instead of laid out again, and written by `--keep-layout`.

The layout is the same on every processor that has kernels. All pages are read once to compare their checksums,
which also maps them. They are the system's cache: shared by processes, and dropped when memory is short.
"""

import contextlib
import hashlib
import math
import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from localllm import __version__
from localllm.checkpoint import kept_layouts
from localllm.checkpoint.kept_layouts import PAGE_BYTES, PARTIAL_SUFFIX, KeptIndex, damaged
from localllm.hardware.device import dtype_name
from localllm.quant import packing
from localllm.quant.formats import interleaved
from localllm.quant.packing import INTERLEAVED_BITS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import interleave

WORD_BYTES = 8  # of the sums over a page that are its checksum
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name


def layout_digest() -> str:
    """Digest of the version and of the modules whose code decides how weights are laid out."""
    files = [Path(module.__file__ or "") for module in (interleave, interleaved, packing)]
    return hashlib.sha256(__version__.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()


class KeptWeights:
    """A mapped file of laid-out weights."""

    def __init__(self, path: Path):
        """Raises DamagedModel if the file is not what was written, and OSError."""
        self.path = path
        self.index = kept_layouts.read_index(path)
        with path.open("rb") as file:
            self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            for advice in (mmap.MADV_HUGEPAGE, POPULATE_READ):
                with contextlib.suppress(OSError):  # where the system does not support it
                    self.mapping.madvise(advice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors; nothing writes to weights
            self.content = torch.frombuffer(self.mapping, dtype=torch.uint8)[: self.index.data_bytes]
        if checksum(page_sums(self.content)) != self.index.checksum:
            raise damaged(path)

    def find(self, key: str, shape: tuple[int, int]) -> tuple[QuantizedTensor, ...] | None:
        """Return the weights of a key, [rows, columns] together; None if there are none, or of another shape."""
        weights = tuple(self.tensor(entry) for entry in self.index.weights.get(key, ()))
        rows = sum(weight.shape[0] for weight in weights)
        fits = rows == shape[0] and all(weight.shape[1] == shape[1] for weight in weights)
        return weights if weights and fits else None

    def add(self, key: str, weights: Sequence[Tensor | QuantizedTensor]) -> None:
        """Do nothing: the weights are kept."""

    def tensor(self, entry: dict[str, Any]) -> QuantizedTensor:
        rows, columns = entry["shape"]
        parts = {name: self.part(*part) for name, part in entry["parts"].items()}
        return QuantizedTensor(entry["format"], (rows, columns), parts, entry["group"])

    def part(self, dtype_text: str, shape: list[int], offset: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, dtype_text)
        raw = self.content[offset : offset + math.prod(shape) * dtype.itemsize]
        return raw.view(dtype).view(shape)


class KeptWeightsWriter:
    """Writes laid-out weights to `path` as they are loaded, under its lock. An error of the disk ends it."""

    def __init__(self, path: Path, source: Path):
        self.path, self.source = path, source
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self.file: BinaryIO | None = self.partial.open("wb")
        self.weights: dict[str, list[dict[str, Any]]] = {}
        self.sums: list[Tensor] = []
        self.error: OSError | None = None

    def find(self, key: str, shape: tuple[int, int]) -> None:
        """Find nothing: the weights are not kept yet."""

    def add(self, key: str, weights: Sequence[Tensor | QuantizedTensor]) -> None:
        """Write the weights of a key if all of them are laid out for kernels."""
        packed = [w for w in weights if isinstance(w, QuantizedTensor) and w.format in INTERLEAVED_BITS]
        if self.file is None or len(packed) < len(weights):
            return
        try:
            self.weights[key] = [self.write(self.file, weight) for weight in packed]
        except OSError as error:
            self.abort(error)

    def write(self, file: BinaryIO, weight: QuantizedTensor) -> dict[str, Any]:
        parts: dict[str, tuple[str, list[int], int]] = {}
        for name, part in weight.parts.items():
            parts[name] = dtype_name(part.dtype), list(part.shape), file.tell()
            raw = part.contiguous().flatten().view(torch.uint8)
            whole = len(raw) // PAGE_BYTES * PAGE_BYTES
            last = torch.zeros(PAGE_BYTES * (whole < len(raw)), dtype=torch.uint8)
            last[: len(raw) - whole] = raw[whole:]
            for pages in (raw[:whole], last):
                if len(pages):
                    file.write(pages.numpy().data)
                    self.sums.append(page_sums(pages))
        return {"format": weight.format, "shape": list(weight.shape), "group": weight.group, "parts": parts}

    def finish(self) -> bool:
        """Write the index and give the file its name. Returns False if nothing was laid out, or after an error."""
        if self.file is None:
            return False
        if not self.weights:
            self.abort()
            return False
        try:
            index = KeptIndex(str(self.source.absolute()), self.weights, checksum(torch.cat(self.sums)), 0)
            self.file.write(kept_layouts.format_index(index))
            self.file.close()
            os.replace(self.partial, self.path)
        except OSError as error:
            self.abort(error)
            return False
        self.file = None
        return True

    def abort(self, error: OSError | None = None) -> None:
        """Remove what was written. Does nothing after `finish`."""
        if self.file is not None:
            self.error, file, self.file = error, self.file, None
            with contextlib.suppress(OSError):
                file.close()
            self.partial.unlink(missing_ok=True)


KeptLayout = KeptWeights | KeptWeightsWriter


def page_sums(content: Tensor) -> Tensor:
    """Return a checksum of each page, int64 [pages]. content: uint8 [bytes], whole pages"""
    return content.view(torch.int64).view(-1, PAGE_BYTES // WORD_BYTES).sum(1)


def checksum(sums: Tensor) -> str:
    """Return the digest of all pages' checksums."""
    return hashlib.sha256(sums.contiguous().numpy().data).hexdigest()
