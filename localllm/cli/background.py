"""`localllm serve --background` and `--stop`, and the command line of the server that other flags start."""

from collections.abc import Mapping
from typing import Any

from localllm.cli.fast_start import read_command_table
from localllm.cli.io import StdoutWriter, flag_name, note, status
from localllm.cli.machine import absolute_model_path
from localllm.client.background import start_server, stop_server
from localllm.errors import UsageError
from localllm.files import expand_path
from localllm.settings import Settings

MODES = ("background", "stop", "install", "uninstall")
MODE_FIELDS = (*MODES, "dry_run", "quiet")  # not of the server that they start
FILE_FIELDS = ("api_key_file", "tls_cert", "tls_key", "cache_dir", "token_file")


def check_modes(flags: Mapping[str, Any]) -> str | None:
    """The mode of `serve` that flags select, None to serve in this process. Raises UsageError for two modes."""
    modes = [mode for mode in MODES if flags[mode]]
    if len(modes) > 1:
        raise UsageError(
            f"{flag_name(modes[0])} and {flag_name(modes[1])} exclude each other", "leave one of them out"
        )
    if flags["dry_run"] and modes != ["install"]:
        raise UsageError("--dry-run shows what --install writes", "add --install, or leave --dry-run out")
    return modes[0] if modes else None


def serve_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Arguments of `localllm serve` for a process with another current folder. flags: by field name."""
    options = read_command_table()["commands"]["serve"]["options"]
    arguments = list[str]()
    for name, option in options.items():
        field = option["field"]
        value = flags.get(field)
        if field in MODE_FIELDS or value in (None, (), [], option["default"]):
            continue
        if option["type"] == "flag":
            arguments.append(name)
            continue
        values = value if option["multiple"] else [value]
        arguments += [f"{name}={absolute_file(each) if field in FILE_FIELDS else each}" for each in values]
    return arguments + [absolute_model_path(model) or model for model in flags["models"] or ()]


def absolute_file(file: str) -> str:
    return str(expand_path(file).absolute())


def serve_in_background(flags: Mapping[str, Any]) -> None:
    """Start a background server, and print its address to stdout. Raises UsageError if one is running, and the
    error with which it ends."""
    out = StdoutWriter()

    def on_line(line: str) -> None:
        if line and not line.startswith("listening on "):
            note(line)

    with status("starting the server"):
        server, is_new = start_server(Settings.from_environment().home, serve_arguments(flags), on_line)
    if not is_new:
        raise UsageError(
            f"a background server is running already at {server.url} (process {server.pid})",
            "use it, or stop it first with `localllm serve --stop`",
        )
    note(f"process {server.pid}, log in {server.log}")
    out.write(server.url + "\n")


def stop_background_server() -> None:
    """Raises the errors of `stop_server`."""
    with status("waiting for running answers"):
        server = stop_server(Settings.from_environment().home)
    note(f"the background server at {server.url} (process {server.pid}) has ended")
