"""Soak test of a server: many concurrent streams for minutes, of mixed lengths, some disconnected early, some
invalid.

    python -m bench.soak [--model demo] [--streams 64] [--seconds 300] [--deterministic] [--no-overlong] [--save]

Checks that every text equals that of the same request alone, that no request and no block remains at the end, and
that memory does not grow. Inter-token latencies are those of the client, which shares the machine with the server.
"""

import argparse
import asyncio
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from threading import Thread
from typing import Any

import httpx2
import psutil

from bench.report import finish
from localllm.benchmark.load.client import parse_message, read_sse
from localllm.llm.garbage import freeze_garbage
from localllm.metrics import percentile

DISTINCT = 96  # requests that streams draw from
DISCONNECTING, INVALID = 1 / 3, 1 / 20  # shares of requests
WARM_UP = 0.2  # share of the time, after which memory must not grow
INVALID_BODIES: list[tuple[Any, int]] = [  # with the expected status
    (b"{", 400),
    (b'{"model": 1}', 400),
    (b'{"model": "nobody", "prompt": "x"}', 404),
    (b'{"model": "MODEL", "prompt": "x", "temperature": -1}', 400),
    (b'{"model": "MODEL", "prompt": "x", "logit_bias": {"a": 1}}', 400),
    (b'{"model": "MODEL", "prompt": "' + b"a lot of words " * 9000 + b'"}', 400),
]
WORDS = [
    "once",
    "there",
    "was",
    "a",
    "little",
    "girl",
    "who",
    "had",
    "big",
    "dog",
    "and",
    "they",
    "went",
    "to",
    "play",
]


@dataclass
class Observations:
    """Outcomes of all streams."""

    invalid_bodies: list[tuple[Any, int]]
    counts: Counter[str] = field(default_factory=Counter)  # requests by outcome
    itl_s: list[float] = field(default_factory=list)  # of complete answers
    ttft_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # descriptions of wrong answers


@contextmanager
def server(model: str, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server, and yield its URL and its process."""
    command = [sys.executable, "-m", "localllm", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            for line in process.stderr:
                if match := re.search(r"listening on (\S+)", line):
                    Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
                    yield match[1], psutil.Process(process.pid)
                    break
            else:
                raise RuntimeError("the server did not start")
        finally:
            process.terminate()


def make_requests(model: str, rng: random.Random) -> list[dict[str, Any]]:
    """Greedy requests with prompts of 2 to 300 words and answers of 1 to 96 tokens."""
    return [
        {
            "model": model,
            "prompt": " ".join(rng.choices(WORDS, k=int(2 * 150 ** rng.random()))),
            "max_tokens": int(96 ** rng.random()),
            "temperature": 0,
            "stream": True,
        }
        for _ in range(DISTINCT)
    ]


async def stream_pieces(client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[str]:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx2.codes.OK:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
        async for message in read_sse(response):
            piece = parse_message(message)
            if "error" in piece:
                raise RuntimeError(str(piece["error"]))
            yield piece["choices"][0]["text"]


async def send_requests(
    client: httpx2.AsyncClient,
    bodies: list[dict[str, Any]],
    expected: list[str],
    observations: Observations,
    end: float,
    seed: int,
) -> None:
    """Send one request after another until `end`. expected: the text of each request alone."""
    rng = random.Random(seed)
    while time.perf_counter() < end:
        index, share = rng.randrange(len(bodies)), rng.random()
        if share < INVALID:
            await send_invalid(client, bodies[0]["model"], observations, rng)
            continue
        disconnect_after = rng.randrange(8) if share < INVALID + DISCONNECTING else None
        text, times = "", [time.perf_counter()]
        try:
            stream = stream_pieces(client, bodies[index])
            async for piece in stream:
                text += piece
                times.append(time.perf_counter())
                if disconnect_after is not None and len(times) > disconnect_after:
                    await stream.aclose()
                    break
        except (RuntimeError, httpx2.HTTPError) as error:
            observations.counts[f"failed: {error!s:.80}"] += 1
            continue
        complete = disconnect_after is None
        observations.counts["whole" if complete else "left"] += 1
        if text != expected[index] if complete else not expected[index].startswith(text):
            prompt = bodies[index]["prompt"][:40]
            observations.wrong.append(f"{prompt!r}: {text!r}, but {expected[index]!r} alone")
        if complete and len(times) > 1:
            observations.ttft_s.append(times[1] - times[0])
            observations.itl_s += [b - a for a, b in pairwise(times[1:])]


async def send_invalid(
    client: httpx2.AsyncClient, model: str, observations: Observations, rng: random.Random
) -> None:
    body, status = rng.choice(observations.invalid_bodies)
    response = await client.post("/v1/completions", content=body.replace(b"MODEL", model.encode()))
    observations.counts["senseless"] += 1
    if response.status_code != status:
        observations.wrong.append(f"{body[:60]!r}: status {response.status_code}, {response.text[:100]}")


async def soak(
    url: str, model: str, streams: int, seconds: float, process: psutil.Process, *, overlong: bool = True
) -> dict[str, Any]:
    """Run the test, and return its results. overlong: invalid requests include prompts far beyond the context."""
    bodies, memory = make_requests(model, random.Random(1)), list[int]()
    observations = Observations(INVALID_BODIES if overlong else INVALID_BODIES[:-1])
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=streams)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        expected = ["".join([piece async for piece in stream_pieces(client, body)]) for body in bodies]
        freeze_garbage()  # pauses of this process would count as gaps between tokens
        end = time.perf_counter() + seconds

        async def watch_memory() -> None:
            while time.perf_counter() < end:
                memory.append(process.memory_info().rss)
                await asyncio.sleep(seconds / 100)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch_memory())
            for seed in range(streams):
                tasks.create_task(send_requests(client, bodies, expected, observations, end, seed))
        remaining = await remaining_work(client)
    warm = memory[int(len(memory) * WARM_UP) :]
    third = len(warm) // 3
    return {
        "streams": streams,
        "seconds": seconds,
        "overlong": overlong,
        "requests": dict(observations.counts),
        "wrong_texts": len(observations.wrong),
        "first_wrong": observations.wrong[:3],
        "ttft_p50_s": percentile(observations.ttft_s, 50),
        "ttft_p99_s": percentile(observations.ttft_s, 99),
        "itl_p50_s": percentile(observations.itl_s, 50),
        "itl_p99_s": percentile(observations.itl_s, 99),
        "itl_p99_to_p50": percentile(observations.itl_s, 99) / percentile(observations.itl_s, 50),
        "memory_bytes": median(warm[-third:]),
        "memory_growth_bytes": median(warm[-third:]) - median(warm[:third]),
        "left_behind": remaining,
    }


async def remaining_work(client: httpx2.AsyncClient) -> dict[str, float]:
    """Running and waiting requests and used blocks, one second after the last answer."""
    await asyncio.sleep(1)
    text = (await client.get("/metrics")).text
    gauges = re.findall(r"^localllm_(running|waiting|kv_blocks_used)\w*(?:{.*})? (\S+)$", text, re.M)
    return {name: float(value) for name, value in gauges}


def main() -> None:
    parser = argparse.ArgumentParser(description="Soak test of a server with many concurrent streams.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--name", help="name of the model on the server")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--dtype")
    parser.add_argument(
        "--no-overlong", action="store_true", help="omit prompts of 135 KB, whose tokenization occupies a core"
    )
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/soak.jsonl")
    options = parser.parse_args()
    flags = [
        *(["--deterministic"] if options.deterministic else []),
        *(["--dtype", options.dtype] if options.dtype else []),
    ]
    name = options.name or options.model.rstrip("/").rsplit("/", 1)[-1]
    with server(options.model, *flags) as (url, process):
        overlong = not options.no_overlong
        result = asyncio.run(soak(url, name, options.streams, options.seconds, process, overlong=overlong))
    finish("soak", {"model": name, "flags": flags, **result}, options.save)


if __name__ == "__main__":
    main()
