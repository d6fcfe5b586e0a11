"""A 1B-parameter Llama in bfloat16 under load: what continuous batching brings, how far a long prompt holds up
answers that stream, and what the prefix cache saves a second turn.

    python -m bench.serve [--prompt 4096] [--answer 48] [--rounds 3] [--save]

Batching: the same requests (16 tokens in, `--answer` out) all at once and one after the other, in turns.
Long prompt: two answers stream while a prompt of `--prompt` tokens comes, and once it has begun a short request.
The 99th percentile of the gaps is told in units of their median, which is the step of a chunk. Second turn: half
of `--prompt` tokens, an answer, and then all of that with another 16 tokens.
"""

import itertools
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import localllm
from bench.rounds import Sample, new_prompt, run, take_turns
from localllm import LLM, SamplingParams
from localllm.llm.worker import Stream
from localllm.metrics import Metrics, percentile
from localllm.request import ChatRequest
from localllm.runtime.scheduler import MAX_TOKEN_GAP_S

AT_ONCE = 8  # requests
QUESTION, ADDED = 16, 16  # tokens
ANSWERS = 1_000_000  # prompts of different kinds are numbered from multiples of this


def answer(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def submit(llm: LLM, prompt: list[int], tokens: int) -> Stream:
    return llm.submit(llm.prepare(ChatRequest(prompt, answer(tokens))))


def metrics(stream: Stream) -> Metrics:
    *_, last = stream
    assert last.metrics
    return last.metrics


def batching(llm: LLM, turn: int, tokens: int) -> dict[str, Sample]:
    """Requests a second of as many, at once and one after the other."""
    prompts = [new_prompt(ANSWERS + turn * 2 * AT_ONCE + i, QUESTION) for i in range(2 * AT_ONCE)]
    start = time.perf_counter()
    for stream in [submit(llm, prompt, tokens) for prompt in prompts[:AT_ONCE]]:
        metrics(stream)
    between = time.perf_counter()
    for prompt in prompts[AT_ONCE:]:
        metrics(submit(llm, prompt, tokens))
    end = time.perf_counter()
    return {
        "at once": {"requests_per_s": AT_ONCE / (between - start)},
        "one after the other": {"requests_per_s": AT_ONCE / (end - between)},
    }


def long_prompt(llm: LLM, turn: int, tokens: int) -> dict[str, Sample]:
    """Two answers stream, and go on while it is computed; gaps of one of them."""
    streams = [submit(llm, new_prompt(2 * ANSWERS + 2 * turn + i, QUESTION), 10 * tokens) for i in range(2)]
    for stream in streams:
        for _ in range(8):
            next(stream)
    times, steps = list[float](), llm.stats().steps
    long = submit(llm, new_prompt(3 * ANSWERS + turn, tokens), 1)
    ended: list[Metrics] = []
    reader = threading.Thread(target=lambda: ended.append(metrics(long)))
    reader.start()
    short: Stream | None = None
    while not ended:
        next(streams[0])
        times.append(time.perf_counter())
        if len(times) == 3:
            short = submit(llm, new_prompt(4 * ANSWERS + turn, QUESTION), 1)
    steps = llm.stats().steps - steps
    assert short
    for stream in streams:
        stream.close()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    chunk = statistics.median(gaps)
    return {
        "long prompt": {
            "ttft_s": ended[0].ttft_s,
            "steps": steps,
            "chunk_s": chunk,
            "itl_p99_s": percentile(gaps, 99),
            "itl_p99_chunks": percentile(gaps, 99) / chunk,
            "short_ttft_s": metrics(short).ttft_s,
        }
    }


def second_turn(llm: LLM, turn: int, tokens: int) -> dict[str, Sample]:
    prompt = new_prompt(5 * ANSWERS + turn, tokens)
    first = llm.generate(prompt, answer(8))
    again = llm.generate([*prompt, *first.token_ids, *new_prompt(6 * ANSWERS + turn, ADDED)], answer(8))
    before, after = first.metrics, again.metrics
    return {
        "second turn": {
            "first_ttft_s": before.ttft_s,
            "ttft_s": after.ttft_s,
            "prompt_tokens": after.prompt_tokens,
            "cached_tokens": after.cached_tokens,
            "ttft_saved": 1 - after.ttft_s / before.ttft_s,
        }
    }


def measure(folder: Path, prompt_tokens: int, answer_tokens: int, rounds: int) -> dict[str, Any]:
    with localllm.load(folder, dtype="bfloat16", draft="off", context=8192) as llm:
        taken = take_turns(
            rounds,
            lambda i: (
                batching(llm, i, answer_tokens)
                | long_prompt(llm, i, prompt_tokens)
                | second_turn(llm, i, prompt_tokens // 2)
            ),
        )
        ratio = taken["at once"]["requests_per_s"] / taken["one after the other"]["requests_per_s"]
        sizes = {"prompt_tokens": prompt_tokens, "output_tokens": answer_tokens, "rounds": rounds}
        return sizes | {"requests": AT_ONCE, "at_once_ratio": ratio, "patience_s": MAX_TOKEN_GAP_S} | taken


if __name__ == "__main__":
    run("serve", __doc__, measure)
