"""Ranks of tensor and pipeline parallelism as threads of this process, which exchange real messages, so that every
family can be tested without starting processes. Collectives are sums in the order of ranks.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Buffer

from localllm.arch.cost import state_bytes
from localllm.arch.describe import parse_config
from localllm.arch.stages import Position
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import divide_model, part_of_model
from localllm.checkpoint.tensors import Weights
from localllm.parallel.channel import COPY_IN, COPY_OUT, STEP
from localllm.parallel.remote_caches import RemoteCaches, answer_copy_in, answer_copy_out
from localllm.parallel.steps import StepDecoder, StepEncoder
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.host_copies import to_part
from localllm.runtime.kv_cache.sequence_state import BlockPool, CacheCopies, SequenceState
from localllm.runtime.model import Decoder
from localllm.runtime.runner import Runner
from localllm.runtime.speculation.policy import Drafter
from localllm.runtime.weight_source import WeightSource

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE, STATE_SLOTS = 64, 8, 24
# Arguments of RanksInThreads.
DIVISIONS: dict[str, dict[str, Any]] = {
    "two ranks": {"size": 2},
    "two stages": {"size": 1, "shares": (1.0, 1.0)},
    "two stages of two ranks": {"size": 2, "shares": (1.0, 1.0)},
}


@dataclass
class Exchange:
    """What the threads share."""

    size: int
    tensor_size: int
    tensors: list[Tensor | None] = field(default_factory=list)
    barriers: list[threading.Barrier] = field(default_factory=list)  # of each stage
    messages: list[SimpleQueue[tuple[int, bytearray] | None]] = field(default_factory=list)  # to each rank
    hidden: list[SimpleQueue[Tensor]] = field(default_factory=list)  # to each rank

    def __post_init__(self) -> None:
        self.tensors = [None] * self.size
        stages = self.size // self.tensor_size
        self.barriers = [threading.Barrier(self.tensor_size, timeout=30) for _ in range(stages)]
        self.messages = [SimpleQueue() for _ in range(self.size)]
        self.hidden = [SimpleQueue() for _ in range(self.size)]

    def share(self, position: Position, x: Tensor) -> list[Tensor]:
        """Return x of all ranks of the stage."""
        stage = position.rank // self.tensor_size
        first = stage * self.tensor_size
        self.tensors[position.rank] = x.clone()
        self.barriers[stage].wait()
        shared = [tensor for tensor in self.tensors[first : first + self.tensor_size] if tensor is not None]
        self.barriers[stage].wait()
        return shared


class ThreadRanks:
    def __init__(self, position: Position, exchange: Exchange, concurrent_steps: int = 1):
        self.position = position
        self.shard = position.shard
        self.exchange = exchange
        self.concurrent_steps = concurrent_steps
        self.encoder = StepEncoder(concurrent_steps)
        self.other_caches = RemoteCaches(self.send_to_rank)
        self.message_bytes: list[int] = []
        self.on_wait: Callable[[], object] = lambda: None  # called before rank 0 waits for the last stage

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self.exchange.share(self.position, x)
        total = first.clone()
        for other in others:
            total += other
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.exchange.share(self.position, x), -1)

    def gather_columns(self, x: Tensor) -> Tensor:
        pieces = self.exchange.share(self.position, x)
        return x if self.shard.rank else torch.cat(pieces, -1)

    def broadcast(self, x: Tensor) -> None:
        if self.position.rank < self.shard.size:
            x.copy_(self.exchange.share(self.position, x)[0])

    def send_to_next_stage(self, x: Tensor) -> None:
        target = (self.position.rank + self.shard.size) % self.position.size
        self.exchange.hidden[target].put(x.clone())

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        if self.position.rank == 0:
            self.on_wait()
        return x.copy_(self.exchange.hidden[self.position.rank].get(timeout=30))

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
        self.message_bytes.append(len(message))
        for queue in self.exchange.messages[1:]:
            queue.put((STEP, bytearray(message)))

    def send_to_rank(self, index: int, kind: int, parts: Iterable[Buffer]) -> None:
        self.exchange.messages[index + 1].put((kind, bytearray(b"".join(parts))))

    def send_caches(self, blocks: int, state_slots: int, max_running: int, context: int) -> None:
        raise AssertionError("not resized here")

    def step_failed(self, error: Exception) -> Exception:
        for barrier in self.exchange.barriers:
            barrier.abort()
        return error


def make_runner(
    path: Path,
    ranks: ThreadRanks,
    dtype: torch.dtype,
    context: int,
    blocks: int,
    rows: int = STATE_SLOTS,
    **options: Any,
) -> tuple[Runner, int]:
    """Return the runner of one rank, and the bytes of its weights."""
    whole = read_header(path)
    header, config = part_of_model(whole, parse_config(whole.config), ranks.position)
    slots = rows if state_bytes(config, dtype.itemsize) else 0
    options = {"max_running": 16} | options
    read = 0

    def on_read(count: int) -> None:
        nonlocal read
        read += count

    source = WeightSource(Weights(header, on_read=on_read), CPU, dtype, ranks=ranks)
    decoder = Decoder(config, source, context)
    return Runner(decoder, blocks, BLOCK_SIZE, dtype, CPU, slots, **options), read


class RanksInThreads:
    """An engine whose model is divided among threads; a context manager, which ends them."""

    def __init__(
        self,
        path: Path,
        size: int,
        dtype: torch.dtype = torch.float32,
        context: int = 256,
        drafter: Drafter | None = None,
        blocks: int = BLOCKS,
        token_budget: int = 512,
        shares: Sequence[float] = (),
        whole_experts: bool = False,
        concurrent_steps: int = 1,
        rows: int = STATE_SLOTS,
        max_running: int = 16,
        **options: Any,
    ):
        """size: ranks of each stage; shares: of the weights, for each stage; whole_experts: see `Shard`;
        concurrent_steps: that stages compute at a time; rows: recurrent
        states, if the model has any"""
        header = read_header(path)
        borders = divide_model(header, parse_config(header.config), shares) if shares else ()
        count = size * max(1, len(shares))
        positions = [Position(rank, size, borders, whole_experts) for rank in range(count)]
        exchange = Exchange(len(positions), size)
        self.ranks = [ThreadRanks(position, exchange, concurrent_steps) for position in positions]
        sizes: dict[str, Any] = {"rows": rows, "max_running": max_running}
        made = [make_runner(path, ranks, dtype, context, blocks, **sizes, **options) for ranks in self.ranks]
        self.runners = [runner for runner, _ in made]
        self.before_step: Callable[[int], object] = lambda rank: None  # called by each other rank
        self.remote_caches = self.ranks[0].other_caches
        self.remote_caches.connect([runner.named_caches.types for runner, _ in made[1:]], BLOCK_SIZE)
        self.read_bytes = [read for _, read in made]
        slots = rows if any(runner.recurrent_caches for runner in self.runners) else 0
        pool = BlockPool(blocks, BLOCK_SIZE, slots)
        self.engine = Engine(self.runners[0], pool, token_budget, max_running, drafter)
        self.exchange = exchange
        self.threads = [
            threading.Thread(target=self.follow, args=(rank, runner), daemon=True)
            for rank, (runner, _) in enumerate(made[1:], 1)
        ]
        for thread in self.threads:
            thread.start()

    def follow(self, rank: int, runner: Runner) -> None:
        decoder = StepDecoder()
        with torch.inference_mode():
            while (message := self.exchange.messages[rank].get()) is not None:
                kind, content = message
                if kind == COPY_OUT:
                    tensors = answer_copy_out(runner, content).wait().values()
                    answer = bytearray(b"".join(to_part(tensor).data for tensor in tensors))
                    self.remote_caches.receive(rank - 1, answer)
                    continue
                if kind == COPY_IN:
                    answer_copy_in(runner, content, BLOCK_SIZE)
                    continue
                self.before_step(rank)
                step = decoder.decode(content)
                batch = step.batch(CPU)
                if step.has_unread:
                    self.ranks[rank].broadcast(batch.token_ids)
                (runner.hidden_states if step.hidden else runner.launch)(batch)

    def __enter__(self) -> "RanksInThreads":
        return self

    def __exit__(self, *error: object) -> None:
        for queue in self.exchange.messages:
            queue.put(None)
        for thread in self.threads:
            thread.join(30)
