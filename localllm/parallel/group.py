"""The processes of tensor parallelism: rank 0 schedules and sends each step, and all ranks compute it together.

Steps go through a pair of sockets to each rank, which also shows when a process ends; sums and logits go through
torch.distributed, by gloo on CPUs and by NCCL on GPUs. NCCL has not been measured yet: no test here has two GPUs.
"""

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from localllm.arch.shard import Shard
from localllm.errors import LocalLLMError, RankFailed
from localllm.parallel.channel import EXIT_WAIT_S, Channel, describe_end, end_process, start_process
from localllm.parallel.steps import StepEncoder
from localllm.runtime.kernels.cpu.compile import COMPILE_ONLY
from localllm.runtime.kv_cache.sequence_state import CacheCopies, SequenceState

# Kinds of messages. A process that ends sends none: its socket is closed.
SETUP, STEP, CACHES, LOADED, CONNECTED, FAILED = range(6)
COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # in which ranks wait for each other between two sums of a step
LOOPBACK = "127.0.0.1"
REMEDY = "load the model again"


class Collectives:
    """Sums and gathered tensors of all ranks."""

    def __init__(self, shard: Shard, folder: Path, device: torch.device):
        """folder: private to the ranks, where they exchange their addresses; device: of this rank"""
        self.shard = shard
        self.folder = folder
        self.device = device
        self.process_group: Any = None
        self.gather_options = dist.GatherOptions()
        self.broadcast_options = dist.BroadcastOptions()

    def connect(self) -> None:
        """Connect with all other ranks, which do the same."""
        path = str(self.folder / "addresses")
        store = dist.FileStore(path, self.shard.size)  # pyright: ignore[reportPrivateImportUsage]
        rank, size = self.shard.rank, self.shard.size
        if self.device.type == "cpu":
            options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._timeout = COLLECTIVE_TIMEOUT
            options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]  # no other machine connects
            self.process_group = ProcessGroupGloo(store, rank, size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            self.process_group = dist.ProcessGroupNCCL(store, rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is None:
            self.process_group.allreduce([x]).wait()
        return x

    def broadcast(self, x: Tensor) -> None:
        self.process_group.broadcast([x], self.broadcast_options).wait()

    def gather_columns(self, x: Tensor) -> Tensor:
        if COMPILE_ONLY.get() is not None:
            return x.repeat(1, self.shard.size)
        if not len(x):
            return x.new_empty(0, x.shape[1] * self.shard.size)
        x = x.contiguous()
        if self.shard.rank:
            self.process_group.gather([], [x], self.gather_options).wait()
            return x
        pieces = [torch.empty_like(x) for _ in range(self.shard.size)]
        self.process_group.gather([pieces], [x], self.gather_options).wait()
        return torch.cat(pieces, -1)

    def abort(self) -> None:
        """End collectives that wait for a process that has ended."""
        if self.process_group is not None and self.device.type != "cpu":
            self.process_group.abort()


class Leader(Collectives):
    """Rank 0, which starts the other ranks, sends them the work and notices when one ends."""

    def __init__(self, size: int, device: torch.device):
        super().__init__(Shard(0, size), Path(tempfile.mkdtemp(prefix="localllm-ranks-")), device)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Channel] = []
        self.encoder = StepEncoder()
        self.failure: RankFailed | None = None
        self.failed = threading.Event()
        self.closing = False
        self.lock = threading.Lock()
        self.on_failure: Callable[[RankFailed], object] = lambda error: None
        self.read_bytes: list[int] = []  # of weights, by each other rank

    def start(self, setup: dict[str, Any]) -> None:
        """Start the other ranks, which load their parts. setup: fields of `rank.Setup` without those of a rank"""
        for rank in range(1, self.shard.size):
            process, channel = start_process("localllm.parallel.rank")
            self.processes.append(process)
            self.channels.append(channel)
            fields = setup | {"rank": rank, "size": self.shard.size, "folder": str(self.folder)}
            self.channels[-1].send(SETUP, json.dumps(fields).encode())

    def finish_start(self) -> None:
        """Wait until all ranks have loaded their parts, and connect with them. Raises their errors."""
        self.read_bytes = [message["read_bytes"] for message in self.receive_from_all()]
        self.connect()
        self.receive_from_all()  # until then, they read addresses from the folder
        shutil.rmtree(self.folder, ignore_errors=True)
        for rank, channel in enumerate(self.channels, 1):
            name = f"localllm-rank-{rank}"
            threading.Thread(target=self.watch, args=(rank, channel), name=name, daemon=True).start()

    def receive_from_all(self) -> list[dict[str, Any]]:
        """Return a message of each other rank. Raises the error of one that has failed."""
        messages = []
        for rank, channel in enumerate(self.channels, 1):
            message = channel.receive()
            if message is None:
                raise self.ended(rank)
            kind, content = message
            fields = json.loads(content)
            if kind == FAILED:
                raise LocalLLMError(f"{self.title(rank)}: {fields['message']}", fields["remedy"])
            messages.append(fields)
        return messages

    def watch(self, rank: int, channel: Channel) -> None:
        """Wait for the end of a rank: the body of a thread."""
        message = channel.receive()
        with self.lock:
            if self.closing or self.failure:
                return
            self.failure = self.ended(rank, message)
        self.failed.set()
        self.abort()
        self.on_failure(self.failure)

    def ended(self, rank: int, message: tuple[int, bytes] | None = None) -> RankFailed:
        """Return the error for a rank that has ended. message: its last one"""
        if message and message[0] == FAILED:
            return RankFailed(f"{self.title(rank)} failed: {json.loads(message[1])['message']}", REMEDY)
        return RankFailed(f"{self.title(rank)} {describe_end(self.processes[rank - 1])}", REMEDY)

    def title(self, rank: int) -> str:
        return f"process {rank + 1} of {self.shard.size}"

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
        for channel in self.channels:
            try:
                channel.send(kind, content)
            except OSError as error:
                raise self.step_failed(error) from error

    def step_failed(self, error: Exception) -> Exception:
        self.failed.wait(EXIT_WAIT_S)  # a collective may notice the end of a process first
        return self.failure or RankFailed(f"a step of {self.shard.size} processes failed: {error}", REMEDY)

    def close(self) -> None:
        """End the other ranks."""
        with self.lock:
            self.closing = True
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            end_process(process)
        self.process_group = None
        shutil.rmtree(self.folder, ignore_errors=True)


class Follower(Collectives):
    """Another rank than 0, which runs what rank 0 sends."""

    def send_step(self, *arguments: Any, **fields: Any) -> None:
        raise AssertionError("only rank 0 schedules")

    send_caches = send_step

    def step_failed(self, error: Exception) -> Exception:
        return error
