"""A server that outlives its command: `localllm serve --background` and `--stop`, and `--install`, whose systemd
user unit, or launchd agent on macOS, starts the server at login."""

import os
import plistlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.cli.fast_start import read_command_table
from localllm.cli.io import StdoutWriter, flag_name, note, status
from localllm.cli.machine import absolute_model_path
from localllm.client.background import PATH_VARIABLES, absolute_settings, program, start_server, stop_server
from localllm.errors import UsageError
from localllm.files import expand_path, explain_disk_errors, write_atomic
from localllm.settings import Settings

MODES = ("background", "stop", "install", "uninstall")
MODE_FIELDS = (*MODES, "dry_run", "quiet")  # not of the server that they start
FILE_FIELDS = ("api_key_file", "tls_cert", "tls_key", "cache_dir", "token_file")

LABEL = "localllm"
SECRET_VARIABLES = ("LOCALLLM_API_KEY", "HF_TOKEN")
CLIENT_VARIABLES = ("LOCALLLM_HOST", "LOCALLLM_BACKGROUND", "LOCALLLM_DEBUG")
PLAIN_WORD = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


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


@dataclass(frozen=True)
class Service:
    """A file that makes the system start a server."""

    path: Path
    text: str
    start_command: str
    stop_command: str
    links: tuple[Path, ...] = ()  # by which the system starts it at login


def install_service(flags: Mapping[str, Any], *, dry_run: bool) -> None:
    """Write the file, and print it and the command that starts the server. flags: of `serve` by field name.

    Raises UsageError for flags that give others access, NotWritable and DiskFull.
    """
    check_service_flags(flags)
    service = make_service(serve_arguments(flags), service_environment())
    if not dry_run:
        with explain_disk_errors(service.path.parent):
            write_atomic(service.path, service.text)
    StdoutWriter().write(service.text)
    for name in SECRET_VARIABLES:
        if os.environ.get(name):
            remedy = "; pass --api-key-file instead" if name == "LOCALLLM_API_KEY" else ""
            note(f"note: {name} is a secret and is not in this file{remedy}")
    note(f"{'would write' if dry_run else 'wrote'} {service.path}; start it with: {service.start_command}")


def uninstall_service() -> None:
    """Delete the file, and print the command that ends a running server. Raises UsageError if there is none."""
    service = make_service((), {})
    if not service.path.exists():
        raise UsageError(f"there is no {service.path}", "`localllm serve --install` writes it")
    with explain_disk_errors(service.path.parent):
        for path in (*service.links, service.path):
            path.unlink(missing_ok=True)
    note(f"deleted {service.path}; end a running server with: {service.stop_command}")


def check_service_flags(flags: Mapping[str, Any]) -> None:
    """Raises UsageError for flags that the file must not have."""
    from localllm.server.access import parse_ip_address

    if not parse_ip_address(flags["host"]).is_loopback:
        raise UsageError(
            f"--install is for this machine only, and --host is {flags['host']}", "leave out --host or --install"
        )
    if flags["api_key"]:
        raise UsageError("--api-key would be written to the file in plain text", "use --api-key-file")


def service_environment() -> dict[str, str]:
    """Settings of this environment that a server reads, without secrets."""
    excluded = (*SECRET_VARIABLES, *CLIENT_VARIABLES, *PATH_VARIABLES)
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith("LOCALLLM_") and v}
    return {name: value for name, value in settings.items() if name not in excluded} | absolute_settings()


def make_service(arguments: Sequence[str], environment: Mapping[str, str]) -> Service:
    """The service of this system. Raises UsageError if it is neither Linux nor macOS."""
    for text in (*arguments, *environment.values()):
        if not text.isprintable():
            raise UsageError(f"{text!r} has a control character", "use another name")
    command = [*program(), "serve", *arguments]
    if sys.platform == "darwin":
        return launchd_agent(command, environment)
    if sys.platform == "linux":
        return systemd_unit(command, environment)
    raise UsageError(f"--install supports systemd and launchd, not {sys.platform}", "use --background")


def systemd_unit(command: Sequence[str], environment: Mapping[str, str]) -> Service:
    folder = expand_path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "systemd" / "user"
    settings = [f"Environment={quote_unit_word(f'{name}={value}')}" for name, value in environment.items()]
    lines = [
        "[Unit]",
        "Description=localllm server",
        "",
        "[Service]",
        "Type=exec",
        *settings,
        f"ExecStart={' '.join(quote_unit_word(word).replace('$', '$$') for word in command)}",
        "Restart=on-failure",
        "RestartSec=5",
        "TimeoutStopSec=60",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return Service(
        folder / f"{LABEL}.service",
        "\n".join(lines) + "\n",
        f"systemctl --user daemon-reload && systemctl --user enable --now {LABEL}",
        f"systemctl --user stop {LABEL}; systemctl --user daemon-reload",
        (folder / "default.target.wants" / f"{LABEL}.service",),
    )


def quote_unit_word(word: str) -> str:
    """Quote a word of a unit's line: a specifier begins with %, which is doubled."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if PLAIN_WORD.fullmatch(word) else f'"{escaped}"'


def launchd_agent(command: Sequence[str], environment: Mapping[str, str]) -> Service:
    path = expand_path("~/Library/LaunchAgents") / f"{LABEL}.plist"
    content = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "EnvironmentVariables": dict(environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Interactive",
        "StandardErrorPath": str(expand_path("~/Library/Logs") / f"{LABEL}.log"),
    }
    return Service(
        path,
        plistlib.dumps(content, sort_keys=False).decode(),
        f"launchctl bootstrap gui/{os.getuid()} '{path}'",
        f"launchctl bootout gui/{os.getuid()}/{LABEL}",
    )
