"""Decode of the 8B model compared, in alternation, with transformers with a static cache and torch.compile, and
with torch's INT4 product and cuBLAS instead of localllm's kernels in its own loop.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.gpu.setting import Row, Setting, judged, release
from bench.gpu.static_cache import CompiledLlama
from bench.gpu.torch_int4 import FORMAT, TorchInt4Source, linear_int4pack
from localllm.benchmark.gpu.decode_steps import ANSWER, DTYPE, Model, generate, needed_bytes, step_seconds
from localllm.benchmark.gpu.generated import SHAPES, TINY, Form
from localllm.runtime.kernels.registry import prefer_kernel, prefer_reference

BUDGET_S = 115
CONTEXT, TINY_CONTEXT = 128, 20  # tokens
STEPS, TINY_STEPS = 32, 2
ROUNDS = 3
FORMS: tuple[Form, ...] = ("bf16", "int4")


MeasureStep = Callable[[], float]  # returns the seconds of one token
MakeRival = Callable[[Setting, dict[str, Any], int], MeasureStep]  # takes config.json and the context length


def measure(setting: Setting) -> Iterator[Row]:
    shape = TINY if setting.tiny else SHAPES["8B"]
    context = TINY_CONTEXT if setting.tiny else CONTEXT
    if not setting.room_for(need := 3 * needed_bytes(shape, "bf16", context)):
        yield {"left out": f"needs {need / 1e9:.0f} GB"}
        return
    ours = {form: localllm_step(setting, shape, form, context) for form in FORMS}
    for name, (form, make_rival) in RIVALS.items():
        case: Row = {"weights": form, "contestant": name}
        try:
            theirs = make_rival(setting, shape, context)
            theirs()  # compiles and captures
            times = [(ours[form](), theirs()) for _ in range(ROUNDS)]
        except Exception as error:  # a rival that fails is reported, and the others are measured
            yield case | {"left out": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
        else:
            our_s, their_s = map(statistics.median, zip(*times, strict=True))
            yield case | {
                **{"ms/token": their_s * 1e3, "tokens/s": 1 / their_s},
                **{"localllm, ms/token": our_s * 1e3, "localllm, tokens/s": 1 / our_s},
                **judged(their_s / our_s, 1.0),
                "times as fast": their_s / our_s,
            }
        theirs = None
        release()


def steps(setting: Setting) -> int:
    return TINY_STEPS if setting.tiny else STEPS


def in_our_loop(
    setting: Setting, model: Model, context: int, kernels: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> MeasureStep:
    """kernels: context in which the model runs and its graph is captured."""

    def measure_step() -> float:
        with kernels():
            return step_seconds(model, context, 1, steps(setting))[0]

    return measure_step


def localllm_step(setting: Setting, shape: dict[str, Any], form: Form, context: int) -> MeasureStep:
    measure_step = in_our_loop(setting, generate(shape, form, setting.device, context), context)
    measure_step()  # compiles and captures
    return measure_step


def cublas(setting: Setting, shape: dict[str, Any], context: int) -> MeasureStep:
    def unless_dense(_: Tensor, weight: object, *__: object) -> str | None:
        return None if isinstance(weight, Tensor) else "a packed weight"

    @contextmanager
    def kernels() -> Iterator[None]:
        with prefer_reference("fused_linear"), prefer_kernel("linear", F.linear, unless_dense):
            yield

    return in_our_loop(setting, generate(shape, "bf16", setting.device, context), context, kernels)


def torch_int4(setting: Setting, shape: dict[str, Any], context: int) -> MeasureStep:
    def unless_int4pack(_: Tensor, weight: object, *__: object) -> str | None:
        weights = weight if isinstance(weight, tuple) else (weight,)
        return None if all(getattr(w, "format", "") == FORMAT for w in weights) else "another format"

    @contextmanager
    def kernels() -> Iterator[None]:
        with (
            prefer_reference("fused_linear", unless_int4pack),
            prefer_kernel("linear", linear_int4pack, unless_int4pack),
        ):
            yield

    model = generate(shape, "int4", setting.device, context, source=TorchInt4Source)
    return in_our_loop(setting, model, context, kernels)


def transformers_step(setting: Setting, shape: dict[str, Any], context: int) -> MeasureStep:
    model = CompiledLlama(setting, shape, context, context + ANSWER, DTYPE)
    return lambda: model.step_s(steps(setting))


def transformers_generate(setting: Setting, shape: dict[str, Any], context: int) -> MeasureStep:
    model = CompiledLlama(setting, shape, context, context + ANSWER, DTYPE)
    return lambda: model.generate_s(steps(setting))


RIVALS: dict[str, tuple[Form, MakeRival]] = {
    "cuBLAS in localllm's loop": ("bf16", cublas),
    "torch's int4pack_mm in localllm's loop": ("int4", torch_int4),
    "transformers, a compiled step": ("bf16", transformers_step),
    "transformers, generate()": ("bf16", transformers_generate),
}
