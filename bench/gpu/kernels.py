"""Where a step's time goes: each kind of kernel of the 8B model, left out of the step's graph and by itself.

`in the step` is what the step gets faster by when the calls of one kind give back what they gave before; `alone`
is a graph of nothing but these calls, with the tensors of all layers, so that no cache holds them. Both are a
call's. Steps here are the decoder's alone: no sampling, no host.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.gpu.ceilings import copy_bandwidth
from bench.gpu.choice import chosen, first
from bench.gpu.clock import captured, seconds
from bench.gpu.generated import SHAPES, TINY, Form
from bench.gpu.loop import DTYPE, Model, generate, needed_bytes
from bench.gpu.setting import Row, Setting, judged, release
from localllm.arch.config import AttentionConfig
from localllm.plan.memory import BLOCK_SIZE, blocks_for
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.registry import KERNELS
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import KVCache

BUDGET_S = 60
CONTEXT, TINY_CONTEXT = 1024, 20
FORMS: tuple[Form, ...] = ("int4", "bf16", "int8")
BATCHES = (1, 8)
LONG, TINY_LONG = (8192, 32_768, 131_072), (40,)  # contexts for attention alone
DECIDES = 32_768  # which of them is judged
ATTENTION_LINE = 0.85  # of the copy
CACHES = 4  # layers that attention alone goes round

Kind = tuple[str, str]  # an operation, and the shapes of its weights


@dataclass
class Calls:
    """Of one kind, in one step."""

    name: str  # of the kernel that ran
    arguments: list[tuple[Any, ...]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


def measure(setting: Setting) -> Iterator[Row]:
    ceiling, shape = copy_bandwidth(setting), TINY if setting.tiny else SHAPES["8B"]
    context = TINY_CONTEXT if setting.tiny else CONTEXT
    for form in FORMS[:1] if setting.tiny else FORMS:
        if not setting.room_for(needed_bytes(shape, form, context, max(BATCHES))):
            yield {"weights": form, "left out": "does not fit"}
            continue
        model = generate(shape, form, setting, context, sequences=max(BATCHES))
        for batch in BATCHES:
            try:
                yield from of_step(setting, model, form, context, batch, ceiling)
            except RuntimeError as error:  # where a step cannot be captured, attention alone may be
                yield {"weights": form, "batch": batch, "left out": str(error).partition("\n")[0]}
        del model
        release()
    for length in TINY_LONG if setting.tiny else LONG:
        for batch in BATCHES:
            yield attention_alone(setting, length, batch, ceiling)


@torch.inference_mode()
def of_step(setting: Setting, model: Model, form: Form, context: int, batch: int, ceiling: float) -> Iterator[Row]:
    runner, pool = model.engine.runner, BlockPool(batch * blocks_for(context), BLOCK_SIZE)
    states = [SequenceState(pool) for _ in range(batch)]
    for state in states:
        state.extend(context)
    step = Batch.from_states(states, [[7 + i] for i in range(batch)], list(range(batch)), setting.device)

    def run() -> Tensor:
        return runner.model(step, runner.caches)

    kinds = noted(run)
    whole = seconds(captured(run, setting.device), setting.device)
    rest = whole
    for (operation, shapes), calls in kinds.items():
        with first(operation, given_back(calls), only(shapes)):
            without = captured(run, setting.device)
        in_step = (whole - seconds(without, setting.device)) / len(calls.results)
        rest -= in_step * len(calls.results)
        alone = seconds(captured(again(operation, calls), setting.device), setting.device) / len(calls.results)
        seen = context * batch if operation == "attention" else 0  # tokens of the cache
        size = sum(bytes_of(arguments, seen) for arguments in calls.arguments) / len(calls.results)
        yield {
            **{"weights": form, "batch": batch, "operation": operation, "of": shapes, "kernel": calls.name},
            **{"calls": len(calls.results), "in the step, us": in_step * 1e6, "alone, us": alone * 1e6},
            **{"GB/s": size / alone / 1e9, "of copy": size / alone / ceiling},
        }
    yield {"weights": form, "batch": batch, "operation": "all else", "calls": 1, "in the step, us": rest * 1e6}
    yield {"weights": form, "batch": batch, "operation": "the step", "calls": 1, "in the step, us": whole * 1e6}


def noted(run: Callable[[], object]) -> dict[Kind, Calls]:
    """The calls of one step by kind, those that others make left out."""
    found: dict[Kind, Calls] = {}
    depth = 0
    with ExitStack() as added:

        def note(operation: str) -> Callable[..., Any]:
            def run_noted(*arguments: Any) -> Any:
                nonlocal depth
                kernel = chosen(operation, arguments, run_noted)
                depth += 1
                result = kernel.run(*arguments)
                depth -= 1
                if not depth:
                    calls = found.setdefault((operation, shapes_of(arguments)), Calls(kernel.name))
                    calls.arguments.append(arguments)
                    calls.results.append(result)
                return result

            return run_noted

        for operation in list(KERNELS):
            added.enter_context(first(operation, note(operation)))
        run()
    return found


def given_back(calls: Calls) -> Callable[..., Any]:
    """In place of the calls: what they gave."""
    results = itertools.cycle(calls.results)
    return lambda *_: next(results)


def only(shapes: str) -> Callable[..., str | None]:
    return lambda *arguments: None if shapes_of(arguments) == shapes else "another kind"


def again(operation: str, calls: Calls) -> Callable[[], None]:
    """The same calls, with nothing between."""
    runs = [next(k for k in KERNELS[operation] if k.unsupported(*a) is None).run for a in calls.arguments]

    def run() -> None:
        for one, arguments in zip(runs, calls.arguments, strict=True):
            one(*arguments)

    return run


def shapes_of(arguments: tuple[Any, ...]) -> str:
    """Of the weights among the arguments: matrices of `fused_linear` and `linear`."""
    groups = (a if isinstance(a, tuple) else (a,) for a in arguments[1:2])
    weights = [w for group in groups for w in group if isinstance(w, Tensor | QuantizedTensor)]
    return ", ".join(f"{w.shape[0]} x {w.shape[1]}" for w in weights if len(w.shape) == 2)


def bytes_of(argument: Any, seen: int) -> int:
    """What a call has to read of it, of a cache so many tokens; of a batch next to nothing."""
    match argument:
        case Tensor() | QuantizedTensor():
            return argument.nbytes
        case tuple():
            return sum(bytes_of(part, seen) for part in argument)
        case KVCache():
            return 2 * seen * argument.k[0].nbytes
    return 0


@torch.inference_mode()
def attention_alone(setting: Setting, context: int, batch: int, ceiling: float) -> Row:
    """Decode of the 8B model's attention in a graph, over the caches of several layers."""
    heads, kv_heads, dim = (4, 2, 16) if setting.tiny else (32, 8, 128)
    size = 2 * context * batch * kv_heads * dim * DTYPE.itemsize  # that a call has to read
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

    alone = seconds(captured(run, setting.device), setting.device) / CACHES
    rate = size / alone
    judgement = judged(rate / ceiling, ATTENTION_LINE) if context == DECIDES and batch == 1 else {}
    return case | {"alone, us": alone * 1e6, "GB/s": rate / 1e9, "of copy": rate / ceiling} | judgement
