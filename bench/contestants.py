"""The programs that `bench.peers` compares, each in a process of its own: a line of JSON for each that comes.
What is imported here counts in the memory of both."""

import argparse
import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = 1024  # tokens
Sample = dict[str, float]
Answer = Callable[[list[int], int], Sample]  # a prompt and how many tokens


def localllm(file: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    os.environ["LOCALLLM_THREADS"] = str(threads)
    import localllm as package

    load = package.load  # imports the rest
    start = time.perf_counter()
    llm = load(file, device="cpu", context=CONTEXT, draft="off")

    load_s = time.perf_counter() - start

    def answer(prompt: list[int], count: int) -> Sample:
        params = package.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        m = llm.generate(prompt, params).metrics
        assert m.output_tokens == count and m.cached_tokens == 0
        return {"prefill_tokens_per_s": m.prefill_tokens_per_s, "decode_tokens_per_s": m.tokens_per_s}

    about = {"version": package.__version__, "dtype": llm.dtype, "mapped": llm.layout_file is not None}
    return answer, about | {"load_s": load_s}


def llama_cpp(file: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    llama_cpp = importlib.import_module("llama_cpp")  # no dependency

    start = time.perf_counter()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = CONTEXT, 512, 512
    wanted.n_threads = wanted.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, wanted)
    sampler = llama_cpp.llama_sampler_init_greedy()
    load_s = time.perf_counter() - start

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
    return answer, {"version": llama_cpp.__version__, "features": features, "load_s": load_s}


CONTESTANTS = {"localllm": localllm, "llama.cpp": llama_cpp}


def contest(name: str, file: Path, threads: int) -> None:
    """The other side of `Contestant`: a line of JSON for each that comes."""
    start = time.perf_counter()
    answer, about = CONTESTANTS[name](file, threads)
    ready_s = time.perf_counter() - start
    print(json.dumps(about | {"import_s": ready_s - about["load_s"]}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        memory = {"peak_bytes": peak_bytes(), "pss_bytes": pss_bytes()}
        print(json.dumps(answer(asked["prompt"], asked["count"]) | memory), flush=True)


def peak_bytes() -> int:
    told = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("VmHWM"))


def pss_bytes() -> int:
    """Memory of this process, with each shared page divided by the number of its processes."""
    told = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("Pss:"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", choices=list(CONTESTANTS))
    options.add_argument("file", type=Path)
    options.add_argument("threads", type=int)
    chosen = options.parse_args()
    contest(chosen.name, chosen.file, chosen.threads)


if __name__ == "__main__":
    main()
