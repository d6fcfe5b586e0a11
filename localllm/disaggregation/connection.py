"""A process that computes prompts, as the one that answers sees it: how it connects, what it has sent there, and
which beginnings of prompts it will find there."""

import json
import os
import socket
from collections import OrderedDict
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.disaggregation.transport import FAILED, SETUP, Receiver, SharedMemory, open_slots
from localllm.errors import LocalLLMError
from localllm.parallel.channel import Channel

if TYPE_CHECKING:
    from localllm.disaggregation.prefill_tier import RemotePrompt

PIECE = 128  # tokens by which the beginnings of prompts are remembered
MAX_PIECES = 10_000  # remembered for each process


@dataclass(frozen=True)
class PrefillAddress:
    """Where a process that computes prompts listens, and what it is told by who connects."""

    number: int
    path: Path  # of its socket
    setup: dict[str, Any]  # fields of `llm.prefill_process.Setup`, without those of the shared memory
    segment_bytes: int  # most bytes of keys, values and states that are handed over at once

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


class PrefillProcess:
    """A connection to a process that computes prompts, as the engine's thread sees it."""

    def __init__(self, number: int, channel: Channel, receiver: Receiver, address: PrefillAddress | None = None):
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
        """Wait until it has loaded the model. Raises its error."""
        message = self.channel.receive()
        title = f"prefill process {self.number}"
        if message is None:
            raise LocalLLMError(f"{title} has ended", "load the model again")
        fields: dict[str, Any] = json.loads(message[1])
        if message[0] == FAILED:
            raise LocalLLMError(f"{title}: {fields['message']}", fields["remedy"])
        self.frequencies, self.context = fields["frequencies"], fields["context"]


def pieces_of(token_ids: ListLike[int], scope: str) -> list[int]:
    """Return what identifies the beginnings of a prompt, in pieces of PIECE tokens."""
    pieces, parent = list[int](), hash(scope)
    for start in range(0, len(token_ids) - PIECE + 1, PIECE):
        parent = hash((parent, *token_ids[start : start + PIECE]))
        pieces.append(parent)
    return pieces
