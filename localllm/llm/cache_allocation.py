"""The KV cache and block pool of a loaded model: allocated as planned, and again when the context is resized."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from localllm.arch.stages import Position
from localllm.checkpoint.digest import combine_digests, digest_model
from localllm.checkpoint.header import Header
from localllm.disaggregation.prefill_tier import PrefillTier
from localllm.errors import LocalLLMError, UsageError
from localllm.hardware.device import (
    cpu_features,
    device_name,
    dtype_name,
    free_bytes,
    free_host_bytes,
    processor_features,
    rank_device,
    release_cached,
    reserve_bytes,
)
from localllm.hardware.processor import library_versions
from localllm.plan.memory import BLOCK_SIZE, CACHE_SHARE, MemoryNeeds, MemoryPlan, allocate, host_blocks
from localllm.quant.vectors import KVDtype, kv_dtype_name
from localllm.request import SamplingParams
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.disk_folder import CacheFolder, log
from localllm.runtime.kv_cache.disk_tier import DiskTier
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.kv_cache.snapshot import CacheIdentity
from localllm.runtime.model import Decoder
from localllm.runtime.runner import Runner
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.settings import DiskCache

COMPUTING_LIBRARIES = ("localllm", "torch", "triton", "llvmlite")


@dataclass(frozen=True)
class CacheSpec:
    """The properties of a model's caches apart from their size."""

    needs: MemoryNeeds
    device: torch.device
    dtype: torch.dtype
    kv_dtype: KVDtype
    use_graphs: bool
    batch_invariant: bool = False  # a token's result does not depend on the rest of its batch

    def max_len(self, memory: MemoryPlan) -> int:
        """Return the maximum tokens per sequence; a draft model may support fewer than its target."""
        return min(memory.context, self.needs.config.max_context)

    def state_slots(self, memory: MemoryPlan) -> int:
        return memory.state_slots if self.needs.own_state_slot_bytes else 0

    def make_runner(self, decoder: Decoder, memory: MemoryPlan) -> Runner:
        context = self.max_len(memory) if self.use_graphs else None
        return Runner(
            decoder,
            memory.blocks,
            BLOCK_SIZE,
            self.dtype,
            self.device,
            self.state_slots(memory),
            self.kv_dtype,
            memory.max_running,
            context,
            self.batch_invariant,
        )

    def make_block_pool(self, memory: MemoryPlan, host_block_count: int = 0) -> BlockPool:
        return BlockPool(memory.blocks, BLOCK_SIZE, self.state_slots(memory), host_block_count)

    def allocate(self, decoder: Decoder, memory: MemoryPlan) -> tuple[Runner, BlockPool]:
        """Allocate the caches as planned, and reserve a step's workspace."""
        release_cached(self.device)  # temporary memory of loading, or caches of another size
        runner = self.make_runner(decoder, memory)
        reserve_bytes(self.device, memory.workspace)
        return runner, self.make_block_pool(memory, memory.host_blocks)


@dataclass(kw_only=True)
class CacheAllocation:
    """The caches of a model and of its draft model, and the plan that they were allocated by."""

    memory: MemoryPlan  # as currently allocated
    target: CacheSpec
    weight_bytes: int  # occupied by weights; on a CPU without those that are mapped
    shortage_of: Callable[[MemoryPlan], LocalLLMError]  # returns the error for too little memory
    draft_spec: CacheSpec | None
    draft_model: DraftModel | None
    position: Position  # of this process among those that the model is divided among
    own_memories: bool  # whether the stages are on different devices
    worker_processors: tuple[str, ...]  # what computes the stages on other machines
    engines: int  # whole models that share the memory of the device
    name: str  # of the model
    disk_tier: DiskTier | None = None
    prefill_tier: PrefillTier | None = None

    @property
    def ranks(self) -> int:
        """The number of processes among which the model is divided."""
        return self.position.size

    def shortage(self) -> LocalLLMError:
        """Return the error to raise when a step runs out of memory."""
        return self.shortage_of(self.memory)

    def plan_resize(self, engine: Engine, context: int | None) -> MemoryPlan:
        """Return the memory plan for another context, in which these caches count as free. Raises DoesNotFit and
        UsageError as `allocate`."""
        device, needs, memory = self.target.device, self.target.needs, self.memory
        if self.position.stage_count > 1 and self.own_memories:  # of which others may have less room than this one
            kept = memory.cache_bytes * 100 // CACHE_SHARE[device.type]
            free = memory.total - memory.cache_bytes + kept
        elif device.type == "cpu":  # the operating system allocates memory as caches are written
            pool = engine.pool
            written = min(pool.count, pool.count - pool.free_count + len(pool.cached))
            # All ranks of a stage, and all engines, have as much as this one.
            free = free_bytes(device) // (self.position.tensor_size * self.engines)
            return allocate(needs, free + self.weight_bytes + written * memory.block_bytes, context)
        else:
            free = free_bytes(device) + memory.total
        resized = allocate(needs, free + memory.workspace, context)
        return replace(resized, host_blocks=host_blocks(resized, free_host_bytes() + memory.host_bytes))

    def resize(self, engine: Engine, plan: MemoryPlan, params: SamplingParams) -> None:
        """Replace the caches of an idle engine. If the device has less memory than it reported, the previous sizes
        are allocated again and the error is raised. params: for which to capture the decode step."""
        if self.disk_tier:
            self.disk_tier.save_all()
        decoder = engine.runner.model
        draft_decoder = self.draft_model.runner.model if self.draft_model else None
        engine.runner.free()
        if self.draft_model:
            self.draft_model.free()
        try:
            self._replace_caches(engine, decoder, draft_decoder, plan)
            self.memory = plan
        except Exception:
            self._replace_caches(engine, decoder, draft_decoder, self.memory)
            raise
        finally:
            engine.runner.capture_decode_step(params)

    def _replace_caches(
        self, engine: Engine, decoder: Decoder, draft_decoder: Decoder | None, memory: MemoryPlan
    ) -> None:
        decoder.set_max_len(self.target.max_len(memory), self.target.device)
        if decoder.ranks:
            slots, context = self.target.state_slots(memory), self.target.max_len(memory)
            decoder.ranks.send_caches(memory.blocks, slots, memory.max_running, context)
        runner, pool = self.target.allocate(decoder, memory)
        engine.replace_caches(runner, pool)
        if lower := self.disk_tier or self.prefill_tier:
            lower.attach(runner, pool)
        if self.draft_model and self.draft_spec and draft_decoder:
            context = self.draft_spec.max_len(memory)
            draft_decoder.set_max_len(context, self.draft_spec.device)
            self.draft_model.replace_caches(
                self.draft_spec.make_runner(draft_decoder, memory),
                self.draft_spec.make_block_pool(memory),
                context,
            )

    def open_disk_tier(
        self, engine: Engine, cache: DiskCache, header: Header, activation_bits: int, threads: int
    ) -> None:
        """Attach a disk tier to the engine, which has not run yet. Reads megabytes of the model's files. Raises
        UsageError if the folder cannot be used; if it is the default, one line in the log says so."""
        try:
            folder = CacheFolder(cache.path, cache.limit)
        except UsageError as error:
            if cache.kept_only:
                log.warning("%s", error.message)
                return
            raise
        identity = self.identity(engine, header.path, activation_bits, threads)
        self.disk_tier = DiskTier(folder, identity, writes_evicted=not cache.kept_only)
        self.disk_tier.attach(engine.runner, engine.pool)

    def identity(self, engine: Engine, model: Path, activation_bits: int, threads: int) -> CacheIdentity:
        """Return the properties that the bits of keys and values depend on, without a scope. Reads megabytes of
        the model's files."""
        spec, config = self.target, engine.runner.model.config
        digest, _ = combine_digests(tuple(file for file in digest_model(model) if file.affects_logits))
        versions = library_versions(COMPUTING_LIBRARIES[1:])
        processor = cpu_features() if spec.device.type == "cpu" else self.gpu_names()
        if any(other != processor_features(spec.device) for other in self.worker_processors):
            processor = [*processor, *self.worker_processors, str(self.position.borders)]
        invariant = f"batch invariant with {threads} threads" if spec.batch_invariant else "not batch invariant"
        return CacheIdentity(
            model=digest,
            name=self.name,
            dtype=dtype_name(spec.dtype),
            kv_dtype=kv_dtype_name(spec.kv_dtype),
            activation_bits=activation_bits,
            block_size=engine.block_size,
            layers=config.stage.total if config.stage else len(config.layers),
            setup=(invariant, *processor, *(f"{name} {versions[name]}" for name in COMPUTING_LIBRARIES)),
            division=self.division,
        )

    @property
    def division(self) -> str:
        """Division of the model among processes, if it affects the bits of results; that into stages does not."""
        size, experts = self.position.tensor_size, " with whole experts" if self.position.whole_experts else ""
        return f"{size} ranks{experts}" if size > 1 else ""

    def gpu_names(self) -> list[str]:
        """Return the name of the GPUs; if they differ, those of all ranks and where stages begin."""
        own = self.position.tensor_size if self.worker_processors else self.ranks
        names = [device_name(rank_device(self.target.device, rank)) for rank in range(own)]
        return names[:1] if len(set(names)) == 1 else [*names, str(self.position.borders)]


def measured_growth(measure: Callable[[], int], initial: int, limit: int) -> int:
    """Return the increase of a measurement since `initial`, at least 0 and at most `limit`."""
    return max(0, min(measure() - initial, limit))
