"""The models of this machine by the flags of the command line: one way to open one, for the app and for a single
answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm.cli.exits import invalid_hf_setting
from localllm.cli.io import note
from localllm.protocol.model import Model
from localllm.request import Grammar

if TYPE_CHECKING:
    from localllm.tui.machine import (
        LoadObserver,
        ModelOffer,
    )  # what the app needs, a server's answer need not wait for
import os.path
from collections.abc import Callable

from localllm.client.model import RemoteModel, open_model
from localllm.client.server import ServerClient
from localllm.errors import LocalLLMError, ModelNotFound, ServerUnreachable, UsageError
from localllm.settings import Settings

# Whether a running server answers instead of a model of this process.
LOADING_FLAGS = {  # what they say is settled when a model is loaded
    "context": "--context",
    "device": "--device",
    "dtype": "--dtype",
    "kv_dtype": "--kv-dtype",
    "activations": "--activations",
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
        try:
            return announce_server(open_model(ServerClient(named), name, path=None, load=True), verbose, say)
        except ModelNotFound as error:  # its remedy is in the words of the API
            remedy = f"`localllm ps --server {named}` shows what is loaded there"
            raise ModelNotFound(error.message, remedy) from error
    if loading or flags["local"] or settings.deterministic:
        return None
    server = ServerClient()
    try:
        return announce_server(open_model(server, name, path=absolute_model_path(name), load=False), verbose, say)
    except LocalLLMError as error:
        if verbose and (settings.host or not isinstance(error, ServerUnreachable)):
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


class LocalMachine:
    """`Machine` of the app. flags: those of `run`, which count for each model that is opened."""

    def __init__(self, flags: Mapping[str, Any]):
        self.flags = flags

    def offers(self) -> "Sequence[ModelOffer]":
        """As `Machine`. Raises NoSuchDevice and UsageError for flags that name what is not here."""
        from localllm.cli.offers import list_offers
        from localllm.plan.fit import LoadOptions
        from localllm.settings import Settings

        settings, flags = Settings.from_environment(), self.flags
        dtype, kv_dtype = flags["dtype"] or settings.dtype, flags["kv_dtype"] or settings.kv_dtype
        wish = LoadOptions(flags["context"], quant=flags["quant"], dtype=dtype, kv_dtype=kv_dtype)
        return list_offers(wish, flags["device"] or settings.device, settings)

    def open(self, name: str, watch: "LoadObserver") -> Model:
        return connect_or_load({**self.flags, "model": name}, watch=watch)


def connect_or_load(
    flags: Mapping[str, Any], grammar: Grammar | None = None, watch: "LoadObserver | None" = None
) -> Model:
    """A running server that has the model, or the model in this process: pulled, quantized and loaded as
    `load_model` does. flags: those of `run`; grammar: one that answers will be asked for; watch: follows it, None:
    on stderr."""
    if served := connect_to_server(flags, watch.note if watch else note):
        return served
    try:
        from localllm.cli.loading import load_model  # what only loading needs, a server's answer need not wait for
    except ValueError as error:
        raise invalid_hf_setting(error) from error

    where = {name: flags[name] for name in LOADING_FLAGS}
    draft = where.pop("draft")
    where["draft"] = None if draft is None else "lookup" if draft else "off"
    return load_model(flags["model"], **where, verbose=flags["verbose"], grammar=grammar, watch=watch)
