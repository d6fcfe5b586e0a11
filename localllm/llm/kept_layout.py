"""The kept layout of a model's weights, as a load on a CPU finds it or writes it (`runtime/kept_weights.py`)."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.checkpoint import kept_layouts
from localllm.errors import DamagedModel, LocalLLMError
from localllm.formatting import format_bytes
from localllm.llm.find import LoadRequest, LocalModel
from localllm.metrics import PhaseTimer
from localllm.runtime.kept_weights import KeptLayout, KeptWeights, KeptWeightsWriter, layout_digest
from localllm.runtime.kernels.cpu.compile import cpu_supported

SPARE_BYTES = 2**30  # that stay free on the disk


@dataclass
class LayoutUse:
    """Use of a model's kept layout during a load."""

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
def open_layout(model: LocalModel, weight_bytes: int, request: LoadRequest) -> Iterator[LayoutUse]:
    """Map the kept layout of a model, or begin to write it with `keep_layout`.

    A damaged file is named in the note and not used. weight_bytes: of the laid-out weights, at most
    """
    cache, keeps, source = request.settings.cache, request.settings.keep_layout, model.header.path
    if request.device.type != "cpu" or not cpu_supported():
        yield LayoutUse(note="--keep-layout has no effect here: weights are not laid out" if keeps else "")
        return
    if not (keeps or kept_layouts.has_files(cache)):
        yield LayoutUse()
        return
    key = kept_layouts.model_key(source)
    use, path = LayoutUse(), kept_layouts.kept_path(cache, key, layout_digest())
    if path.exists():
        try:
            with request.phases("layout"):
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
