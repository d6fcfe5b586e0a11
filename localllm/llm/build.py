"""The third step of loading: put weights, caches and kernels on the device, in an engine that is ready to step."""

import contextlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from localllm.arch.stages import Position
from localllm.checkpoint.digest import digest_model
from localllm.checkpoint.partition import part_of_model
from localllm.disaggregation.connection import PrefillAddress, PrefillProcess, WorkerAddress
from localllm.disaggregation.prefill_tier import PrefillTier
from localllm.disaggregation.supervisor import PrefillSupervisor
from localllm.errors import LocalLLMError, UsageError
from localllm.hardware.device import anonymous_bytes, device_context, processor_features, rank_device
from localllm.llm.cache_allocation import CacheAllocation, CacheSpec, measured_growth
from localllm.llm.find import LoadRequest, LocalModel
from localllm.llm.load_plan import LoadPlan
from localllm.plan.fit import shortage_error
from localllm.plan.memory import BLOCK_SIZE, MAX_VERIFIED_TOKENS, TOKEN_BUDGET, MemoryPlan
from localllm.receipts import provenance
from localllm.runtime.device_errors import translate_device_errors
from localllm.runtime.engine import Engine
from localllm.runtime.kept_weights import LayoutUse, open_layout
from localllm.runtime.kernels import triton_unsupported
from localllm.runtime.kernels.threads import use_threads
from localllm.runtime.kv_cache.prefix_copy import SEGMENT_BLOCKS
from localllm.runtime.model_loader import compile_kernels, load_decoder, set_triton_cache_dir, warm_up
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.runtime.speculation.policy import SpeculativeDrafter
from localllm.runtime.speculation.step_cost import StepCost, estimate_cpu_cost, estimate_gpu_cost

if TYPE_CHECKING:
    from localllm.parallel.group import ProcessLeader  # imports torch.distributed
    from localllm.parallel.remote import RemoteLeader, RemoteWorker

log = logging.getLogger("localllm.prefill")


@dataclass(frozen=True)
class BuiltModel:
    """A model in the memory of its device."""

    engine: Engine
    caches: CacheAllocation
    read_bytes_per_s: float | None  # while copying weights to a GPU; None: mapped
    kept: LayoutUse
    leader: "ProcessLeader | RemoteLeader | None"  # of several processes that compute the model


def build(model: LocalModel, plan: LoadPlan, request: LoadRequest) -> BuiltModel:
    """Read the weights, allocate the caches, compile kernels and capture the decode step.

    Raises DoesNotFit if the device has less memory than it reported, DamagedModel if the weights do not match the
    header. After an error, all memory is released.
    """
    device, memory, phases = request.device, plan.memory, request.phases
    shortage_of: Callable[[MemoryPlan], LocalLLMError] = partial(
        shortage_error,
        device=str(device),
        kv_dtype=plan.fit.kv_dtype,
        quantized=model.header.quantization is not None,
    )
    if device.type != "cpu":
        set_triton_cache_dir(request.settings.cache)
    threads = request.threads(plan.fit.weights.total)
    anonymous = anonymous_bytes()
    with contextlib.ExitStack() as undo:
        if template := plan.text.own.template:
            undo.callback(template.close)
            template.warm_up()  # starts its process while the weights are read
        leader, header, config = None, model.header, model.config
        options = request.options
        position = Position(0, options.tensor_parallel, plan.fit.borders, options.expert_parallel)
        if position.size > 1:
            leader = start_ranks(position, model, plan, request, threads)  # which load while this process does
            undo.callback(leader.close)
            header, config = part_of_model(header, config, position)
        supervisor = None
        if request.prefill:
            ranks = range(1, request.prefill + 1)  # on GPUs, each has one of its own
            supervisor = PrefillSupervisor([str(rank_device(device, rank)) for rank in ranks])
            undo.callback(supervisor.close)
        sockets = supervisor.sockets if supervisor else request.prefill_sockets
        prefill = list[PrefillProcess]()
        undo.callback(lambda: [process.channel.close() for process in prefill])
        addresses = prefill_addresses(sockets, model, plan, request, threads)
        for address in addresses:
            if process := connect_prefill(address):
                prefill.append(process)
        with (
            torch.inference_mode(),
            device_context(device),
            # More threads than may be used would wait for each other at the end of each operation.
            use_threads(threads),
            translate_device_errors(lambda: shortage_of(memory)),
        ):
            # Of one process of several, laid-out weights are not kept.
            use = (
                nullcontext(LayoutUse())
                if leader
                else open_layout(model.header.path, device, plan.fit.weights.total, request.settings, phases)
            )
            kept = undo.enter_context(use)
            with phases("weights"):
                decoder, read_bytes_per_s = load_decoder(
                    header,
                    config,
                    device,
                    plan.dtype,
                    memory.context,
                    phases,
                    request.on_part,
                    plan.activation_bits,
                    kept.layout,
                    leader,
                )
            kept.finish(phases)
            # Collectives are not captured yet.
            use_graphs = request.settings.graphs and triton_unsupported(device) is None and leader is None
            spec = CacheSpec(plan.fit.needs, device, plan.dtype, plan.kv_dtype, use_graphs, plan.deterministic)
            with phases("cache"):
                engine = Engine(*spec.allocate(decoder, memory), TOKEN_BUDGET[device.type], memory.max_running)
            with phases("compile"):
                if device.type == "cpu":
                    compile_kernels(engine.runner, engine.pool, threads)
                if leader:
                    leader.finish_start()
                for process in prefill:
                    process.wait_until_loaded()
                if device.type != "cpu":
                    warm_up(engine.runner, engine.pool)
            if device.type != "cpu":
                with phases("capture"):
                    engine.runner.capture_decode_step(plan.recommended)
            draft_spec, draft_model = add_drafter(engine, model, memory, request, use_graphs=use_graphs)
            if draft_model:
                with phases("compile"):
                    if device.type == "cpu":
                        compile_kernels(draft_model.runner, draft_model.pool, threads)
                    else:
                        warm_up(draft_model.runner, draft_model.pool)
            weights = measured_growth(anonymous_bytes, anonymous, memory.weights.total + memory.draft_bytes)
            if leader and options.tensor_parallel == 1 and not request.workers:
                weights += sum(leader.weight_bytes)  # of stages, which share the memory of a CPU
        undo.pop_all()
    caches = CacheAllocation(
        memory=memory,
        target=spec,
        weight_bytes=weights,
        shortage_of=shortage_of,
        draft_spec=draft_spec,
        draft_model=draft_model,
        position=position,
        own_memories=bool(request.workers) or device.type != "cpu",
        worker_processors=tuple(worker.processor for worker in request.workers),
        engines=request.engines,
        name=model.ref.name,
    )
    if addresses:
        on_close = supervisor.close if supervisor else lambda: None
        caches.prefill_tier = PrefillTier(prefill, len(addresses), on_close=on_close)
        caches.prefill_tier.attach(engine.runner, engine.pool)
    return BuiltModel(engine, caches, read_bytes_per_s, kept, leader)


def start_ranks(
    position: Position, model: LocalModel, plan: LoadPlan, request: LoadRequest, threads: int
) -> "ProcessLeader | RemoteLeader":
    """Have the other processes load their parts of the model: workers, or processes that start here. position: of
    this one"""
    from localllm.parallel.group import ProcessLeader  # torch.distributed is not needed by a single process
    from localllm.parallel.remote import RemoteLeader

    leader = (
        RemoteLeader(position, request.device, request.workers)
        if request.workers
        else ProcessLeader(position, request.device)
    )
    leader.start(
        {
            "path": str(model.header.path),
            "device": str(request.device),
            "dtype": plan.fit.dtype,
            "kv_dtype": plan.fit.kv_dtype,
            "activation_bits": plan.activation_bits,
            "deterministic": plan.deterministic,
            "threads": threads,
            "block_size": BLOCK_SIZE,
            "blocks": plan.memory.blocks,
            "state_slots": plan.memory.state_slots if plan.fit.needs.own_state_slot_bytes else 0,
            "max_running": plan.memory.max_running,
            "context": plan.memory.context,
        }
    )
    return leader


def prefill_addresses(
    sockets: ListLike[Path], model: LocalModel, plan: LoadPlan, request: LoadRequest, threads: int
) -> "list[PrefillAddress | WorkerAddress]":
    """Return the processes that compute prompts, with what they are told of the model. sockets: of those on this
    machine"""
    needs = plan.fit.needs
    setup = {
        "name": model.ref.name,
        "path": str(model.header.path),
        "dtype": plan.fit.dtype,
        "kv_dtype": plan.fit.kv_dtype,
        "activation_bits": plan.activation_bits,
        "threads": threads,
        "context": plan.memory.context,
        "deterministic": plan.deterministic,
        "force": request.force,
        "max_memory": None,
    }
    segment_bytes = SEGMENT_BLOCKS * needs.block_bytes + needs.own_state_slot_bytes
    if not request.prefill_workers:
        on_cpu = request.device.type == "cpu"
        own = setup | {"max_memory": request.free_memory.memory_bytes if on_cpu else None}
        return [PrefillAddress(number, path, own, segment_bytes) for number, path in enumerate(sockets, 1)]
    files = digest_model(model.header.path)
    return [
        WorkerAddress(
            number,
            address,
            request.token,
            partial(check_worker, request, plan),
            provenance.source_name(model.source),
            request.options.quant,
            files,
            setup,
            segment_bytes,
        )
        for number, address in enumerate(request.prefill_workers, 1)
    ]


def check_worker(request: LoadRequest, plan: LoadPlan, worker: "RemoteWorker") -> None:
    """Raise UsageError if a worker would not compute the keys and values of this machine."""
    worker.check_device(request.device)
    worker.check_dtype(request.options.dtype, plan.fit.dtype)
    own = processor_features(request.device)
    if plan.deterministic and worker.processor != own:
        raise UsageError(
            f"{worker.title} has another processor ({worker.processor}, not {own}), so that bits would differ",
            "leave out --deterministic",
        )


def connect_prefill(address: "PrefillAddress | WorkerAddress") -> PrefillProcess | None:
    """Connect to a process that computes prompts, which loads the model while this one does; None if it has been
    given up. Raises UsageError if there is none, and as `WorkerAddress.connect`."""
    try:
        return address.connect()
    except ConnectionRefusedError:
        log.warning("%s has been given up; others compute its prompts", address.title)
        return None
    except OSError as error:
        where = address.path if isinstance(address, PrefillAddress) else address.address
        message = f"no process for prompts listens at {where} ({error.strerror})"
        raise UsageError(message, "restart the server") from None


def add_drafter(
    engine: Engine, model: LocalModel, memory: MemoryPlan, request: LoadRequest, *, use_graphs: bool
) -> tuple[CacheSpec | None, DraftModel | None]:
    """Give the engine a drafter as requested; return the draft model, if there is one, and the spec of its
    caches."""
    device, phases, draft_spec, draft_model = request.device, request.phases, None, None
    step_cost = StepCost(estimate_cpu_cost if device.type == "cpu" else estimate_gpu_cost)
    if model.draft:
        draft_spec = model.draft.cache_spec(device, use_graphs=use_graphs)
        with phases("draft model"):
            draft_model = model.draft.load(engine, draft_spec, memory, step_cost, phases)
    use_lookup = request.drafting == "lookup"
    if use_lookup or draft_model:
        engine.drafter = SpeculativeDrafter(
            step_cost,
            MAX_VERIFIED_TOKENS[device.type],
            lambda batch_size: engine.runner.captured_widths(batch_size),
            use_lookup,
            draft_model,
        )
    return draft_spec, draft_model
