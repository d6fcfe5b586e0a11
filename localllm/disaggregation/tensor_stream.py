"""Keys and values between two machines, over the connection of a worker: the tensors of a segment as one message,
then a message that describes them.

At most SLOTS segments are on their way, so that a slow link fills the memory of neither side. Messages wait for a
thread that sends them: what the other side does not read never holds up an engine.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import Buffer

from localllm.disaggregation.transport import (
    ALIGNMENT,
    PING,
    PONG,
    SLOTS,
    TENSORS,
    Message,
    lay_out,
    parts_in,
)
from localllm.metrics import TierMove
from localllm.parallel.channel import LOADED, Channel
from localllm.runtime.kv_cache.host_copies import to_part
from localllm.runtime.kv_cache.snapshot import Part

PING_S = 5.0  # between messages that the other side answers unless its engine hangs
SILENCE_S = 30.0  # without a byte from there, after which it counts as ended
MAX_WAITING_BYTES = 2**26  # of messages that are not sent; prompts take 4 bytes a token


class TensorStream:
    """An end of a connection between an engine that computes prompts and one that answers: a channel, a Sender at
    the first and a Receiver at the second."""

    def __init__(self, channel: Channel, limit: int):
        """limit: bytes of a message that is received; a larger one ends the connection"""
        self.channel = channel
        channel.limit = limit
        self.outbox = queue.SimpleQueue[tuple[int, list[Buffer]] | None]()
        self.waiting_bytes = 0  # of messages without tensors in the outbox
        self.lock = threading.Lock()  # of `waiting_bytes`
        self.closed = threading.Event()
        self.end_reason = "has ended, or the network to it is cut"
        self.free_slots = list(range(SLOTS))
        self.arrived: dict[int, bytearray] = {}  # tensors by slot
        self.received = TierMove()
        threading.Thread(target=self.write, name="localllm-send", daemon=True).start()

    # As a channel

    def send(self, kind: int, content: bytes) -> None:
        """Have a message sent. Raises ConnectionError if too many wait, or the other side has ended."""
        with self.lock:
            self.waiting_bytes += len(content)
        if self.waiting_bytes > MAX_WAITING_BYTES:
            self.close()
        if self.closed.is_set():
            raise ConnectionError("the other side does not read")
        self.outbox.put((kind, [content]))

    def write(self) -> None:
        """Send messages until the connection ends: the body of a thread."""
        while item := self.outbox.get():
            kind, parts = item
            try:
                self.channel.send_parts(kind, parts)
            except OSError:
                break
            if kind != TENSORS:
                with self.lock:
                    self.waiting_bytes -= memoryview(parts[0]).nbytes
        self.close()

    def receive(self) -> tuple[int, bytearray] | None:
        """Return the next message for the caller: tensors and pongs are handled here. None if the connection has
        ended, or is closed because of what was received."""
        while message := self.channel.receive():
            kind, content = message
            if kind == TENSORS:
                slot = int.from_bytes(content[:ALIGNMENT], "little")
                if slot >= SLOTS:
                    break
                self.arrived[slot] = content  # instead of what was there, if its prompt was cancelled
                nbytes, seconds = self.received
                took = self.channel.heard_at - self.channel.began_at
                self.received = TierMove(nbytes + len(content) - ALIGNMENT, seconds + took)
            elif kind != PONG:
                if kind == LOADED:  # from now on, it answers
                    threading.Thread(target=self.watch, name="localllm-watch", daemon=True).start()
                return message
        return None

    def watch(self) -> None:
        """End the connection when nothing has come for a while: the body of a thread."""
        while not self.closed.wait(PING_S):
            if time.monotonic() - self.channel.heard_at > SILENCE_S:
                self.end_reason = f"has not answered for {SILENCE_S:.0f} s"
                self.close()
            else:
                with contextlib.suppress(ConnectionError):  # it ends
                    self.send(PING, Message({}).encode())

    def close(self) -> None:
        """End the connection, from any thread. The other side and `receive` notice it."""
        self.closed.set()
        self.outbox.put(None)
        self.channel.close()

    # As a Sender

    @property
    def has_room(self) -> bool:
        return bool(self.free_slots)

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        slot = self.free_slots.pop()
        parts, end = lay_out(tensors, ALIGNMENT)
        chunks: list[Buffer] = [slot.to_bytes(ALIGNMENT, "little")]
        for tensor in tensors.values():
            if tensor.nbytes:
                chunks += [to_part(tensor).data, bytes(-tensor.nbytes % ALIGNMENT)]
        self.outbox.put((TENSORS, chunks))
        return {"slot": slot, "parts": parts, "bytes": end - ALIGNMENT}

    def release(self, location: Mapping[str, Any]) -> None:
        self.free_slots.append(location["slot"])

    def report(self, tokens: int) -> None:
        """A worker computes for one machine: there are no others."""

    # As a Receiver

    @property
    def reported(self) -> int:
        return 0

    def get(self, location: Mapping[str, Any]) -> dict[str, Part]:
        return parts_in(memoryview(self.arrived.pop(location["slot"], b"")), location["parts"])
