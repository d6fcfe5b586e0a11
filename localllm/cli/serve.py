"""`localllm serve`: models behind an HTTP endpoint that speaks the APIs of OpenAI, Ollama and Anthropic."""

import math
import os
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, cast

import typer

from localllm.cli import options
from localllm.cli.io import note
from localllm.cli.loading import load_for_server
from localllm.errors import UsageError
from localllm.formatting import parse_duration
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.llm.embedder import Embedder
    from localllm.llm.llm import LLM  # torch, for which `--help` need not wait


def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    host: Annotated[
        str, typer.Option(help="Of this machine; 0.0.0.0 is all it has, for others too.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any that is free.", metavar="N", min=0, max=65535)] = 11434,
    api_key_file: Annotated[
        str | None, options.option("--api-key-file", text="Ask for one of these keys, one a line.", metavar="FILE")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        options.option("--api-key", text="Ask for this key, which `ps` shows to all. Repeatable.", metavar="KEY"),
    ] = None,
    insecure: Annotated[
        bool, options.switch("--insecure", text="Let anybody ask who reaches the address.")
    ] = False,
    tls_cert: Annotated[
        str | None, options.option("--tls-cert", text="Certificates in PEM: speak HTTPS.", metavar="FILE")
    ] = None,
    tls_key: Annotated[
        str | None, options.option("--tls-key", text="Their key, if it is in another file.", metavar="FILE")
    ] = None,
    host_name: Annotated[
        list[str] | None,
        options.option("--host-name", text="Answer under this name, too. Repeatable.", metavar="NAME"),
    ] = None,
    origin: Annotated[
        list[str] | None,
        options.option(
            "--origin", text="Let web pages of this origin ask; * is any. Repeatable.", metavar="ORIGIN"
        ),
    ] = None,
    context: options.Context = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    quant: options.Quant = None,
    deterministic: options.Deterministic = False,
    force: Annotated[
        bool, options.switch("--force", text="Also a model that does not fit into the free memory.")
    ] = False,
    keep_alive: Annotated[
        str,
        typer.Option(help="How long a model stays that nobody asks: 5m, 30s, 0; -1 is for ever.", metavar="TIME"),
    ] = "5m",
    max_models: Annotated[
        int | None, options.option(text="Most models loaded at a time; else as many as fit.", metavar="N")
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="Of the log on stderr, a line a request: text, json or off.", metavar="FORMAT")
    ] = "text",
    log_prompts: Annotated[bool, options.switch("--log-prompts", text="Log what is asked, too.")] = False,
    verbose: Annotated[bool, options.switch("--verbose", text="Tell what loading takes.")] = False,
) -> None:
    """Answer programs over HTTP, as OpenAI, Ollama and Anthropic do.

    Each MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file; one that is
    not on this machine is pulled first. These are loaded before the server listens, and stay. All others that
    `localllm list` shows are loaded when they are asked for, and go when nobody has asked for --keep-alive, or
    where another needs the room. Only programs of this machine can ask, unless --host says otherwise, which takes
    a key. The first Ctrl-C or SIGTERM lets answers end, the second does not.
    """
    from localllm.server.access_flags import access_warnings, load_tls_context, make_access_policy, read_keys
    from localllm.server.logs import LogFormat, configure_logging
    from localllm.server.serve import bind  # FastAPI takes its time to import

    kept = math.inf if keep_alive.startswith("-") else parse_duration(keep_alive)
    if log_format not in list(LogFormat):
        raise UsageError(f"--log-format is {log_format}", f"give {', '.join(LogFormat)}")
    if max_models is not None and not len(models or []) <= max_models != 0:
        raise UsageError(f"--max-models is {max_models}", "give at least 1, and no fewer than you name")
    keys = [*(api_key or []), *read_keys(api_key_file), *filter(None, [Settings.from_environment().api_key])]
    tls = load_tls_context(tls_cert, tls_key)
    access = make_access_policy(host, keys, host_name or [], origin or [], tls=tls, insecure=insecure)
    for warning in access_warnings(access):
        note(warning)
    with closing(bind(host, port)) as listener:
        where = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quant": quant, "context": context}
        where |= {"deterministic": deterministic, "force": force, "verbose": verbose}
        from localllm.server.app import create_app
        from localllm.server.models import ModelPool
        from localllm.server.serve import Server

        def load(source: str, context: int | None) -> "LLM | Embedder":
            return cast(
                "LLM | Embedder", load_for_server(source, **{**where, "context": context or where["context"]})
            )

        served = ModelPool(load, keep_alive=kept, max_models=max_models)
        for model in models or []:
            served.add_preloaded(load(model, None), model)
        app = create_app(served, access, log_prompts=log_prompts)
        names = [loaded.name for loaded in served.loaded.values()]
        remark = (
            note if log_format == LogFormat.TEXT else (lambda words: None)
        )  # who asks for JSON reads it by program
        server = Server(
            app, listener, note, served.close, served.abort_waiting, remark=remark, model_names=names, tls=tls
        )
        configure_logging(LogFormat(log_format))
        server.run()
        if served.has_unfinished_load:
            os._exit(0)
