"""`localllm top`: a running server, looked at again and again."""

import json
import time
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

from localllm.cli import options
from localllm.cli.io import StdoutWriter, is_interactive
from localllm.client.server import ServerClient
from localllm.errors import UsageError
from localllm.formatting import parse_duration
from localllm.tui.top_board import fetch_snapshot, throughput_between

MIN_INTERVAL_S = 0.1


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
    between = parse_duration(every)
    if between < MIN_INTERVAL_S:
        raise UsageError(f"--every {every} is too often", f"give at least {MIN_INTERVAL_S:g}s")
    asked = ServerClient(server)
    with closing(asked):
        first = fetch_snapshot(asked)  # what is wrong is said where the terminal is a plain one
        if is_interactive() and not as_json:
            from localllm.tui.top_app import TopApp

            TopApp(lambda: fetch_snapshot(asked), asked.url, between).run()
            return
        out = StdoutWriter()
        time.sleep(between)
        now = fetch_snapshot(asked)
        paces = [throughput_between(first, now, model.name) for model in now.models]
        if as_json:
            models = [
                asdict(model) | {"pace": speed and asdict(speed)}
                for model, speed in zip(now.models, paces, strict=True)
            ]
            out.write(json.dumps(asdict(now) | {"models": models}, indent=1) + "\n")
            return
        from localllm.tui.top_board import render_plain

        out.write(render_plain(now, asked.url, paces) + "\n")
