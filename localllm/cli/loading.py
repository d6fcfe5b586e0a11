"""Load a model for a command: resolve its name, download and quantize it if needed, and show progress."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from localllm.arch.stages import parse_stages
from localllm.cli.io import note, status
from localllm.conversation.model import Model
from localllm.files import expand_path
from localllm.formatting import format_bytes, format_columns, format_seconds, parse_bytes
from localllm.hardware.device import explain_unused_gpus, free_bytes, resolve_device
from localllm.hub.names import RepoName
from localllm.hub.resolve import ModelRef, locate_model, resolve_model
from localllm.parallel.handshake import split_addresses
from localllm.plan.fit import FreeMemory, LoadOptions
from localllm.plan.memory import BLOCK_SIZE, MemoryPlan
from localllm.quantize.source import INSTEAD, check_source
from localllm.quantize.store import find_artefact, recipe_of
from localllm.request import Grammar
from localllm.settings import CONVERSATIONS_BYTES, DISK_CACHE_BYTES, DISK_CACHE_FOLDER, DiskCache, Settings
from localllm.tui.machine import LoadObserver

if TYPE_CHECKING:
    from localllm.checkpoint.header import Header
    from localllm.hub.pull import PullPlan
    from localllm.llm.embedder import Embedder
    from localllm.llm.embedding_inputs import Embeddings
    from localllm.llm.llm import LLM

EMBEDDER_FLAGS = ("device", "dtype", "context", "force")
PULL_FLAGS = (
    *EMBEDDER_FLAGS,
    "kv_dtype",
    "quant",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "workers",
    "token_file",
)


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
    keep_layout: bool = False,
    tensor_parallel: int | None = None,
    pipeline_parallel: str | None = None,
    expert_parallel: bool = False,
    workers: str | None = None,
    token_file: str | None = None,
    prefill: int | Sequence[str | Path] | None = None,
    verbose: bool = False,
    draft: str | None = None,
    grammar: Grammar | None = None,
    threads: int | None = None,
    draft_model: str | None = None,
    cache_dir: str | None = None,
    cache_size: str | None = None,
    keep_conversations: bool = False,
    observer: LoadObserver | None = None,
) -> Model:
    """Load a model; download and quantize it first if needed.

    None leaves a choice to the settings; a number of threads in the settings overrides `threads`. A grammar is
    checked before the download and compiled before the weights are read. cache_dir, cache_size: folder and limit
    of the disk tier of the prefix cache, with a default for each if the other is given; keep_conversations:
    without both, store conversations in a folder of this user. verbose: report memory use and the time of each
    phase; observer: receives progress, which goes to stderr without one. The reason why a GPU
    runs without CUDA graphs, for example because Triton is missing, or is not used, is reported in any case.

    Raises what `fetch`, `resolve_model` and the engine raise.
    """
    settings = Settings.from_environment()
    settings = replace(
        settings,
        threads=settings.threads or threads,
        draft=draft or settings.draft,
        activations=activations or settings.activations,
        keep_layout=keep_layout or settings.keep_layout,
        disk_cache=disk_cache_of(settings, cache_dir, cache_size, keep_conversations=keep_conversations),
    )
    if grammar:
        from localllm.text.grammar.source import compile_source  # only constrained answers need its library

        compile_source(grammar)
    if quant:
        recipe_of(quant)  # refuses an unknown name before the download
    with observe_load(name if isinstance(name, str) else name.name, observer) as progress:
        target: dict[str, Any] = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "force": force}
        ref = resolve_or_fetch(
            name,
            settings,
            **target,
            quant=quant,
            context=context,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            expert_parallel=expert_parallel,
            workers=workers,
            token_file=token_file,
            observer=progress,
        )
        draft_ref = draft_model and resolve_or_fetch(draft_model, settings, **target, observer=progress)
        if quant:
            quantize_missing(ref, quant, settings, progress)
        progress.phase("import")
        start = time.perf_counter()
        from localllm.llm.loader import load

        import_s = time.perf_counter() - start
        llm = load(
            ref,
            settings=settings,
            device=device or "auto",
            dtype=dtype or "auto",
            kv_dtype=kv_dtype or "auto",
            quant=quant,
            context=context,
            draft=draft or "auto",
            draft_model=draft_ref or None,
            force=force,
            grammar=grammar,
            deterministic=deterministic,
            tensor_parallel=1 if tensor_parallel is None else tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            expert_parallel=expert_parallel,
            workers=split_addresses(workers),
            token_file=token_file,
            prefill=prefill or 0,
            on_phase=progress.phase,
            on_part=progress.part,
        )
    report = observer.note if observer else note
    if verbose:
        phases = {"import": import_s, **llm.load_phases}
        report(format_load(llm.device, llm.memory, phases, llm.read_bytes_per_s, llm.without_graphs))
        if llm.device == "cpu":
            report(f"activations      {llm.activation_bits} bits in products with packed weights")
            if llm.layout_file:
                report(f"layout           mapped from {llm.layout_file}")
    elif llm.without_graphs:
        report(f"each kernel is launched individually on {llm.device}, which is slower: {llm.without_graphs}")
    if llm.layout_note:
        report(llm.layout_note)
    if unused := explain_unused_gpus(device or settings.device):
        report(f"the model runs on the CPU: {unused}")
    return llm


@contextmanager
def fetch_for_server(name: str, settings: Settings, observer: LoadObserver | None = None) -> Iterator[None]:
    """Download a model if needed, and show that it is being loaded until this context ends: for a server, which
    downloads nothing. Raises the errors of `resolve_or_fetch`."""
    with observe_load(name, observer) as progress:
        resolve_or_fetch(name, settings, observer=progress)
        progress.phase("server")
        yield


def disk_cache_of(
    settings: Settings, cache_dir: str | None, cache_size: str | None, *, keep_conversations: bool
) -> DiskCache | None:
    """The disk tier of the prefix cache that flags and settings request. Raises UsageError for a wrong size."""
    default = settings.home / DISK_CACHE_FOLDER
    if cache_dir is not None or cache_size is not None:
        limit = DISK_CACHE_BYTES if cache_size is None else parse_bytes(cache_size)
        return DiskCache(default if cache_dir is None else expand_path(cache_dir), limit)
    if keep_conversations and settings.cache_conversations:
        return DiskCache(default, CONVERSATIONS_BYTES, kept_only=True)
    return None


def observe_load(name: str, observer: LoadObserver | None) -> AbstractContextManager[LoadObserver]:
    """The given observer, or one that shows progress on stderr."""
    if observer:
        return nullcontext(observer)
    from localllm.cli.progress import StderrObserver

    return StderrObserver(name)


def format_load(
    device: str,
    memory: MemoryPlan,
    phases: Mapping[str, float],
    bytes_per_s: float | None,
    without_graphs: str = "",
) -> str:
    """Memory use of a loaded model and the seconds of each load phase. without_graphs: why a GPU's steps are not
    captured as a graph, or "" if they are."""
    parts = [
        ("weights", memory.weights.total, ""),
        ("draft model", memory.draft_bytes, " of weights"),
        ("cache", memory.cache_bytes, f" for {memory.blocks * BLOCK_SIZE} tokens"),
        ("states", memory.state_bytes, f" for {memory.state_slots} of recurrent layers"),
        ("workspace", memory.workspace, " for a step"),
        ("host tier", memory.host_bytes, " of main memory at most, for blocks evicted from the cache"),
    ]
    read_rate = {"read": f"  {format_bytes(bytes_per_s)}/s"} if bytes_per_s else {}
    return format_columns(
        [
            ("device", device),
            *((name, format_bytes(nbytes) + text) for name, nbytes, text in parts if nbytes),
            *(
                (f"load {name}", format_seconds(seconds) + read_rate.get(name, ""))
                for name, seconds in phases.items()
            ),
            *([("graphs", f"no: {without_graphs}")] if without_graphs else []),
        ]
    )


def load_for_server(name: str | ModelRef, **flags: Any) -> "Model | EmbeddingModel":
    """Load a model or an embedder with the load flags of `serve`; an embedder takes only those that apply to
    it."""
    ref = resolve_or_fetch(name, Settings.from_environment(), **{flag: flags[flag] for flag in PULL_FLAGS})
    if is_embedder(ref):
        return load_embedding_model(ref, **{flag: flags[flag] for flag in EMBEDDER_FLAGS})
    return load_model(ref, **flags)


def load_with_flags(flags: Mapping[str, Any], name: str | ModelRef, context: int | None) -> "LLM | Embedder":
    """Load a model for a server. flags: as for `load_for_server`, but `prefill` may be the sockets of processes
    for prompts by the names of models; name: a ModelRef for a request, which has no processes for prompts and no
    workers, as it comes and goes; context: requested, None for that of the flags"""
    prefill = flags["prefill"] if isinstance(name, str) else None
    if isinstance(prefill, Mapping):
        prefill = prefill[name]
    changes: dict[str, Any] = {"context": context or flags["context"], "prefill": prefill}
    if not isinstance(name, str) and flags["token_file"]:
        changes["token_file"] = None
    if not isinstance(name, str) and flags["workers"]:
        changes |= {"workers": None, "pipeline_parallel": None}
    return cast("LLM | Embedder", load_for_server(name, **{**flags, **changes}))


class EmbeddingModel(Protocol):
    """An embedder, or an LLM that also embeds."""

    def embed(
        self, inputs: Sequence[str], *, dimensions: int | None, truncate: bool, prompt: str | None
    ) -> "Embeddings": ...
    def close(self) -> None: ...


def load_embedding_model(
    name: str | ModelRef, *, device: str | None, dtype: str | None, context: int | None, force: bool = False
) -> EmbeddingModel:
    """Load an embedder, or any other model for its embeddings. Raises the errors of `load_model`."""
    settings = Settings.from_environment()
    ref = resolve_or_fetch(name, settings, device=device, dtype=dtype, context=context, force=force)
    if not is_embedder(ref):
        return cast("LLM", load_model(ref, device=device, dtype=dtype, context=context, force=force))
    with status(f"loading {ref.name}"):
        from localllm.llm.embedder import load_embedder

        return load_embedder(
            ref,
            settings=settings,
            device=device or "auto",
            dtype=dtype or "auto",
            context=context,
            force=force,
        )


def is_embedder(ref: ModelRef) -> bool:
    """Whether the model computes embeddings instead of tokens. Raises the errors of `read_header` and
    `parse_config`."""
    from localllm.arch.describe import parse_config
    from localllm.checkpoint.header import read_header

    return parse_config(read_header(ref.path).config).encoder is not None


def resolve_or_fetch(
    name: str | ModelRef,
    settings: Settings,
    *,
    device: str | None = None,
    force: bool = False,
    observer: LoadObserver | None = None,
    **flags: Any,
) -> ModelRef:
    """Call `resolve_for` with the options of a command's flags. flags: those of `parse_load_options`"""
    load_options = parse_load_options(settings, **flags)
    return resolve_for(load_options, name, settings, device=device, force=force, observer=observer)


def parse_load_options(
    settings: Settings,
    *,
    context: int | None = None,
    users: int = 1,
    quant: str | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: str | None = None,
    expert_parallel: bool = False,
    workers: str | None = None,
    token_file: str | None = None,
) -> LoadOptions:
    """Return the options of a command's flags, None for those of the settings. Raises UsageError."""
    addresses = split_addresses(workers)
    stages, shares = parse_stages(pipeline_parallel, len(addresses))
    return LoadOptions(
        context,
        users=users,
        quant=quant,
        dtype=dtype or settings.dtype,
        kv_dtype=kv_dtype or settings.kv_dtype,
        tensor_parallel=1 if tensor_parallel is None else tensor_parallel,
        pipeline_parallel=stages,
        stage_shares=shares,
        expert_parallel=expert_parallel,
        workers=tuple(addresses),
        token_file=token_file,
    )


def resolve_for(
    load_options: LoadOptions,
    name: str | ModelRef,
    settings: Settings,
    *,
    device: str | None,
    force: bool = False,
    observer: LoadObserver | None = None,
) -> ModelRef:
    """Resolve a name, and download the model if it is not local: the edition that fits with these options. Called
    before torch takes a second to import. Raises what `fetch` and `resolve_model` raise."""
    located = name if isinstance(name, ModelRef) else locate_model(name)
    if not isinstance(located, RepoName):
        return located
    name = str(name)
    from localllm.cli.offers import TargetDevice, offer_from_header
    from localllm.llm.fetch import fetch

    target_device = device or settings.device
    with observe_load(name, observer) as progress:
        progress.phase("download")

        def on_header(plan: "PullPlan", header: "Header") -> None:
            target = TargetDevice.resolve(load_options, target_device, settings)
            progress.about(offer_from_header(name, header, target, nbytes=plan.total_bytes))

        fetch(
            located,
            progress.pull,
            lambda: free_memory_for(load_options, target_device, settings),
            load_options,
            force=force,
            on_header=on_header,
            on_choice=progress.note,
        )
    return resolve_model(name)


def quantize_missing(ref: ModelRef, quant: str, settings: Settings, observer: LoadObserver | None = None) -> None:
    """Quantize a local model, unless its quantization is cached. Raises the errors of `find_or_quantize`."""
    from localllm.checkpoint.header import read_header

    header = read_header(ref.path)
    check_source(header, INSTEAD)
    if find_artefact(settings.home, header.path, quant) is not None:
        return
    with observe_load(ref.name, observer) as progress:
        progress.note(f"quantizing {ref.name} to {quant.upper()}; the result is cached for later runs")
        progress.phase("quantize")
        from localllm.quantize.quantizer import find_or_quantize

        def on_part(part: str, done: int, count: int) -> None:
            progress.part(done, count)

        find_or_quantize(header, quant, settings.home, on_part, progress.note)


def free_memory_for(load_options: LoadOptions, device: str, settings: Settings) -> FreeMemory:
    """The free memory of a device, or of one on each machine; queries the workers. Raises the errors of
    `open_workers`."""
    if not load_options.workers:
        return free_memory(device)
    from localllm.llm.find import memory_of_stages
    from localllm.llm.loader import open_workers

    resolved = resolve_device(device)
    size = load_options.tensor_parallel
    workers = open_workers(load_options.workers, load_options.token_file, resolved, size, settings)
    try:
        return memory_of_stages(resolved, workers, size)
    finally:
        for worker in workers:
            worker.channel.close()


def free_memory(device: str) -> FreeMemory:
    from localllm.plan.expected import memory_of

    resolved = resolve_device(device)
    return memory_of(resolved, free_bytes(resolved), Settings.from_environment())
