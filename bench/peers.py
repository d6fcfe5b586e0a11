"""localllm beside llama.cpp (`llama-cpp-python`, built for this machine) on the same GGUF file of a generated 1.2B
Llama, with as many threads.

    python -m bench.peers [--type Q4_0] [--type Q8_0] [--prompt 512] [--answer 64] [--rounds 7] [--save]

Each runs in a process of its own, in which nothing else runs, and waits while the other has its turn; medians are
compared as ratios. Peak memory is the largest resident set of the process, as the kernel counts it, after all
rounds: torch's own libraries included. llama.cpp computes keys and values in float16, localllm in bfloat16.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.rounds import Sample, new_prompt, take_turns

CONTEXT = 1024  # tokens
LOADS = 3
Answer = Callable[[list[int], int], Sample]  # a prompt and how many tokens


def localllm(file: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    os.environ["LOCALLLM_THREADS"] = str(threads)
    import localllm as package

    llm = package.load(file, device="cpu", context=CONTEXT)

    def answer(prompt: list[int], count: int) -> Sample:
        params = package.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        m = llm.generate(prompt, params).metrics
        assert m.output_tokens == count and m.cached_tokens == 0
        return {"prefill_tokens_per_s": m.prefill_tokens_per_s, "decode_tokens_per_s": m.tokens_per_s}

    return answer, {"version": package.__version__, "dtype": llm.dtype}


def llama_cpp(file: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = CONTEXT, 512, 512
    wanted.n_threads = wanted.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, wanted)
    sampler = llama_cpp.llama_sampler_init_greedy()

    def step(tokens: list[int]) -> int:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
        return llama_cpp.llama_sampler_sample(sampler, context, -1)

    def answer(prompt: list[int], count: int) -> Sample:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        token = step(prompt)
        first = time.perf_counter()
        for _ in range(count - 1):
            token = step([token])
        taken = time.perf_counter() - first
        return {
            "prefill_tokens_per_s": len(prompt) / (first - start),
            "decode_tokens_per_s": (count - 1) / taken,
        }

    features = llama_cpp.llama_print_system_info().decode()
    return answer, {"version": llama_cpp.__version__, "features": features}


CONTESTANTS = {"localllm": localllm, "llama.cpp": llama_cpp}


def contest(name: str, file: Path, threads: int) -> None:
    """The other side of `Contestant`: a line of JSON for each that comes."""
    start = time.perf_counter()
    answer, about = CONTESTANTS[name](file, threads)
    print(json.dumps(about | {"load_s": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(asked["prompt"], asked["count"]) | {"peak_bytes": peak_bytes()}), flush=True)


def peak_bytes() -> int:
    told = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("VmHWM"))


class Contestant:
    def __init__(self, name: str, file: Path, threads: int):
        command = [sys.executable, "-m", "bench.peers", "--contestant", name, "--file", str(file)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*command, "--threads", str(threads)], text=True, **pipes)
        self.about = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} ended with {self.process.wait()}")
        return json.loads(line)

    def answer(self, prompt: list[int], count: int) -> Sample:
        assert self.process.stdin
        print(json.dumps({"prompt": prompt, "count": count}), file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measure(form: str, threads: int, prompt: int, answer: int, rounds: int) -> dict[str, Any]:
    from bench import gguf_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{form}.gguf"
        gguf_checkpoint.make(file, form)
        loads: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for i in range(LOADS):
            for name in CONTESTANTS:
                contestant = Contestant(name, file, threads)
                loads[name] += [contestant.about["load_s"]] if i else []  # the first finds nothing in the cache
                contestant.close()
        both = {name: Contestant(name, file, threads) for name in CONTESTANTS}

        def turn(i: int) -> dict[str, Sample]:
            order = list(both.items()) if i % 2 else list(both.items())[::-1]
            return {name: one.answer(new_prompt(i, prompt), answer) for name, one in order}

        taken = take_turns(rounds, turn)
        for one in both.values():
            one.close()
        found = {name: s | {"load_s": statistics.median(loads[name])} for name, s in taken.items()}
        ratios = {f"{key}_ratio": value / found["llama.cpp"][key] for key, value in found["localllm"].items()}
        sizes = {"type": form, "file_bytes": file.stat().st_size, "threads": threads}
        asked = {"prompt_tokens": prompt, "output_tokens": answer, "rounds": rounds}
        told = {name: {k: v for k, v in one.about.items() if k != "load_s"} for name, one in both.items()}
    return sizes | asked | {name: told[name] | found[name] for name in found} | ratios


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--type", action="append", choices=["Q4_0", "Q8_0"])
    options.add_argument("--prompt", type=int, default=512, help="tokens")
    options.add_argument("--answer", type=int, default=64, help="tokens")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--save", action="store_true", help="append the results to bench/results/peers.jsonl")
    options.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    options.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.contestant:
        contest(chosen.contestant, chosen.file, chosen.threads)
        return
    from bench.report import finish

    for form in chosen.type or ["Q4_0", "Q8_0"]:
        result = measure(form, chosen.threads, chosen.prompt, chosen.answer, chosen.rounds)
        finish("peers", result, chosen.save)


if __name__ == "__main__":
    main()
