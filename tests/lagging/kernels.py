"""Kernels of a lagging device: each is one task, like a launch, that computes the torch reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime import gpu_sampler
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.experts import StackedExperts
from localllm.runtime.kernels.gpu import step
from localllm.runtime.kernels.gpu.sampling import SamplingColumns
from localllm.runtime.kernels.gpu.step import CONTEXT_LEN, FIRST_TOKEN, NEWEST_INDEX, NEWEST_TOKEN, StepColumns
from localllm.runtime.kernels.registry import KERNELS, Kernel
from localllm.runtime.kv_cache.tensors import LatentCache
from localllm.runtime.sampler import SamplingSpec, sample
from tests.lagging.device import LaggingDevice, LagTensor, on_cpu, tensors_in
from tests.lagging.streams import active

GPU_KERNELS = "localllm.runtime.kernels.gpu"


def use_references(patch: pytest.MonkeyPatch) -> None:
    """Compute with torch on lagging devices.

    Attention, recurrent layers, experts, sampling and the ends of a step are single tasks; those of recurrent
    layers cannot be captured. All other operations are those of torch, one by one.
    """
    for operation, kernels in list(KERNELS.items()):
        own = [kernel for kernel in kernels if not kernel.run.__module__.startswith(GPU_KERNELS)]
        if operation in RESULTS:
            run = as_task(own[-1].run, operation, RESULTS[operation])
            own.insert(0, Kernel(operation, "lagging", only_on_device(operation), run))
        patch.setitem(KERNELS, operation, own)
    patch.setattr(step, "begin_step", changing(step.begin_step_reference))
    patch.setattr(step, "end_step", changing(end_step_reference))
    patch.setattr(gpu_sampler, "sample_tokens", changing(sample_tokens_reference))


def latent_result(q: Tensor, cache: LatentCache, batch: Any, config: Any, k_b: Tensor, v_b: Tensor) -> Tensor:
    return q.new_empty(len(q), q.shape[1], v_b.shape[1])


def empty_if_spans(like: Tensor, batch: Batch) -> Tensor:
    """Return an empty result of a reference that needs the host's view of a step. Raises CannotCapture."""
    len(batch.spans)
    return torch.empty_like(like)


RESULTS: dict[str, Callable[..., Tensor]] = {
    "attention": lambda q, *_: torch.empty_like(q),
    "latent_attention": latent_result,
    "experts": lambda x, *_: torch.empty_like(x),
    "causal_conv": lambda x, taps, cache, batch, *_: empty_if_spans(x, batch),
    "delta_net": lambda q, k, v, decay, beta, cache, batch: empty_if_spans(v, batch),
}
CHANGE_STATES = ("causal_conv", "delta_net")


def only_on_device(operation: str) -> Callable[..., str | None]:
    def unsupported(x: Tensor, *others: Any) -> str | None:
        if not isinstance(x, LagTensor):
            return "not on a lagging device"
        is_single_task = operation != "experts" or isinstance(others[2], StackedExperts)
        return None if is_single_task else "the experts are not stacked"

    return unsupported


def launch(
    label: str, run: Callable[..., object], arguments: Any, reads: Iterable[Any], writes: Iterable[Any]
) -> None:
    device = active()
    assert isinstance(device, LaggingDevice)
    given = on_cpu(arguments)
    with device.lock:
        device.reclaim()
        device.forbid_host_tensors(label, arguments)
        device.launch(label, lambda: run(*given), reads, writes)


def as_task(run: Callable[..., Tensor], label: str, result: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that queues `run`. result: makes the empty result of a call"""

    def kernel(*arguments: Any) -> Tensor:
        out = result(*arguments)

        def fill(target: Tensor, *given: Any) -> None:
            target.copy_(run(*given))

        given = list(tensors_in(arguments))
        launch(label, fill, (out, *arguments), given, [out, *(given if label in CHANGE_STATES else ())])
        return out

    return kernel


def changing(run: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel that queues `run`, which may change any of its arguments."""

    def kernel(*arguments: Any, **named: Any) -> None:
        def call(given: tuple[Any, ...], others: dict[str, Any]) -> None:
            run(*given, **others)

        launch(run.__name__, call, (arguments, named), [], tensors_in([arguments, named]))

    return kernel


def end_step_reference(columns: StepColumns, choices: Tensor) -> None:
    c = columns
    for i, length in enumerate(c.inputs[CONTEXT_LEN, : len(c.context_len)].tolist()):
        if length >= 0:
            c.newest[c.inputs[NEWEST_INDEX, i]] = choices[(i + 1) * c.count - 1]
            c.inputs[CONTEXT_LEN, i] += c.count
            c.inputs[FIRST_TOKEN : FIRST_TOKEN + c.count, i] = NEWEST_TOKEN


def sample_tokens_reference(
    logits: Tensor, choices: Tensor, columns: SamplingColumns, scratch: Any, *, any_random: bool, penalties: Any
) -> None:
    """Sample row by row with `sampler.sample`, from what is in the columns."""
    for row, live in enumerate(columns.live[: len(logits)].tolist()):
        if not live:
            continue
        position, history = int(columns.position[row]), int(columns.history[row])
        tokens: list[int] = []
        if penalties:
            histories, biases = penalties
            tokens = histories.tokens[history, :position].tolist() if history >= 0 else []
            biased = biases.token[row] >= 0
            logits[row].index_add_(0, biases.token[row][biased].long(), biases.value[row][biased])
        assert any_random or columns.temperature[row] == 0
        params = SamplingParams(
            temperature=float(columns.temperature[row]),
            top_k=int(columns.top_k[row]),
            top_p=float(columns.top_p[row]),
            min_p=float(columns.min_p[row]),
            repetition_penalty=float(columns.repetition[row]),
            repeat_last_n=int(columns.last[row]),
            presence_penalty=float(columns.presence[row]),
            frequency_penalty=float(columns.frequency[row]),
        )
        answer = Counter(tokens[int(columns.answer[row]) :])
        spec = SamplingSpec(params, int(columns.seed[row]), position, tokens, answer)
        choices[row] = sample(logits[row : row + 1], [spec])[0]
        columns.position[row] += 1
        if penalties and history >= 0 and position < histories.tokens.shape[1]:
            histories.tokens[history, position] = choices[row].clamp(min=0)
