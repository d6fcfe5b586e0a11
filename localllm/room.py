"""The room that a loaded model has on its device: caches and pool as planned, made when it is loaded and made anew
for another context. Weights stay where they are. Knows nothing of requests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from localllm.device import claim, free_bytes, free_memory, release
from localllm.errors import LocalLLMError
from localllm.plan.memory import BLOCK_SIZE, MAX_RUNNING, Memory, Needs, allocate, host_blocks
from localllm.request import SamplingParams
from localllm.runtime.engine import Engine
from localllm.runtime.model import Decoder
from localllm.runtime.runner import Runner
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.runtime.state import BlockPool


@dataclass(frozen=True)
class Room:
    """What a model's caches are made of, whatever their size."""

    needs: Needs
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    graphs: bool
    by_row: bool = False  # what a token brings depends on nothing beside it

    def context(self, memory: Memory) -> int:
        """Most tokens of a sequence; a draft model may know fewer than the model that it guesses for."""
        return min(memory.context, self.needs.config.max_context)

    def rows(self, memory: Memory) -> int:
        return memory.rows if self.needs.own_row_bytes else 0

    def runner(self, decoder: Decoder, memory: Memory) -> Runner:
        context = self.context(memory) if self.graphs else None
        rows, by_row = self.rows(memory), self.by_row
        return Runner(
            decoder,
            memory.blocks,
            BLOCK_SIZE,
            self.dtype,
            self.device,
            rows,
            self.kv_dtype,
            MAX_RUNNING,
            context,
            by_row,
        )

    def pool(self, memory: Memory, aside: int = 0) -> BlockPool:
        return BlockPool(memory.blocks, BLOCK_SIZE, self.rows(memory), aside)

    def caches(self, decoder: Decoder, memory: Memory) -> tuple[Runner, BlockPool]:
        """As planned, with what a step needs set apart."""
        release(self.device)  # what only loading took, or caches of another size
        runner = self.runner(decoder, memory)
        claim(self.device, memory.workspace)
        return runner, self.pool(memory, memory.host_blocks)


@dataclass(frozen=True)
class Rooms:
    """Of a model and of the draft model beside it."""

    own: Room
    weights: int  # bytes that are not free because of them; on a CPU mapped ones are
    shortage: Callable[[Memory], LocalLLMError]  # what to tell where a device has less than was planned with
    draft: Room | None = None
    guesser: DraftModel | None = None

    def plan(self, engine: Engine, memory: Memory, context: int | None) -> Memory:
        """What another context takes of what would be free without this model. Raises DoesNotFit and UsageError,
        as `allocate`."""
        device, needs = self.own.device, self.own.needs
        if device.type == "cpu":  # where a cache takes memory as it is written
            pool = engine.pool
            written = min(pool.count, pool.count - pool.available + len(pool.found))
            return allocate(needs, free_bytes(device) + self.weights + written * memory.block_bytes, context)
        planned = allocate(needs, free_bytes(device) + memory.total + memory.workspace, context)
        return replace(planned, host_blocks=host_blocks(planned, free_memory() + memory.host_bytes))

    def change(self, engine: Engine, old: Memory, new: Memory, params: SamplingParams) -> None:
        """Other caches for an engine in which nothing runs; params: what to capture a first step for. Where the
        device breaks its word, it has the old ones again, and that is raised."""
        decoder = engine.runner.model
        beside = self.guesser.runner.model if self.guesser else None
        engine.runner.free()
        if self.guesser:
            self.guesser.free()
        try:
            self.fill(engine, decoder, beside, new)
        except Exception:
            self.fill(engine, decoder, beside, old)
            raise
        finally:
            engine.runner.prepare(params)

    def fill(self, engine: Engine, decoder: Decoder, beside: Decoder | None, memory: Memory) -> None:
        decoder.resize(self.own.context(memory), self.own.device)
        engine.move(*self.own.caches(decoder, memory))
        if self.guesser and self.draft and beside:
            context = self.draft.context(memory)
            beside.resize(context, self.draft.device)
            self.guesser.move(self.draft.runner(beside, memory), self.draft.pool(memory), context)


def added(measure: Callable[[], int], begin: int, most: int) -> int:
    """How much more there is now than at the beginning, within reason."""
    return max(0, min(measure() - begin, most))
