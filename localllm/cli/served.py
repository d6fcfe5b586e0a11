"""Whether a running server answers instead of a model of this process."""

import os.path
from collections.abc import Callable, Mapping
from typing import Any

from localllm.cli.io import note
from localllm.client.model import ServedModel, open_model
from localllm.client.server import NoServer, Server
from localllm.errors import LocalLLMError, UsageError
from localllm.settings import Settings

LOADING_FLAGS = {  # what they say is settled when a model is loaded
    "context": "--context",
    "device": "--device",
    "dtype": "--dtype",
    "kv_dtype": "--kv-dtype",
    "quant": "--quant",
    "deterministic": "--deterministic",
    "draft": "--draft",
    "draft_model": "--draft-model",
    "force": "--force",
}
NO_FLAG = {"draft": None}  # the value of those that are not given, where it is not false


def served_model(flags: Mapping[str, Any], say: Callable[[str], object] = note) -> ServedModel | None:
    """The model in a server, if one that runs has it loaded; in the one that was named, also if it has not.

    flags: those of `run`; say: takes a line for the person. Raises UsageError where flags contradict each other,
    and where a server was named what keeps it from answering.
    """
    name, named, verbose = flags["model"], flags["server"], flags["verbose"]
    settings = Settings.from_environment()
    loading = [
        flag for field, flag in LOADING_FLAGS.items() if flags[field] not in (None, NO_FLAG.get(field, False))
    ]
    if named and (loading or flags["local"]):
        other = "--local" if flags["local"] else loading[0]
        raise UsageError(f"{other} loads the model here, and --server asks another", "leave out one of them")
    if named:
        return told(open_model(Server(named), name, path=None, load=True), verbose, say)
    if loading or flags["local"] or settings.deterministic:
        return None
    server = Server()
    try:
        return told(open_model(server, name, path=path_of(name), load=False), verbose, say)
    except LocalLLMError as error:
        if settings.host or (verbose and not isinstance(error, NoServer)):
            say(f"note: {error.message}; so it runs in this process")
        return None


def told(model: ServedModel, verbose: bool, say: Callable[[str], object]) -> ServedModel:
    if verbose:
        runs = f"{model.name} on {model.device} in {model.dtype}, context {model.context} tokens"
        say(f"the server at {model.server.url} (localllm {model.version}) answers: {runs}")
    return model


def path_of(name: str) -> str | None:
    """Where a model lies that is meant by its path. A folder that happens to be called like a model is one that no
    server has, and so `run` goes on as it would without one."""
    if name.startswith(("/", ".", "~")) or os.path.exists(name):
        return os.path.realpath(os.path.expanduser(name))
    return None
