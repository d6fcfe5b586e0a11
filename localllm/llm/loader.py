"""Loading a model: find it, plan what it is given, build it on its device, start its engine."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from localllm.errors import UsageError
from localllm.hardware.device import resolve_device
from localllm.hub.resolve import ModelRef
from localllm.llm.build import BuiltModel, build
from localllm.llm.find import FoundModel, LoadRequest, find, resolve_or_fetch
from localllm.llm.llm import LLM, ModelOrigin, ModelParts
from localllm.llm.load_plan import LoadPlan, plan
from localllm.llm.worker import MAX_QUEUE, Worker
from localllm.metrics import PhaseTimer
from localllm.plan import expected
from localllm.plan.fit import LoadOptions
from localllm.quantize.store import recipe_of
from localllm.receipts import provenance
from localllm.request import Grammar, require_int
from localllm.runtime.kernels.threads import threads_for
from localllm.settings import Settings
from localllm.text.grammar.source import compile_source


def load(
    model: str | Path | ModelRef,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quant: str | None = None,
    context: int | None = None,
    draft: str = "auto",
    draft_model: str | Path | ModelRef | None = None,
    settings: Settings | None = None,
    force: bool = False,
    grammar: Grammar | None = None,
    deterministic: bool | None = False,
    max_queue: int = MAX_QUEUE,
    on_phase: Callable[[str], object] = lambda name: None,
    on_part: Callable[[int, int], None] = lambda done, total: None,
) -> LLM:
    """Load a model by alias, repository, folder or GGUF file; one of the Hub that is not here is pulled first.

    device: `auto`, `cpu`, `cuda`, `cuda:N`; dtype: `auto`, `float32`, `bfloat16`, `float16` (`auto` leaves the
    choice to the settings, and they to the machine); kv_dtype: what keys and values are kept in, `auto` (as the
    settings say, else the model's dtype), `int8`, `fp8` or that dtype; quant: `int8` or `int4`, rounded to nearest
    the first time and kept under the home folder for the next; context: most tokens of prompt and answer (None: as
    many as the model knows and memory holds); draft: `lookup` guesses tokens that stood before, so that a step may
    bring several, `off` does not, `auto` leaves it to the settings; draft_model: a smaller one with the same
    vocabulary that guesses what comes next; force: also where it does not fit, at the price of swapping; grammar:
    one that answers will be asked for, refused at once if this model cannot keep to it; deterministic: the same
    bytes whatever else is asked meanwhile, however prompts are cut, and whatever is found in the cache
    (docs/determinism.md), on a CPU alone; None: where that holds; max_queue: where so many requests wait, one more
    is refused with Busy; on_phase: told each phase as it begins, by its name in `LLM.load_phases`; on_part: how
    much of that phase is done of how much: bytes of weights that were read, parts that were quantized. What either
    raises ends the loading, and nothing stays of it in memory.
    An edition that somebody made is loaded as the model that it is of, and answers as its maker wants.
    Raises the errors of `localllm.errors`: a model that is not found, not supported, damaged or does not fit is
    refused before its weights are read where that can be known.
    """
    settings = settings or Settings.from_environment()
    require_int("max_queue", max_queue, minimum=1)
    if quant is not None:
        recipe_of(quant)  # a wrong name is reported before a model is pulled
    drafting = settings.draft if draft == "auto" else draft
    if drafting not in ("lookup", "off"):
        raise UsageError(f"draft is {draft!r}", "give auto, lookup or off")
    if grammar is not None:
        compile_source(grammar)
    place = resolve_device(settings.device if device == "auto" else device)
    options = LoadOptions(
        context,
        quant=quant,
        dtype=settings.dtype if dtype == "auto" else dtype,
        kv_dtype=settings.kv_dtype if kv_dtype == "auto" else kv_dtype,
    )

    def resolve(name: str | Path | ModelRef, options: LoadOptions) -> ModelRef:
        return name if isinstance(name, ModelRef) else resolve_or_fetch(str(name), place, options, force=force)

    ref = resolve(model, options)
    draft_ref = draft_model and resolve(draft_model, replace(options, context=None, quant=None))
    request = LoadRequest(
        ref=ref,
        draft_ref=draft_ref or None,
        device=place,
        options=options,
        drafting=drafting,
        deterministic=deterministic,
        grammar=grammar,
        force=force,
        max_queue=max_queue,
        settings=settings,
        phases=PhaseTimer(on_begin=on_phase),
        on_part=on_part,
    )
    found = find(request)
    planned = plan(found, request)
    return start(found, planned, build(found, planned, request), request)


def start(found: FoundModel, planned: LoadPlan, built: BuiltModel, request: LoadRequest) -> LLM:
    """Start the engine's thread: the model is ready to answer."""
    weight_bytes = planned.fit.weights.total
    threads = threads_for(weight_bytes, request.settings.threads)
    tokenizer, caches = planned.text.tokenizer, built.caches
    worker = Worker(built.engine, tokenizer, threads, caches.shortage, planned.memory.context, request.max_queue)
    origin = ModelOrigin(
        ref=found.ref,
        source=found.source,
        quant=request.options.quant,
        draft=request.drafting,
        draft_model=found.draft and provenance.source_name(found.draft.header.path),
        setup=expected.run_setup(
            found.ref.name, found.header, planned.dtype, request.device, threads, weight_bytes
        ),
        load_s=time.perf_counter() - request.started,
        load_phases=request.phases.seconds,
        read_bytes_per_s=built.read_bytes_per_s,
        settings=request.settings,
    )
    parts = ModelParts(
        origin=origin,
        config=found.config,
        recommended=planned.recommended,
        tokenizer=tokenizer,
        chat_format=planned.text.own,
        chat_formats=planned.text.others,
        worker=worker,
        caches=caches,
        kv_dtype=planned.fit.kv_dtype,
        activation_bits=planned.activation_bits,
    )
    return LLM(parts, found.ref.edition)
