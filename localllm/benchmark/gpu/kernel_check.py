"""Compares every operation of a model with its reference, so that kernels are tested with the shapes and tensors
that models use.

The error may be at most four times that of plain torch in the same dtype, which is twice the bound of the kernels'
own tests, since the worst of hundreds of calls counts. Arguments that a call changes in place are compared, too.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from localllm.metrics import Stopwatch
from localllm.quant.vectors import DTYPE_MAX
from localllm.request import Request, SamplingParams
from localllm.runtime.engine import Engine
from localllm.runtime.kernels.registry import KERNELS, Kernel, prefer_kernel, select_kernel
from localllm.runtime.kv_cache.tensors import KVCache, LatentCache, RecurrentCache
from localllm.runtime.sequence import Sequence

CHANGING = (KVCache, LatentCache, RecurrentCache)
LARGE = 2**24  # elements: weights, which nothing changes


PROMPTS = (1, 5, 16, 17, 70, 130)  # tokens of prompts: short ones alone, then all beside each other
BESIDE = 20  # short prompts beside each other
ANSWER = 4  # tokens
MAX_STEPS = 10_000


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


def converted(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy that shares no tensor. Floats are converted to `dtype`, except 8-bit caches with their scales,
    and objects that are never changed: norms, packed weights, the batch, experts.
    """
    return _converted(value, dtype, {})


def _converted(value: Any, dtype: torch.dtype | None, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Tensor):
        plain = value.is_floating_point() and value.dtype not in DTYPE_MAX
        found: Any = value.to(dtype, copy=True) if dtype and plain else value.clone()
    elif type(value) in (tuple, list):
        found = type(value)(_converted(each, dtype, seen) for each in value)
    elif isinstance(value, CHANGING):
        kept = (
            dtype
            if not any(isinstance(x, Tensor) and x.dtype in DTYPE_MAX for x in vars(value).values())
            else None
        )
        found = copy.copy(value)
        for name, each in vars(value).items():
            object.__setattr__(found, name, _converted(each, kept, seen))
    else:
        return value
    seen[id(value)] = found
    return found


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

    longest: maximum tokens of a prompt
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
