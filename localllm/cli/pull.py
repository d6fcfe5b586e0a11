"""`localllm pull`: a model from the Hub, whole, or why not."""

from pathlib import Path

from localllm.cli import options
from localllm.cli.io import AnswerWriter, note
from localllm.cli.report import size
from localllm.errors import UsageError
from localllm.hub.names import RepoName, parse
from localllm.hub.resolve import is_downloaded


def pull(
    model: options.ModelName,
    as_json: options.JsonEvents = False,
) -> None:
    """Download a model from the Hub, or bring it up to date.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT for one model of a
    repository of GGUF files. It goes into the cache of Hugging Face, where other programs find it. What was broken
    off goes on where it stopped. stdout gets the path of the model.
    """
    out = AnswerWriter()
    repo = parse(model)
    if not isinstance(repo, RepoName):
        raise UsageError(f"{model} is on this machine and not from the Hub", "name ORG/REPO")
    if as_json:
        from localllm.cli.progress import Events  # with the Hub's library 0.1 s that other commands need not wait for
        from localllm.hub import pull as hub

        events = Events()
        order = hub.order(repo, events.say)
        events.write("done", path=str(hub.pull(order, events)), fetched=order.missing_bytes)
        return
    out.write(f"{fetch(repo)}\n")


def fetch(repo: RepoName) -> Path:
    """Pull with progress on stderr. Raises what `hub.pull` raises."""
    from localllm.cli.progress import shown
    from localllm.hub import pull as hub

    order = hub.order(repo, note)
    kept = order.total_bytes - order.missing_bytes
    if not order.missing_bytes:
        note(f"{repo} is here, all {size(order.total_bytes)}")
    else:
        here = f", {size(kept)} are here" if kept else ""
        note(f"pulling {repo}: {len(order.files)} files, {size(order.total_bytes)}{here}")
    with shown() as show:
        return hub.pull(order, show)


def fetch_missing(model: str) -> None:
    """Pull a model that is not here. Raises what `parse` and `hub.pull` raise."""
    repo = parse(model)
    if isinstance(repo, RepoName) and not is_downloaded(repo):
        fetch(repo)
