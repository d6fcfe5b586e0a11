"""The decoding process's view of a process that computes prompts, on this machine or as a worker on another one:
connecting and reconnecting, the prompts sent there, and the prefixes that its cache should hold."""

import json
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.checkpoint.digest import FileDigest
from localllm.disaggregation.supervisor import FIRST_DELAY_S, STEADY_S
from localllm.disaggregation.tensor_stream import TensorStream
from localllm.disaggregation.transport import Receiver, SharedMemory, open_slots
from localllm.errors import LocalLLMError, ServerUnreachable
from localllm.files import reason_of
from localllm.parallel.channel import FAILED, PREFILL, SETUP, Channel, reported_error
from localllm.parallel.handshake import EARLY_BYTES

if TYPE_CHECKING:
    from localllm.disaggregation.prefill_tier import RemotePrompt
    from localllm.parallel.remote import RemoteWorker  # imports torch.distributed

PIECE = 128  # tokens by which the beginnings of prompts are remembered
MAX_PIECES = 10_000  # remembered for each process
RECONNECT_S = 5.0  # after a process that was started again could not load the model
MAX_DELAY_S = 60.0  # between attempts to reach a worker

log = logging.getLogger("localllm.prefill")


@dataclass(frozen=True)
class PrefillAddress:
    """The socket of a process on this machine that computes prompts, and the setup to send when connecting."""

    number: int
    path: Path  # of its socket
    setup: dict[str, Any]  # fields of `llm.prefill_process.Setup`, without those of the shared memory
    segment_bytes: int  # maximum bytes of keys, values and states per transfer

    def connect(self) -> "PrefillProcess":
        """Connect to the process, which may still be starting. Raises OSError if it does not run and will not be
        started."""
        connection = socket.socket(socket.AF_UNIX)
        descriptor = -1
        try:
            connection.connect(str(self.path))
            descriptor, slot_bytes = open_slots(self.segment_bytes)
            socket.send_fds(connection, [b"\0"], [descriptor])
            channel = Channel(connection)
            channel.send(SETUP, json.dumps(self.setup | {"slot_bytes": slot_bytes}).encode())
            return PrefillProcess(self.number, channel, SharedMemory(descriptor, slot_bytes), self)
        except BaseException:
            connection.close()
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def title(self) -> str:
        return f"prefill process {self.number}"

    def connect_again(self, reason: str, closed: threading.Event) -> "PrefillProcess | None":
        """Wait until the process has been started again and has loaded the model; None if it will not be, or
        nothing more is wanted. reason: how it has ended, which its supervisor reports"""
        while not closed.is_set():
            try:
                process = self.connect()
            except OSError:
                return None
            try:
                process.wait_until_loaded()
            except LocalLLMError as error:
                log.info("%s", error)  # its supervisor counts such failures and reports them
                closed.wait(RECONNECT_S)
            else:
                return process
        return None


@dataclass
class WorkerAddress:
    """A worker on another machine, and the model whose prompts it is to compute."""

    number: int
    address: str  # HOST:PORT
    token: bytes = field(repr=False)
    check: "Callable[[RemoteWorker], None]"  # raises LocalLLMError if it cannot compute for this machine
    model: str  # as published, or its path
    quant: str | None  # to which the worker quantizes it first
    files: ListLike[FileDigest]  # which must be the same there
    setup: dict[str, Any]  # fields of `llm.prefill_process.Setup`; path, threads and memory are the worker's own
    segment_bytes: int  # maximum bytes of keys, values and states per transfer
    failures: int = 0  # since it has computed prompts for STEADY_S
    loaded_at: float = field(default_factory=time.monotonic)

    @property
    def title(self) -> str:
        return f"the worker at {self.address}"

    def connect(self) -> "PrefillProcess":
        """Connect to the worker, and have it load the model. Raises the errors of `connect_workers` and
        `send_model`."""
        from localllm.parallel.remote import connect_workers, send_model

        [worker] = connect_workers([self.address], self.token)
        try:
            self.check(worker)
            send_model([worker], self.model, self.quant, self.files)
            worker.channel.send(PREFILL, json.dumps(self.setup).encode())
            stream = TensorStream(worker.channel, self.segment_bytes + EARLY_BYTES)
            return PrefillProcess(self.number, stream, stream, self)
        except OSError as error:
            worker.channel.close()
            raise ServerUnreachable(f"{self.title} has left ({reason_of(error)})", "see what it printed") from None
        except BaseException:
            worker.channel.close()
            raise

    def connect_again(self, reason: str, closed: threading.Event) -> "PrefillProcess | None":
        """Reconnect to the worker until it has loaded the model again, at growing intervals; None after `closed`
        is set. reason: how it has ended"""
        if closed.is_set():
            return None
        if time.monotonic() - self.loaded_at >= STEADY_S:
            self.failures = 0
        told, text = "", "%s %s; its prompts are computed elsewhere, next attempt in %g s"
        log.warning(text, self.title, reason, self.delay_s)
        while not closed.wait(self.delay_s):
            self.failures += 1
            try:
                process = self.connect()
                process.wait_until_loaded()
            except LocalLLMError as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("%s; the attempt is repeated", told)
            else:
                self.loaded_at = time.monotonic()
                log.info("%s computes prompts again", self.title)
                return process
        return None

    @property
    def delay_s(self) -> float:
        return min(FIRST_DELAY_S * 2 ** min(self.failures, 10), MAX_DELAY_S)


class PrefillProcess:
    """A connection to a process that computes prompts, as the engine's thread sees it."""

    def __init__(
        self,
        number: int,
        channel: Channel | TensorStream,
        receiver: Receiver,
        address: PrefillAddress | WorkerAddress | None = None,
    ):
        """address: where to connect again when it has ended; None: nowhere"""
        self.number = number
        self.channel = channel
        self.receiver = receiver
        self.address = address
        self.is_alive = True
        self.frequencies = ""  # digest of its rotary frequencies
        self.context = 0
        self.loads: list[RemotePrompt] = []  # that it computes
        self.pieces = OrderedDict[int, None]()  # of prompts that it has computed

    @property
    def end_reason(self) -> str:
        """The reason why its connection has ended."""
        return self.channel.end_reason if isinstance(self.channel, TensorStream) else "has ended"

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of the prompts that were sent there from here."""
        return sum(load.missing for load in self.loads)

    def head_start(self, pieces: ListLike[int]) -> int:
        """Return how many tokens of a prompt it probably has cached, less those that it computes before, also
        for other processes: the highest number is the earliest end."""
        return self.known_tokens(pieces) - self.outstanding_tokens - self.receiver.reported

    def known_tokens(self, pieces: ListLike[int]) -> int:
        """Return how many tokens of a prompt it probably has cached."""
        return next((i * PIECE for i in range(len(pieces), 0, -1) if pieces[i - 1] in self.pieces), 0)

    def remember(self, pieces: ListLike[int]) -> None:
        for piece in pieces:
            self.pieces[piece] = None
            self.pieces.move_to_end(piece)
        while len(self.pieces) > MAX_PIECES:
            self.pieces.popitem(last=False)

    def wait_until_loaded(self) -> None:
        """Wait until it has loaded the model. Raises its error, after which the connection is closed."""
        message = self.channel.receive()
        if message and message[0] != FAILED:
            fields: dict[str, Any] = json.loads(message[1])
            self.frequencies, self.context = fields["frequencies"], fields["context"]
            return
        title = self.address.title if self.address else f"prefill process {self.number}"
        with closing(self.channel):
            if message:
                raise reported_error(title, message[1])
            raise LocalLLMError(f"{title} has ended", "load the model again")


def pieces_of(token_ids: ListLike[int], scope: str) -> list[int]:
    """Return what identifies the beginnings of a prompt, in pieces of PIECE tokens."""
    pieces, parent = list[int](), hash(scope)
    for start in range(0, len(token_ids) - PIECE + 1, PIECE):
        parent = hash((parent, *token_ids[start : start + PIECE]))
        pieces.append(parent)
    return pieces
