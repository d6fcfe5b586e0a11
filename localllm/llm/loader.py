"""Loads a model in four steps: find its files, plan its memory, build it on the device, start its engine."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from localllm.arch.stages import check_processes, parse_stages
from localllm.checkpoint.digest import digest_model
from localllm.errors import UsageError
from localllm.files import expand_path
from localllm.hardware.device import rank_device, resolve_device
from localllm.hub.resolve import ModelRef
from localllm.llm.build import BuiltModel, build
from localllm.llm.find import LoadRequest, LocalModel, find, resolve_or_fetch
from localllm.llm.llm import LLM, ModelOrigin, ModelParts
from localllm.llm.load_plan import LoadPlan, plan
from localllm.llm.worker import MAX_QUEUE, Worker
from localllm.metrics import PhaseTimer
from localllm.parallel.handshake import check_distinct, split_addresses, worker_token
from localllm.plan import expected
from localllm.plan.fit import LoadOptions
from localllm.quantize.store import recipe_of
from localllm.receipts import provenance
from localllm.request import Grammar, require_int
from localllm.runtime.kernels.threads import end_openmp_threads
from localllm.settings import DISK_CACHE_BYTES, DiskCache, Settings
from localllm.text.grammar.source import compile_source

if TYPE_CHECKING:
    from localllm.parallel.remote import RemoteWorker

MAX_PREFILL = 16  # processes that compute prompts


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
    keep_layout: bool | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int | str | Sequence[float] | None = None,
    expert_parallel: bool = False,
    workers: Sequence[str] = (),
    token_file: str | Path | None = None,
    prefill: int | str | Sequence[str | Path] = 0,
    max_queue: int = MAX_QUEUE,
    cache_dir: str | Path | None = None,
    cache_size: int = DISK_CACHE_BYTES,
    on_phase: Callable[[str], object] = lambda name: None,
    on_part: Callable[[int, int], None] = lambda done, total: None,
) -> LLM:
    """Load a model by name, repository, folder or GGUF file; it is pulled from the Hub first if it is missing.

    device: `auto`, `cpu`, `cuda`, `cuda:N`.
    dtype: `auto` (as in the settings, by default the machine's choice), `float32`, `bfloat16`, `float16`.
    kv_dtype: data type of the KV cache: `auto` (as in the settings, by default the model's dtype), `int8`, `fp8`,
        `k8v4` (keys in INT8, values in INT4), `int4`, or the model's dtype.
    quant: `int8` or `int4`, rounded to nearest; the result is stored in the home folder for the next load.
    context: maximum tokens of prompt and answer (None: as many as the model supports and memory holds).
    draft: `lookup` for speculative decoding with tokens copied from prompt and answer, `off`, or `auto` (as in the
        settings).
    draft_model: a smaller model with the same vocabulary, for speculative decoding.
    force: load the model even if it does not fit, at the price of swapping.
    grammar: of later requests, to check at once whether this model can follow it.
    deterministic: answers do not depend on concurrent requests, the chunks of a prompt or cached prefixes
        (docs/determinism.md), on a CPU only; None: if supported.
    keep_layout: keep quantized weights on disk as a CPU reads them, for later loads (docs/kernels.md); None: as in
        the settings.
    tensor_parallel: number of processes among which each layer is divided, on a CPU by its cores, otherwise a GPU
        each; with workers, so many on each machine (docs/parallel.md).
    pipeline_parallel: number of stages of layers, each in a process of its own, or a share of the weights for each
        stage, such as (24, 16); by default equal ones, or by the free memory of their GPUs or machines.
    expert_parallel: with tensor_parallel, divide MoE layers by experts instead of the columns of each.
    workers: HOST:PORT of `localllm worker` on another machine, for each stage but the first (docs/parallel.md).
    token_file: file with the token of the workers; None: `worker-token` in the home folder of the settings.
    prefill: number of further processes that compute prompts, so that they do not delay answers, on a CPU with a
        share of its cores, otherwise with a GPU each; or HOST:PORT of `localllm worker` on other machines; or the
        sockets, as Paths, of running processes that compute prompts, shared by several engines
        (docs/disaggregation.md).
    max_queue: number of waiting requests from which further ones are refused with Busy.
    cache_dir: folder in which computed prompts are stored, for this and later processes (docs/kv-cache.md); None:
        as in the settings, by default nowhere.
    cache_size: maximum bytes of its files.
    on_phase: called with each phase as it begins, named as in `LLM.load_phases`.
    on_part: called with the progress of the phase and its total: bytes of weights, or quantized parts. An
        exception raised by a callback aborts loading and releases all memory.

    An edition is loaded as its model, with the edition's messages, template and parameters as defaults.
    Raises the errors of `localllm.errors`, where possible before any weights are read.
    """
    settings = settings or Settings.from_environment()
    if keep_layout is not None:
        settings = replace(settings, keep_layout=keep_layout)
    if cache_dir is not None:
        cache_size = require_int("cache_size", cache_size, minimum=1)
        settings = replace(settings, disk_cache=DiskCache(expand_path(str(cache_dir)), cache_size))
    require_int("max_queue", max_queue, minimum=1)
    if quant is not None:
        recipe_of(quant)  # a wrong name is reported before a model is pulled
    drafting = settings.draft if draft == "auto" else draft
    if drafting not in ("lookup", "off"):
        raise UsageError(f"draft is {draft!r}", "give auto, lookup or off")
    if grammar is not None:
        compile_source(grammar)
    torch_device = resolve_device(settings.device if device == "auto" else device)
    stages, shares = parse_stages(pipeline_parallel, len(workers))
    check_processes(tensor_parallel, stages)
    if workers and prefill:
        raise UsageError("stages on other machines cannot be combined with --prefill yet", "leave one of them out")
    if isinstance(prefill, str):
        prefill = split_addresses(prefill)
    sockets, addresses = split_prefill(prefill)
    if token_file is not None and not (workers or addresses):
        raise UsageError("--token-file is for workers", "add --workers or --prefill HOST:PORT, or leave it out")
    processes = tensor_parallel * stages
    if processes > 1:
        own = tensor_parallel if workers else processes
        resolve_device(str(rank_device(torch_device, own - 1)))  # raises if there are too few GPUs
        if settings.keep_layout:
            flag = (
                "--workers" if workers else "--tensor-parallel" if tensor_parallel > 1 else "--pipeline-parallel"
            )
            raise UsageError("the layout of divided weights cannot be kept", f"leave out --keep-layout or {flag}")
    if prefill:
        check_prefill(prefill, processes, torch_device, settings)
    options = LoadOptions(
        context,
        quant=quant,
        dtype=settings.dtype if dtype == "auto" else dtype,
        kv_dtype=settings.kv_dtype if kv_dtype == "auto" else kv_dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=stages,
        stage_shares=shares,
        expert_parallel=expert_parallel,
        workers=tuple(workers),
    )

    started, phases = time.perf_counter(), PhaseTimer(on_begin=on_phase)
    with ExitStack() as undo:
        connected: Sequence[RemoteWorker] = ()
        if workers:
            with phases("workers"):
                connected = open_workers(workers, token_file, torch_device, tensor_parallel, settings)
        for worker in connected:
            undo.callback(worker.channel.close)

        def resolve(name: str | Path | ModelRef, options: LoadOptions) -> ModelRef:
            if isinstance(name, ModelRef):
                return name
            return resolve_or_fetch(str(name), torch_device, options, force=force, workers=connected)

        ref = resolve(model, options)
        draft_ref = draft_model and resolve(
            draft_model, replace(options, context=None, quant=None).in_one_process()
        )
        request = LoadRequest(
            ref=ref,
            draft_ref=draft_ref or None,
            device=torch_device,
            options=options,
            drafting=drafting,
            deterministic=deterministic,
            grammar=grammar,
            force=force,
            max_queue=max_queue,
            settings=settings,
            phases=phases,
            on_part=on_part,
            prefill=prefill if isinstance(prefill, int) else 0,
            prefill_sockets=sockets,
            prefill_workers=addresses,
            token=worker_token(token_file, settings.home) if addresses else b"",
            workers=connected,
            started=started,
        )
        local_model = find(request)
        if connected:
            send_model_to_workers(local_model, request)
        load_plan = plan(local_model, request)
        for worker in connected:
            worker.check_dtype(options.dtype, load_plan.fit.dtype)
        built = build(local_model, load_plan, request)
        end_openmp_threads()  # of this thread, which would slow down the engine's
        undo.pop_all()
        return start(local_model, load_plan, built, request)


def open_workers(
    addresses: Sequence[str],
    token_file: str | Path | None,
    device: torch.device,
    tensor_parallel: int,
    settings: Settings,
) -> "list[RemoteWorker]":
    """Connect to workers. device: of this machine; tensor_parallel: processes of each machine. Raises UsageError
    for a worker with another type of device, or without a token, and as `connect_workers`."""
    from localllm.parallel.remote import connect_workers  # imports torch.distributed

    workers = connect_workers(addresses, worker_token(token_file, settings.home), tensor_parallel)
    try:
        for worker in workers:
            worker.check_device(device)
    except UsageError:
        for worker in workers:
            worker.channel.close()
        raise
    return workers


def send_model_to_workers(model: LocalModel, request: LoadRequest) -> None:
    """Have the workers find the model, and compare its files. Raises their errors."""
    from localllm.parallel.remote import send_model

    with request.phases("workers"):
        name = provenance.source_name(model.source)
        send_model(request.workers, name, request.options.quant, digest_model(model.header.path))


def split_prefill(prefill: int | Sequence[str | Path]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the sockets and the addresses of workers in an argument of `load`. Raises UsageError."""
    if isinstance(prefill, int):
        return (), ()
    sockets = tuple(each for each in prefill if isinstance(each, Path))
    addresses = tuple(split_addresses(",".join(each for each in prefill if isinstance(each, str)) or None))
    if sockets and addresses:
        raise UsageError("prompts are computed either by processes here or by workers", "leave one kind out")
    check_distinct(addresses)
    return sockets, addresses


def check_prefill(
    prefill: int | Sequence[str | Path], processes: int, device: torch.device, settings: Settings
) -> None:
    """Raise UsageError for what cannot be combined with processes that compute prompts."""
    count = require_int("prefill", prefill, minimum=1) if isinstance(prefill, int) else len(prefill)
    if count > MAX_PREFILL:
        raise UsageError(f"prefill is {count}", f"give at most {MAX_PREFILL} processes")
    if processes > 1:
        raise UsageError(
            "--prefill does not support a model that is divided among processes",
            "leave out --prefill or --tensor-parallel",
        )
    if settings.disk_cache and not settings.disk_cache.kept_only:
        raise UsageError(
            "prompts that other processes compute cannot be stored on disk",
            "leave out --cache-dir or --prefill",
        )
    if isinstance(prefill, int):
        resolve_device(str(rank_device(device, prefill)))  # raises if there are too few GPUs


def start(model: LocalModel, load_plan: LoadPlan, built: BuiltModel, request: LoadRequest) -> LLM:
    """The fourth step of loading: start the engine's thread, and return the model."""
    weight_bytes = load_plan.fit.weights.total
    threads = request.threads(weight_bytes)
    tokenizer, caches = load_plan.text.tokenizer, built.caches
    if request.settings.disk_cache and not caches.prefill_tier:
        with request.phases("prefix cache"):
            caches.open_disk_tier(
                built.engine, request.settings.disk_cache, model.header, load_plan.activation_bits, threads
            )
    leader = built.leader
    close: Callable[[], object] = leader.close if leader else lambda: None
    if caches.prefill_tier:
        close = caches.prefill_tier.close
    worker = Worker(
        built.engine,
        tokenizer,
        threads,
        caches.shortage,
        load_plan.memory.context,
        request.max_queue,
        on_end=close,
    )
    if leader:
        leader.on_failure = worker.report_failure
    origin = ModelOrigin(
        ref=model.ref,
        source=model.source,
        quant=request.options.quant,
        draft=request.drafting,
        draft_model=model.draft and provenance.source_name(model.draft.header.path),
        setup=expected.run_setup(
            model.ref.name, model.header, load_plan.dtype, request.device, threads, weight_bytes
        ),
        load_s=time.perf_counter() - request.started,
        load_phases=request.phases.seconds,
        read_bytes_per_s=built.read_bytes_per_s,
        layout_file=built.kept.mapped_file,
        layout_note=built.kept.note,
        settings=request.settings,
    )
    parts = ModelParts(
        origin=origin,
        config=model.config,
        recommended=load_plan.recommended,
        tokenizer=tokenizer,
        chat_format=load_plan.text.own,
        chat_formats=load_plan.text.others,
        worker=worker,
        caches=caches,
        kv_dtype=load_plan.fit.kv_dtype,
        activation_bits=load_plan.activation_bits,
    )
    return LLM(parts, model.ref.edition)
