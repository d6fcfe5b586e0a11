"""Tests a GPU for `localllm doctor --gpu-selftest`: compares the kernels that generated models call with their
references in torch, and measures products and decode steps, whose rates then replace the estimates of `plan`.

The models have the shapes of published ones and random weights, so nothing is downloaded. What does not fit into
the time or the memory is left out and named. Every operation is compared with the shapes and tensors that models
use. The error may be at most four times that of plain torch in the same dtype, which is twice the bound of the
kernels' own tests, since the worst of hundreds of calls counts. Arguments that a call changes in place are
compared, too.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from localllm.arch.cost import flops
from localllm.benchmark.gpu.decode_steps import (
    Model,
    cancel_all,
    fill_prefix_cache,
    generate,
    needed_bytes,
    random_prompt,
    run_until,
    step_seconds,
    submit,
)
from localllm.benchmark.gpu.generated import (
    DEEPSEEK,
    GPT_OSS,
    QWEN3_5,
    QWEN3_MOE,
    SHAPES,
    TINY,
    Form,
    RandomSource,
)
from localllm.benchmark.gpu.self_test_report import CheckedModel, ProductRate, SelfTest, StepRate
from localllm.formatting import format_bytes
from localllm.hardware.device import device_context, device_name, free_bytes, release_cached
from localllm.hardware.gpu_clock import capture, finished, seconds
from localllm.hardware.measure import measure
from localllm.metrics import Stopwatch
from localllm.plan.memory import TOKEN_BUDGET
from localllm.plan.speed import prefill_steps
from localllm.quant.vectors import DTYPE_MAX, KV_DTYPES
from localllm.request import Request, SamplingParams
from localllm.runtime import kernels
from localllm.runtime.engine import Engine
from localllm.runtime.kernels.registry import KERNELS, Kernel, prefer_kernel, select_kernel
from localllm.runtime.kv_cache.tensors import KVCache, LatentCache, RecurrentCache
from localllm.runtime.sequence import Sequence

BUDGET_S = 110.0  # after which nothing is begun, so that the test ends within two minutes
CHECKED_CONTEXT = 256  # tokens
VOCABULARY = 32_000  # of checked models
PROMPTS = (1, 5, 16, 17, 70, 130)  # tokens of prompts: short ones alone, then all beside each other
BESIDE = 20  # short prompts beside each other
ANSWER = 4  # tokens
MAX_STEPS = 10_000  # of the engine, for all answers
CHANGING = (KVCache, LatentCache, RecurrentCache)
LARGE = 2**24  # elements: weights, which nothing changes
CAPTURED_SEQUENCES = 3  # of compared steps; up to 16 have the same kernels in a graph and outside
CONTEXT, TINY_CONTEXT = 2048, 40  # tokens in the cache of measured steps
STEPS, TINY_STEPS = 32, 2  # of a window
ROWS = (1, 8)  # of x, in measured products
MATRIX, TINY_MATRIX = (14_336, 4096), (64, 64)
MATRICES_BYTES = 2**30  # of different matrices, several times the size of caches
DTYPE = torch.bfloat16


def layers(shape: dict[str, Any], count: int, **changes: Any) -> dict[str, Any]:
    """Return the shape of a model with its first layers and a small vocabulary."""
    types = {"layer_types": shape["layer_types"][:count]} if "layer_types" in shape else {}
    return shape | {"num_hidden_layers": count, "vocab_size": VOCABULARY} | types | changes


# The most important ones come first, should time run out: together they call every kernel of a decode step.
Case = tuple[str, dict[str, Any], Form, str | None]  # name, shape, format of weights, dtype of keys and values
CHECKS: tuple[Case, ...] = (
    ("Llama 8B, INT4", layers(SHAPES["8B"], 1), "int4", None),
    ("Llama 1B, bf16", layers(SHAPES["1B"], 1), "bf16", None),
    ("Llama 1B, INT8, 8-bit cache", layers(SHAPES["1B"], 1), "int8", "int8"),
    ("gpt-oss, MXFP4", layers(GPT_OSS, 2, num_local_experts=8), "mxfp4", None),
    ("Qwen3 MoE, INT4, FP8 cache", layers(QWEN3_MOE, 1, num_experts=16), "int4", "fp8"),
    ("DeepSeek V2 Lite, bf16", layers(DEEPSEEK, 2, n_routed_experts=8), "bf16", None),
    ("Qwen3.5, bf16", layers(QWEN3_5, 4), "bf16", None),
)
MEASURED: tuple[tuple[str, Form], ...] = (
    ("8B", "int4"),
    ("1B", "int4"),
    ("8B", "bf16"),
    ("1B", "bf16"),
    ("8B", "int8"),
)
PRODUCTS: tuple[Form, ...] = ("int4", "bf16", "int8", "mxfp4")


@torch.inference_mode()
def run_self_test(
    device: torch.device,
    *,
    budget_s: float = BUDGET_S,
    tiny: bool = False,
    progress: Callable[[str], object] = lambda text: None,
) -> SelfTest:
    """Test a GPU. tiny: test this function itself, with tiny shapes; progress: receives the name of each part"""
    result, start = SelfTest(device_name(device)), time.perf_counter()
    with device_context(device):
        for name, run in parts(result, device, tiny):
            if time.perf_counter() - start > budget_s:
                result.left_out.append(f"{name}: no time left")
                continue
            progress(name)
            try:
                run()
            except torch.OutOfMemoryError:
                result.left_out.append(f"{name}: not enough memory")
            release(device)
        finished(device)
    result.seconds = time.perf_counter() - start
    return result


def parts(result: SelfTest, device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each part of the test with the function that adds its results."""

    def ceilings() -> None:
        rates = measure(device, DTYPE)
        result.copy, result.flops = rates.copy, rates.flops

    yield "copies and products", ceilings
    for name, shape, form, kv_dtype in CHECKS:
        yield name, lambda case=(name, shape, form, kv_dtype): result.checked.append(check(case, device))
    for form in PRODUCTS:
        yield (
            f"products in {form}",
            lambda form=form: result.products.extend(measure_products(result, form, device, tiny)),
        )
    for name, form in MEASURED:
        yield f"steps of {name} in {form}", lambda case=(name, form): measure_step(result, *case, device, tiny)


def check(case: Case, device: torch.device) -> CheckedModel:
    """Compare the kernels of a model with their references, and its captured steps with others."""
    name, shape, form, kv_dtype = case
    model = generate(
        shape, form, device, CHECKED_CONTEXT, sequences=32, kv_dtype=KV_DTYPES[kv_dtype] if kv_dtype else None
    )
    engine, vocabulary = model.engine, model.config.vocab_size
    graphs, engine.runner.graphs = engine.runner.graphs, None  # replays call no kernel of the registry
    with compared() as findings:
        run_all_kinds_of_steps(engine, vocabulary, CHECKED_CONTEXT)
    faults = [*Counter(findings.wrong)]
    if not findings.ran:
        faults.append("no kernel supports its operations")
    engine.runner.graphs = graphs
    if graphs and (fault := compare_graphs(model)):
        faults.append(fault)
    return CheckedModel(name, dict(findings.ran), faults)


def compare_graphs(model: Model) -> str | None:
    """Return a fault if captured steps give other tokens than steps that are launched kernel by kernel."""
    prompts = [random_prompt(model, CHECKED_CONTEXT // 4, seed) for seed in range(CAPTURED_SEQUENCES)]
    for prompt in prompts:
        fill_prefix_cache(model, prompt)
    runner = model.engine.runner
    graphs, answers = runner.graphs, []
    for used in (None, graphs):
        runner.graphs = used
        sequences = [make_sequence(p, 16, sampled=i % 2 == 1) for i, p in enumerate(prompts)]
        answers.append(answer_all(model.engine, sequences))
    return None if answers[0] == answers[1] else "captured steps give other tokens than single launches"


@dataclass
class Findings:
    ran: Counter[str] = field(default_factory=Counter)  # kernels by operation/name
    wrong: list[str] = field(default_factory=list)


@contextmanager
def compared() -> Iterator[Findings]:
    """Compare all calls inside the context, and yield the findings. Kernels are launched individually, without
    graphs.
    """
    findings, inside = Findings(), False

    def beside(operation: str) -> Callable[..., Any]:
        reference = KERNELS[operation][-1]

        def run(*arguments: Any) -> Any:
            nonlocal inside
            kernel = select_kernel(operation, arguments, run)
            if inside or kernel is reference:
                return (reference if inside else kernel).run(*arguments)
            exactly, plainly = converted(arguments, torch.float64), converted(arguments, None)
            inside = True
            try:
                plain, exact = reference.run(*plainly), in_float64(reference, exactly)
            finally:
                inside = False
            if exact is None:
                exactly, exact = plainly, plain
            result = kernel.run(*arguments)
            name = f"{operation}/{kernel.name}"
            findings.ran[name] += 1
            both = zip(
                tensors((result, written(arguments))),
                tensors((plain, written(plainly))),
                tensors((exact, written(exactly))),
                strict=True,
            )
            findings.wrong += [f"{name}: {fault}" for each in both if (fault := fault_of(*each))]
            return result

        return run

    with ExitStack() as added:
        for operation in list(KERNELS):
            added.enter_context(prefer_kernel(operation, beside(operation)))
        yield findings


def in_float64(reference: Kernel, exactly: tuple[Any, ...]) -> Any:
    """Run the reference in float64; None if arguments (experts) contain weights with their own dtype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no fast way for such a mixture
            return reference.run(*exactly)
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        return None


def fault_of(got: Tensor, plain: Tensor, exact: Tensor) -> str | None:
    """Return why `got` is not close enough to `exact`, or None. plain: torch's result in the same dtype."""
    if got.shape != exact.shape or got.dtype != plain.dtype:
        return f"{got.dtype} {list(got.shape)} for {plain.dtype} {list(plain.shape)}"
    if not got.is_floating_point() or got.dtype in DTYPE_MAX:
        wrong = (got != plain) & (got.double() != exact.double())
        # A number of 8 bits may be rounded to its neighbour: what it stands for is compared where it is read.
        most = got.numel() // 100 if got.dtype in DTYPE_MAX else 0
        return f"{int(wrong.sum())} of {got.numel()} differ" if int(wrong.sum()) > most else None
    if not torch.equal(got.isnan(), exact.isnan()):
        return f"{int(got.isnan().sum())} NaN for {int(exact.isnan().sum())}"
    if not got.numel():
        return None
    eps = torch.finfo(got.dtype).eps
    got, plain, exact = (x.double().nan_to_num() for x in (got, plain, exact))
    off = (plain - exact).abs().max()
    allowed = 4 * off + (2 if off > 0 else 4) * eps * exact.abs().max()  # no exact answer: both are rounded
    error = (got - exact).abs().max()
    return None if error <= allowed else f"{error:.2e} > {allowed:.2e} at {list(got.shape)}"


def converted(value: Any, dtype: torch.dtype | None, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy that shares no tensor. Floats are converted to `dtype`, except 8-bit caches with their scales,
    and objects that are never changed: norms, packed weights, the batch, experts.

    copies: made so far, by the id of their original
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor):
        plain = value.is_floating_point() and value.dtype not in DTYPE_MAX
        copied: Any = value.to(dtype, copy=True) if dtype and plain else value.clone()
    elif type(value) in (tuple, list):
        copied = type(value)(converted(each, dtype, copies) for each in value)
    elif isinstance(value, CHANGING):
        has_8_bits = any(isinstance(x, Tensor) and x.dtype in DTYPE_MAX for x in vars(value).values())
        copied = copy.copy(value)
        for name, each in vars(value).items():
            object.__setattr__(copied, name, converted(each, None if has_8_bits else dtype, copies))
    else:
        return value
    copies[id(value)] = copied
    return copied


def written(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments that a call may change: caches, and the states of recurrent layers."""
    return [a for a in arguments if isinstance(a, CHANGING) or (isinstance(a, Tensor) and a.numel() < LARGE)]


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in it, in the same order for a value and its copy."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, CHANGING):
        yield from tensors(list(vars(value).values()))


def run_all_kinds_of_steps(engine: Engine, vocabulary: int, longest: int) -> None:
    """Run prompts, chunks, and steps of one and of many sequences, greedy and sampled.

    longest: most tokens of a prompt
    """
    prompts = [random_ids(min(count, longest), vocabulary, count) for count in PROMPTS]
    for prompt in prompts[:2]:
        answer_all(engine, [make_sequence(prompt, ANSWER)])
    answer_all(engine, [make_sequence(prompt, ANSWER + 2, sampled=i % 2 == 0) for i, prompt in enumerate(prompts)])
    answer_all(engine, [make_sequence(random_ids(9, vocabulary, i), ANSWER) for i in range(BESIDE)])


def random_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_sequence(prompt: list[int], answer: int, sampled: bool = False) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, logprobs=1)
    if sampled:
        filters = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
        params = replace(params, temperature=0.8, **filters)
    request = Request(tuple(prompt), params, 0.0)
    return Sequence(request, len(prompt), frozenset(), len(prompt) + answer, Stopwatch(0.0))


def answer_all(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    """Return the answers' tokens. Raises RuntimeError if a model computes NaN or infinity."""
    for sequence in sequences:
        engine.add_sequence(sequence)
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests:
            return [sequence.token_ids[sequence.prompt_len :] for sequence in sequences]
        if error := next((event.error for event in engine.step() if event.error), None):
            raise RuntimeError(str(error))
    raise RuntimeError("the engine makes no progress")


def measure_products(result: SelfTest, form: Form, device: torch.device, tiny: bool) -> list[ProductRate]:
    """Measure products with different matrices in a captured graph, so that launches of the host do not count."""
    rows, columns = TINY_MATRIX if tiny else MATRIX
    source = RandomSource(form, device).under("layers.0.mlp.experts.0")  # in MXFP4, experts are packed
    first = kernels.prepare_weights(source.matrix("up_proj", rows, columns))[0]
    count = 2 if tiny else max(2, min(MATRICES_BYTES, free_bytes(device) // 4) // first.nbytes)
    others = (kernels.prepare_weights(source.matrix("up_proj", rows, columns))[0] for _ in range(count - 1))
    weights, rates = [first, *others], []
    for n in ROWS:
        x = torch.randn(n, columns, dtype=DTYPE, device=device)
        run = capture(lambda x=x: [kernels.linear(x, weight) for weight in weights], device)
        rate = count * first.nbytes / seconds(run, device, repeats=5)
        rates.append(ProductRate(form, n, rate, result.share_of_copy(rate)))
    return rates


def measure_step(result: SelfTest, name: str, form: Form, device: torch.device, tiny: bool) -> None:
    """Measure a decode step with CONTEXT tokens in the cache, and the prefill of so many."""
    shape, context = (TINY, TINY_CONTEXT) if tiny else (SHAPES[name], CONTEXT)
    if not tiny and (need := needed_bytes(shape, form, context)) > free_bytes(device):
        result.left_out.append(f"steps of {name} in {form}: they need {format_bytes(need)}")
        return
    model = generate(shape, form, device, context, sequences=2)
    prefill_s = measure_prefill(model, context, device)
    step_s, _ = step_seconds(model, context, 1, TINY_STEPS if tiny else STEPS)
    rate = model.step_bytes(context, 1) / step_s
    operations = sum(
        flops(model.config, step) * times for step, times in prefill_steps(context, TOKEN_BUDGET[device.type])
    )
    result.steps.append(
        StepRate(
            name,
            form,
            context,
            tokens_per_s=1 / step_s,
            bytes_per_s=rate,
            of_copy=result.share_of_copy(rate),
            prefill_flops=operations / prefill_s,
            without_graphs=model.engine.no_graphs_reason,
        )
    )


def measure_prefill(model: Model, context: int, device: torch.device) -> float:
    """Return the seconds of a prompt's prefill, after one that is not counted."""
    for seed in (100, 101):
        start = finished(device)
        sequence = submit(model, random_prompt(model, context, seed), 2)
        run_until(model.engine, [sequence], 1)
        duration = finished(device) - start
        cancel_all(model.engine, [sequence])
    return duration


def release(device: torch.device) -> None:
    """Release the memory of models that are no longer referenced."""
    gc.collect()
    release_cached(device)
