"""What a person or a log sees on stderr of a model on its way: pulled, quantized, loaded. `Watch` of one."""

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from localllm.cli.io import note, status
from localllm.tui.machine import ModelOffer

if TYPE_CHECKING:
    from localllm.cli.progress import QuantizeProgress
    from localllm.hub.pull import PullProgress


class StderrWatch:
    """`with` it, so that what is drawn ends with what it shows. One display at a time: of the download, of the
    quantizer, of the loading."""

    def __init__(self, name: str):
        self.name = name
        self.stage = ""
        self.display = ExitStack()
        self.download: PullProgress | None = None
        self.quantization: QuantizeProgress | None = None

    @property
    def pull(self) -> "PullProgress":
        """Of the phase `download`."""
        assert self.download
        return self.download

    def phase(self, name: str) -> None:
        kind = name if name in ("download", "quantize") else "load"
        if kind == self.stage:
            return
        self.display.close()
        self.stage, self.quantization = kind, None
        if kind == "load":
            self.display.enter_context(status(f"loading {self.name}"))
            return
        from localllm.cli import progress  # Rich: 60 ms that a model that is here need not wait for

        if kind == "download":
            self.download = self.display.enter_context(progress.download_progress())
        else:
            self.quantization = self.display.enter_context(progress.quantize_progress())

    def part(self, done: int, total: int) -> None:
        if self.quantization:
            self.quantization.part("", done, total)

    def about(self, offer: ModelOffer) -> None:
        """The summary of the pull says what a line has room for."""

    def note(self, text: str) -> None:
        note(text)

    def __enter__(self) -> "StderrWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.__exit__(kind, error, trace)
