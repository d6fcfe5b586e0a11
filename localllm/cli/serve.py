"""`localllm serve`: an HTTP server for models with the APIs of OpenAI, Ollama and Anthropic."""

import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.background import (
    check_modes,
    install_service,
    serve_in_background,
    stop_background_server,
    uninstall_service,
)
from localllm.cli.io import flag_name, note, status
from localllm.cli.loading import PULL_FLAGS, is_embedder, load_with_flags, resolve_or_fetch
from localllm.cli.machine import parse_idle_time
from localllm.client.background import inherited_record
from localllm.errors import UsageError
from localllm.files import expand_path
from localllm.formatting import parse_duration
from localllm.parallel.handshake import split_addresses, worker_token
from localllm.plan.advice import ASSUMED_NETWORK
from localllm.plan.fit import LoadOptions
from localllm.plan.parallel import parse_link
from localllm.routing import MAX_REPLICAS, parse_replicas
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.cluster.service import ReplicaOptions  # imports torch

REPLICA_ROUTES = ("prefix", "load")
REPLICA_FIELDS = (
    "models",
    "device",
    "dtype",
    "kv_dtype",
    "activations",
    "quant",
    "context",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "deterministic",
    "max_models",
    "slot_save_path",
    "token_price",
    "strict",
)


def serve(
    ctx: typer.Context,
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 accepts other machines.",
            metavar="ADDRESS",
            rich_help_panel=options.Panel.NETWORK,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            help="Port to listen on; 0 picks a free one.",
            metavar="N",
            min=0,
            max=65535,
            rich_help_panel=options.Panel.NETWORK,
        ),
    ] = 11434,
    api_key_file: Annotated[
        str | None,
        options.option(
            "--api-key-file",
            text="File of accepted API keys, one per line: KEY or NAME: KEY.",
            metavar="FILE",
            panel=options.Panel.NETWORK,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        options.option(
            "--api-key",
            text="Accepted API key; visible to other users in the process list. Repeatable.",
            metavar="KEY",
            panel=options.Panel.NETWORK,
        ),
    ] = None,
    insecure: Annotated[
        bool,
        options.switch(
            "--insecure", text="Accept other machines without an API key.", panel=options.Panel.NETWORK
        ),
    ] = False,
    tls_cert: Annotated[
        str | None,
        options.option(
            "--tls-cert",
            text="TLS certificate chain in PEM format; enables HTTPS.",
            metavar="FILE",
            panel=options.Panel.NETWORK,
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        options.option(
            "--tls-key",
            text="Private key of the certificate, if in a separate file.",
            metavar="FILE",
            panel=options.Panel.NETWORK,
        ),
    ] = None,
    host_name: Annotated[
        list[str] | None,
        options.option(
            "--host-name",
            text="Additional host name to accept in the Host header. Repeatable.",
            metavar="NAME",
            panel=options.Panel.NETWORK,
        ),
    ] = None,
    origin: Annotated[
        list[str] | None,
        options.option(
            "--origin",
            text="Allowed CORS origin of web pages; * allows any. Repeatable.",
            metavar="ORIGIN",
            panel=options.Panel.NETWORK,
        ),
    ] = None,
    context: options.Context = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    activations: options.Activations = None,
    quant: options.Quant = None,
    keep_layout: options.KeepLayout = False,
    tensor_parallel: options.TensorParallel = None,
    pipeline_parallel: options.PipelineParallel = None,
    expert_parallel: options.ExpertParallel = False,
    workers: options.Workers = None,
    token_file: options.TokenFile = None,
    prefill: options.Prefill = None,
    decode: options.Decode = None,
    link: options.PrefillLink = None,
    deterministic: options.Deterministic = False,
    force: options.ForceLoad = False,
    cache_dir: options.CacheDir = None,
    cache_size: options.CacheSize = None,
    cache_shared: Annotated[
        bool,
        options.switch(
            "--cache-shared",
            text="Share cached prompts between API keys; response times then reveal which prompts others sent.",
            panel=options.Panel.LOADING,
        ),
    ] = False,
    slot_save_path: Annotated[
        str | None,
        options.option(
            "--slot-save-path",
            text="Folder for the slots that clients of llama.cpp's API save; default: saving is disabled.",
            metavar="FOLDER",
            panel=options.Panel.LOADING,
        ),
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(
            help="How long an idle model stays loaded: 5m, 30s or 0; -1 is forever.",
            metavar="TIME",
            rich_help_panel=options.Panel.LOADING,
        ),
    ] = "5m",
    max_models: Annotated[
        int | None,
        options.option(
            text="Maximum number of loaded models; default: as many as fit.",
            metavar="N",
            panel=options.Panel.LOADING,
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        options.option(
            "--replicas",
            text="Answer with N engines on Ray, one per GPU; 2..8 runs as many as the requests need.",
            metavar="N",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    route: Annotated[
        str,
        options.option(
            "--route",
            text="Choose the replica that has cached the prompt's beginning (prefix), or the least loaded (load).",
            metavar="ROUTE",
            choices=REPLICA_ROUTES,
            panel=options.Panel.FLEET,
        ),
    ] = "prefix",
    cluster: Annotated[
        bool,
        options.switch(
            "--cluster",
            text="Place the replicas on all machines of the cluster; without --replicas, serve those there.",
            panel=options.Panel.FLEET,
        ),
    ] = False,
    background: Annotated[
        bool,
        options.switch(
            "--background",
            text="Start the server in the background; return when it is ready.",
            panel=options.Panel.BACKGROUND,
        ),
    ] = False,
    exit_when_idle: Annotated[
        str | None,
        options.option(
            "--exit-when-idle",
            text="Exit after this time without requests, such as 30m; default: never.",
            metavar="TIME",
            panel=options.Panel.BACKGROUND,
        ),
    ] = None,
    stop: Annotated[
        bool,
        options.switch(
            "--stop",
            text="Stop the background server; running answers finish first.",
            panel=options.Panel.BACKGROUND,
        ),
    ] = False,
    install: Annotated[
        bool,
        options.switch(
            "--install",
            text="Write a systemd user unit, on macOS a launchd agent, that starts this server at login.",
            panel=options.Panel.BACKGROUND,
        ),
    ] = False,
    uninstall: Annotated[
        bool,
        options.switch(
            "--uninstall", text="Delete the file written by --install.", panel=options.Panel.BACKGROUND
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        options.switch("--dry-run", text="With --install: only print the file.", panel=options.Panel.BACKGROUND),
    ] = False,
    strict: Annotated[
        bool,
        options.switch(
            "--strict",
            text="Refuse requests with unknown fields instead of ignoring the fields.",
            panel=options.Panel.NETWORK,
        ),
    ] = False,
    log_format: Annotated[
        str,
        typer.Option(
            help="Format of the request log on stderr: text, json or off.",
            metavar="FORMAT",
            rich_help_panel=options.Panel.OUTPUT,
            autocompletion=lambda: ["text", "json", "off"],
        ),
    ] = "text",
    token_price: Annotated[
        str | None,
        options.option(
            "--token-price",
            text="Prices per million prompt, answer and cached tokens, for the cost of each API key in /metrics.",
            metavar="P,A[,C]",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    log_prompts: Annotated[
        bool, options.switch("--log-prompts", text="Include prompts in the log.", panel=options.Panel.OUTPUT)
    ] = False,
    verbose: Annotated[
        bool, options.switch("--verbose", text="Print load statistics to stderr.", panel=options.Panel.OUTPUT)
    ] = False,
) -> None:
    """Serve models over HTTP: OpenAI, Ollama and Anthropic APIs.

    Each MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file; a model that
    is not on this machine is downloaded first. These models are loaded before the server listens, and stay loaded.
    All other models of `localllm list` are loaded on request, and unloaded after --keep-alive without requests or
    when another model needs the memory. The server accepts only this machine unless --host allows others, which
    requires an API key. The first Ctrl-C or SIGTERM lets running answers finish, the second aborts them.

    With --background, stdout gets the address of the server, and stderr its process and its log. Each user has at
    most one such server; `run`, `ps`, `stop` and `top` find it on any port.

    With --replicas, this process is the front of N engines in processes of their own, and SIGHUP restarts them one
    after the other. The same applies to --prefill N --decode M, where M engines share the N processes that compute
    prompts. Both need `pip install "localllm[cluster]"`. With --cluster and neither MODEL nor --replicas, this
    process is a further front of the replicas that another server has placed on the cluster.
    """
    match check_modes(ctx.params):
        case "background":
            return serve_in_background(ctx.params)
        case "stop":
            return stop_background_server()
        case "install":
            return install_service(ctx.params, dry_run=dry_run)
        case "uninstall":
            return uninstall_service()
        case _:
            pass
    from localllm.server.access import access_warnings, load_tls_context, make_access_policy, read_keys
    from localllm.server.logs import LogFormat, configure_logging
    from localllm.server.serve import bind, listener_url  # uvicorn takes time to import

    settings = Settings.from_environment()
    record = inherited_record(settings.home)
    idle_limit_s = parse_idle_time(exit_when_idle, "--exit-when-idle") if exit_when_idle else math.inf
    keep_alive_s = math.inf if keep_alive.startswith("-") else parse_duration(keep_alive)
    if log_format not in list(LogFormat):
        raise UsageError(f"--log-format is {log_format}", f"give one of {', '.join(LogFormat)}")
    if max_models is not None and not len(models or []) <= max_models != 0:
        raise UsageError(
            f"--max-models is {max_models}", "give at least 1, and at least the number of models named"
        )
    flags = {**ctx.params, "prefill": parse_prefill(prefill)}
    if prefill is not None or decode is not None or link is not None:
        check_prefill(flags)
    if workers and (replicas is not None or len(models or []) != 1):
        raise UsageError("--workers are for one engine", "name one model, and leave out --replicas")
    keys = [*(api_key or []), *read_keys(api_key_file), *filter(None, [settings.api_key])]
    tls = load_tls_context(tls_cert, tls_key)
    access = make_access_policy(
        host, keys, host_name or [], origin or [], tls=tls, insecure=insecure, shares_cache=cache_shared
    )
    for warning in access_warnings(access):
        note(warning)
    replica_options = parse_replica_options(flags)
    with ExitStack() as stack:
        listener = stack.enter_context(closing(bind(host, port)))
        load_flags = {
            "device": device,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "activations": activations,
            "quant": quant,
            "context": context,
            "keep_layout": keep_layout,
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": pipeline_parallel,
            "expert_parallel": expert_parallel,
            "workers": workers,
            "token_file": token_file,
            "prefill": flags["prefill"],
            "deterministic": deterministic,
            "force": force,
            "cache_dir": cache_dir,
            "cache_size": cache_size,
            "verbose": verbose,
        }
        if replica_options and prefill:
            from localllm.cluster.service import running_prefill

            load_flags["prefill"] = stack.enter_context(running_prefill(models or [], replica_options))
        # These import torch, which takes a second that no refusal above needs.
        from localllm.server.app import ServerSetup
        from localllm.server.prometheus import TokenPrice
        from localllm.server.serve import Server

        setup = ServerSetup(
            models or [],
            partial(load_with_flags, load_flags),
            access,
            keep_alive_s=keep_alive_s,
            max_models=max_models,
            log_prompts=log_prompts,
            strict=strict or settings.strict,
            slot_folder=expand_path(slot_save_path) if slot_save_path else None,
            token_price=TokenPrice.parse(token_price) if token_price else None,
        )
        notify = note if log_format == LogFormat.TEXT else (lambda message: None)  # not beside JSON

        def on_listening(message: str) -> None:
            note(message)
            if record:
                record.publish(message.removeprefix("listening on "))

        pool = restart = None
        if replica_options or cluster:
            from localllm.cluster.front import create_front
            from localllm.cluster.service import attached_front, running_replicas

            url = listener_url(listener, access.scheme)
            if replica_options:
                service = stack.enter_context(running_replicas(setup, replica_options, settings.home, url, note))
            else:
                service = stack.enter_context(attached_front(settings.home, url, note))
            app, restart = create_front(service.fleet(), access, log_prompts=log_prompts), service.restart
            names = list(service.models)
        else:
            app, pool = setup.build()
            names = [loaded.name for loaded in pool.loaded.values()]

        async def close() -> None:
            if pool:
                await app.state.simulations.close()
                await pool.close()

        server = Server(
            app,
            listener,
            on_listening,
            close,
            pool.abort_waiting if pool else lambda: None,
            notify=notify,
            model_names=names,
            tls=tls,
            on_closing=record.withdraw if record else lambda: None,
            on_hangup=restart and partial(restart, notify),
            exit_when_idle_s=idle_limit_s,
            is_loading=lambda: bool(pool and pool.pending_loads),
        )
        configure_logging(LogFormat(log_format))
        server.run()
        if pool and pool.has_unfinished_load:
            os._exit(0)


def parse_replica_options(flags: Mapping[str, Any]) -> "ReplicaOptions | None":
    """Return the replicas that the flags of `serve` request; None to serve in this process. Raises UsageError."""
    decode = flags["decode"] or 1
    if flags["replicas"] is None and decode == 1:
        given = [name for name in REPLICA_FIELDS if flags[name] not in (None, [], (), False)]
        if flags["cluster"] and given:
            name = "MODEL" if given == ["models"] else flag_name(given[-1])
            message = f"{name} is for replicas, and without --replicas this server uses those that are running"
            raise UsageError(message, f"add --replicas N to place them on the cluster, or leave out {name}")
        return None
    least, most = parse_replicas(flags["replicas"] or str(decode))
    if flags["route"] not in REPLICA_ROUTES:
        raise UsageError(f"--route is {flags['route']}", f"give {' or '.join(REPLICA_ROUTES)}")
    if not flags["models"]:
        raise UsageError("replicas load a model at the start, and none is named", "name one")
    from localllm.cluster.service import ReplicaOptions

    return ReplicaOptions(
        least,
        most,
        flags["route"],
        cluster=flags["cluster"],
        device=flags["device"],
        gpus=(flags["tensor_parallel"] or 1) * (flags["pipeline_parallel"] or 1),
        prefill=flags["prefill"] or 0,
    )


def parse_prefill(text: str | None) -> int | list[str] | None:
    """Return the number of processes that --prefill requests, or the addresses of workers. Raises UsageError."""
    if text is None:
        return None
    if not re.fullmatch(r"[+-]?\d+", text.strip()):
        return split_addresses(text)
    if (count := int(text)) < 1:
        raise UsageError(f"--prefill is {count}", "give a whole number from 1, or HOST:PORT of workers")
    return count


def check_prefill(flags: Mapping[str, Any]) -> None:
    """Check --prefill, as returned by `parse_prefill`, --decode and --link. Raises UsageError, without --force
    also if processes for prompts would not pay."""
    prefill, decode, models = flags["prefill"], flags["decode"], flags["models"]
    if prefill is None and decode is None:
        raise UsageError("--link needs --prefill", "give HOST:PORT of the workers that compute prompts")
    if prefill is None:
        raise UsageError("--decode needs --prefill", "give the number of processes that compute prompts")
    if isinstance(prefill, list):
        if len(models or []) != 1 or (decode or 1) > 1 or flags["replicas"] is not None:
            raise UsageError(
                "workers compute prompts for one engine", "name one model, and leave out --decode and --replicas"
            )
        if flags["link"]:
            parse_link(flags["link"])
        # Before a simulation, which takes time.
        worker_token(flags["token_file"], Settings.from_environment().home)
    elif flags["link"] is not None:
        raise UsageError("--link is for workers that compute prompts", "give --prefill HOST:PORT, or leave it out")
    if decode is not None and not 1 <= decode <= MAX_REPLICAS:
        raise UsageError(f"--decode is {decode}", f"give 1 to {MAX_REPLICAS} engines")
    if not models:
        raise UsageError("--prefill applies only to models that are named", "name a MODEL")
    if flags["replicas"] is not None:
        raise UsageError("--replicas computes prompts and answers in each replica", "give --decode instead")
    if flags["cluster"]:
        raise UsageError(
            "processes that compute prompts cannot be on a cluster", "leave out --cluster or --prefill"
        )
    if decode and decode > 1:
        from localllm.cluster.ray_node import require_ray

        require_ray()  # before a simulation, which takes seconds
    if flags["force"]:
        return
    for model in models:
        if refusal := why_not_apart(model, flags):
            raise UsageError(refusal, "leave out --prefill, or force it with --force")


def why_not_apart(model: str, flags: Mapping[str, Any]) -> str | None:
    """Return why processes for prompts would not pay, None if they serve more in a simulation. Downloads the model
    if needed."""
    from localllm.checkpoint.header import read_header
    from localllm.cli.simulate_setup import default_lengths, target_of
    from localllm.simulate.apart import IDLE_RATE, SHARED_MEMORY, compare_apart
    from localllm.simulate.load import LoadPlan

    settings = Settings.from_environment()
    ref = resolve_or_fetch(model, settings, **{flag: flags[flag] for flag in PULL_FLAGS})
    if is_embedder(ref):
        return f"{ref.name} is an embedding model, whose texts are no prompts"
    load_options = LoadOptions(
        flags["context"],
        quant=flags["quant"],
        dtype=flags["dtype"] or settings.dtype,
        kv_dtype=flags["kv_dtype"] or settings.kv_dtype,
    )
    device = flags["device"] or settings.device
    target = target_of(ref.name, read_header(ref.path), load_options, None, device, settings, typed=model)
    lengths = default_lengths(target.setup.context)
    load = LoadPlan(rate=IDLE_RATE, max_len=target.setup.capacity, **lengths)
    prefill, link, on_machines = flags["prefill"], SHARED_MEMORY, isinstance(flags["prefill"], list)
    if on_machines:
        prefill, link = len(prefill), parse_link(flags["link"]) if flags["link"] else ASSUMED_NETWORK
    with status(f"simulating {ref.name} with and without --prefill"):
        comparison = compare_apart(target, load, prefill, flags["decode"] or 1, link=link, on_machines=on_machines)
    return None if comparison.pays else comparison.sentence()
