"""What the app needs of the machine that it runs on: models, and how far one is on its way. `cli` has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localllm.protocol.model import Model

if TYPE_CHECKING:
    from localllm.hub.pull import PullProgress  # with the Hub's library 0.1 s that not everybody need wait for


@dataclass(frozen=True)
class ModelOffer:
    """A model that could be run, as a list shows it; None where it is not known."""

    name: str
    about: str  # one line: what it is good for, or what keeps it from running
    parameters: str
    bytes: int | None  # of its files
    license: str | None
    is_here: bool  # no download is needed
    fits: bool | None
    needs_bytes: int | None  # of memory, with its context
    free_bytes: int | None  # of the memory that it would take
    tokens_per_s: float | None  # about, by what this machine was measured to do
    recommended: bool = False  # for this machine


class LoadObserver(Protocol):
    """Follows a model on its way, from several threads. Raises Cancelled in any of its methods to break off."""

    @property
    def pull(self) -> "PullProgress":
        """Follows the download, which is the phase of that name."""
        ...

    def about(self, offer: ModelOffer) -> None:
        """What it is, before it is downloaded."""
        ...

    def phase(self, name: str) -> None:
        """`download`, `quantize`, or one of docs/cli.md's phases of loading has begun."""
        ...

    def part(self, done: int, total: int) -> None:
        """Of the phase: bytes of weights that were read, parts of the model that were quantized."""
        ...

    def note(self, text: str) -> None: ...


class Cancelled(Exception):
    """The person does not want it any more."""


class Machine(Protocol):
    def offers(self) -> Sequence[ModelOffer]:
        """Models here first, then those of the catalogue. Reads headers, which takes a moment: not for the thread
        of the screen."""
        ...

    def open(self, name: str, watch: LoadObserver) -> Model:
        """A model that is ready, pulled and quantized before where that is to be done; one that a running server
        has is asked there. Raises Cancelled and LocalLLMError."""
        ...
