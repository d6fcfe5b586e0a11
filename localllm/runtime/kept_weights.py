"""Laid-out weights on disk: mapped by a load on a CPU instead of laid out again, and written by `--keep-layout`.

The layout is the same on every processor that has kernels. All pages are read once to compare their checksums,
which also maps them. They are the system's cache: shared by processes, and dropped when memory is short.
"""

import contextlib
import hashlib
import math
import mmap
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from localllm import __version__
from localllm.checkpoint import kept_layouts
from localllm.checkpoint.kept_layouts import PAGE_BYTES, PARTIAL_SUFFIX, KeptIndex, damaged
from localllm.errors import DamagedModel, LocalLLMError
from localllm.formatting import format_bytes
from localllm.hardware.device import dtype_name
from localllm.metrics import PhaseTimer
from localllm.quant import packing
from localllm.quant.formats import interleaved
from localllm.quant.packing import INTERLEAVED_BITS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import interleave
from localllm.runtime.kernels.cpu.compile import cpu_supported
from localllm.settings import Settings

WORD_BYTES = 8  # of the sums over a page that are its checksum
SPARE_BYTES = 2**30  # that stay free on the disk
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


@dataclass
class LayoutUse:
    """How a load uses the kept layout of its model."""

    layout: KeptLayout | None = None
    note: str = ""  # for the user

    @property
    def mapped_file(self) -> Path | None:
        """The file that weights are mapped from; None if they were laid out."""
        return self.layout.path if isinstance(self.layout, KeptWeights) else None

    def finish(self, phases: PhaseTimer) -> None:
        """Finish the file, if this load writes one."""
        if not isinstance(self.layout, KeptWeightsWriter):
            return
        path = self.layout.path
        with phases("layout"):
            is_kept = self.layout.finish()
        if is_kept:
            self.note = f"laid-out weights are kept in {path} ({format_bytes(path.stat().st_size)})"
        elif self.layout.error:
            self.note = cannot_keep(path, self.layout.error)
        else:
            self.note = "there is no layout to keep: no weights of this model were laid out"


@contextlib.contextmanager
def open_layout(
    source: Path, device: torch.device, weight_bytes: int, settings: Settings, phases: PhaseTimer
) -> Iterator[LayoutUse]:
    """Map the kept layout of a model, or begin to write it with `keep_layout`.

    A damaged file is named in the note and not used. weight_bytes: of the laid-out weights, at most
    """
    cache, keeps = settings.cache, settings.keep_layout
    if device.type != "cpu" or not cpu_supported():
        yield LayoutUse(note="--keep-layout has no effect here: weights are not laid out" if keeps else "")
        return
    if not (keeps or kept_layouts.has_files(cache)):
        yield LayoutUse()
        return
    key = kept_layouts.model_key(source)
    use, path = LayoutUse(), kept_layouts.kept_path(cache, key, layout_digest())
    if path.exists():
        try:
            with phases("layout"):
                use.layout = KeptWeights(path)
        except (DamagedModel, OSError) as error:
            use.note = str(error)
    with contextlib.ExitStack() as undo:
        if keeps and not use.layout:
            try:
                if undo.enter_context(kept_layouts.writing(path)):
                    remove_outdated(cache, key, path)
                    start_writing(use, path, source, weight_bytes)
                else:
                    use.note = f"another process is writing {path}"
            except OSError as error:
                use.note = cannot_keep(path, error)
        if isinstance(use.layout, KeptWeightsWriter):
            undo.callback(use.layout.abort)  # before the lock is released
        yield use


def start_writing(use: LayoutUse, path: Path, source: Path, weight_bytes: int) -> None:
    """Start to write the layout if the disk has room for it."""
    free = shutil.disk_usage(path.parent).free
    if free >= weight_bytes + SPARE_BYTES:
        use.layout = KeptWeightsWriter(path, source)
        return
    use.note = (
        f"the layout takes about {format_bytes(weight_bytes)} and is not kept: the disk with {path.parent} has "
        f"{format_bytes(free)} left"
    )


def cannot_keep(path: Path, error: OSError) -> str:
    return f"laid-out weights cannot be kept in {path.parent} ({error.strerror})"


def remove_outdated(cache: Path, key: str, path: Path) -> None:
    """Remove what other versions kept of the model, and the layouts of models that no longer exist."""
    others = [file for file in kept_layouts.files_by_key(cache, key) if file.path != path]
    for file in [*others, *kept_layouts.orphaned_files(cache)]:
        with contextlib.suppress(LocalLLMError, OSError):
            file.remove()
