"""Pipeline stages on several machines: rank 0 has the first, and a worker (`listener`) each of the others.

Everything goes through one connection from rank 0 to each worker, hidden states too: rank 0 passes on those from
one worker to the next. So a worker needs one port, reachable from the first machine alone, also through a tunnel,
and nothing listens that does not ask for the token, as gloo's connections would. Of N stages, N - 2 messages of a
step go one way more than between neighbours.
"""

import contextlib
import json
import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from localllm.arch.stages import Position
from localllm.checkpoint.digest import FileDigest
from localllm.errors import LocalLLMError, RankFailed, ServerTooSlow, UsageError
from localllm.parallel.channel import FACTS, FAILED, HIDDEN, MAX_MESSAGE_BYTES, MODEL, Channel, reported_error
from localllm.parallel.group import REMEDY, Follower, Leader
from localllm.parallel.handshake import open_connection
from localllm.parallel.remote_caches import tensor_at
from localllm.runtime.kernels.cpu.compile import COMPILE_ONLY
from localllm.runtime.kv_cache.host_copies import to_part

FACTS_S = 60.0  # in which a worker has imported torch
STEP_S = 600.0  # in which a step comes back from the last stage; a lost connection shows earlier


@dataclass
class RemoteWorker:
    """A connection to a worker, and what it has said of its machine."""

    address: str
    channel: Channel
    device: str  # such as cuda:0
    device_type: str
    free_bytes: int  # of the device
    auto_dtype: str  # in which it computes a model in bfloat16 by default
    processor: str  # see `processor_features`

    @property
    def title(self) -> str:
        return f"the worker at {self.address}"

    def receive(self, kind: int) -> dict[str, Any]:
        """Return its next message, of this kind. Raises the error that it reports instead."""
        return receive_fields(self.title, self.channel, kind)


def receive_fields(title: str, channel: Channel, kind: int) -> dict[str, Any]:
    message = channel.receive()
    if message is None:
        raise ServerTooSlow(f"{title} has ended, or does not answer", "check what the worker printed")
    if message[0] == FAILED:
        raise reported_error(title, message[1])
    if message[0] != kind:
        raise LocalLLMError(f"{title} sent a message of kind {message[0]}", "report this as a bug")
    return json.loads(message[1])


def connect_workers(addresses: Sequence[str], token: bytes) -> list[RemoteWorker]:
    """Connect to workers, which are then in use until their channels are closed. Raises as `open_connection`, Busy
    for a worker that computes for another machine, and UsageError for an address that is named twice."""
    if len(set(addresses)) < len(addresses):
        raise UsageError("a worker is named twice", "start one for each device, at a port of its own")
    channels: list[Channel] = []
    try:
        channels += (open_connection(address, token) for address in addresses)
        workers = []
        for address, channel in zip(addresses, channels, strict=True):
            channel.connection.settimeout(FACTS_S)
            workers.append(
                RemoteWorker(address, channel, **receive_fields(f"the worker at {address}", channel, FACTS))
            )
            channel.connection.settimeout(None)
            channel.limit = MAX_MESSAGE_BYTES
        return workers
    except BaseException:
        for channel in channels:
            channel.close()
        raise


def send_model(workers: Sequence[RemoteWorker], name: str, quant: str | None, files: Sequence[FileDigest]) -> None:
    """Have workers find a model, and check that its files there are the same. name: of the model as published, or
    its path; quant: to which they quantize it first. Raises their errors."""
    listed = [[file.path, file.size, file.sha256, file.samples] for file in files if file.affects_logits]
    for worker in workers:
        worker.channel.send(MODEL, json.dumps({"name": name, "quant": quant, "files": listed}).encode())
    for worker in workers:
        worker.receive(MODEL)


def fill(x: Tensor, content: bytearray) -> Tensor:
    """Fill a tensor with the bytes of one of its shape and dtype. Raises ValueError for another number."""
    if len(content) != x.nbytes:
        raise ValueError(f"hidden states of {len(content)} bytes, and {x.nbytes} were expected")
    return x.copy_(tensor_at(content, 0, (x.dtype, tuple(x.shape))))


class WholeLayers:
    """Ranks that have whole layers each."""

    def __init__(self, position: Position):
        self.position = position
        self.shard = position.shard
        self.concurrent_steps = position.stage_count

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> None:
        pass


class RemoteLeader(WholeLayers, Leader):
    """Rank 0 of stages on other machines."""

    def __init__(self, position: Position, workers: Sequence[RemoteWorker]):
        WholeLayers.__init__(self, position)
        Leader.__init__(self, position)
        self.workers = workers
        self.channels = [worker.channel for worker in workers]
        self.arrived = queue.SimpleQueue[bytearray | None]()  # from the last stage; None: a rank has ended

    def start(self, setup: dict[str, Any]) -> None:
        """Have the workers load their stages. setup: as for `send_setup`"""
        for rank in range(1, self.position.size):
            self.send_setup(rank, setup)

    def title(self, rank: int) -> str:
        return self.workers[rank - 1].title

    def connect(self) -> None:
        """Nothing: all messages go through the connections to the workers."""

    def handle(self, rank: int, kind: int, content: bytearray) -> None:
        if kind != HIDDEN:
            super().handle(rank, kind, content)
        elif rank == self.position.size - 1:
            self.arrived.put(content)
        else:
            with contextlib.suppress(OSError):  # its own thread reports that it has ended
                self.channels[rank].send(HIDDEN, content)

    def send_to_next_stage(self, x: Tensor) -> None:
        if COMPILE_ONLY.get() is None:
            self.channels[0].send_parts(HIDDEN, [to_part(x.cpu()).data])

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x
        try:
            content = self.arrived.get(timeout=STEP_S)
        except queue.Empty:
            raise TimeoutError(f"no answer of {self.title(self.position.size - 1)} in {STEP_S:.0f} s") from None
        if content is None:
            raise ConnectionError("a stage has ended")
        return fill(x, content)

    def abort(self) -> None:
        self.arrived.put(None)

    def ended(self, rank: int, message: tuple[int, bytearray] | None = None) -> RankFailed:
        if message:
            return RankFailed(f"{self.title(rank)} failed: {json.loads(message[1])['message']}", REMEDY)
        return RankFailed(f"{self.title(rank)} has ended, or the network to it is cut", REMEDY)


class StageFollower(Follower, WholeLayers):
    """A worker's stage."""

    def __init__(self, position: Position, channel: Channel):
        WholeLayers.__init__(self, position)
        Follower.__init__(self, channel)
        self.later = deque[tuple[int, bytearray]]()  # messages that came before the hidden states of a step

    def connect(self) -> None:
        """Nothing: all messages go through the connection to rank 0."""

    def next_message(self) -> tuple[int, bytearray] | None:
        return self.later.popleft() if self.later else super().next_message()

    def send_to_next_stage(self, x: Tensor) -> None:
        if COMPILE_ONLY.get() is None:
            self.channel.send_parts(HIDDEN, [to_part(x.cpu()).data])

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x
        while message := self.channel.receive():
            if message[0] == HIDDEN:
                return fill(x, message[1])
            self.later.append(message)
        raise ConnectionError("rank 0 has ended")
