"""`localllm ps` and `localllm stop`: the models of a running server."""

import json
import time
from contextlib import closing
from typing import Any

from localllm.cli import options
from localllm.cli.io import AnswerWriter, note
from localllm.client.model import unknown
from localllm.client.server import Server, checked
from localllm.columns import table
from localllm.units import seconds, size


def ps(server: options.Running = None, as_json: options.Json = False) -> None:
    """List the models that a running server has loaded.

    UNTIL is when one is unloaded if nobody asks it; KV is how much of its cache answers use.
    """
    out = AnswerWriter()
    with closing(Server(server)) as asked:
        found = checked(asked.ask("/localllm/ps"), asked.url)
    if as_json:
        out.write(json.dumps(found, indent=1) + "\n")
        return
    header = ("NAME", "SIZE", "DEVICE", "CONTEXT", "UNTIL", "RUNNING", "WAITING", "KV")
    try:
        loading = [(name, *["-"] * 3, "loading", *["-"] * 3) for name in found["loading"]]
        rows = [*map(_row, found["models"]), *loading]
    except (LookupError, TypeError):
        raise unknown(asked.url) from None
    out.write(table([header, *rows]) + "\n")


def stop(model: options.ModelName, server: options.Running = None, as_json: options.Json = False) -> None:
    """Unload a model of a running server.

    MODEL is a name of `localllm ps`. Answers under way end first.
    """
    with closing(Server(server)) as asked:
        found = asked.ask("/localllm/stop", {"model": model})
    if "users" not in found:
        raise unknown(asked.url)
    if as_json:
        AnswerWriter().write(json.dumps({"name": model, "users": found["users"]}) + "\n")
        return
    note(f"{model} is unloaded when its answers have ended" if found["users"] else f"{model} is unloaded")


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    used = model["used_blocks"] / model["blocks"] if model["blocks"] else 0.0
    return (
        model["name"],
        size(model["bytes"]),
        f"{model['device']} {model['dtype']}",
        str(model["context"]),
        _until(model),
        str(model["running"]),
        str(model["waiting"]),
        f"{used:.0%}",
    )


def _until(model: dict[str, Any]) -> str:
    if model["users"]:
        return "in use"
    return "for ever" if model["until"] is None else f"in {seconds(max(0.0, model['until'] - time.time()))}"
