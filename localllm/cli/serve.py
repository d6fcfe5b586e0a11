"""`localllm serve`: models behind an HTTP endpoint that speaks OpenAI's API."""

import math
import os
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, cast

import typer

from localllm.cli import options
from localllm.cli.io import note
from localllm.cli.loading import load_model
from localllm.errors import UsageError
from localllm.units import duration

if TYPE_CHECKING:
    from localllm.llm import LLM  # torch, for which `--help` need not wait


def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    host: Annotated[str, typer.Option(help="127.0.0.1 or ::1.", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any that is free.", metavar="N", min=0, max=65535)] = 11434,
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
    """Answer programs over HTTP, as OpenAI's API does.

    Each MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file; one that is
    not on this machine is pulled first. These are loaded before the server listens, and stay. All others that
    `localllm list` shows are loaded when they are asked for, and go when nobody has asked for --keep-alive, or
    where another needs the room. Only programs of this machine can ask. The first Ctrl-C or SIGTERM lets answers
    end, the second does not.
    """
    from localllm.server.logs import Format, set_up
    from localllm.server.serve import bind  # FastAPI takes its time to import

    kept = math.inf if keep_alive.startswith("-") else duration(keep_alive)
    if log_format not in list(Format):
        raise UsageError(f"--log-format is {log_format}", f"give {', '.join(Format)}")
    if max_models is not None and not len(models or []) <= max_models != 0:
        raise UsageError(f"--max-models is {max_models}", "give at least 1, and no fewer than you name")
    with closing(bind(host, port)) as listener:
        where = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quant": quant, "context": context}
        where |= {"deterministic": deterministic, "force": force, "verbose": verbose}
        from localllm.server.app import create_app
        from localllm.server.models import Models
        from localllm.server.serve import Server

        def load(source: str, context: int | None) -> "LLM":
            return cast("LLM", load_model(source, **{**where, "context": context or where["context"]}))

        served = Models(load, keep_alive=kept, most=max_models)
        for model in models or []:
            served.give(load(model, None), model)
        app = create_app(served, with_prompts=log_prompts)
        server = Server(app, listener, note, served.close, served.abandon)
        set_up(Format(log_format))
        server.run()
        if served.left_behind:
            os._exit(0)
