"""How many tokens a second the host can hand over, if the model computes nothing: the Python of the engine, of the
readers and of the server, which a fast GPU waits for.

    python -m bench.host [--tokens 4000] [--rounds 3] [--scene NAME] [--profile] [--save]

The demo model is loaded as usual, but with a runner whose steps return known tokens at once, as an asynchronous
device would; everything else is what a user runs. `stream`: `LLM.stream` in a process of its own. `run`: `localllm
run` into a pipe. `serve 1`, `serve 32`: server-sent events of so many chats at once, read by another process.
`app`: the chat app in a pseudo-terminal while keys are typed into it.

Without a pause the engine makes many tokens before a reader wakes up, which then handles them together. A GPU is
slower than that: in the scenes that end in `paced`, the device takes 0.5 ms for a step of one sequence (2,000
tokens a second) and 3.2 ms for one of 32 (10,000), during which it uses no processor.

Tokens per second are medians of rounds, from the first byte to the last. CPU time is that of the process that has
the engine, per token, from the difference of a long and a short answer where a process also starts up. `--profile`
runs each scene again with timers around the functions of each layer: CPU microseconds per token, without the calls
to other layers. Timers cost about 0.5 us per call, which is part of these numbers only.
"""

import argparse
import functools
import importlib
import json
import os
import random
import re
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

ROOT = Path(__file__).parents[1]
CONTEXT = 32_768  # tokens: the demo model's own is too short to measure
ENVIRONMENT = {"LOCALLLM_THREADS": "1", "LOCALLLM_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
STEP_S = "BENCH_HOST_STEP_S"  # seconds that a step takes, without using a processor
PROFILE = "BENCH_HOST_PROFILE"  # file for the profile
PACES = {"serve 1 paced": 0.0005, "serve 32 paced": 0.0032, "app paced": 0.0005}  # seconds of a step, by scene
TEXT_TOKENS = 16_384
SHORT = 400  # tokens of the answer that is subtracted

# Functions of each layer. Time in a nested one counts for its own layer alone.
LAYERS = {
    "engine step": ("localllm.runtime.engine:Engine.step",),
    "scheduler": ("localllm.runtime.scheduler:Scheduler.schedule",),
    "KV cache blocks": (
        "localllm.runtime.kv_cache.sequence_state:SequenceState.extend",
        "localllm.runtime.kv_cache.sequence_state:SequenceState.cache_full_blocks",
    ),
    "prompt lookup": (
        "localllm.runtime.speculation.policy:SpeculativeDrafter.draft",
        "localllm.runtime.speculation.policy:SpeculativeDrafter.may_draft",
        "localllm.runtime.speculation.policy:SpeculativeDrafter.on_verified",
        "localllm.runtime.speculation.policy:SpeculativeDrafter.on_step",
    ),
    "sampling specs": ("localllm.runtime.sequence:Sequence.sampling_specs",),
    "runner of this benchmark": ("bench.host:FreeRunner.run",),
    "events": ("localllm.llm.worker:RequestOutput.process",),
    "detokenizing": ("localllm.text.detokenizer:Detokenizer.push",),
    "output parser": (
        "localllm.text.output.reader:PlainParser.push",
        "localllm.text.output.tagged:TaggedParser.push",
    ),
    "stop strings": ("localllm.llm.worker:RequestOutput.apply_stop_strings",),
    "hand-over to the reader": (
        "localllm.server.answers:AnswerReader.deliver",
        "localllm.server.answers:AnswerReader.enqueue",
        "localllm.llm.worker:Stream.__next__",
    ),
    "chunk objects": ("localllm.api.openai.responses:ChatStream.chunks_for",),
    "JSON": ("localllm.server.streaming:json_bytes",),
    "HTTP": ("h11:Connection.send",),
    "socket": ("asyncio.selector_events:_SelectorSocketTransport.write",),
    "printing": ("localllm.cli.answer:AnswerPrinter.write",),
}


def install_free_runner() -> None:
    """Make `load` use a runner that computes nothing."""
    from localllm.llm.cache_allocation import CacheSpec
    from localllm.runtime import runner as runners
    from localllm.runtime.step import Readback, Step, StepOutput

    class Paced(Readback):
        """Results that are there when their step has ended on the device."""

        def __init__(self, values: torch.Tensor, ends_at: float):
            super().__init__(values)
            self.ends_at = ends_at

        def wait(self) -> tuple[torch.Tensor | None, ...]:
            if (left_s := self.ends_at - time.perf_counter()) > 0:
                time.sleep(left_s)
            return super().wait()

    class Free(runners.Runner):
        """Returns the tokens of a text, one for each position, as an asynchronous device would."""

        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            self.asynchronous = True  # the next step is launched before this one is read, as on a GPU
            self.text = text_tokens()
            self.step_s = float(os.environ.get(STEP_S, 0))
            self.ends_at = 0.0  # end of the last launched step on the device, which begins where another ends

        def run(self, step: Step) -> StepOutput:
            self.ends_at = max(self.ends_at, time.perf_counter()) + self.step_s
            text, count = self.text, len(self.text)
            ids = torch.tensor([text[spec.position % count] for spec in step.sampling_specs], dtype=torch.int64)
            return StepOutput(Paced(ids, self.ends_at) if self.step_s else Readback(ids), None)

    runners.Runner, globals()["FreeRunner"] = Free, Free
    importlib.import_module(CacheSpec.__module__).Runner = Free  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def text_tokens() -> list[int]:
    """Words in sentences and paragraphs that hardly repeat, so that prompt lookup drafts nothing."""
    from localllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(ROOT / "localllm/boxed/demo")
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    words = [token for token, text in texts.items() if re.fullmatch(" ?[a-z]{2,}", text)]
    line_break = tokenizer.encode("a\n\nb", special=False)[1:-1]
    draw, ids = random.Random(0), []
    while len(ids) < TEXT_TOKENS:
        ids += [*draw.choices(words, k=draw.randint(40, 90)), *line_break]
    return ids


def make_model(folder: Path) -> Path:
    """The demo model with a long context, whose weights are never read."""
    model = folder / "free"
    shutil.copytree(ROOT / "localllm/boxed/demo", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return model


class LayerTimers:
    """CPU time of each layer, without calls to other layers, on all threads."""

    def __init__(self) -> None:
        self.totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0])  # nanoseconds, calls
        self.local = threading.local()

    def install(self) -> None:
        for layer, functions in LAYERS.items():
            for each in functions:
                module_name, name = each.split(":")
                owner = importlib.import_module(module_name) if module_name != "bench.host" else None
                parts = name.split(".")
                target: Any = globals().get(parts[0]) if owner is None else getattr(owner, parts[0])
                if target is None:
                    continue
                if len(parts) == 1:
                    wrapped = self.timed(layer, target)
                    for module in list(sys.modules.values()):
                        if getattr(module, name, None) is target:
                            setattr(module, name, wrapped)
                else:
                    setattr(target, parts[1], self.timed(layer, getattr(target, parts[1])))

    def timed(self, layer: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, total = time.thread_time_ns, self.totals[layer]

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            nested: list[int] = self.local.__dict__.setdefault("nested", [0])
            nested.append(0)
            began = clock()
            try:
                return function(*arguments, **named)
            finally:
                spent = clock() - began
                total[0] += spent - nested.pop()
                total[1] += 1
                nested[-1] += spent

        return call

    def report(self, tokens: int) -> dict[str, float]:
        """CPU microseconds per token of each layer, and of all other code of the process."""
        return {layer: round(total[0] / 1e3 / tokens, 2) for layer, total in self.totals.items() if total[1]}


def program(arguments: list[str]) -> None:
    """Run the command line with the free runner; a profile is written at its end."""
    install_free_runner()
    timers = LayerTimers() if os.environ.get(PROFILE) else None
    if timers:
        if arguments[0] == "serve":
            importlib.import_module("localllm.cli.serve")
        timers.install()
    from localllm.__main__ import main as run_command

    sys.argv[1:] = arguments
    try:
        run_command()
    finally:
        if timers:
            process = time.process_time()
            Path(os.environ[PROFILE]).write_text(json.dumps([process, timers.totals]))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench.host", "--program", *arguments]


def measure_stream(model: Path, tokens: int) -> dict[str, float]:
    """One answer in a process of its own, after a short one."""
    output = subprocess.run(command("stream", str(model), str(tokens)), capture_output=True, text=True, check=True)
    return json.loads(output.stdout.splitlines()[-1])


def stream_program(model: str, tokens: int) -> None:
    install_free_runner()
    import localllm
    from localllm.request import SamplingParams

    timers = LayerTimers() if os.environ.get(PROFILE) else None
    if timers:
        timers.install()
    with localllm.load(model) as llm:

        def answer(count: int) -> int:
            messages = [{"role": "user", "content": "Tell me a story"}]
            params = SamplingParams(max_tokens=count, ignore_eos=True)
            return sum(len(event.token_ids) for event in llm.stream(messages, params))

        answer(SHORT)
        if timers:
            for total in timers.totals.values():
                total[:] = [0, 0]
        wall, cpu = time.perf_counter(), time.process_time()
        received = answer(tokens)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert received == tokens
    result: dict[str, Any] = {"tokens_per_s": tokens / wall, "cpu_us": 1e6 * cpu / tokens}
    if timers:
        result["profile_us"] = timers.report(tokens)
    print(json.dumps(result))


def measure_run(model: Path, tokens: int) -> dict[str, float]:
    """A pipe's reader sees the first and the last byte of the answer. CPU time is counted from the first."""
    times: dict[int, tuple[float, float]] = {}
    for count in (SHORT, tokens):
        words = ("run", str(model), "Tell me a story", "--local", "--ignore-eos", "--max-tokens", str(count))
        with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
            assert process.stdout
            descriptor, began, start_cpu = process.stdout.fileno(), 0.0, 0.0
            while os.read(descriptor, 1 << 16):
                if not began:
                    began, start_cpu = time.perf_counter(), sum(psutil.Process(process.pid).cpu_times()[:2])
            wall = time.perf_counter() - began
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            times[count] = wall, usage.ru_utime + usage.ru_stime - start_cpu
    cpu = (times[tokens][1] - times[SHORT][1]) / (tokens - SHORT)
    return {"tokens_per_s": tokens / times[tokens][0], "cpu_us": 1e6 * cpu}


@contextmanager
def running_server(model: Path) -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    words = command("serve", str(model), "--port", "0", "--log-format", "off")
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        try:
            line = server.stderr.readline()
            while "listening on" not in line:
                line = server.stderr.readline()
            url = urlsplit(line.removeprefix("listening on ").strip())
            yield psutil.Process(server.pid), (url.hostname or "", url.port or 0)
        finally:
            server.terminate()


def read_streams(address: tuple[str, int], model: str, count: int, tokens: int) -> tuple[float, list[float]]:
    """Read chats at once; return the seconds from the first byte of any to the last of all, and each one's."""
    message = {"role": "user", "content": ""}
    body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    opened = list[socket.socket]()
    for number in range(count):
        content = json.dumps(body | {"messages": [message | {"content": f"Tell me story {number}"}]}).encode()
        connection = socket.create_connection(address, 60)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        opened.append(connection)
    poller = select.poll()
    by_descriptor = {connection.fileno(): connection for connection in opened}
    events, tails, first = dict.fromkeys(by_descriptor, 0), dict.fromkeys(by_descriptor, b""), dict[int, float]()
    seconds = dict[int, float]()
    for descriptor in by_descriptor:
        poller.register(descriptor, select.POLLIN)
    while len(seconds) < count:
        for descriptor, _ in poller.poll(60_000):
            data = by_descriptor[descriptor].recv(1 << 18)
            now = time.perf_counter()
            if not data:
                seconds[descriptor] = now - first[descriptor]
                poller.unregister(descriptor)
                by_descriptor[descriptor].close()
                continue
            first.setdefault(descriptor, now)
            text = tails[descriptor] + data
            events[descriptor] += text.count(b"data: ")
            tails[descriptor] = text[-5:] if b"data: " not in text[-5:] else b""
    ended = max(first[descriptor] + seconds[descriptor] for descriptor in seconds)
    # Role, finish reason, usage and [DONE] have events too, and some tokens have no text of their own.
    assert all(0.9 * tokens < number <= tokens + 4 for number in events.values()), events
    return ended - min(first.values()), list(seconds.values())


def measure_serve(model: Path, tokens: int, count: int, step_s: float = 0.0) -> dict[str, float]:
    os.environ[STEP_S] = str(step_s)
    tokens = max(SHORT, tokens // min(count, 4))
    with running_server(model) as (server, address):
        read_streams(address, model.name, 1, SHORT)
        before = sum(server.cpu_times()[:2])
        wall, each = read_streams(address, model.name, count, tokens)
        cpu = sum(server.cpu_times()[:2]) - before
    total = tokens * count
    slowest = tokens / max(each)
    return {"tokens_per_s": total / wall, "slowest_stream": slowest, "cpu_us": 1e6 * cpu / total}


def measure_app(model: Path, keys: int, step_s: float) -> dict[str, float]:
    """Keys typed while an answer streams: milliseconds until their echo."""
    from bench.tui import Scene, measure

    os.environ[STEP_S] = str(step_s)
    found: Any = measure(Scene(f"free {model}"), keys)
    waits = found["streaming_ms"]
    return {"tokens_per_s": found["tokens_per_s"], "key_median_ms": waits["median"], "key_max_ms": waits["max"]}


def scenes(model: Path, tokens: int, keys: int) -> dict[str, Callable[[], dict[str, float]]]:
    return {
        "stream": lambda: measure_stream(model, tokens),
        "run": lambda: measure_run(model, tokens),
        "serve 1": lambda: measure_serve(model, tokens, 1),
        "serve 32": lambda: measure_serve(model, tokens, 32),
        "serve 1 paced": lambda: measure_serve(model, tokens, 1, PACES["serve 1 paced"]),
        "serve 32 paced": lambda: measure_serve(model, tokens, 32, PACES["serve 32 paced"]),
        "app paced": lambda: measure_app(model, keys, PACES["app paced"]),
        "app": lambda: measure_app(model, keys, 0.0),
    }


def profile(model: Path, scene: str, tokens: int, folder: Path) -> dict[str, float]:
    """CPU microseconds per token by layer; `everything else` is the rest of the process, its start-up excluded."""
    file = folder / "profile.json"
    os.environ[PROFILE] = str(file)
    try:
        if scene == "stream":
            measured: Any = measure_stream(model, tokens)
            layers, cpu = measured["profile_us"], measured["cpu_us"]
        else:
            costs = list[dict[str, float]]()
            counts = (SHORT, tokens)
            streams = int(scene.split()[1]) if scene.startswith("serve") else 1
            for count in counts:
                if scene == "run":
                    words = ("run", str(model), "Tell me a story", "--local", "--ignore-eos")
                    subprocess.run(
                        command(*words, "--max-tokens", str(count)), stdout=subprocess.DEVNULL, check=True
                    )
                else:
                    with running_server(model) as (_, address):
                        read_streams(address, model.name, streams, count)
                process, totals = json.loads(file.read_text())
                costs.append({"": process * 1e9} | {layer: total[0] for layer, total in totals.items()})
            added = (counts[1] - counts[0]) * streams
            per_token = {name: (costs[1][name] - costs[0][name]) / 1e3 / added for name in costs[1]}
            cpu = per_token.pop("")
            layers = {name: round(value, 2) for name, value in per_token.items() if value > 0.005}
        return layers | {"everything else": round(cpu - sum(layers.values()), 2), "all": round(cpu, 2)}
    finally:
        del os.environ[PROFILE]


def main() -> None:
    if sys.argv[1:2] == ["--program"]:
        if sys.argv[2] == "stream":
            stream_program(sys.argv[3], int(sys.argv[4]))
        else:
            program(sys.argv[2:])
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=4000, help="of an answer, fewer with many streams")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--keys", type=int, default=100, help="typed into the app in each round")
    options.add_argument("--scene", action="append", help="instead of all")
    options.add_argument("--profile", action="store_true", help="CPU time by layer as well")
    options.add_argument("--save", action="store_true", help="append the result to bench/results/host.jsonl")
    chosen = options.parse_args()
    os.environ.update(ENVIRONMENT)
    result: dict[str, Any] = {"tokens": chosen.tokens, "rounds": chosen.rounds, "cores": os.cpu_count()}
    result["load_average_before"] = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as home:
        os.environ["LOCALLLM_HOME"] = home
        model = make_model(Path(home))
        taken = defaultdict[str, list[dict[str, float]]](list)
        for _ in range(chosen.rounds):
            for name, measure in scenes(model, chosen.tokens, chosen.keys).items():
                if not chosen.scene or name in chosen.scene:
                    os.environ[STEP_S] = "0"
                    taken[name].append(measure())
                    print(name, taken[name][-1], file=sys.stderr)
        for name, rounds in taken.items():
            result[name] = {
                field: round(statistics.median(each[field] for each in rounds), 1) for field in rounds[0]
            }
            if chosen.profile and not name.startswith("app"):
                os.environ[STEP_S] = str(PACES.get(name, 0.0))
                result[name]["profile_us"] = profile(model, name, chosen.tokens, Path(home))
    result["load_average_after"] = os.getloadavg()[0]
    from bench.report import finish

    finish("host", result, chosen.save)


if __name__ == "__main__":
    main()
