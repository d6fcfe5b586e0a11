"""Decode through the engine: milliseconds a token, and the bytes that a step has to read over its time, as a
share of what a copy on the same device reaches in the same process. The lines are those set for an H200."""

from collections.abc import Iterator

import torch

from bench.gpu.ceilings import copy_bandwidth
from bench.gpu.setting import Row, Setting, judged, release
from localllm.benchmark.gpu.decode_steps import Model, generate, needed_bytes, step_seconds
from localllm.benchmark.gpu.generated import SHAPES, TINY, Form
from localllm.runtime.cuda_graphs import QUERY_LENS
from localllm.runtime.kernels.gpu.launch import uses_pdl, without_pdl
from localllm.runtime.runner import Runner

BUDGET_S = 130
STEPS = 48  # of a window
CONTEXTS = (128, 16_384)
LINES: dict[tuple[str, Form], tuple[float, float | None]] = {  # share of the copy: accept, goal
    ("8B", "bf16"): (0.78, 0.92),
    ("8B", "int8"): (0.66, 0.82),
    ("8B", "int4"): (0.50, 0.72),
    ("1B", "bf16"): (0.75, None),
}
BATCHES = (8, 32)  # of the 8B models, at the shorter context
TOTALS = {("int4", 8): 3000.0, ("int4", 32): 7000.0}  # tokens a second of all sequences
FLAT = 1.10  # a step of eight takes at most so much of one
# The ones that decide most come first, should time run out.
CASES: tuple[tuple[str, Form], ...] = (
    *(("8B", "bf16"), ("8B", "int4"), ("8B", "int8"), ("1B", "bf16"), ("1B", "int4"), ("1B", "int8")),
    *(("32B", "int4"), ("32B", "int8"), ("32B", "bf16"), ("70B", "int4")),
)


def measure(setting: Setting) -> Iterator[Row]:
    ceiling = copy_bandwidth(setting)
    for name, form in CASES[:3] if setting.tiny else CASES:
        try:
            yield from of_model(setting, name, form, ceiling)
        except torch.OutOfMemoryError as error:
            yield {"model": name, "weights": form, "left out": str(error).partition("\n")[0]}
        release()


def of_model(setting: Setting, name: str, form: Form, ceiling: float) -> Iterator[Row]:
    shape = TINY if setting.tiny else SHAPES[name]
    contexts = (20, 40) if setting.tiny else CONTEXTS
    batches = BATCHES if name == "8B" else ()
    sequences = 4 if batches else 1
    need = needed_bytes(shape, form, max(contexts), sequences)
    if not setting.room_for(need):
        yield {"model": name, "weights": form, "left out": f"needs {need / 1e9:.0f} GB"}
        return
    model = generate(shape, form, setting.device, max(contexts), sequences)
    for context in contexts:
        yield row(setting, model, name, form, context, ceiling)
    if name == "8B" and uses_pdl(setting.device):
        yield without_early_starts(setting, model, name, form, contexts[0], ceiling)
    alone = step_seconds(model, contexts[0], 1, steps(setting))[0] if batches else 0.0
    for batch in batches:
        yield batch_row(setting, model, name, form, contexts[0], batch, alone)
    for width in QUERY_LENS[1:] if batches else ():
        yield width_row(setting, model, name, form, contexts[0], width, alone)


def steps(setting: Setting) -> int:
    return 2 if setting.tiny else STEPS


def row(setting: Setting, model: Model, name: str, form: Form, context: int, ceiling: float) -> Row:
    taken, apart = step_seconds(model, context, 1, steps(setting))
    rate = model.step_bytes(context, 1) / taken
    found: Row = {
        **{"model": name, "weights": form, "context": context, "batch": 1},
        **{"ms/token": taken * 1e3, "tokens/s": 1 / taken, "GB/s": rate / 1e9},
        **{"of copy": rate / ceiling, "apart": apart, "graphs": model.engine.runner.no_graphs_reason or "yes"},
        "PDL": "on" if uses_pdl(setting.device) else "no",
    }
    line = LINES.get((name, form)) if context <= CONTEXTS[0] else None
    return found | (judged(rate / ceiling, *line) if line else {})


def without_early_starts(
    setting: Setting, model: Model, name: str, form: Form, context: int, ceiling: float
) -> Row:
    """The same step where each kernel starts after the one before it has ended."""
    runner = model.engine.runner
    with without_pdl():
        release_graphs(runner)
        found = row(setting, model, name, form, context, ceiling)
    release_graphs(runner)
    return found | {"PDL": "off"}


def release_graphs(runner: Runner) -> None:
    """Let the next step be captured anew."""
    if runner.graphs:
        runner.graphs.captured.clear()


def width_row(
    setting: Setting, model: Model, name: str, form: Form, context: int, width: int, alone: float
) -> Row:
    """A step that verifies drafts of one sequence, beside a plain one: what speculation pays."""
    taken, apart = step_seconds(model, context, 1, steps(setting), width - 1)
    return {
        **{"model": name, "weights": form, "context": context, "batch": 1, "tokens a step": width},
        **{"ms/step": taken * 1e3, "of one step": taken / alone, "apart": apart},
    }


def batch_row(
    setting: Setting, model: Model, name: str, form: Form, context: int, batch: int, alone: float
) -> Row:
    """Beside the time of one: of eight sequences a step should take as long, by its weights."""
    taken, apart = step_seconds(model, context, batch, steps(setting))
    found: Row = {
        **{"model": name, "weights": form, "context": context, "batch": batch},
        **{"ms/token": taken * 1e3, "tokens/s": batch / taken},
        **{"of one step": taken / alone, "apart": apart},
    }
    if batch == 8:
        found["flat"] = "yes" if taken <= FLAT * alone else "no"
    line = TOTALS.get((form, batch))
    return found | (judged(batch / taken, line) if line else {})
