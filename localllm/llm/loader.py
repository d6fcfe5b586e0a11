"""From a name to a model that is ready: found, checked, planned, its weights read, its engine started."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from localllm.arch.describe import parse_config
from localllm.arch.fields import ConfigFields
from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.tokenizer import read_tokenizer
from localllm.errors import UnsupportedModel, UsageError
from localllm.hardware.device import anonymous_bytes, device_context, free_bytes, free_host_bytes, resolve_device
from localllm.hub.made import find_edition
from localllm.hub.names import strip_latest
from localllm.hub.resolve import ModelRef, missing_repo, resolve_model
from localllm.llm.cache_allocation import CacheAllocation, CacheSpec, measured_growth
from localllm.llm.draft_model import DraftModelPlan
from localllm.llm.llm import LLM, ModelOrigin
from localllm.llm.worker import MAX_QUEUE, Worker
from localllm.metrics import PhaseTimer
from localllm.plan import expected
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit
from localllm.plan.memory import (
    MAX_RUNNING,
    MAX_VERIFIED_TOKENS,
    TOKEN_BUDGET,
    allocate_minimum,
    host_blocks,
)
from localllm.plan.shortage import shortage_error
from localllm.quant.vectors import KV_DTYPES
from localllm.quantize.keep import find_or_quantize
from localllm.quantize.source import INSTEAD, check_source
from localllm.quantize.store import recipe_of
from localllm.receipts import provenance
from localllm.request import Grammar, SamplingParams, require_int
from localllm.runtime.deterministic import check_deterministic as check_deterministic
from localllm.runtime.deterministic import why_not_deterministic as why_not_deterministic
from localllm.runtime.device_errors import translate_device_errors
from localllm.runtime.engine import Engine
from localllm.runtime.kernels import triton_runs_on
from localllm.runtime.kernels.threads import threads_for
from localllm.runtime.model_loader import load_decoder, set_triton_cache_dir, warm_up
from localllm.runtime.speculation.policy import SpeculativeDrafter
from localllm.runtime.speculation.step_cost import StepCost, estimate_cpu_cost, estimate_gpu_cost
from localllm.settings import Settings
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.grammar.source import compile_source as checked_grammar
from localllm.text.output.formats import OutputFormat
from localllm.text.same_vocabulary import check_same_vocabulary
from localllm.text.template import ChatTemplate


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quant: str | None = None,
    context: int | None = None,
    draft: str = "auto",
    draft_model: str | Path | None = None,
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
        recipe_of(quant)  # a wrong name is told before a model is pulled
    guessing = settings.draft if draft == "auto" else draft
    if guessing not in ("lookup", "off"):
        raise UsageError(f"draft is {draft!r}", "give auto, lookup or off")
    edition = find_edition(strip_latest(str(model)))
    place = resolve_device(settings.device if device == "auto" else device)
    wish = LoadOptions(
        context,
        quant=quant,
        dtype=settings.dtype if dtype == "auto" else dtype,
        kv_dtype=settings.kv_dtype if kv_dtype == "auto" else kv_dtype,
    )
    if grammar is not None:
        checked_grammar(grammar)
    for name in (model, draft_model):
        if name is not None and (repo := missing_repo(str(name))):
            from localllm.llm.fetch import (  # with the Hub's library 0.1 s that others need not wait for
                LogProgress,
                fetch,
            )

            own = wish if name is model else replace(wish, context=None, quant=None)
            fetch(repo, LogProgress(), lambda: FreeMemory(place.type, free_bytes(place)), own, force=force)
    start, phases = time.perf_counter(), PhaseTimer(on_begin=on_phase)
    with phases("header"):
        ref = resolve_model(str(model))
        source, header = ref.path, read_header(ref.path)
        beside = None if draft_model is None else DraftModelPlan.find(str(draft_model), place.type, wish)
        if quant is not None:
            check_source(header, INSTEAD)
            check_fit(header, FreeMemory(place.type, free_bytes(place)), wish, name=ref.name, force=force)
    if quant is not None:
        with phases("quantize"):
            made = find_or_quantize(header, quant, settings.home, lambda part, done, total: on_part(done, total))
        ref, wish = ModelRef(f"{ref.name} in {quant.upper()}", made), replace(wish, quant=None)
    with phases("header"):
        if quant is not None:
            header = read_header(ref.path)
        config = parse_config(header.config)
        if config.encoder:
            raise UnsupportedModel(
                f"{ref.name!r} does not support chat", "ask it for vectors: `localllm embed`, load_embedder"
            )
        check_quantization(header.config)
        if edition and edition.context and context is None:
            context = min(edition.context, config.max_context)
            wish = replace(wish, context=context)
        default_params = SamplingParams.from_generation_config(header.generation_config)
        end_ids = ConfigFields(header.generation_config).ids("eos_token_id")
    with phases("tokenizer"):
        tokenizer = read_tokenizer(header)
        output = OutputFormat.detect(tokenizer.chat_templates, tokenizer.added_tokens)
        eos_ids = frozenset([*end_ids, *config.eos_ids, *tokenizer.eos_ids])
        grammars = GrammarCompiler(tokenizer, config.vocab_size, eos_ids, output)
        if grammar is not None:
            grammars.compile(grammar)
        if beside:
            check_same_vocabulary(tokenizer, read_tokenizer(beside.header), (ref.name, beside.name))
    with phases("device"):
        taken = beside and beside.needs
        fit = check_fit(
            header, FreeMemory(place.type, free_bytes(place)), wish, name=ref.name, force=force, draft=taken
        )
        memory = fit.memory or allocate_minimum(fit.needs, context)
        if place.type != "cpu":
            memory = replace(memory, host_blocks=host_blocks(memory, free_host_bytes()))
            set_triton_cache_dir(settings.cache)
    of_plan = partial(
        shortage_error, device=str(place), kv_dtype=fit.kv_dtype, quantized=header.quantization is not None
    )
    short = partial(of_plan, memory)
    kind: torch.dtype = getattr(torch, fit.dtype)
    kept: torch.dtype = KV_DTYPES.get(fit.kv_dtype, kind)
    if deterministic or settings.deterministic:
        check_deterministic(config, place, kept)
        deterministic = True
    elif deterministic is None:
        deterministic = why_not_deterministic(config, place, kept) is None
    anonymous = anonymous_bytes()
    threads = threads_for(fit.weights.total, settings.threads)
    setup = expected.run_setup(ref.name, header, kind, place, threads, fit.weights.total)
    guesser = None
    with contextlib.ExitStack() as undo:
        template = ChatTemplate.from_tokenizer(tokenizer) if tokenizer.chat_templates else None
        if template:
            undo.callback(template.close)
            template.warm_up()  # its process starts while the weights are read
        with torch.inference_mode(), device_context(place), translate_device_errors(short):
            with phases("weights"):
                decoder, read_bytes_per_s = load_decoder(
                    header, config, place, kind, memory.context, phases, on_part
                )
            graphs = settings.graphs and triton_runs_on(place)
            room = CacheSpec(fit.needs, place, kind, kept, graphs, deterministic)
            with phases("cache"):
                engine = Engine(*room.allocate(decoder, memory), TOKEN_BUDGET[place.type], MAX_RUNNING)
            if place.type != "cpu":
                with phases("compile"):
                    warm_up(engine)
                with phases("capture"):
                    engine.runner.capture_decode_step(default_params)
            aside = beside.cache_spec(place, use_graphs=graphs) if beside else None
            price = StepCost(estimate_cpu_cost if place.type == "cpu" else estimate_gpu_cost)
            if beside and aside:
                with phases("draft model"):
                    guesser = beside.load(engine, aside, memory, price, phases)
            if guessing == "lookup" or guesser:
                lookup, rows = guessing == "lookup", MAX_VERIFIED_TOKENS[place.type]
                engine.drafter = SpeculativeDrafter(
                    price, rows, lambda of: engine.runner.captured_widths(of), lookup, guesser
                )
            weights = measured_growth(anonymous_bytes, anonymous, memory.weights.total + memory.draft_bytes)
        worker = Worker(engine, tokenizer, threads, short, memory.context, max_queue)
        undo.pop_all()
    origin = ModelOrigin(
        ref,
        source,
        quant,
        guessing,
        beside and provenance.source_name(beside.header.path),
        setup,
        time.perf_counter() - start,
        phases.seconds,
        read_bytes_per_s,
        settings,
    )
    llm = LLM(
        origin,
        config,
        default_params,
        eos_ids,
        tokenizer,
        template,
        output,
        grammars,
        worker,
        memory,
        fit.kv_dtype,
        CacheAllocation(room, weights, of_plan, aside, guesser),
    )
    return llm.edited(edition) if edition else llm
