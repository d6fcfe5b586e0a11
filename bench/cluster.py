"""What a front and several replicas cost and bring: the same requests to plain `serve` and to `--replicas`.

    python -m bench.cluster [--model demo] [--rounds 5] [--save]

All servers run at once, idle but for the one that is asked, and take turns, so that the machine's other work hits
all of them. Overhead: median TTFT, and median time of a whole one-token answer, over HTTP on one connection.
Disconnect: seconds from closing a stream until no request runs. Throughput: output tokens per second of streams at
once. Prefix: share of prompt tokens found in a cache, of interleaved conversations. Run it on an idle machine; on
one without several GPUs, replicas share its cores, and throughput shows the cost of that alone.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import httpx2

from bench.report import finish

VARIANTS = {"plain": (), "front": ("--replicas", "1"), "two": ("--replicas", "2")}
SHORT_REQUESTS = 40  # per round
STREAMS, STREAM_TOKENS = 8, 64
CHATS, TURNS = 8, 5
WORDS = "Lily dog cat park ball red big sad happy mom tree sun play found gave said went little day friend"


class Variant:
    """A server and what was measured of it."""

    def __init__(self, model: str, flags: tuple[str, ...]):
        command = [sys.executable, "-m", "localllm", "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        lines = iter(self.process.stderr.readline, "")
        url = next((line for line in lines if line.startswith("listening on ")), None)
        if url is None:
            raise SystemExit(f"{' '.join(command)} did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # the log
        self.client = httpx2.Client(base_url=url.split()[-1], timeout=300)
        self.model = model
        self.samples: dict[str, list[float]] = {}

    def add(self, name: str, *values: float) -> None:
        self.samples.setdefault(name, []).extend(values)

    def body(self, prompt: str, tokens: int, *, stream: bool = False) -> dict[str, Any]:
        fields = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return fields | {"ignore_eos": True, "stream": stream}

    def complete(self, prompt: str, tokens: int) -> dict[str, Any]:
        return self.client.post("/v1/completions", json=self.body(prompt, tokens)).raise_for_status().json()

    def running(self) -> int:
        return sum(model["running"] for model in self.client.get("/localllm/ps").json()["models"])

    def measure_overhead(self) -> None:
        for _ in range(SHORT_REQUESTS):
            began = time.perf_counter()
            self.complete("Once upon a time", 1)
            self.add("whole_s", time.perf_counter() - began)
            began = time.perf_counter()
            body = self.body("Once upon a time", 2, stream=True)
            with self.client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                self.add("ttft_s", time.perf_counter() - began)
                for _ in lines:
                    pass

    def measure_disconnect(self) -> None:
        with self.client.stream("POST", "/v1/completions", json=self.body("Once", 900, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert self.running() == 1
        began = time.perf_counter()
        while self.running():
            pass
        self.add("disconnect_s", time.perf_counter() - began)

    def measure_throughput(self) -> None:
        tokens: list[int] = []

        def work(number: int) -> None:
            answer = self.complete(f"Story {number} of {time.time()}", STREAM_TOKENS)
            tokens.append(answer["usage"]["completion_tokens"])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(STREAMS)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.add("tokens_per_s", sum(tokens) / (time.perf_counter() - began))

    def measure_prefix(self, seed: int) -> None:
        rng, texts, prompt, found = random.Random(seed), dict[int, str](), 0, 0
        order = [chat for chat in range(CHATS) for _ in range(TURNS)]
        rng.shuffle(order)
        for chat in order:
            text = texts.get(chat, f"Story {seed} {chat}. ") + " ".join(rng.choices(WORDS.split(), k=30)) + ". "
            answer = self.complete(text, 4)
            prompt += answer["usage"]["prompt_tokens"]
            found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            texts[chat] = text + answer["choices"][0]["text"]
        self.add("cached_share", found / prompt)

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        servers: dict[str, Variant] = {}
        for name, flags in VARIANTS.items():
            servers[name] = Variant(options.model, flags)
            stack.callback(servers[name].close)
            servers[name].complete("Once upon a time", 8)  # compiles what is compiled on first use
        for number in range(options.rounds):
            for server in servers.values():
                server.measure_overhead()
                server.measure_disconnect()
                server.measure_throughput()
                server.measure_prefix(number)
        medians = {
            name: {what: round(statistics.median(values), 5) for what, values in server.samples.items()}
            for name, server in servers.items()
        }
    plain, front = medians["plain"], medians["front"]
    overhead = {what: round((front[what] - plain[what]) * 1e3, 2) for what in ("ttft_s", "whole_s")}
    result = {"model": options.model, "rounds": options.rounds, "medians": medians, "overhead_ms": overhead}
    print(json.dumps(medians, indent=1), file=sys.stderr)
    finish("cluster", result, options.save)


if __name__ == "__main__":
    main()
