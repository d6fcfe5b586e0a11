"""`localllm pull`: a model from the Hub, whole, or why not."""

from localllm.cli import options
from localllm.cli.io import AnswerWriter
from localllm.errors import UsageError
from localllm.hub.names import RepoName, parse


def pull(model: options.ModelName, as_json: options.JsonEvents = False) -> None:
    """Download a model from the Hub, or bring it up to date.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT for one model of a
    repository of GGUF files. It goes into the cache of Hugging Face, where other programs find it. What was broken
    off goes on where it stopped. stdout gets the path of the model.
    """
    from localllm.cli import fetch, progress  # 0.1 s that other commands need not wait for

    repo = parse(model)
    if not isinstance(repo, RepoName):
        raise UsageError(f"{model} names no repository of the Hub", "name ORG/REPO, or a model of `localllm list`")
    if as_json:
        events = progress.Events()
        events.write("done", path=str(fetch.fetch(repo, events)))
        return
    out = AnswerWriter()
    with progress.shown() as show:
        path = fetch.fetch(repo, show)
    out.write(f"{path}\n")
