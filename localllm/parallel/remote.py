"""Pipeline stages on several machines: rank 0 has the first, and a worker (`listener`) each of the others.

Everything goes through one connection from rank 0 to each worker, hidden states too: rank 0 forwards those from
one worker to the next. So a worker needs one port, reachable from the first machine alone, also through a tunnel,
and nothing listens that does not ask for the token, as gloo's connections would. Of N stages, N - 2 messages of a
step go one way more than between neighbours.

With tensor parallelism, each machine divides its stage among processes of its own. The first of them has the
connection, and forwards messages to the others over the sockets by which it has started them.
"""

import contextlib
import json
import queue
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Buffer

from localllm.arch.stages import Position
from localllm.checkpoint.digest import FileDigest
from localllm.errors import LocalLLMError, RankFailed, ServerTooSlow, UsageError
from localllm.parallel.channel import (
    ADDRESS,
    CACHES,
    CONNECTED,
    FACTS,
    FAILED,
    FORWARDED,
    HIDDEN,
    LOADED,
    MAX_MESSAGE_BYTES,
    MODEL,
    STEP,
    Channel,
    reported_error,
)
from localllm.parallel.group import REMEDY, ProcessFollower, ProcessLeader
from localllm.parallel.handshake import check_distinct, open_connection
from localllm.parallel.remote_caches import tensor_at
from localllm.runtime.kernels.cpu.compile import COMPILE_ONLY
from localllm.runtime.kv_cache.host_copies import to_part

NOTICE_S = 1.0  # in which the end of a process shows on its socket, after it shows in a sum
FACTS_S = 60.0  # in which a worker has imported torch
STEP_S = 600.0  # in which a step comes back from the last stage; a lost connection shows earlier


@dataclass
class RemoteWorker:
    """A connection to a worker, and the properties of its machine that it has reported."""

    address: str
    channel: Channel
    device: str  # such as cuda:0
    device_type: str
    free_bytes: int  # for each process: a share of a CPU's, or of the fullest GPU
    auto_dtype: str  # in which it computes a model in bfloat16 by default
    processor: str  # see `processor_features`; of GPUs that differ, all names

    @property
    def title(self) -> str:
        return f"the worker at {self.address}"

    def check_device(self, device: torch.device) -> None:
        """Raise UsageError if it has another type of device than this machine."""
        if self.device_type != device.type:
            raise UsageError(
                f"{self.title} uses {self.device}, and this machine {device}",
                "give --device cpu on both, or a GPU on both",
            )

    def check_dtype(self, requested: str, computed: str) -> None:
        """Raise UsageError if it would compute in another dtype by itself, and none was requested. computed: in
        which this machine computes"""
        if requested == "auto" and computed == "bfloat16" != self.auto_dtype:
            raise UsageError(
                f"{self.title} has no fast bfloat16, in which this machine computes",
                "give --dtype float32, or --dtype bfloat16, which is slow there",
            )

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


def connect_workers(addresses: Sequence[str], token: bytes, tensor_parallel: int = 1) -> list[RemoteWorker]:
    """Connect to workers, which are then in use until their channels are closed. tensor_parallel: processes of
    each. Raises the errors of `open_connection`, Busy for a worker that computes for another machine, NoSuchDevice
    for one with too few GPUs, and UsageError for an address that is named twice."""
    check_distinct(addresses)
    channels: list[Channel] = []
    try:
        for address in addresses:
            channels.append(open_connection(address, token))
            with contextlib.suppress(OSError):  # it has ended, which is noticed below
                channels[-1].send(FACTS, json.dumps({"processes": tensor_parallel}).encode())
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


class RemoteLeader(ProcessLeader):
    """Rank 0 of stages on several machines, of which this one has the first."""

    def __init__(self, position: Position, device: torch.device, workers: Sequence[RemoteWorker]):
        """device: of this process"""
        super().__init__(position, device, across_machines=True)
        # Processes that divide a stage wait for the results of a step before they begin the next one.
        self.concurrent_steps = position.stage_count if position.tensor_size == 1 else 1
        self.workers = workers
        self.worker_ranks = range(self.shard.size, position.size, self.shard.size)  # the first one of each
        self.channels = dict(zip(self.worker_ranks, (worker.channel for worker in workers), strict=True))
        self.arrived = queue.SimpleQueue[bytearray | None]()  # from the last stage; None: a rank has ended

    def start(self, setup: dict[str, Any]) -> None:
        """Have the other processes here and the workers load their parts. setup: as for `send_setup`"""
        super().start(setup)
        for rank in self.worker_ranks:
            self.send_setup(rank, setup | {"across_machines": True})

    def title(self, rank: int) -> str:
        if rank in self.members:
            return f"{super().title(rank)} on this machine"
        return self.workers[rank // self.shard.size - 1].title

    def send_parts(self, index: int, kind: int, parts: Iterable[Buffer]) -> None:
        rank = index + 1
        if rank in self.channels:
            return super().send_parts(index, kind, parts)
        in_stage = rank % self.shard.size
        super().send_parts(index - in_stage, FORWARDED, [ADDRESS.pack(in_stage, kind), *parts])

    def handle(self, rank: int, kind: int, content: bytearray) -> None:
        if kind == FORWARDED:
            in_stage, kind = ADDRESS.unpack_from(content)
            del content[: ADDRESS.size]
            rank += in_stage
        if kind != HIDDEN:
            super().handle(rank, kind, content)
            return
        is_last = rank == self.worker_ranks[-1]
        for target in self.members[1:] if is_last else [rank + self.shard.size]:
            with contextlib.suppress(OSError):  # its own thread reports that it has ended
                self.channels[target].send(HIDDEN, content)
        if is_last:
            self.arrived.put(content)

    def send_to_next_stage(self, x: Tensor) -> None:
        if COMPILE_ONLY.get() is None:
            self.channels[self.worker_ranks[0]].send_parts(HIDDEN, [to_part(x.cpu()).data])

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x
        try:
            content = self.arrived.get(timeout=STEP_S)
        except queue.Empty:
            raise TimeoutError(f"no answer from {self.workers[-1].title} in {STEP_S:.0f} s") from None
        if content is None:
            raise ConnectionError("a stage has ended")
        return fill(x, content)

    def abort(self) -> None:
        super().abort()
        self.arrived.put(None)

    def ended(self, rank: int, message: tuple[int, bytearray] | None = None) -> RankFailed:
        if rank in self.members:
            return super().ended(rank, message)
        if message:
            return RankFailed(f"{self.title(rank)} failed: {json.loads(message[1])['message']}", REMEDY)
        return RankFailed(f"{self.title(rank)} has ended, or the network to it is cut", REMEDY)


class FromOneConnection:
    """Receives the messages of a stage on another machine, all through one connection."""

    channel: Channel

    def __init__(self) -> None:
        self.later = deque[tuple[int, bytearray]]()  # messages that came before the hidden states of a step

    def receive(self) -> tuple[int, bytearray] | None:
        return self.channel.receive()

    def next_message(self) -> tuple[int, bytearray] | None:
        """Return the next message of rank 0; None when it has ended."""
        return self.later.popleft() if self.later else self.receive()

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x
        while message := self.receive():
            if message[0] == HIDDEN:
                return fill(x, message[1])
            self.later.append(message)
        raise ConnectionError("rank 0 has ended")


class StageMember(FromOneConnection, ProcessFollower):
    """Another process of a stage than the first one of its machine, which shares the hidden states with it."""

    def __init__(self, *arguments: Any, **options: Any):
        """Take the arguments of `ProcessFollower`."""
        FromOneConnection.__init__(self)
        ProcessFollower.__init__(self, *arguments, **options)

    def send_to_next_stage(self, x: Tensor) -> None:
        """Do nothing: the first process sends the hidden states, which are the same in all."""


class StageLeader(FromOneConnection, ProcessLeader):
    """The first process of a worker's stage: it follows rank 0, and forwards its messages to the others there."""

    def __init__(self, position: Position, channel: Channel, device: torch.device):
        """channel: to rank 0; device: of this process"""
        FromOneConnection.__init__(self)
        ProcessLeader.__init__(self, position, device, across_machines=True)
        self.channel = channel

    def finish_load(self, loaded: dict[str, Any]) -> None:
        """Implement `Follower.finish_load` for all processes of the stage. Raises the errors of
        `receive_from_all`."""
        self.channel.send(LOADED, json.dumps([loaded, *self.receive_loaded()]).encode())
        if self.channel.receive() is None:
            raise ConnectionError("rank 0 has ended")
        self.connect_and_watch()
        self.channel.send(CONNECTED, b"{}")

    def receive(self) -> tuple[int, bytearray] | None:
        while message := self.channel.receive():
            kind, content = message
            if kind == FORWARDED:
                in_stage, kind = ADDRESS.unpack_from(content)
                self.forward([self.position.rank + in_stage], kind, memoryview(content)[ADDRESS.size :])
                continue
            if kind in (STEP, CACHES, HIDDEN):
                self.forward(self.members[1:], kind, content)
            return message
        return None

    def forward(self, ranks: Iterable[int], kind: int, content: Buffer) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):  # its own thread reports that it has ended
                self.channels[rank].send_parts(kind, [content])

    def handle(self, rank: int, kind: int, content: bytearray) -> None:
        with contextlib.suppress(OSError):  # rank 0 has ended, which ends this process
            self.channel.send_parts(FORWARDED, [ADDRESS.pack(rank - self.position.rank, kind), content])

    def send_to_next_stage(self, x: Tensor) -> None:
        if COMPILE_ONLY.get() is None:
            self.channel.send_parts(HIDDEN, [to_part(x.cpu()).data])

    def step_failed(self, error: Exception) -> Exception:
        if self.processes and not isinstance(error, ConnectionError):  # of rank 0, which has left
            self.failed.wait(NOTICE_S)  # a collective may notice the end of a process first
        return self.failure or error

    def kill(self) -> None:
        """End the other processes of the stage at once, whatever they do."""
        with self.lock:
            self.closing = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
