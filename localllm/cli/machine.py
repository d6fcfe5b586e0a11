"""Choose between a running server and this process: `connect_or_load` opens a model for `run` and for the app."""

import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm.cli.exits import invalid_hf_setting
from localllm.cli.io import flag_name, note
from localllm.client.model import RemoteModel, open_model
from localllm.client.server import ServerClient
from localllm.errors import LocalLLMError, ModelNotFound, ServerUnreachable, UsageError
from localllm.protocol.model import Model
from localllm.request import Grammar
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.tui.machine import LoadObserver, ModelOffer  # not needed to answer from a server

LOADING_FIELDS = (  # flags that take effect when a model is loaded
    "context",
    "device",
    "dtype",
    "kv_dtype",
    "activations",
    "quant",
    "deterministic",
    "draft",
    "draft_model",
    "force",
)


def connect_or_load(
    flags: Mapping[str, Any], grammar: Grammar | None = None, observer: "LoadObserver | None" = None
) -> Model:
    """The model in a running server that has it loaded, or the model loaded in this process.

    flags: flags of `run` by field name; grammar: compiled before the weights are read; observer: receives
    progress, which goes to stderr without one. Raises as `connect_to_server` and `load_model`.
    """
    if remote := connect_to_server(flags, observer.note if observer else note):
        return remote
    try:
        from localllm.cli.loading import load_model  # slow to import, and not needed to answer from a server
    except ValueError as error:
        raise invalid_hf_setting(error) from error

    load_flags = {name: flags[name] for name in LOADING_FIELDS}
    draft = load_flags.pop("draft")
    load_flags["draft"] = None if draft is None else "lookup" if draft else "off"
    return load_model(flags["model"], **load_flags, verbose=flags["verbose"], grammar=grammar, observer=observer)


def connect_to_server(flags: Mapping[str, Any], report: Callable[[str], object] = note) -> RemoteModel | None:
    """The model in a running server that has it loaded, or None; a server named by --server loads it if needed.

    flags: flags of `run` by field name; report: prints a line, and is used only with --verbose. Raises UsageError
    for flags that contradict each other, and the error of a server named by --server.
    """
    name, server_name, verbose = flags["model"], flags["server"], flags["verbose"]
    settings = Settings.from_environment()
    # --no-draft is False, and needs a model in this process as well.
    loading_fields = [f for f in LOADING_FIELDS if flags[f] not in ((None,) if f == "draft" else (None, False))]
    if server_name:
        if loading_fields or flags["local"]:
            other = "--local" if flags["local"] else flag_name(loading_fields[0])
            raise UsageError(
                f"{other} loads the model in this process, and --server uses a server", "leave one of them out"
            )
        try:
            remote = open_model(ServerClient(server_name), name, path=None, load=True)
        except ModelNotFound as error:  # its remedy is for clients of the API
            remedy = f"`localllm ps --server {server_name}` lists the models that are loaded there"
            raise ModelNotFound(error.message, remedy) from error
    elif loading_fields or flags["local"] or settings.deterministic:
        return None
    else:
        try:
            remote = open_model(ServerClient(), name, path=absolute_model_path(name), load=False)
        except LocalLLMError as error:
            if verbose and (settings.host or not isinstance(error, ServerUnreachable)):
                report(f"note: {error.message}; loading the model in this process")
            return None
    if verbose:
        model = f"{remote.name} on {remote.device} in {remote.dtype}, context {remote.context} tokens"
        report(f"using the server at {remote.server.url} (localllm {remote.version}): {model}")
    return remote


def absolute_model_path(name: str) -> str | None:
    """Absolute path of a model that is named by a path, otherwise None. A local folder whose name is also that of
    a model counts as a path; no server has it loaded, so it is loaded in this process as without a server."""
    if name.startswith(("/", ".", "~")) or os.path.exists(name):
        return os.path.realpath(os.path.expanduser(name))
    return None


class LocalMachine:
    """`Machine` of the app, which opens each model with the flags of `run`, by field name."""

    def __init__(self, flags: Mapping[str, Any]):
        self.flags = flags

    def offers(self) -> "Sequence[ModelOffer]":
        """Models to choose from. Raises NoSuchDevice and UsageError for unsuitable flags."""
        from localllm.cli.offers import list_offers
        from localllm.plan.fit import LoadOptions

        settings, flags = Settings.from_environment(), self.flags
        dtype, kv_dtype = flags["dtype"] or settings.dtype, flags["kv_dtype"] or settings.kv_dtype
        load_options = LoadOptions(flags["context"], quant=flags["quant"], dtype=dtype, kv_dtype=kv_dtype)
        return list_offers(load_options, flags["device"] or settings.device, settings)

    def open(self, name: str, watch: "LoadObserver") -> Model:
        return connect_or_load({**self.flags, "model": name}, observer=watch)
