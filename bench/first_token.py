"""How long `localllm run` takes to say its first word through a warm server: from the start of its process until
the first byte on its stdout, beside what the same takes without a server. Python's compiled files are kept between
runs, as those of an installed program are.

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
    """Its address."""
    with subprocess.Popen(
        [*COMMAND, "serve", model, "--port", "0", "--log-format", "off"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process.stderr.readline().removeprefix("listening on ").strip()
        finally:
            process.terminate()


def first_byte(words, environment):
    """Seconds of a run until its first byte."""
    start = time.perf_counter()
    with subprocess.Popen(
        [*COMMAND, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        took = time.perf_counter() - start
        process.stdout.read()
    assert process.returncode == 0
    return took


def empty_interpreter(_):
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
    parser.add_argument("--local", action="store_true", help="also time it without a server")
    asked = parser.parse_args()
    with TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        print(json.dumps(measured(asked)))


def measured(asked):
    words = ["run", asked.model, "Once upon a time", "--max-tokens", "8", *(["--raw"] if asked.raw else [])]
    with server(asked.model) as url:
        served = os.environ | {"LOCALLLM_HOST": url}
        told = subprocess.run(
            [*COMMAND, *words, "--verbose"], cwd=ROOT, env=served, capture_output=True, text=True, check=True
        )
        assert told.stderr.startswith(f"the server at {url}"), told.stderr
        taken = [first_byte(words, served) for _ in range(asked.runs)]
    found = {"model": asked.model, "raw": asked.raw, "runs": asked.runs, "first_byte_ms": in_ms(taken)}
    found["python_alone_ms"] = in_ms(list(map(empty_interpreter, range(asked.runs))))
    found["load_average"] = os.getloadavg()[0]
    if asked.local:
        found["without_server_ms"] = in_ms([first_byte([*words, "--local"], dict(os.environ)) for _ in range(3)])
    return found


if __name__ == "__main__":
    main()
