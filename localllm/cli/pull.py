"""`localllm pull`: a model from the Hub, whole, or why not."""

from typing import Annotated

from localllm.cli import options
from localllm.cli.io import StdoutWriter
from localllm.errors import UsageError
from localllm.hardware.device import resolve_device, total_bytes
from localllm.hub.catalog import CatalogEntry
from localllm.hub.names import RepoName, parse_name
from localllm.plan.fit import FreeMemory, LoadOptions
from localllm.settings import Settings


def pull(
    model: options.ModelName,
    as_json: options.JsonEvents = False,
    force: Annotated[
        bool, options.switch("--force", text="Download the model even if it does not run on this machine.")
    ] = False,
) -> None:
    """Download a model from the Hub, or update it.

    MODEL is a name of `localllm list --all`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT for one model of a
    GGUF repository. A name without a format, like qwen3:8b, gets the edition that fits this machine: 4 bits, or
    more for a small model that stays fast. The files go into the Hugging Face cache, which other programs share.
    An interrupted download resumes. stdout gets the path of the model. Exits with code 3 before downloading if
    this machine has too little memory for the model.
    """
    from localllm.cli import progress  # with the Hub's library 0.1 s that other commands need not wait for
    from localllm.llm.fetch import fetch

    repo, settings = parse_name(model), Settings.from_environment()
    if isinstance(repo, CatalogEntry):
        raise UsageError(
            f"{model} comes with localllm, there is nothing to pull", f"`localllm run {model}` runs it"
        )
    if not isinstance(repo, RepoName):
        remedy = "name ORG/REPO, or a model of `localllm list --all`"
        raise UsageError(f"{model} names no repository of the Hub", remedy)
    wish = LoadOptions(dtype=settings.dtype, kv_dtype=settings.kv_dtype)
    if as_json:
        events = progress.JsonEvents()
        path = fetch(repo, events, lambda: total_space(settings.device), wish, force=force)
        events.write("done", path=str(path))
        return
    out = StdoutWriter()
    with progress.download_progress() as show:
        path = fetch(repo, show, lambda: total_space(settings.device), wish, force=force, on_choice=show.say)
    out.write(f"{path}\n")


def total_space(device: str) -> FreeMemory:
    """All that this machine has: what else runs now will have ended when the model is run."""
    from localllm.plan.expected import memory_of

    place = resolve_device(device)
    return memory_of(place, total_bytes(place), Settings.from_environment())
