"""`localllm serve`: a model behind an HTTP endpoint that speaks OpenAI's API."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, cast

import typer

from localllm.cli import options
from localllm.cli.io import note
from localllm.cli.loading import load_served

if TYPE_CHECKING:
    from localllm.embedder import Embedder
    from localllm.llm import LLM  # torch, for which `--help` need not wait


def serve(
    model: options.ModelName,
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
    verbose: Annotated[bool, options.switch("--verbose", text="Tell what loading takes.")] = False,
) -> None:
    """Answer programs over HTTP, as OpenAI's API does.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file; one that is not on
    this machine is pulled first. Only programs of this machine can ask. The first Ctrl-C or SIGTERM lets answers
    end, the second does not.
    """
    from localllm.server.serve import bind  # FastAPI takes its time to import

    with closing(bind(host, port)) as listener:
        where = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quant": quant, "context": context}
        where |= {"deterministic": deterministic, "force": force, "verbose": verbose}
        from localllm.server.app import create_app
        from localllm.server.models import Models
        from localllm.server.serve import Server

        def load(source: str, context: int | None) -> "LLM | Embedder":
            return cast("LLM | Embedder", load_served(source, **{**where, "context": context or where["context"]}))

        llm = load(model, None)
        models = Models(load, {llm.name: model})
        models.add(llm.name, llm)
        Server(create_app(models), listener, note, models.close).run()
