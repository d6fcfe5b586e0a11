"""How much long prompts delay streaming answers, and how long they wait for their own first token: computed by
one engine, and with a process that computes prompts. Each measurement has a process of its own, with the generated
1.2B model.

`python -m bench.disaggregation --prompt 1000 --rounds 3`. STREAMS answers stream all the time; PROMPTS prompts
follow each other, each when the last has its first token. `alone` are the streams without prompts. Both kinds take
turns. Run it on an idle machine.
"""

import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.rounds import medians, run

STREAMS, PROMPTS = 2, 6
ALONE_S = 5.0  # for which the streams are measured without prompts
VOCABULARY = 200  # ids that every model has


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7919 * (i + seed * 104_729)) % VOCABULARY + 3 for i in range(length)]


def measure_one(model: Path, prefill: int, prompt_len: int, answer_len: int) -> dict[str, float]:
    """Return the gaps between tokens of streaming answers, and the TTFT of prompts beside them. answer_len: tokens
    of each streaming answer, which another follows"""
    import localllm
    from localllm.request import ChatRequest, SamplingParams

    llm = localllm.load(model, prefill=prefill, context=prompt_len + answer_len + 256, draft="off")
    llm.generate(prompt_of(200, 99), SamplingParams(temperature=0, max_tokens=4))
    ended, gaps, lock = threading.Event(), list[float](), threading.Lock()
    running = threading.Semaphore(0)

    def read(number: int) -> None:
        while not ended.is_set():
            params = SamplingParams(temperature=0, max_tokens=answer_len, ignore_eos=True)
            stream = llm.answer(ChatRequest(prompt_of(32, number), params))
            last = None
            for _ in stream:
                now = time.perf_counter()
                with lock:
                    if last is not None:
                        gaps.append(now - last)
                last = now
                running.release()
                if ended.is_set():
                    stream.close()
                    break

    readers = [threading.Thread(target=read, args=(number,)) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    for _ in range(8 * STREAMS):  # until all stream
        running.acquire()
    with lock:
        gaps.clear()
    time.sleep(ALONE_S)
    with lock:
        alone = sorted(gaps)
        gaps.clear()
    ttft = list[float]()
    for number in range(PROMPTS):
        answer = llm.generate(prompt_of(prompt_len, 200 + number), SamplingParams(temperature=0, max_tokens=1))
        ttft.append(answer.metrics.ttft_s)
    ended.set()
    for reader in readers:
        reader.join()
    moves = llm.stats().moves.get("prefill_to_decode")
    llm.close()
    beside = sorted(gaps)
    return {
        "ttft_s": statistics.median(ttft),
        "tpot_s": statistics.mean(beside),
        "gap_p99_s": beside[int(0.99 * (len(beside) - 1))],
        "tpot_alone_s": statistics.mean(alone),
        "handed_over_bytes": moves.bytes if moves else 0,
        "handed_over_s": moves.seconds if moves else 0.0,
    }


def in_new_process(*arguments: Any) -> dict[str, float]:
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        return executor.submit(measure_one, *arguments).result()


def measure(model: Path, prompt_len: int, answer_len: int, rounds: int) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {"together": [], "apart": []}
    for _ in range(rounds):
        for prefill, name in enumerate(samples):
            samples[name].append(in_new_process(model, prefill, prompt_len, answer_len))
    medians_of = {name: medians(each) for name, each in samples.items()}
    return {"prompt_tokens": prompt_len, "streams": STREAMS, "prompts": PROMPTS} | medians_of | {"rounds": samples}


if __name__ == "__main__":
    run("disaggregation", __doc__, measure)
