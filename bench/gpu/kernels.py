"""Time of each kernel in a step of the 8B model, by operation and shapes.

`in the step` is the time that the step's graph saves when these calls return recorded results instead; `alone` is
the time in a graph that contains only these calls, with the tensors of all layers, which exceed any cache. Both
are per call. Steps contain only the decoder: no sampling and no work of the host.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.gpu.ceilings import copy_bandwidth
from bench.gpu.setting import Row, Setting, judged, release
from localllm.arch.config import AttentionConfig
from localllm.benchmark.gpu.decode_steps import DTYPE, Model, generate, needed_bytes
from localllm.benchmark.gpu.generated import SHAPES, TINY, Form
from localllm.hardware.gpu_clock import capture, seconds
from localllm.plan.memory import BLOCK_SIZE, blocks_for
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.registry import KERNELS, prefer_kernel, select_kernel
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import KVCache

BUDGET_S = 60
CONTEXT, TINY_CONTEXT = 1024, 20
FORMS: tuple[Form, ...] = ("int4", "bf16", "int8")
BATCHES = (1, 8)
LONG_CONTEXTS, TINY_LONG_CONTEXTS = (8192, 32_768, 131_072), (40,)  # for attention alone
JUDGED_CONTEXT = 32_768
ATTENTION_LINE = 0.85  # fraction of the copy bandwidth to reach
CACHES = 4  # KV caches that attention alone cycles through

CallType = tuple[str, str]  # an operation, and the shapes of its weights


@dataclass
class Calls:
    """Calls of one type in one step."""

    name: str  # of the kernel
    arguments: list[tuple[Any, ...]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


def measure(setting: Setting) -> Iterator[Row]:
    ceiling, shape = copy_bandwidth(setting), TINY if setting.tiny else SHAPES["8B"]
    context = TINY_CONTEXT if setting.tiny else CONTEXT
    for form in FORMS[:1] if setting.tiny else FORMS:
        if not setting.room_for(needed_bytes(shape, form, context, max(BATCHES))):
            yield {"weights": form, "left out": "does not fit"}
            continue
        model = generate(shape, form, setting.device, context, sequences=max(BATCHES))
        for batch in BATCHES:
            try:
                yield from step_rows(setting, model, form, context, batch, ceiling)
            except RuntimeError as error:  # the step cannot be captured; attention alone may still be
                yield {"weights": form, "batch": batch, "left out": str(error).partition("\n")[0]}
        del model
        release()
    for length in TINY_LONG_CONTEXTS if setting.tiny else LONG_CONTEXTS:
        for batch in BATCHES:
            yield attention_alone(setting, length, batch, ceiling)


@torch.inference_mode()
def step_rows(
    setting: Setting, model: Model, form: Form, context: int, batch: int, ceiling: float
) -> Iterator[Row]:
    """Yield one row per type of call, and the totals."""
    runner, pool = model.engine.runner, BlockPool(batch * blocks_for(context), BLOCK_SIZE)
    states = [SequenceState(pool) for _ in range(batch)]
    for state in states:
        state.extend(context)
    step = Batch.from_states(states, [[7 + i] for i in range(batch)], list(range(batch)), setting.device)

    def run() -> Tensor:
        return runner.model(step, runner.caches)

    calls_by_type = record_calls(run)
    total = seconds(capture(run, setting.device), setting.device)
    remainder = total
    for (operation, shapes), calls in calls_by_type.items():
        with prefer_kernel(operation, replay_results(calls), unless_shapes(shapes)):
            without = capture(run, setting.device)
        in_step = (total - seconds(without, setting.device)) / len(calls.results)
        remainder -= in_step * len(calls.results)
        repeated = capture(repeat_calls(operation, calls), setting.device)
        alone = seconds(repeated, setting.device) / len(calls.results)
        cached_tokens = context * batch if operation == "attention" else 0
        size = sum(bytes_read(arguments, cached_tokens) for arguments in calls.arguments) / len(calls.results)
        yield {
            **{"weights": form, "batch": batch, "operation": operation, "of": shapes, "kernel": calls.name},
            **{"calls": len(calls.results), "in the step, us": in_step * 1e6, "alone, us": alone * 1e6},
            **{"GB/s": size / alone / 1e9, "of copy": size / alone / ceiling},
        }
    for name, time in (("all else", remainder), ("the step", total)):
        yield {"weights": form, "batch": batch, "operation": name, "calls": 1, "in the step, us": time * 1e6}


def record_calls(run: Callable[[], object]) -> dict[CallType, Calls]:
    """Record the calls of one step by type, except those that kernels make of other operations."""
    calls_by_type: dict[CallType, Calls] = {}
    depth = 0
    with ExitStack() as preferred:

        def recorder(operation: str) -> Callable[..., Any]:
            def run_recorded(*arguments: Any) -> Any:
                nonlocal depth
                kernel = select_kernel(operation, arguments, run_recorded)
                depth += 1
                result = kernel.run(*arguments)
                depth -= 1
                if not depth:
                    call_type = operation, weight_shapes(arguments)
                    calls = calls_by_type.setdefault(call_type, Calls(kernel.name))
                    calls.arguments.append(arguments)
                    calls.results.append(result)
                return result

            return run_recorded

        for operation in list(KERNELS):
            preferred.enter_context(prefer_kernel(operation, recorder(operation)))
        run()
    return calls_by_type


def replay_results(calls: Calls) -> Callable[..., Any]:
    """Return a kernel that computes nothing and returns the recorded results."""
    results = itertools.cycle(calls.results)
    return lambda *_: next(results)


def unless_shapes(shapes: str) -> Callable[..., str | None]:
    return lambda *arguments: None if weight_shapes(arguments) == shapes else "other shapes"


def repeat_calls(operation: str, calls: Calls) -> Callable[[], None]:
    """Return a function that repeats the recorded calls, without other work in between."""
    selected = [next(k for k in KERNELS[operation] if k.unsupported(*a) is None) for a in calls.arguments]

    def run() -> None:
        for kernel, arguments in zip(selected, calls.arguments, strict=True):
            kernel.run(*arguments)

    return run


def weight_shapes(arguments: tuple[Any, ...]) -> str:
    """Shapes of the matrices that `fused_linear` and `linear` take as their second argument."""
    groups = (a if isinstance(a, tuple) else (a,) for a in arguments[1:2])
    weights = [w for group in groups for w in group if isinstance(w, Tensor | QuantizedTensor)]
    return ", ".join(f"{w.shape[0]} x {w.shape[1]}" for w in weights if len(w.shape) == 2)


def bytes_read(argument: Any, cached_tokens: int) -> int:
    """Bytes that a call reads of an argument: of a cache this many tokens, of a batch approximately none."""
    match argument:
        case Tensor() | QuantizedTensor():
            return argument.nbytes
        case tuple():
            return sum(bytes_read(part, cached_tokens) for part in argument)
        case KVCache():
            return 2 * cached_tokens * argument.k[0].nbytes
    return 0


@torch.inference_mode()
def attention_alone(setting: Setting, context: int, batch: int, ceiling: float) -> Row:
    """Measure the 8B model's attention during decode, in a graph, over the caches of several layers."""
    heads, kv_heads, dim = (4, 2, 16) if setting.tiny else (32, 8, 128)
    size = 2 * context * batch * kv_heads * dim * DTYPE.itemsize  # bytes that a call reads
    case: Row = {"operation": "attention", "of": f"context {context:,}", "batch": batch, "calls": CACHES}
    if not setting.room_for(CACHES * size + 2**30):
        return case | {"left out": "does not fit"}
    config = AttentionConfig(heads, kv_heads, dim, None, dim**-0.5)
    pool = BlockPool(batch * blocks_for(context), BLOCK_SIZE)
    states = [SequenceState(pool) for _ in range(batch)]
    for state in states:
        state.extend(context)
    step = Batch.from_states(states, [[0]] * batch, [], setting.device)
    caches = [
        KVCache(batch * blocks_for(context), BLOCK_SIZE, kv_heads, dim, DTYPE, setting.device)
        for _ in range(CACHES)
    ]
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    q = torch.randn(batch, heads, dim, device=setting.device, dtype=DTYPE)

    def run() -> list[Tensor]:
        return [kernels.attention(q, cache, step, config) for cache in caches]

    alone = seconds(capture(run, setting.device), setting.device) / CACHES
    rate = size / alone
    judgement = judged(rate / ceiling, ATTENTION_LINE) if context == JUDGED_CONTEXT and batch == 1 else {}
    return case | {"alone, us": alone * 1e6, "GB/s": rate / 1e9, "of copy": rate / ceiling} | judgement
