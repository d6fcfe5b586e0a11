"""Many streams of one server at once, for minutes: of mixed lengths, some broken off, some that make no sense.

    python -m bench.soak [--model demo] [--streams 64] [--seconds 300] [--deterministic] [--no-overlong] [--save]

Every text must be the one that the same request has alone, nothing may be left behind at the end, and memory must
not grow. Gaps between pieces are measured here, at the client, which shares the machine with the server.
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
from localllm.metrics import percentile

DISTINCT = 96  # requests, of which every stream draws its own
LEAVING, SENSELESS = 1 / 3, 1 / 20  # parts of them
WARM_S = 0.2  # of the time, after which memory may not grow
SENSELESS_BODIES: list[tuple[Any, int]] = [
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
class Seen:
    """What came of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)  # seconds between the pieces of whole answers
    first: list[float] = field(default_factory=list)  # seconds until the first
    wrong: list[str] = field(default_factory=list)
    senseless: list[tuple[Any, int]] = field(default_factory=list)  # what to send of these


@contextmanager
def server(model: str, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server of its own process, and the process."""
    command = [sys.executable, "-m", "localllm", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            for line in process.stderr:
                if found := re.search(r"listening on (\S+)", line):
                    Thread(target=process.stderr.read, daemon=True).start()  # else its log would fill the pipe
                    yield found[1], psutil.Process(process.pid)
                    break
            else:
                raise RuntimeError("the server did not start")
        finally:
            process.terminate()


def requests(model: str, draw: random.Random) -> list[dict[str, Any]]:
    """Greedy ones, of 2 to 300 words and 1 to 96 tokens."""
    return [
        {
            "model": model,
            "prompt": " ".join(draw.choices(WORDS, k=int(2 * 150 ** draw.random()))),
            "max_tokens": int(96 ** draw.random()),
            "temperature": 0,
            "stream": True,
        }
        for _ in range(DISTINCT)
    ]


async def pieces(client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[str]:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx2.codes.OK:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
        async for message in read_sse(response):
            piece = parse_message(message)
            if "error" in piece:
                raise RuntimeError(str(piece["error"]))
            yield piece["choices"][0]["text"]


async def user(
    client: httpx2.AsyncClient, bodies: list[dict[str, Any]], alone: list[str], seen: Seen, end: float, seed: int
) -> None:
    """Asks again and again until `end`."""
    draw = random.Random(seed)
    while time.perf_counter() < end:
        place, kind = draw.randrange(len(bodies)), draw.random()
        if kind < SENSELESS:
            await send_senseless(client, bodies[0]["model"], seen, draw)
            continue
        leave_at = draw.randrange(8) if kind < SENSELESS + LEAVING else None
        text, times = "", [time.perf_counter()]
        try:
            stream = pieces(client, bodies[place])
            async for piece in stream:
                text += piece
                times.append(time.perf_counter())
                if leave_at is not None and len(times) > leave_at:
                    await stream.aclose()
                    break
        except (RuntimeError, httpx2.HTTPError) as error:
            seen.counts[f"failed: {error!s:.80}"] += 1
            continue
        seen.counts["whole" if leave_at is None else "left"] += 1
        if text != alone[place] if leave_at is None else not alone[place].startswith(text):
            seen.wrong.append(f"{bodies[place]['prompt'][:40]!r}: {text!r} and alone {alone[place]!r}")
        if leave_at is None and len(times) > 1:
            seen.first.append(times[1] - times[0])
            seen.gaps += [b - a for a, b in pairwise(times[1:])]


async def send_senseless(client: httpx2.AsyncClient, model: str, seen: Seen, draw: random.Random) -> None:
    body, status = draw.choice(seen.senseless)
    answer = await client.post("/v1/completions", content=body.replace(b"MODEL", model.encode()))
    seen.counts["senseless"] += 1
    if answer.status_code != status:
        seen.wrong.append(f"{body[:60]!r} was answered with {answer.status_code}: {answer.text[:100]}")


async def soak(
    url: str, model: str, streams: int, seconds: float, process: psutil.Process, *, overlong: bool = True
) -> dict[str, Any]:
    """overlong: with prompts far beyond the context among those that make no sense."""
    bodies, seen, memory = requests(model, random.Random(1)), Seen(), list[int]()
    seen.senseless = SENSELESS_BODIES if overlong else SENSELESS_BODIES[:-1]
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=streams)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        alone = ["".join([piece async for piece in pieces(client, body)]) for body in bodies]
        end = time.perf_counter() + seconds

        async def watch() -> None:
            while time.perf_counter() < end:
                memory.append(process.memory_info().rss)
                await asyncio.sleep(seconds / 100)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            for seed in range(streams):
                tasks.create_task(user(client, bodies, alone, seen, end, seed))
        left = await gauges(client)
    warm = memory[int(len(memory) * WARM_S) :]
    third = len(warm) // 3
    return {
        "streams": streams,
        "seconds": seconds,
        "overlong": overlong,
        "requests": dict(seen.counts),
        "wrong_texts": len(seen.wrong),
        "first_wrong": seen.wrong[:3],
        "ttft_p50_s": percentile(seen.first, 50),
        "ttft_p99_s": percentile(seen.first, 99),
        "itl_p50_s": percentile(seen.gaps, 50),
        "itl_p99_s": percentile(seen.gaps, 99),
        "itl_p99_to_p50": percentile(seen.gaps, 99) / percentile(seen.gaps, 50),
        "memory_bytes": median(warm[-third:]),
        "memory_growth_bytes": median(warm[-third:]) - median(warm[:third]),
        "left_behind": left,
    }


async def gauges(client: httpx2.AsyncClient) -> dict[str, float]:
    """What still runs, waits or holds blocks a moment after the last answer."""
    await asyncio.sleep(1)
    text = (await client.get("/metrics")).text
    found = re.findall(r"^localllm_(running|waiting|kv_blocks_used)\w*(?:{.*})? (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def main() -> None:
    parser = argparse.ArgumentParser(description="64 streams, for minutes.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--name", help="what the server calls it")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--dtype")
    parser.add_argument(
        "--no-overlong", action="store_true", help="none of 135 KB, which take a core to be counted"
    )
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    flags = [
        *(["--deterministic"] if asked.deterministic else []),
        *(["--dtype", asked.dtype] if asked.dtype else []),
    ]
    name = asked.name or asked.model.rstrip("/").rsplit("/", 1)[-1]
    with server(asked.model, *flags) as (url, process):
        found = asyncio.run(soak(url, name, asked.streams, asked.seconds, process, overlong=not asked.no_overlong))
    finish("soak", {"model": name, "flags": flags, **found}, asked.save)


if __name__ == "__main__":
    main()
