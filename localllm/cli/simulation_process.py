"""The process that runs simulations for the page: `python -m localllm.cli.simulation_process`.

A simulation is a loop in Python, which in the server's process would hold up the engine and every answer. This
process reads requests from stdin and writes lines to stdout, both JSON objects; it ends when stdin does, hence
with the server.

    {"describe": true}                                  {"options": ..., "presets": ...}
    {"run": {"model": ..., "source": ..., "options": {}}}
                                                        {"command": ...}, frames, {"report": ...} or {"error": ...}
    {"cancel": true}                                    ends the run in progress

The last line of each answer has the field `end`.
"""

import json
import os
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from localllm.api.events import error_to_json
from localllm.cli.simulate_page import describe_page, parse_options, shell_line
from localllm.errors import LocalLLMError

NICENESS = 10  # the server's engine goes first
MEMORY_LIMIT_BYTES = 4 * 2**30  # besides what the libraries have mapped at the start

Json = dict[str, Any]
Send = Callable[[Json], None]


class RunCancelled(Exception):
    """The client has left."""


def main() -> None:
    os.nice(NICENESS)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests: queue.SimpleQueue[Json] = queue.SimpleQueue()
    cancelled = threading.Event()
    threading.Thread(target=read_requests, args=(requests, cancelled), daemon=True).start()

    def send(value: Json) -> None:
        if cancelled.is_set() and "end" not in value:
            raise RunCancelled
        output.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
        output.flush()

    limited = False
    with redirect_stdout(sys.stderr):  # libraries that print would break the protocol
        while True:
            request = requests.get()
            if "describe" in request:
                send(describe_page() | {"end": True})
                continue
            if not limited:
                limit_memory()
                limited = True
            run(request["run"], send, cancelled)


def read_requests(requests: "queue.SimpleQueue[Json]", cancelled: threading.Event) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "cancel" in request:
            cancelled.set()
        else:
            cancelled.clear()
            requests.put(request)
    os._exit(0)  # the server has ended


def limit_memory() -> None:
    """Load what a simulation needs, and limit what it may use beyond that, on Linux."""
    import localllm.simulate.simulation  # noqa: F401 - loads torch, which maps gigabytes

    statm = Path("/proc/self/statm")
    if statm.exists():
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = mapped + MEMORY_LIMIT_BYTES
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def run(request: Json, send: Send, cancelled: threading.Event) -> None:
    """Run a simulation and send its frames and its report, or its error."""
    try:
        report = simulate(request, send)
    except RunCancelled:
        report = {"cancelled": True}
    except LocalLLMError as error:
        report = error_to_json(error)
    except MemoryError:
        message = f"the simulation takes more than {MEMORY_LIMIT_BYTES / 2**30:g} GiB"
        report = error_to_json(LocalLLMError(message, "choose a smaller cache, shorter prompts or fewer requests"))
    except Exception:
        traceback.print_exc()
        report = error_to_json(LocalLLMError("internal error", "see the server's log for the traceback"))
    send(report | {"end": True})


def simulate(request: Json, send: Send) -> Json:
    """Return the report of a simulation, as JSON and as the command prints it."""
    from localllm.cli.simulate_setup import prepare_simulation, run_prepared
    from localllm.simulate.frames import Frames
    from localllm.simulate.report import answer_lines, as_dict, describe_engine, format_report

    options = request["options"]
    flags, _ = parse_options(request["source"], options)
    simulation = prepare_simulation(flags)
    target, load, objective = simulation.target, simulation.load, simulation.objective
    send(
        {
            "command": shell_line(request["model"], options),
            "model": request["model"],
            "device": target.device,
            "quant": target.fit.quant or target.fit.dtype,
            "kv_dtype": target.fit.kv_dtype,
            "engine": describe_engine(target.setup),
            "step_times": target.cost.source,
            "blocks": target.setup.blocks,
            "block_size": target.setup.block_size,
            "max_running": target.setup.max_running,
            "requests": load.requests,
            "limits": objective.limits if objective else {},
        }
    )
    frames = Frames(load.requests, objective.limits if objective else {}, send)
    report = run_prepared(simulation, lambda text: send({"status": text}), frames)
    return {"report": as_dict(report), "text": format_report(report), "answer": " ".join(answer_lines(report))}


if __name__ == "__main__":
    main()
