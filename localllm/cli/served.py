"""Whether a running server answers instead of a model of this process."""

import os.path
from collections.abc import Callable, Mapping
from typing import Any

from localllm.cli.io import note
from localllm.client.model import RemoteModel, open_model
from localllm.client.server import ServerClient, ServerUnreachable
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
UNSET_VALUES = {"draft": None}  # the value of those that are not given, where it is not false


def connect_to_server(flags: Mapping[str, Any], say: Callable[[str], object] = note) -> RemoteModel | None:
    """The model in a server, if one that runs has it loaded; in the one that was named, also if it has not.

    flags: those of `run`; say: takes a line for the person. Raises UsageError where flags contradict each other,
    and where a server was named what keeps it from answering.
    """
    name, named, verbose = flags["model"], flags["server"], flags["verbose"]
    settings = Settings.from_environment()
    loading = [
        flag for field, flag in LOADING_FLAGS.items() if flags[field] not in (None, UNSET_VALUES.get(field, False))
    ]
    if named and (loading or flags["local"]):
        other = "--local" if flags["local"] else loading[0]
        raise UsageError(f"{other} loads the model here, and --server asks another", "leave out one of them")
    if named:
        return announce_server(open_model(ServerClient(named), name, path=None, load=True), verbose, say)
    if loading or flags["local"] or settings.deterministic:
        return None
    server = ServerClient()
    try:
        return announce_server(open_model(server, name, path=absolute_model_path(name), load=False), verbose, say)
    except LocalLLMError as error:
        if settings.host or (verbose and not isinstance(error, ServerUnreachable)):
            say(f"note: {error.message}; so it runs in this process")
        return None


def announce_server(model: RemoteModel, verbose: bool, say: Callable[[str], object]) -> RemoteModel:
    if verbose:
        runs = f"{model.name} on {model.device} in {model.dtype}, context {model.context} tokens"
        say(f"the server at {model.server.url} (localllm {model.version}) answers: {runs}")
    return model


def absolute_model_path(name: str) -> str | None:
    """Where a model lies that is meant by its path. A folder that happens to be called like a model is one that no
    server has, and so `run` goes on as it would without one."""
    if name.startswith(("/", ".", "~")) or os.path.exists(name):
        return os.path.realpath(os.path.expanduser(name))
    return None
