"""The one door from the command line to the engine."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from localllm.cli.io import note, status
from localllm.cli.progress import StderrWatch
from localllm.cli.report import load_block
from localllm.hardware.device import free_bytes, resolve_device
from localllm.hub.names import RepoName
from localllm.hub.resolve import ModelRef, locate_model, resolve_model
from localllm.plan.fit import FreeMemory, LoadOptions
from localllm.protocol.model import Model
from localllm.quantize.source import INSTEAD, check_source
from localllm.quantize.store import find_artefact, recipe_of
from localllm.request import Grammar
from localllm.settings import Settings
from localllm.tui.machine import LoadObserver

if TYPE_CHECKING:
    from localllm.checkpoint.header import Header
    from localllm.hub.pull import PullPlan
    from localllm.llm.embedding_inputs import Embeddings
    from localllm.llm.llm import LLM


EMBEDDER_FLAGS = ("device", "dtype", "context", "force")
PULL_FLAGS = (*EMBEDDER_FLAGS, "kv_dtype", "quant")


def load_model(
    name: str | ModelRef,
    *,
    device: str | None,
    dtype: str | None,
    context: int | None,
    kv_dtype: str | None = None,
    activations: str | None = None,
    quant: str | None = None,
    force: bool = False,
    deterministic: bool | None = False,
    verbose: bool = False,
    draft: str | None = None,
    grammar: Grammar | None = None,
    threads: int | None = None,
    draft_model: str | None = None,
    watch: LoadObserver | None = None,
) -> Model:
    """Load a model, and pull and quantize it first where that is to be done; verbose: tell what it takes and how
    long each phase took; watch: follows all of it, None: with signs of life on a terminal.

    None leaves a choice to the settings, which also know better where they name threads. A grammar is checked
    before anything is pulled, and compiled before the weights are read. Raises what `fetch`, `resolve` and the
    engine raise.
    """
    settings = Settings.from_environment()
    settings = replace(settings, threads=settings.threads or threads, draft=draft or settings.draft)
    settings = replace(settings, activations=activations or settings.activations)
    if grammar:
        from localllm.text.grammar.source import compile_source  # others need not wait for its library

        compile_source(grammar)
    if quant:
        recipe_of(quant)  # a wrong name is told before a model is pulled
    with nullcontext(watch) if watch else StderrWatch(name if isinstance(name, str) else name.name) as told:
        place: dict[str, Any] = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "force": force}
        ref = resolve_or_fetch(name, settings, **place, quant=quant, context=context, watch=told)
        draft_ref = draft_model and resolve_or_fetch(draft_model, settings, **place, context=None, watch=told)
        if quant:
            quantize_missing(ref, quant, settings, told)
        told.phase("import")
        start = time.perf_counter()
        from localllm.llm.loader import load

        imported_s = time.perf_counter() - start
        where: dict[str, Any] = {"device": device or "auto", "dtype": dtype or "auto"}
        where |= {"kv_dtype": kv_dtype or "auto", "force": force, "deterministic": deterministic}
        where |= {"quant": quant, "draft": draft or "auto", "draft_model": draft_ref or None}
        where |= {"on_phase": told.phase, "on_part": told.part}
        llm = load(ref, settings=settings, context=context, grammar=grammar, **where)
    if verbose:
        phases = {"import": imported_s, **llm.load_phases}
        say = watch.note if watch else note
        say(load_block(llm.device, llm.memory, phases, llm.read_bytes_per_s, llm.without_graphs))
        if llm.device == "cpu":
            say(f"activations      {llm.activation_bits} bits where they meet packed weights")
    return llm


class EmbeddingModel(Protocol):
    """What the command line needs of an embedder, or of an LLM that embeds."""

    def embed(
        self, inputs: Sequence[str], *, dimensions: int | None, truncate: bool, prompt: str | None
    ) -> "Embeddings": ...
    def close(self) -> None: ...


def load_embedding_model(
    name: str | ModelRef, *, device: str | None, dtype: str | None, context: int | None, force: bool = False
) -> EmbeddingModel:
    """Load an embedder, or any other model to embed by. Raises as `load_model`."""
    where: dict[str, Any] = {"device": device, "dtype": dtype, "context": context, "force": force}
    ref = resolve_or_fetch(name, Settings.from_environment(), **where)
    if not is_embedder(ref):
        return cast("LLM", load_model(ref, **where))
    with status(f"loading {ref.name}"):
        from localllm.llm.embedder import load_embedder

        where |= {"device": device or "auto", "dtype": dtype or "auto"}
        return load_embedder(ref, settings=Settings.from_environment(), **where)


def load_for_server(name: str | ModelRef, **where: Any) -> Model | EmbeddingModel:
    """Load what a server is asked for, by the flags of `serve`: an embedder takes those that it has a use for."""
    ref = resolve_or_fetch(name, Settings.from_environment(), **{flag: where[flag] for flag in PULL_FLAGS})
    if is_embedder(ref):
        return load_embedding_model(ref, **{flag: where[flag] for flag in EMBEDDER_FLAGS})
    return load_model(ref, **where)


def is_embedder(ref: ModelRef) -> bool:
    """Whether the model gives vectors and no tokens. Raises as `read_header` and `parse_config`."""
    from localllm.arch.describe import parse_config
    from localllm.checkpoint.header import read_header

    return parse_config(read_header(ref.path).config).encoder is not None


def resolve_or_fetch(
    name: str | ModelRef,
    settings: Settings,
    *,
    device: str | None,
    dtype: str | None,
    context: int | None,
    kv_dtype: str | None = None,
    quant: str | None = None,
    force: bool = False,
    watch: LoadObserver | None = None,
) -> ModelRef:
    """Resolve the name, before torch takes its second to import, and pull the model where it is not here. Raises
    what `fetch` and `resolve_model` raise."""
    located = name if isinstance(name, ModelRef) else locate_model(name)
    if isinstance(located, RepoName):
        name = str(name)
        from localllm.cli.offers import TargetDevice, offer_from_header
        from localllm.llm.fetch import fetch

        wish = LoadOptions(
            context, quant=quant, dtype=dtype or settings.dtype, kv_dtype=kv_dtype or settings.kv_dtype
        )
        where = device or settings.device
        with nullcontext(watch) if watch else StderrWatch(name) as told:
            told.phase("download")

            def on_header(job: "PullPlan", header: "Header") -> None:
                told.about(
                    offer_from_header(
                        name, header, TargetDevice.resolve(wish, where, settings), nbytes=job.total_bytes
                    )
                )

            fetch(
                located,
                told.pull,
                lambda: free_space(where),
                wish,
                force=force,
                on_header=on_header,
                on_choice=told.note,
            )
        return resolve_model(name)
    return located


def quantize_missing(ref: ModelRef, quant: str, settings: Settings, watch: LoadObserver | None = None) -> None:
    """Quantize a model that is here, unless that was done. Raises as `kept_or_made`."""
    from localllm.checkpoint.header import read_header

    header = read_header(ref.path)
    check_source(header, INSTEAD)
    if find_artefact(settings.home, header.path, quant) is None:
        with nullcontext(watch) if watch else StderrWatch(ref.name) as told:
            told.note(f"quantizing {ref.name} to {quant.upper()}; it is kept for the next time")
            told.phase("quantize")
            from localllm.quantize.quantizer import find_or_quantize

            def on_part(part: str, done: int, count: int) -> None:
                told.part(done, count)

            find_or_quantize(header, quant, settings.home, on_part, told.note)


def free_space(device: str) -> FreeMemory:
    from localllm.plan.expected import memory_of

    place = resolve_device(device)
    return memory_of(place, free_bytes(place), Settings.from_environment())
