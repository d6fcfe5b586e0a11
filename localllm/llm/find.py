"""The first step of loading: find the files of a model, pulled and quantized if necessary, and read its header."""

import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import UnsupportedModel
from localllm.hardware.device import free_bytes, machine_bytes, rank_device
from localllm.hub.resolve import ModelRef, locate_model, resolve_model
from localllm.llm.cache_allocation import CacheSpec
from localllm.metrics import PhaseTimer
from localllm.plan.expected import memory_of
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit, model_needs
from localllm.plan.memory import TOKEN_BUDGET, MemoryNeeds, MemoryPlan
from localllm.quant.vectors import KV_DTYPES
from localllm.quantize.quantizer import find_or_quantize
from localllm.quantize.source import INSTEAD, check_source
from localllm.request import Grammar
from localllm.runtime.engine import Engine
from localllm.runtime.kernels.threads import threads_for
from localllm.runtime.model_loader import load_decoder
from localllm.runtime.speculation.draft_budget import DraftModelCost
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.runtime.speculation.step_cost import StepCost
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.parallel.remote import RemoteWorker  # imports torch.distributed


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of `load`, with each `auto` replaced by the setting that it refers to."""

    ref: ModelRef
    draft_ref: ModelRef | None
    device: torch.device
    options: LoadOptions
    drafting: str  # lookup or off
    deterministic: bool | None  # None: if supported
    grammar: Grammar | None
    force: bool
    max_queue: int
    settings: Settings
    phases: PhaseTimer
    on_part: Callable[[int, int], None]
    prefill: int = 0  # further processes to start, which compute prompts
    prefill_sockets: tuple[Path, ...] = ()  # of running processes that compute prompts
    workers: "ListLike[RemoteWorker]" = ()  # of other machines, which compute the stages behind the first
    prefill_workers: tuple[str, ...] = ()  # HOST:PORT of other machines that compute prompts
    token: bytes = field(default=b"", repr=False)  # of these
    max_memory: int | None = None  # bytes that this process may plan with; None: what is free
    started: float = field(default_factory=time.perf_counter)  # in seconds, of `perf_counter`

    @property
    def free_memory(self) -> FreeMemory:
        """The memory that the device has free now; with several processes on GPUs or machines, the one with the
        least, and on a CPU the share of each engine."""
        if self.max_memory is not None:
            return FreeMemory(self.device.type, self.max_memory)
        if self.workers:
            return memory_of_stages(self.device, self.workers, self.options.tensor_parallel)
        if self.device.type == "cpu":
            return FreeMemory("cpu", free_bytes(self.device) // self.engines)
        options = self.options
        free = [free_bytes(rank_device(self.device, rank)) for rank in range(options.processes + self.prefill)]
        size, stages = options.tensor_parallel, options.pipeline_parallel
        stage_bytes = tuple(min(free[stage * size : (stage + 1) * size]) for stage in range(stages))
        return FreeMemory(
            self.device.type,
            min(free),
            stage_bytes=stage_bytes if stages > 1 else (),
            find_machine_bytes=lambda: machine_bytes(self.device),
        )

    @property
    def ranks(self) -> int:
        """The number of processes among which the model is divided."""
        return self.options.processes

    @property
    def engines(self) -> int:
        """Number of whole models on this device."""
        return 1 + self.prefill + len(self.prefill_sockets) if self.device.type == "cpu" else 1

    def threads(self, rank_weight_bytes: int) -> int:
        """Return the threads of each process, of which those of one stage compute at a time.

        rank_weight_bytes: weights of one process of tensor parallelism
        """
        size = self.options.tensor_parallel
        threads = threads_for(rank_weight_bytes * size, self.settings.threads)
        # The process that started the others has already divided the threads.
        return max(1, threads // (size if self.prefill_sockets else size * self.engines))


def memory_of_stages(device: torch.device, workers: "ListLike[RemoteWorker]", tensor_parallel: int) -> FreeMemory:
    """Return the free memory of a process of the stage on this machine, and of one on each worker: a share of a
    CPU's, or that of the fullest GPU."""
    own = min(free_bytes(rank_device(device, rank)) for rank in range(tensor_parallel))
    own //= tensor_parallel if device.type == "cpu" else 1
    stage_bytes = (own, *(worker.free_bytes for worker in workers))
    return FreeMemory(device.type, min(stage_bytes), stage_bytes=stage_bytes)


def resolve_or_fetch(
    name: str,
    device: torch.device,
    options: LoadOptions,
    *,
    force: bool,
    workers: "ListLike[RemoteWorker]" = (),
) -> ModelRef:
    """Resolve a name, and pull the model if it is not on this machine. Raises the errors of `resolve_model` and
    `llm.fetch.fetch`."""
    located = locate_model(name)
    if isinstance(located, ModelRef):
        return located
    from localllm.llm.fetch import LogProgress, fetch  # huggingface_hub takes 0.1 s to import

    settings = Settings.from_environment()

    def measure() -> FreeMemory:
        if workers:
            return memory_of_stages(device, workers, options.tensor_parallel)
        return memory_of(device, free_bytes(device), settings)

    fetch(located, LogProgress(), measure, options, force=force)
    return resolve_model(name)


@dataclass(frozen=True)
class LocalModel:
    """A supported model on this machine, and its header."""

    ref: ModelRef
    source: Path  # the files that were quantized on request; otherwise the path of `ref`
    header: Header
    config: ModelConfig
    options: LoadOptions  # without `quant`, which has been done
    draft: "DraftModelPlan | None"


def find(request: LoadRequest) -> LocalModel:
    """Quantize the model if requested, and read the header of the files to load.

    Raises UnsupportedModel, DamagedModel and DoesNotFit before any weights are read.
    """
    ref, options, phases = request.ref, request.options, request.phases
    with phases("header"):
        source, header = ref.path, read_header(ref.path)
        draft = request.draft_ref and DraftModelPlan.find(request.draft_ref, request.device.type, options)
        if options.quant is not None:
            check_source(header, INSTEAD)
            check_fit(header, request.free_memory, options, name=ref.name, force=request.force)
    if options.quant is not None:
        with phases("quantize"):
            path = find_or_quantize(
                header,
                options.quant,
                request.settings.home,
                lambda part, done, total: request.on_part(done, total),
            )
        ref = ModelRef(f"{ref.name} in {options.quant.upper()}", path, ref.edition)
        options = replace(options, quant=None)
        with phases("header"):
            header = read_header(ref.path)
    with phases("header"):
        config = parse_config(header.config)
        if config.encoder:
            raise UnsupportedModel(
                f"{ref.name!r} does not support chat",
                "it is an embedding model: use `localllm embed` or load_embedder",
            )
        check_quantization(header.config)
        if ref.edition and ref.edition.context and options.context is None:
            options = replace(options, context=min(ref.edition.context, config.max_context))
    return LocalModel(ref, source, header, config, options, draft or None)


@dataclass(frozen=True)
class DraftModelPlan:
    """A draft model that was checked before anything is loaded, and the memory that it needs."""

    name: str
    header: Header
    config: ModelConfig
    needs: MemoryNeeds

    @classmethod
    def find(cls, ref: ModelRef, device_type: str, target_options: LoadOptions) -> "DraftModelPlan":
        """Read the header of a draft model. target_options: of the model that it drafts for.

        Raises UnsupportedModel for an encoder, and the errors of `read_header` and `parse_config`.
        """
        header = read_header(ref.path)
        config = parse_config(header.config)
        if config.encoder:
            raise UnsupportedModel(
                f"{ref.name!r} is an embedding model and cannot draft tokens", "use another draft model"
            )
        check_quantization(header.config)
        options = replace(target_options, context=None, quant=None).in_one_process()
        return cls(ref.name, header, config, model_needs(header, config, device_type, options, name=ref.name))

    def cache_spec(self, device: torch.device, *, use_graphs: bool) -> CacheSpec:
        dtype: torch.dtype = getattr(torch, self.needs.dtype)
        return CacheSpec(self.needs, device, dtype, KV_DTYPES.get(self.needs.kv_dtype, dtype), use_graphs)

    def load(
        self, engine: Engine, cache_spec: CacheSpec, memory: MemoryPlan, step_cost: StepCost, phases: PhaseTimer
    ) -> DraftModel:
        """Load the draft model within the memory plan of `engine`. step_cost: of the engine's steps."""
        target, context = engine.runner, cache_spec.max_len(memory)
        decoder, _ = load_decoder(self.header, self.config, target.device, cache_spec.dtype, context, phases)
        return DraftModel(
            cache_spec.make_runner(decoder, memory),
            cache_spec.make_block_pool(memory),
            target.model.config.vocab_size,
            context,
            TOKEN_BUDGET[target.device.type],
            DraftModelCost(self.needs.weights.total / max(1, memory.weights.total), step_cost.cost_table),
        )
