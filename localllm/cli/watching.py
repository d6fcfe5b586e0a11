"""What a person or a log sees on stderr of a model on its way: pulled, quantized, loaded. `Watch` of one."""

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from localllm.cli.io import note, status
from localllm.tui.machine import Offer

if TYPE_CHECKING:
    from localllm.cli.progress import Parts
    from localllm.hub.pull import Show


class OnStderr:
    """`with` it, so that what is drawn ends with what it shows. One display at a time: of the download, of the
    quantizer, of the loading."""

    def __init__(self, name: str):
        self.name = name
        self.shown = ""
        self.display = ExitStack()
        self.show: Show | None = None
        self.parts: Parts | None = None

    @property
    def pull(self) -> "Show":
        """Of the phase `download`."""
        assert self.show
        return self.show

    def phase(self, name: str) -> None:
        kind = name if name in ("download", "quantize") else "load"
        if kind == self.shown:
            return
        self.display.close()
        self.shown, self.parts = kind, None
        if kind == "load":
            self.display.enter_context(status(f"loading {self.name}"))
            return
        from localllm.cli import progress  # Rich: 60 ms that a model that is here need not wait for

        if kind == "download":
            self.show = self.display.enter_context(progress.shown())
        else:
            self.parts = self.display.enter_context(progress.parts())

    def part(self, done: int, total: int) -> None:
        if self.parts:
            self.parts.part("", done, total)

    def about(self, offer: Offer) -> None:
        """The summary of the pull says what a line has room for."""

    def note(self, text: str) -> None:
        note(text)

    def __enter__(self) -> "OnStderr":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.__exit__(kind, error, trace)
