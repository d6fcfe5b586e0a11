"""`localllm serve`: a model behind an HTTP endpoint that speaks OpenAI's API."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, cast

import typer

from localllm.cli import options
from localllm.cli.io import note
from localllm.cli.loading import load_model
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.llm import LLM  # torch, for which `--help` need not wait


def serve(
    model: options.ModelName,
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
    verbose: Annotated[bool, options.switch("--verbose", text="Tell what loading takes.")] = False,
) -> None:
    """Answer programs over HTTP, as OpenAI's API does.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file; one that is not on
    this machine is pulled first. Only programs of this machine can ask, unless --host says otherwise, which takes
    a key. The first Ctrl-C or SIGTERM lets answers end, the second does not.
    """
    from localllm.server.access_flags import access_of, read_keys, tls_of, warnings
    from localllm.server.serve import bind  # FastAPI takes its time to import

    keys = [*(api_key or []), *read_keys(api_key_file), *filter(None, [Settings.from_environment().api_key])]
    tls = tls_of(tls_cert, tls_key)
    access = access_of(host, keys, host_name or [], origin or [], tls=tls, insecure=insecure)
    for warning in warnings(access):
        note(warning)
    with closing(bind(host, port)) as listener:
        where = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quant": quant, "context": context}
        where |= {"deterministic": deterministic, "force": force, "verbose": verbose}
        from localllm.server.app import create_app
        from localllm.server.models import Models
        from localllm.server.serve import Server

        def load(source: str, context: int | None) -> "LLM":
            return cast("LLM", load_model(source, **{**where, "context": context or where["context"]}))

        llm = load(model, None)
        models = Models(load, {llm.name: model})
        models.add(llm.name, llm)
        Server(create_app(models, access), listener, note, models.close, tls=access.tls).run()
