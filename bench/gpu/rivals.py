"""The 8B model's decode beside others on the same device in the same run, taking turns: transformers with a
static cache and torch.compile; in localllm's own loop, torch's INT4 product and cuBLAS in place of its kernels."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.gpu.choice import first, reference_of
from bench.gpu.generated import SHAPES, TINY, Form
from bench.gpu.loop import ANSWER, DTYPE, Model, generate, needed_bytes, step_seconds
from bench.gpu.setting import Row, Setting, judged, release
from bench.gpu.static_cache import Compiled
from bench.gpu.torch_int4 import FORMAT, TorchInt4Source, linear_int4pack

BUDGET_S = 115
CONTEXT, TINY_CONTEXT = 128, 20  # tokens
STEPS, TINY_STEPS = 32, 2
ROUNDS = 3
FORMS: tuple[Form, ...] = ("bf16", "int4")


Step = Callable[[], float]  # the seconds of a token
Make = Callable[[Setting, dict[str, Any], int], Step]  # of a config.json and a context


def measure(setting: Setting) -> Iterator[Row]:
    shape = TINY if setting.tiny else SHAPES["8B"]
    context = TINY_CONTEXT if setting.tiny else CONTEXT
    if not setting.room_for(need := 3 * needed_bytes(shape, "bf16", context)):
        yield {"left out": f"needs {need / 1e9:.0f} GB"}
        return
    mine = {form: ours(setting, shape, form, context) for form in FORMS}
    for name, (form, make) in RIVALS.items():
        case: Row = {"weights": form, "contestant": name}
        try:
            theirs = make(setting, shape, context)
            theirs()  # compiles and captures
            times = [(mine[form](), theirs()) for _ in range(ROUNDS)]
        except Exception as error:  # a rival that does not run here is named, and the others are measured
            yield case | {"left out": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
        else:
            our_s, their_s = (statistics.median(each) for each in zip(*times, strict=True))
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
) -> Step:
    """kernels: in force whenever the model runs, so also when its graph is captured."""

    def step() -> float:
        with kernels():
            return step_seconds(model, context, 1, steps(setting))[0]

    return step


def ours(setting: Setting, shape: dict[str, Any], form: Form, context: int) -> Step:
    step = in_our_loop(setting, generate(shape, form, setting, context), context)
    step()
    return step


def cublas(setting: Setting, shape: dict[str, Any], context: int) -> Step:
    def plain(_: Tensor, weight: object, *__: object) -> str | None:
        return None if isinstance(weight, Tensor) else "a packed weight"

    @contextmanager
    def kernels() -> Iterator[None]:
        with reference_of("fused_linear"), first("linear", F.linear, plain):
            yield

    return in_our_loop(setting, generate(shape, "bf16", setting, context), context, kernels)


def torch_int4(setting: Setting, shape: dict[str, Any], context: int) -> Step:
    def packed(_: Tensor, weight: object, *__: object) -> str | None:
        weights = weight if isinstance(weight, tuple) else (weight,)
        return None if all(getattr(w, "format", "") == FORMAT for w in weights) else "another format"

    @contextmanager
    def kernels() -> Iterator[None]:
        with reference_of("fused_linear", packed), first("linear", linear_int4pack, packed):
            yield

    model = generate(shape, "int4", setting, context, source=TorchInt4Source)
    return in_our_loop(setting, model, context, kernels)


def transformers_step(setting: Setting, shape: dict[str, Any], context: int) -> Step:
    model = Compiled(setting, shape, context, context + ANSWER, DTYPE)
    return lambda: model.step_s(steps(setting))


def transformers_generate(setting: Setting, shape: dict[str, Any], context: int) -> Step:
    model = Compiled(setting, shape, context, context + ANSWER, DTYPE)
    return lambda: model.generate_s(steps(setting))


RIVALS: dict[str, tuple[Form, Make]] = {
    "cuBLAS in localllm's loop": ("bf16", cublas),
    "torch's int4pack_mm in localllm's loop": ("int4", torch_int4),
    "transformers, a compiled step": ("bf16", transformers_step),
    "transformers, generate()": ("bf16", transformers_generate),
}
