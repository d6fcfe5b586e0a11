"""Time to the first token of a prompt that is computed, that is in memory, and that another process has stored on
the disk; and what storing costs. Each measurement has a process of its own, with the generated 1.2B model.

`python -m bench.prefix_cache --prompt 8000 --answer 16 --rounds 3`. The disk is measured twice: `page_cache` has
the files in memory of the operating system, `disk` does not (POSIX_FADV_DONTNEED). The overhead is the processor
time from the first request until the model is closed, with and without a folder, in turns.
"""

import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.rounds import run

OVERHEAD_PROMPT = 1024  # tokens
VOCABULARY = 20_000


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7919 * (i + seed * 104_729)) % VOCABULARY + 300 for i in range(length)]


def answer(model: Path, cache: Path | None, prompts: list[list[int]], answer_len: int) -> dict[str, Any]:
    """Answer prompts one after the other, and return their measurements."""
    import localllm
    from localllm.request import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=answer_len, ignore_eos=True)
    llm = localllm.load(model, cache_dir=cache, cache_size=10**11)
    before = time.process_time()
    metrics = [llm.generate(prompt, params).metrics for prompt in prompts]
    stats = llm.stats()
    llm.close()
    return {
        "ttft_s": [each.ttft_s for each in metrics],
        "tpot_s": [each.tpot_s for each in metrics],
        "cached_tokens": [each.cached_tokens for each in metrics],
        "disk_tokens": [each.disk_tokens for each in metrics],
        "processor_s": time.process_time() - before,
        "disk": stats.disk and vars(stats.disk),
    }


def in_new_process(*arguments: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        return executor.submit(answer, *arguments).result()


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(model: Path, prompt_len: int, answer_len: int, rounds: int) -> dict[str, Any]:
    prompt = prompt_of(prompt_len, 0)
    with tempfile.TemporaryDirectory(dir=model if model.is_dir() else None) as scratch:
        cache = Path(scratch) / "cache"
        first = in_new_process(model, cache, [prompt, prompt], answer_len)
        for file in cache.iterdir():
            file.read_bytes()
        again = in_new_process(model, cache, [prompt], answer_len)
        drop_from_page_cache(cache)
        cold = in_new_process(model, cache, [prompt], answer_len)
        size = sum(file.stat().st_size for file in cache.iterdir())
        ratios = []
        for index in range(1, rounds + 1):
            prompts = [prompt_of(OVERHEAD_PROMPT, index)]
            alone = in_new_process(model, None, prompts, answer_len)
            stored = in_new_process(model, Path(scratch) / f"overhead-{index}", prompts, answer_len)
            ratios.append(stored["processor_s"] / alone["processor_s"])
    computed, memory = first["ttft_s"]
    return {
        "prompt_tokens": prompt_len,
        "stored_bytes": size,
        "computed_ttft_s": computed,
        "memory_ttft_s": memory,
        "page_cache_ttft_s": again["ttft_s"][0],
        "disk_ttft_s": cold["ttft_s"][0],
        "disk_tokens": cold["disk_tokens"][0],
        "disk_speedup": computed / cold["ttft_s"][0],
        "read": cold["disk"],
        "processor_time_ratio": statistics.median(ratios),
        "processor_time_ratios": ratios,
    }


if __name__ == "__main__":
    run("prefix_cache", __doc__, measure)
