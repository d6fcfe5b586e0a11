"""Choose between a running server and this process: `connect_or_load` opens a model for `run` and for the app."""

import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm.cli.exits import invalid_hf_setting
from localllm.cli.io import flag_name, note
from localllm.client.background import BackgroundServer, find_accepting_server, find_server, start_server
from localllm.client.model import RemoteModel, open_model
from localllm.client.server import ServerClient
from localllm.conversation.model import Model
from localllm.errors import (
    AccessDenied,
    LocalLLMError,
    ModelNotFound,
    ServerTooSlow,
    ServerUnreachable,
    UnsupportedModel,
    UsageError,
)
from localllm.files import reason_of
from localllm.formatting import parse_duration
from localllm.request import Grammar
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.tui.machine import LoadObserver, ModelOffer  # not needed to answer from a server

MIN_IDLE_S = 1.0  # of a server that exits when it is idle

LOADING_FIELDS = (  # flags that take effect when a model is loaded
    "context",
    "device",
    "dtype",
    "kv_dtype",
    "activations",
    "quant",
    "keep_layout",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "workers",
    "token_file",
    "deterministic",
    "draft",
    "draft_model",
    "force",
    "cache_dir",
    "cache_size",
)


def connect_or_load(
    flags: Mapping[str, Any],
    grammar: Grammar | None = None,
    observer: "LoadObserver | None" = None,
    *,
    keep_conversations: bool = False,
) -> Model:
    """The model in a running server that has it loaded, or the model loaded in this process.

    flags: flags of `run` by field name; grammar: compiled before the weights are read; observer: receives
    progress, which goes to stderr without one; keep_conversations: see `load_model`. Raises the errors of
    `connect_to_server` and `load_model`.
    """
    if remote := connect_to_server(flags, observer.note if observer else note, observer):
        return remote
    try:
        from localllm.cli.loading import load_model  # slow to import, and not needed to answer from a server
    except ValueError as error:
        raise invalid_hf_setting(error) from error

    load_flags = {name: flags[name] for name in LOADING_FIELDS}
    draft = load_flags.pop("draft")
    load_flags["draft"] = None if draft is None else "lookup" if draft else "off"
    return load_model(
        flags["model"],
        **load_flags,
        verbose=flags["verbose"],
        grammar=grammar,
        keep_conversations=keep_conversations,
        observer=observer,
    )


def connect_to_server(
    flags: Mapping[str, Any],
    report: Callable[[str], object] = note,
    observer: "LoadObserver | None" = None,
) -> RemoteModel | None:
    """The model in a running server that has it loaded, or None. A server named by --server loads it if needed;
    so does the background server with LOCALLLM_BACKGROUND, which is started if necessary.

    flags: flags of `run` by field name; report: prints a line; observer: receives progress of a load in the
    background server. Raises UsageError for flags that contradict each other, ServerTooSlow, and the error of a
    server named by --server or of a load in the background server.
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
        if verbose and settings.background:
            cause = "--local" if flags["local"] else "LOCALLLM_DETERMINISTIC"
            if loading_fields:
                cause = (
                    "--no-draft"
                    if loading_fields[0] == "draft" and not flags["draft"]
                    else flag_name(loading_fields[0])
                )
            report(f"note: LOCALLLM_BACKGROUND has no effect with {cause}; loading the model in this process")
        return None
    else:
        path = absolute_model_path(name)
        in_background = settings.background is not None and not settings.host
        if settings.background:
            parse_idle_time(settings.background, "LOCALLLM_BACKGROUND")
        own_server = find_server(settings.home) if in_background else None
        try:
            remote = open_model(ServerClient(own_server and own_server.url), name, path=path, load=False)
        except ServerTooSlow:
            raise  # it may have the model, and loading it a second time would slow both down
        except LocalLLMError as error:
            if verbose and (settings.host or not isinstance(error, ServerUnreachable)) and not in_background:
                report(f"note: {error.message}; loading the model in this process")
            if not in_background:
                return None
            remote = open_on_own_server(name, path, settings, report, observer, verbose=verbose)
            if remote is None:
                return None
        if own_server:
            remote.server.locate = lambda: locate_server(settings)
    if verbose:
        model = f"{remote.name} on {remote.device} in {remote.dtype}, context {remote.context} tokens"
        report(f"using the server at {remote.server.url} (localllm {remote.version}): {model}")
    return remote


def open_on_own_server(
    name: str,
    path: str | None,
    settings: Settings,
    report: Callable[[str], object],
    observer: "LoadObserver | None",
    *,
    verbose: bool,
) -> RemoteModel | None:
    """The model in the background server, started if necessary; None, with a note, if there can be none."""
    own_process = "loading the model in this process"
    if path:
        if verbose:
            report(f"note: a background server loads models by name, not by path; {own_process}")
        return None
    try:
        from localllm.cli.loading import fetch_for_server  # slow to import, and not needed for a loaded model
    except ValueError as error:
        raise invalid_hf_setting(error) from error

    with fetch_for_server(name, settings, observer):
        try:
            server, is_new = ensure_server(settings)
        except (LocalLLMError, OSError) as error:
            message = (
                error.message if isinstance(error, LocalLLMError) else f"{error.filename}: {reason_of(error)}"
            )
            report(f"no background server: {message}; {own_process}")
            return None
        if is_new and verbose:
            report(
                f"started a server at {server.url} (process {server.pid}), which ends after {settings.background} "
                f"without requests; its log is {server.log}"
            )
        try:
            client = ServerClient(server.url)
            client.locate = lambda: locate_server(settings)
            return open_model(client, name, path=None, load=True)
        except (ModelNotFound, AccessDenied, UnsupportedModel) as error:
            if verbose:
                report(f"note: {error.message}; {own_process}")
            return None


def ensure_server(settings: Settings) -> tuple[BackgroundServer, bool]:
    """The background server, and whether this call has started it, on any free port. Raises the errors of
    `start_server`."""
    if server := find_accepting_server(settings.home):
        return server, False
    idle_time = settings.background
    arguments = ("--port=0", f"--keep-alive={idle_time}", f"--exit-when-idle={idle_time}")
    return start_server(settings.home, arguments)


def locate_server(settings: Settings) -> str:
    """URL of the background server, which is started again if it has ended during a conversation."""
    return ensure_server(settings)[0].url


def parse_idle_time(text: str, source: str) -> float:
    """Seconds of an idle time. source: its flag or variable, for errors. Raises UsageError."""
    try:
        seconds = parse_duration(text)
    except UsageError:
        seconds = 0.0
    if seconds < MIN_IDLE_S:
        raise UsageError(f"{source} is {text!r}", "give an idle time of at least 1s, such as 5m or 1h30m")
    return seconds


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
        return connect_or_load({**self.flags, "model": name}, observer=watch, keep_conversations=True)
