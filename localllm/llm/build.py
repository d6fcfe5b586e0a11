"""The third step of loading: weights, caches and kernels on the device, in an engine that is ready to step."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from localllm.errors import LocalLLMError
from localllm.hardware.device import anonymous_bytes, device_context
from localllm.llm.cache_allocation import CacheAllocation, CacheSpec, measured_growth
from localllm.llm.find import FoundModel, LoadRequest
from localllm.llm.load_plan import LoadPlan
from localllm.plan.fit import shortage_error
from localllm.plan.memory import MAX_RUNNING, MAX_VERIFIED_TOKENS, TOKEN_BUDGET, MemoryPlan
from localllm.runtime.device_errors import translate_device_errors
from localllm.runtime.engine import Engine
from localllm.runtime.kernels import triton_runs_on
from localllm.runtime.model_loader import load_decoder, set_triton_cache_dir, warm_up
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.runtime.speculation.policy import SpeculativeDrafter
from localllm.runtime.speculation.step_cost import StepCost, estimate_cpu_cost, estimate_gpu_cost


@dataclass(frozen=True)
class BuiltModel:
    """A model in the memory of its device."""

    engine: Engine
    caches: CacheAllocation
    read_bytes_per_s: float | None  # of the weights' files, on their way to a GPU; None: mapped


def build(found: FoundModel, planned: LoadPlan, request: LoadRequest) -> BuiltModel:
    """Read the weights, allocate the caches, compile kernels and capture the decode step.

    Raises DoesNotFit where the device has less memory than it reported, DamagedModel where the weights are not
    what the header says. Nothing stays in memory then.
    """
    device, memory, phases = request.device, planned.memory, request.phases
    shortage_of: Callable[[MemoryPlan], LocalLLMError] = partial(
        shortage_error,
        device=str(device),
        kv_dtype=planned.fit.kv_dtype,
        quantized=found.header.quantization is not None,
    )
    if device.type != "cpu":
        set_triton_cache_dir(request.settings.cache)
    anonymous = anonymous_bytes()
    with contextlib.ExitStack() as undo:
        if template := planned.text.own.template:
            undo.callback(template.close)
            template.warm_up()  # its process starts while the weights are read
        with (
            torch.inference_mode(),
            device_context(device),
            translate_device_errors(lambda: shortage_of(memory)),
        ):
            with phases("weights"):
                decoder, read_bytes_per_s = load_decoder(
                    found.header,
                    found.config,
                    device,
                    planned.dtype,
                    memory.context,
                    phases,
                    request.on_part,
                    planned.activation_bits,
                )
            use_graphs = request.settings.graphs and triton_runs_on(device)
            spec = CacheSpec(
                planned.fit.needs, device, planned.dtype, planned.kv_dtype, use_graphs, planned.deterministic
            )
            with phases("cache"):
                engine = Engine(*spec.allocate(decoder, memory), TOKEN_BUDGET[device.type], MAX_RUNNING)
            if device.type != "cpu":
                with phases("compile"):
                    warm_up(engine)
                with phases("capture"):
                    engine.runner.capture_decode_step(planned.recommended)
            draft_spec, draft_model = add_drafter(engine, found, memory, request, use_graphs=use_graphs)
            weights = measured_growth(anonymous_bytes, anonymous, memory.weights.total + memory.draft_bytes)
        undo.pop_all()
    caches = CacheAllocation(memory, spec, weights, shortage_of, draft_spec, draft_model)
    return BuiltModel(engine, caches, read_bytes_per_s)


def add_drafter(
    engine: Engine, found: FoundModel, memory: MemoryPlan, request: LoadRequest, *, use_graphs: bool
) -> tuple[CacheSpec | None, DraftModel | None]:
    """Set up speculative decoding as it was asked for; return the draft model, if there is one, and its caches."""
    device, phases, draft_spec, draft_model = request.device, request.phases, None, None
    step_cost = StepCost(estimate_cpu_cost if device.type == "cpu" else estimate_gpu_cost)
    if found.draft:
        draft_spec = found.draft.cache_spec(device, use_graphs=use_graphs)
        with phases("draft model"):
            draft_model = found.draft.load(engine, draft_spec, memory, step_cost, phases)
    use_lookup = request.drafting == "lookup"
    if use_lookup or draft_model:
        engine.drafter = SpeculativeDrafter(
            step_cost,
            MAX_VERIFIED_TOKENS[device.type],
            lambda of: engine.runner.captured_widths(of),
            use_lookup,
            draft_model,
        )
    return draft_spec, draft_model
