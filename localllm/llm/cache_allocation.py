"""The room that a loaded model has on its device: caches and pool as planned, made when it is loaded and made anew
for another context. Weights stay where they are. Knows nothing of requests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from localllm.errors import LocalLLMError
from localllm.hardware.device import free_bytes, free_host_bytes, release_cached, reserve_bytes
from localllm.plan.memory import BLOCK_SIZE, MAX_RUNNING, MemoryNeeds, MemoryPlan, allocate, host_blocks
from localllm.request import SamplingParams
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.model import Decoder
from localllm.runtime.runner import Runner
from localllm.runtime.speculation.draft_model import DraftModel


@dataclass(frozen=True)
class CacheSpec:
    """What a model's caches are made of, whatever their size."""

    needs: MemoryNeeds
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    use_graphs: bool
    batch_invariant: bool = False  # what a token brings depends on nothing beside it

    def max_len(self, memory: MemoryPlan) -> int:
        """Most tokens of a sequence; a draft model may know fewer than the model that it guesses for."""
        return min(memory.context, self.needs.config.max_context)

    def state_slots(self, memory: MemoryPlan) -> int:
        return memory.state_slots if self.needs.own_state_slot_bytes else 0

    def make_runner(self, decoder: Decoder, memory: MemoryPlan) -> Runner:
        context = self.max_len(memory) if self.use_graphs else None
        rows, by_row = self.state_slots(memory), self.batch_invariant
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

    def make_block_pool(self, memory: MemoryPlan, host_block_count: int = 0) -> BlockPool:
        return BlockPool(memory.blocks, BLOCK_SIZE, self.state_slots(memory), host_block_count)

    def allocate(self, decoder: Decoder, memory: MemoryPlan) -> tuple[Runner, BlockPool]:
        """As planned, with what a step needs set apart."""
        release_cached(self.device)  # what only loading took, or caches of another size
        runner = self.make_runner(decoder, memory)
        reserve_bytes(self.device, memory.workspace)
        return runner, self.make_block_pool(memory, memory.host_blocks)


@dataclass
class CacheAllocation:
    """The caches of a model and of its draft model, and the plan that they were allocated by."""

    memory: MemoryPlan  # as allocated now
    target: CacheSpec
    weight_bytes: int  # bytes that are not free because of the weights; on a CPU mapped ones are
    shortage_of: Callable[[MemoryPlan], LocalLLMError]  # the error where a device has less than was planned with
    draft_spec: CacheSpec | None = None
    draft_model: DraftModel | None = None

    def shortage(self) -> LocalLLMError:
        """The error to raise where a step finds less memory than was planned with."""
        return self.shortage_of(self.memory)

    def plan_resize(self, engine: Engine, context: int | None) -> MemoryPlan:
        """Plan another context with what would be free without this model's caches. Raises DoesNotFit and
        UsageError, as `allocate`."""
        device, needs, memory = self.target.device, self.target.needs, self.memory
        if device.type == "cpu":  # where a cache takes memory as it is written
            pool = engine.pool
            written = min(pool.count, pool.count - pool.free_count + len(pool.cached))
            return allocate(needs, free_bytes(device) + self.weight_bytes + written * memory.block_bytes, context)
        planned = allocate(needs, free_bytes(device) + memory.total + memory.workspace, context)
        return replace(planned, host_blocks=host_blocks(planned, free_host_bytes() + memory.host_bytes))

    def resize(self, engine: Engine, planned: MemoryPlan, params: SamplingParams) -> None:
        """Give an engine in which nothing runs other caches; params: what to capture a first step for. Where the
        device has less memory than it reported, the old ones are allocated again and the error is raised."""
        decoder = engine.runner.model
        beside = self.draft_model.runner.model if self.draft_model else None
        engine.runner.free()
        if self.draft_model:
            self.draft_model.free()
        try:
            self.build_caches(engine, decoder, beside, planned)
            self.memory = planned
        except Exception:
            self.build_caches(engine, decoder, beside, self.memory)
            raise
        finally:
            engine.runner.capture_decode_step(params)

    def build_caches(
        self, engine: Engine, decoder: Decoder, draft_decoder: Decoder | None, memory: MemoryPlan
    ) -> None:
        decoder.set_max_len(self.target.max_len(memory), self.target.device)
        engine.replace_caches(*self.target.allocate(decoder, memory))
        if self.draft_model and self.draft_spec and draft_decoder:
            context = self.draft_spec.max_len(memory)
            draft_decoder.set_max_len(context, self.draft_spec.device)
            self.draft_model.replace_caches(
                self.draft_spec.make_runner(draft_decoder, memory),
                self.draft_spec.make_block_pool(memory),
                context,
            )


def measured_growth(measure: Callable[[], int], initial: int, limit: int) -> int:
    """How much more there is now than at the beginning, within reason."""
    return max(0, min(measure() - initial, limit))
