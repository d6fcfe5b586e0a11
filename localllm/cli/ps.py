"""`localllm ps` and `localllm stop`: the models of a running server."""

import json
import time
from contextlib import closing
from typing import Any

from localllm.cli import options
from localllm.cli.io import StdoutWriter, note
from localllm.client.model import version_mismatch
from localllm.client.server import ServerClient, check_server_name
from localllm.formatting import format_bytes, format_seconds, format_table


def ps(server: options.RunningServer = None, as_json: options.Json = False) -> None:
    """List the models loaded by a running server.

    UNTIL is when an idle model is unloaded; KV is the share of its KV cache in use.
    """
    out = StdoutWriter()
    with closing(ServerClient(server)) as asked:
        found = check_server_name(asked.request_json("/localllm/ps"), asked.url)
    if as_json:
        out.write(json.dumps(found, indent=1) + "\n")
        return
    header = ("NAME", "SIZE", "DEVICE", "CONTEXT", "UNTIL", "RUNNING", "WAITING", "KV")
    try:
        loading = [(name, *["-"] * 3, "loading", *["-"] * 3) for name in found["loading"]]
        rows = [*map(_table_row, found["models"]), *loading]
    except (LookupError, TypeError):
        raise version_mismatch(asked.url) from None
    out.write(format_table([header, *rows]) + "\n")


def stop(model: options.ModelName, server: options.RunningServer = None, as_json: options.Json = False) -> None:
    """Unload a model from a running server.

    MODEL is a name of `localllm ps`. Running answers finish first.
    """
    with closing(ServerClient(server)) as asked:
        found = asked.request_json("/localllm/stop", {"model": model})
    if "users" not in found:
        raise version_mismatch(asked.url)
    if as_json:
        StdoutWriter().write(json.dumps({"name": model, "users": found["users"]}) + "\n")
        return
    note(f"{model} is unloaded when its answers have ended" if found["users"] else f"{model} is unloaded")


def _table_row(model: dict[str, Any]) -> tuple[str, ...]:
    used = model["used_blocks"] / model["blocks"] if model["blocks"] else 0.0
    return (
        model["name"],
        format_bytes(model["bytes"]),
        f"{model['device']} {model['dtype']}",
        str(model["context"]),
        _format_until(model),
        str(model["running"]),
        str(model["waiting"]),
        f"{used:.0%}",
    )


def _format_until(model: dict[str, Any]) -> str:
    if model["users"]:
        return "in use"
    return "for ever" if model["until"] is None else f"in {format_seconds(max(0.0, model['until'] - time.time()))}"
