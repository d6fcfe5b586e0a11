"""Interface of the app to this machine: listing and opening models. Implemented by `cli.machine.LocalMachine`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localllm.conversation.model import Model
from localllm.formatting import format_bytes, one_line

if TYPE_CHECKING:
    from localllm.hub.pull import PullProgress  # huggingface_hub takes 0.1 s to import


class Machine(Protocol):
    def offers(self) -> "Sequence[ModelOffer]":
        """Return local models first, then those of the catalogue. Reads model headers, so call it from a thread.

        Raises LocalLLMError if the flags name a device or data type that this machine lacks.
        """
        ...

    def open(self, name: str, watch: "LoadObserver") -> Model:
        """Return a model that is ready to answer, pulled and quantized first where needed.

        A running server that has the model answers instead. Raises Cancelled, LocalLLMError and OSError.
        """
        ...


@dataclass(frozen=True)
class ModelOffer:
    """A model that could be run, for a list; None for unknown values."""

    name: str
    about: str  # one line: what it is good for, or why it cannot run
    parameters: str  # such as 4.02B, or -
    bytes: int | None  # size of its files
    license: str | None
    is_here: bool  # needs no download
    fits: bool | None
    needs_bytes: int | None  # memory for the weights and the context
    free_bytes: int | None  # on the device it would run on
    tokens_per_s: float | None  # estimate from this machine's measured rates
    recommended: bool = False  # for this machine


class LoadObserver(Protocol):
    """Receives the progress of opening a model, from any thread. A method may raise Cancelled to stop it."""

    @property
    def pull(self) -> "PullProgress":
        """Observer of the download phase."""
        ...

    def about(self, offer: ModelOffer) -> None:
        """Receive a description of the model before its download."""
        ...

    def phase(self, name: str) -> None:
        """Begin a phase: `download`, `quantize`, or a phase of loading as in docs/cli.md."""
        ...

    def part(self, done: int, total: int) -> None:
        """Report progress in the current phase: bytes of weights read, or parts of the model quantized."""
        ...

    def note(self, text: str) -> None: ...


class Cancelled(Exception):
    """The user has cancelled opening a model."""


def memory_and_speed(offer: ModelOffer) -> str:
    """Return `fits: 5.2 GB of 23.5 GB; about 118 tokens/s`, without what is unknown."""
    memory = ""
    if offer.needs_bytes is not None and offer.free_bytes is not None:
        needs, free = format_bytes(offer.needs_bytes), format_bytes(offer.free_bytes)
        memory = f"fits: {needs} of {free}" if offer.fits else f"does not fit: needs {needs}, {free} free"
    speed = f"about {approximate_rate(offer.tokens_per_s)}" if offer.tokens_per_s else ""
    return f"{memory}; {speed}" if memory and speed else memory or speed


def approximate_rate(tokens_per_s: float) -> str:
    """Return an estimated speed without meaningless digits."""
    return f"{tokens_per_s:.0f} tokens/s" if tokens_per_s >= 2 else f"{tokens_per_s:.1f} tokens/s"


def parameters_and_license(offer: ModelOffer) -> str:
    """Return `4.02B parameters · apache-2.0`."""
    license = one_line(offer.license) if offer.license else "unknown licence"
    return f"{offer.parameters} parameters · {license}" if offer.parameters != "-" else license
