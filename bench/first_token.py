"""Time from the start of a `localllm run` process to the first byte on its stdout, with a warm server and, for
comparison, without one. Python's compiled files are cached between runs, like those of an installed program.

`python bench/first_token.py [--model NAME] [--raw] [--runs N] [--local]` prints one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "localllm"]


@contextmanager
def server(model):
    """Start a server with the model loaded, and yield its URL."""
    with subprocess.Popen(
        [*COMMAND, "serve", model, "--port", "0", "--log-format", "off"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr
            yield process.stderr.readline().removeprefix("listening on ").strip()
        finally:
            process.terminate()


def first_byte_s(arguments, environment):
    """Run the command, and return the seconds until its first byte."""
    start = time.perf_counter()
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    assert process.returncode == 0
    return seconds


def interpreter_s():
    """Return the seconds that Python alone takes to start and print."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "print(1)"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def in_ms(seconds):
    ordered = sorted(seconds)
    return {
        "least": round(ordered[0] * 1e3, 1),
        "median": round(statistics.median(ordered) * 1e3, 1),
        "most": round(ordered[-1] * 1e3, 1),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--local", action="store_true", help="also measure without a server")
    options = parser.parse_args()
    with TemporaryDirectory() as pycache:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = pycache
        print(json.dumps(measure(options)))


def measure(options):
    arguments = ["run", options.model, "Once upon a time", "--max-tokens", "8"]
    arguments += ["--raw"] if options.raw else []
    with server(options.model) as url:
        environment = os.environ | {"LOCALLLM_HOST": url}
        warm_up = subprocess.run(
            [*COMMAND, *arguments, "--verbose"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert warm_up.stderr.startswith(f"using the server at {url}"), warm_up.stderr
        times = [first_byte_s(arguments, environment) for _ in range(options.runs)]
    result = {"model": options.model, "raw": options.raw, "runs": options.runs, "first_byte_ms": in_ms(times)}
    result["python_alone_ms"] = in_ms([interpreter_s() for _ in range(options.runs)])
    result["load_average"] = os.getloadavg()[0]
    if options.local:
        local_times = [first_byte_s([*arguments, "--local"], dict(os.environ)) for _ in range(3)]
        result["without_server_ms"] = in_ms(local_times)
    return result


if __name__ == "__main__":
    main()
