"""`localllm ps`, `localllm top` and `localllm stop`: the models of a running server."""

import json
import time
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

from localllm.cli import options
from localllm.cli.io import StdoutWriter, is_interactive, note
from localllm.client.background import find_server
from localllm.client.model import version_mismatch
from localllm.client.server import ServerClient, check_server_name
from localllm.errors import UsageError
from localllm.formatting import format_bytes, format_seconds, format_table, parse_duration
from localllm.settings import Settings

MIN_INTERVAL_S = 0.1


def ps(server: options.RunningServer = None, as_json: options.Json = False) -> None:
    """List the models loaded by a running server.

    UNTIL is when an idle model is unloaded; KV is the share of its KV cache in use. A server
    with --replicas has a line for each of them. stderr names the process and the log of a background server.
    """
    out = StdoutWriter()
    with closing(ServerClient(server)) as client:
        status = check_server_name(client.request_json("/localllm/ps"), client.url)
        background = find_server(Settings.from_environment().home)
        if background and background.url == client.url:
            note(f"background server at {background.url}: process {background.pid}, log in {background.log}")
    if as_json:
        out.write(json.dumps(status, indent=1) + "\n")
        return
    header: tuple[str, ...] = ("NAME", "SIZE", "DEVICE", "CONTEXT", "UNTIL", "RUNNING", "WAITING", "KV")
    try:
        loading = [(name, *["-"] * 3, "loading", *["-"] * 3) for name in status["loading"]]
        rows = [*map(_model_row, status["models"]), *loading]
        if any("replica" in model for model in status["models"]):
            numbers = [model.get("replica", "-") for model in status["models"]] + ["-"] * len(loading)
            header, rows = (
                (*header, "REPLICA"),
                [(*row, number) for row, number in zip(rows, numbers, strict=True)],
            )
    except (LookupError, TypeError):
        raise version_mismatch(client.url) from None
    out.write(format_table([header, *rows]) + "\n")


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
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
    return "forever" if model["until"] is None else f"in {format_seconds(max(0.0, model['until'] - time.time()))}"


def stop(model: options.ModelName, server: options.RunningServer = None, as_json: options.Json = False) -> None:
    """Unload a model from a running server.

    MODEL is a name of `localllm ps`. Running answers finish first. `localllm serve --stop` ends a background
    server.
    """
    with closing(ServerClient(server)) as client:
        reply = client.request_json("/localllm/stop", {"model": model})
    if "users" not in reply:
        raise version_mismatch(client.url)
    if as_json:
        StdoutWriter().write(json.dumps({"name": model, "users": reply["users"]}) + "\n")
        return
    note(f"{model} will be unloaded when its running answers end" if reply["users"] else f"{model} is unloaded")


def top(
    server: options.RunningServer = None,
    every: Annotated[
        str, options.option("--every", text="Refresh interval, such as 0.5s or 1m; default: 1s.", metavar="TIME")
    ] = "1s",
    as_json: options.Json = False,
) -> None:
    """Monitor a running server: models, requests, latency, cache.

    If stdout is not a terminal, or with --json, print the activity of one --every interval and exit. Decode and
    prefill are tokens per second over all requests; TTFT, ITL and queue time cover answers that ended in the last
    minutes.
    """
    from localllm.tui.top_board import fetch_snapshot, throughput_between  # imports Textual

    interval_s = parse_duration(every)
    if interval_s < MIN_INTERVAL_S:
        raise UsageError(f"--every {every} is too short", f"give at least {MIN_INTERVAL_S:g}s")
    client = ServerClient(server)
    with closing(client):
        first = fetch_snapshot(client)  # before the app starts, so that an error is printed as usual
        if is_interactive() and not as_json:
            from localllm.tui.top_app import TopApp

            TopApp(lambda: fetch_snapshot(client), client.url, interval_s).run()
            return
        out = StdoutWriter()
        time.sleep(interval_s)
        last = fetch_snapshot(client)
        rates = [throughput_between(first, last, model.name) for model in last.models]
        if as_json:
            models = [
                asdict(model) | {"pace": rate and asdict(rate)}
                for model, rate in zip(last.models, rates, strict=True)
            ]
            out.write(json.dumps(asdict(last) | {"models": models}, indent=1) + "\n")
            return
        from localllm.tui.top_board import render_plain

        out.write(render_plain(last, client.url, rates) + "\n")
