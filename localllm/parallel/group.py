"""The processes of tensor and pipeline parallelism: rank 0 schedules and sends each step, and all compute it.

Steps go through a socket to each rank, which also shows when a process ends; within a machine without GPUs, sums
go through shared memory. What else ranks of a machine exchange, such as logits and the hidden states between
stages, goes through torch.distributed, by gloo on CPUs and by NCCL on GPUs; `remote` sends hidden states to other
machines. NCCL has not been measured yet: no test here has two GPUs.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from typing_extensions import Buffer

from localllm.arch.stages import Position
from localllm.errors import LocalLLMError, RankFailed
from localllm.parallel.channel import (
    CACHES,
    CONNECTED,
    COPIED,
    EXIT_WAIT_S,
    FAILED,
    LOADED,
    SETUP,
    STEP,
    Channel,
    describe_end,
    end_process,
    open_memory,
    reported_error,
    start_process,
)
from localllm.parallel.remote_caches import RemoteCaches
from localllm.parallel.shared_sums import SharedSums, memory_bytes, shared_sums_supported
from localllm.parallel.steps import StepEncoder
from localllm.runtime.kernels.cpu.compile import COMPILE_ONLY
from localllm.runtime.kv_cache.host_copies import CacheTypes
from localllm.runtime.kv_cache.sequence_state import CacheCopies, SequenceState

COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # in which ranks wait for each other between two sums of a step
KILL_NOTICE_S = 1.0  # at most, from the close of a killed process's connections until it can be waited for
LOOPBACK = "127.0.0.1"
REMEDY = "load the model again"


class Collectives:
    """Sums and gathered tensors of the ranks of a stage, and what stages send to each other."""

    def __init__(self, position: Position, folder: Path, device: torch.device, *, across_machines: bool = False):
        """folder: private to the ranks of this machine, where they exchange their addresses; device: of this rank;
        across_machines: each stage is on a machine of its own"""
        self.position = position
        self.shard = position.shard
        self.concurrent_steps = 1  # as stages share a CPU; on GPUs, see `Collectives.send_to_next_stage`
        self.across_machines = across_machines
        first = position.rank - self.shard.rank
        # The ranks of this machine.
        self.members = range(first, first + self.shard.size) if across_machines else range(position.size)
        self.folder = folder
        self.device = device
        self.tensor_group: Any = None  # the ranks of the same stage
        self.pipeline_group: Any = None  # all ranks, on one machine
        self.sums: SharedSums | None = None  # None: by the tensor group
        self.gather_options = dist.GatherOptions()
        self.broadcast_options = dist.BroadcastOptions()

    def connect(self) -> None:
        """Connect with all other ranks of this machine, which do the same."""
        sums_are_all = self.across_machines and self.position.rank >= self.shard.size and self.sums is not None
        if len(self.members) == 1 or sums_are_all:  # of a worker: logits are gathered in the first stage alone
            return
        position, path = self.position, str(self.folder / "addresses")
        store = dist.FileStore(path, len(self.members))  # pyright: ignore[reportPrivateImportUsage]
        if self.shard.size > 1:
            stage = position.rank // position.tensor_size
            self.tensor_group = self.make_group(f"stage {stage}", store, self.shard.rank, self.shard.size)
        if position.stage and not self.across_machines:
            self.pipeline_group = self.make_group("pipeline", store, position.rank, position.size)

    def make_group(self, name: str, store: Any, rank: int, size: int) -> Any:
        store = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
        if self.device.type == "cpu":
            options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._timeout = COLLECTIVE_TIMEOUT
            options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]  # no other machine connects
            return ProcessGroupGloo(store, rank, size, options)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # no other machine connects
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def share_sums(self, descriptor: int) -> None:
        """Have sums go through memory that the ranks of the stage share, and close its descriptor."""
        self.sums = SharedSums(descriptor, self.shard.rank, self.shard.size, self.check_others)
        os.close(descriptor)

    def check_others(self, waited_s: float) -> None:
        """Raise if another rank has ended, or has been waited for too long."""
        if waited_s > COLLECTIVE_TIMEOUT.total_seconds():
            raise TimeoutError(f"another process has not added its part of a sum for {waited_s:.0f} s")

    def all_reduce(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x
        if self.sums is not None:
            return self.sums.all_reduce(x)
        self.tensor_group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x.repeat(1, self.shard.size)
        if self.sums is not None:
            return self.sums.all_gather(x)
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(self.shard.size)]
        self.tensor_group.allgather([pieces], [x]).wait()
        return torch.cat(pieces, -1)

    def broadcast(self, x: Tensor) -> None:
        if self.shard.size > 1 and self.position.rank < self.shard.size:
            self.tensor_group.broadcast([x], self.broadcast_options).wait()

    def send_to_next_stage(self, x: Tensor) -> None:
        """See `Ranks`. It may wait until the next stage receives, so that no further step can be sent before."""
        if COMPILE_ONLY.get() is None:
            self.pipeline_group.send([x.contiguous()], self.rank_in_stage(1), 0).wait()

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is None:
            self.pipeline_group.recv([x], self.rank_in_stage(-1), 0).wait()
        return x

    def rank_in_stage(self, distance: int) -> int:
        """Return the rank with this one's position in another stage, `distance` stages on in the ring."""
        position = self.position
        return (position.rank + distance * position.tensor_size) % position.size

    def gather_columns(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x.repeat(1, self.shard.size)
        if not len(x):
            return x.new_empty(0, x.shape[1] * self.shard.size)
        x = x.contiguous()
        if self.shard.rank:
            self.tensor_group.gather([], [x], self.gather_options).wait()
            return x
        pieces = [torch.empty_like(x) for _ in range(self.shard.size)]
        self.tensor_group.gather([pieces], [x], self.gather_options).wait()
        return torch.cat(pieces, -1)

    def abort(self) -> None:
        """End collectives that wait for a process that has ended."""
        for group in (self.tensor_group, self.pipeline_group):
            if group is not None and self.device.type != "cpu":
                group.abort()


class Leader(ABC):
    """Rank 0, which sends the other ranks the work and notices when one ends."""

    def __init__(self, position: Position):
        """position: of this process, whose rank is 0"""
        self.position = position
        self.channels: dict[int, Channel] = {}  # to other ranks; a worker's first one forwards messages there
        self.encoder = StepEncoder(position.stage_count)
        self.block_size = 0
        self.failure: RankFailed | None = None
        self.failed = threading.Event()
        self.closing = False
        self.lock = threading.Lock()
        self.on_failure: Callable[[RankFailed], object] = lambda error: None
        self.read_bytes: list[int] = []  # of weights, by each other rank
        self.weight_bytes: list[int] = []  # of memory that weights occupy in each other rank, besides mapped files
        self.other_caches = RemoteCaches(self.send_parts)

    @abstractmethod
    def title(self, rank: int) -> str:
        """Return how messages name a rank."""

    @abstractmethod
    def connect(self) -> None:
        """Connect with the other ranks of this machine, which do the same."""

    @abstractmethod
    def ended(self, rank: int, message: tuple[int, bytearray] | None = None) -> RankFailed:
        """Return the error for a rank that has ended. message: its last one"""

    def close(self) -> None:
        """End the other ranks, or leave workers, which are then free for others."""
        with self.lock:
            self.closing = True
        for channel in self.channels.values():
            channel.close()

    def send_setup(self, rank: int, setup: dict[str, Any]) -> None:
        """Have a rank load its part. setup: fields of `rank.Setup` without its position"""
        self.block_size = setup["block_size"]
        fields = setup | {"position": asdict(replace(self.position, rank=rank))}
        self.channels[rank].send(SETUP, json.dumps(fields).encode())

    def finish_start(self) -> None:
        """Wait until all ranks have loaded their parts, and connect with them. Raises their errors."""
        loaded = self.receive_loaded()
        self.read_bytes, self.weight_bytes = ([m[name] for m in loaded] for name in ("read_bytes", "weight_bytes"))
        types = [CacheTypes.from_json(fields["cache_types"]) for fields in loaded]
        self.other_caches.connect(types, self.block_size)
        self.connect_and_watch()

    def receive_loaded(self) -> list[dict[str, Any]]:
        """Return the reports of the other ranks on their parts, once these are loaded. Raises the errors of
        `receive_from_all`."""
        return [fields for message in self.receive_from_all() for fields in message]

    def connect_and_watch(self) -> None:
        """Connect with the other ranks, and start a thread for what each sends. Raises the errors of
        `receive_from_all`."""
        for channel in self.channels.values():
            with contextlib.suppress(OSError):  # it has ended, which is noticed below
                channel.send(CONNECTED, b"{}")
        self.connect()
        self.receive_from_all()
        for rank, channel in self.channels.items():
            name = f"localllm-rank-{rank}"
            threading.Thread(target=self.watch, args=(rank, channel), name=name, daemon=True).start()

    def receive_from_all(self) -> list[Any]:
        """Return a message of each channel, in the order of ranks. Raises the error of a rank that has failed."""
        messages = []
        for rank, channel in sorted(self.channels.items()):
            message = channel.receive()
            if message is None:
                raise self.ended(rank)
            kind, content = message
            if kind == FAILED:
                raise reported_error(self.title(rank), content)
            messages.append(json.loads(content))
        return messages

    def watch(self, rank: int, channel: Channel) -> None:
        """Receive what a rank sends, until it ends: the body of a thread."""
        message = channel.receive()
        while message and message[0] != FAILED:
            self.handle(rank, *message)
            message = channel.receive()
        with self.lock:
            is_expected = self.closing or self.failure is not None
            if not is_expected:
                self.failure = self.ended(rank, message)
        self.other_caches.fail(self.failure or LocalLLMError("the model is closed", "load it again"))
        if is_expected:
            return
        assert self.failure
        self.failed.set()
        self.abort()
        self.on_failure(self.failure)

    def handle(self, rank: int, kind: int, content: bytearray) -> None:
        """Handle a message of a rank that continues."""
        assert kind == COPIED
        self.other_caches.receive(rank - 1, content)

    @abstractmethod
    def abort(self) -> None:
        """End waits of a step for a rank that has ended."""

    def send_step(
        self,
        states: Sequence[SequenceState],
        token_ids: Sequence[Sequence[int]],
        logit_index: Sequence[int],
        copies: CacheCopies,
        *,
        hidden: bool,
        has_unread: bool,
    ) -> None:
        message = self.encoder.encode(states, token_ids, logit_index, copies, hidden=hidden, has_unread=has_unread)
        self.send_to_all(STEP, message)

    def send_caches(self, blocks: int, state_slots: int, max_running: int, context: int) -> None:
        sizes = {"blocks": blocks, "state_slots": state_slots, "max_running": max_running, "context": context}
        self.send_to_all(CACHES, json.dumps(sizes).encode())

    def send_to_all(self, kind: int, content: bytes) -> None:
        for channel in self.channels.values():
            try:
                channel.send(kind, content)
            except OSError as error:
                raise self.step_failed(error) from error

    def send_parts(self, index: int, kind: int, parts: Iterable[Buffer]) -> None:
        """Send a message to the other rank with this index, which is its rank - 1."""
        try:
            self.channels[index + 1].send_parts(kind, parts)
        except OSError as error:
            raise self.step_failed(error) from error

    def step_failed(self, error: Exception) -> Exception:
        self.failed.wait(EXIT_WAIT_S)  # a collective may notice the end of a process first
        return self.failure or RankFailed(f"a step of {self.position.size} processes failed: {error}", REMEDY)


class ProcessLeader(Collectives, Leader):
    """The first of the processes of this machine, which it starts."""

    def __init__(self, position: Position, device: torch.device, *, across_machines: bool = False):
        """across_machines: as in `Collectives`"""
        Leader.__init__(self, position)
        folder = Path(tempfile.mkdtemp(prefix="localllm-ranks-"))
        Collectives.__init__(self, position, folder, device, across_machines=across_machines)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, setup: dict[str, Any]) -> None:
        """Start the other ranks, which load their parts. setup: as for `send_setup`, without the folder"""
        memory = self.open_memory()
        for index, rank in enumerate(self.members[1:], 1):
            process, channel = start_process("localllm.parallel.rank", memory[index // self.shard.size])
            self.processes.append(process)
            self.channels[rank] = channel
            self.send_setup(rank, setup | {"folder": str(self.folder), "across_machines": self.across_machines})
        for descriptors in memory[1:]:
            for descriptor in descriptors:
                os.close(descriptor)
        if memory[0]:
            self.share_sums(*memory[0])

    def open_memory(self) -> list[list[int]]:
        """Return the descriptor of memory for the sums of each stage; of none where sums go another way."""
        stages, ranks = len(self.members) // self.shard.size, self.shard.size
        if ranks == 1 or self.device.type != "cpu" or not shared_sums_supported():
            return [[] for _ in range(stages)]
        return [[open_memory(memory_bytes(ranks))] for _ in range(stages)]

    def check_others(self, waited_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        super().check_others(waited_s)

    def connect_and_watch(self) -> None:
        super().connect_and_watch()
        shutil.rmtree(self.folder, ignore_errors=True)  # in which the ranks have read addresses

    def ended(self, rank: int, message: tuple[int, bytearray] | None = None) -> RankFailed:
        if message:
            killed = self.find_killed()  # whose end others notice as a failed collective
            if killed is None:
                return RankFailed(f"{self.title(rank)} failed: {json.loads(message[1])['message']}", REMEDY)
            rank = killed
        process = self.processes[rank - self.members.start - 1]
        return RankFailed(f"{self.title(rank)} {describe_end(process)}", REMEDY)

    def find_killed(self) -> int | None:
        """Return the rank of a process that a signal has ended, if there is one."""
        deadline, killed = time.monotonic() + KILL_NOTICE_S, None
        while killed is None and time.monotonic() < deadline:
            time.sleep(0.01)
            codes = zip(self.members[1:], (process.poll() for process in self.processes), strict=True)
            killed = next((rank for rank, code in codes if code is not None and code < 0), None)
        return killed

    def title(self, rank: int) -> str:
        return f"process {rank - self.members.start + 1} of {len(self.members)}"

    def close(self) -> None:
        super().close()
        for process in self.processes:
            end_process(process)
        self.tensor_group = self.pipeline_group = None
        shutil.rmtree(self.folder, ignore_errors=True)


class Follower(ABC):
    """Another rank than 0, which runs what rank 0 sends."""

    def __init__(self, channel: Channel):
        """channel: to rank 0, or to the first process of this machine, which forwards its messages"""
        self.channel = channel

    def next_message(self) -> tuple[int, bytearray] | None:
        """Return the next message of rank 0; None when it has ended."""
        return self.channel.receive()

    def finish_load(self, loaded: dict[str, Any]) -> None:
        """Report that the part of this rank is loaded, and connect with the others. loaded: content of a `LOADED`
        message"""
        self.channel.send(LOADED, json.dumps([loaded]).encode())
        if self.channel.receive() is None:  # until all are loaded, which takes longer than connecting may
            raise ConnectionError("process 1 has ended")
        self.connect()
        self.channel.send(CONNECTED, b"{}")

    @abstractmethod
    def connect(self) -> None:
        """Connect with the other ranks of this machine, which do the same."""

    def send_step(self, *arguments: Any, **fields: Any) -> None:
        raise AssertionError("only rank 0 schedules")

    send_caches = send_step

    @property
    def other_caches(self) -> RemoteCaches:
        raise AssertionError("only rank 0 copies blocks of others")

    def step_failed(self, error: Exception) -> Exception:
        return error


class ProcessFollower(Collectives, Follower):
    """A rank that the first process of its machine has started."""

    def __init__(
        self,
        position: Position,
        folder: Path,
        device: torch.device,
        channel: Channel,
        *,
        across_machines: bool = False,
    ):
        """Take the arguments of `Collectives` and `Follower`."""
        Collectives.__init__(self, position, folder, device, across_machines=across_machines)
        Follower.__init__(self, channel)

    def check_others(self, waited_s: float) -> None:
        if self.channel.is_closed:
            raise ConnectionError("process 1 has ended")
        super().check_others(waited_s)
