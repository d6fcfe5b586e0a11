"""A 1B-parameter Llama in bfloat16 under load: the throughput of continuous batching, the delay that a long prompt
causes to streaming answers, and the time that the prefix cache saves in a second turn.

    python -m bench.serve [--prompt 4096] [--answer 48] [--rounds 3] [--save]

Batching: equal requests (16 tokens in, `--answer` out) concurrently, then sequentially. Long prompt: while two
answers stream, a prompt of `--prompt` tokens arrives, followed by a short request; the 99th percentile of the
inter-token latency is also given in units of the median, which is the step of a prefill chunk. Second turn: half
of `--prompt` tokens, an answer, and then all of these with another 16 tokens.
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

CONCURRENT = 8  # requests
QUESTION, ADDED = 16, 16  # tokens
SEEDS = 1_000_000  # prompts of each measurement have seeds from a multiple of this


def answer_params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def submit(llm: LLM, prompt: list[int], tokens: int) -> Stream:
    return llm.submit(llm.prepare(ChatRequest(prompt, answer_params(tokens))))


def read_metrics(stream: Stream) -> Metrics:
    """Read the stream to its end."""
    *_, last = stream
    assert last.metrics
    return last.metrics


def measure_batching(llm: LLM, number: int, tokens: int) -> dict[str, Sample]:
    """Requests per second, concurrently and sequentially."""
    prompts = [new_prompt(SEEDS + number * 2 * CONCURRENT + i, QUESTION) for i in range(2 * CONCURRENT)]
    start = time.perf_counter()
    for stream in [submit(llm, prompt, tokens) for prompt in prompts[:CONCURRENT]]:
        read_metrics(stream)
    middle = time.perf_counter()
    for prompt in prompts[CONCURRENT:]:
        read_metrics(submit(llm, prompt, tokens))
    end = time.perf_counter()
    return {
        "at once": {"requests_per_s": CONCURRENT / (middle - start)},
        "one after the other": {"requests_per_s": CONCURRENT / (end - middle)},
    }


def measure_long_prompt(llm: LLM, number: int, tokens: int) -> dict[str, Sample]:
    """Inter-token latencies of one of two streams during the prefill of a long prompt, and TTFT of it and of a
    short request that arrives meanwhile.
    """
    streams = [submit(llm, new_prompt(2 * SEEDS + 2 * number + i, QUESTION), 10 * tokens) for i in range(2)]
    for stream in streams:
        for _ in range(8):
            next(stream)
    times, first_step = list[float](), llm.stats().steps
    long = submit(llm, new_prompt(3 * SEEDS + number, tokens), 1)
    long_metrics: list[Metrics] = []
    reader = threading.Thread(target=lambda: long_metrics.append(read_metrics(long)))
    reader.start()
    short: Stream | None = None
    while not long_metrics:
        next(streams[0])
        times.append(time.perf_counter())
        if len(times) == 3:
            short = submit(llm, new_prompt(4 * SEEDS + number, QUESTION), 1)
    steps = llm.stats().steps - first_step
    assert short
    for stream in streams:
        stream.close()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    chunk = statistics.median(gaps)
    return {
        "long prompt": {
            "ttft_s": long_metrics[0].ttft_s,
            "steps": steps,
            "chunk_s": chunk,
            "itl_p99_s": percentile(gaps, 99),
            "itl_p99_chunks": percentile(gaps, 99) / chunk,
            "short_ttft_s": read_metrics(short).ttft_s,
        }
    }


def measure_second_turn(llm: LLM, number: int, tokens: int) -> dict[str, Sample]:
    """TTFT of a prompt, and of that prompt with its answer and a new question."""
    prompt, params = new_prompt(5 * SEEDS + number, tokens), answer_params(8)
    answer = llm.generate(prompt, params)
    conversation = [*prompt, *answer.token_ids, *new_prompt(6 * SEEDS + number, ADDED)]
    first, second = answer.metrics, llm.generate(conversation, params).metrics
    return {
        "second turn": {
            "first_ttft_s": first.ttft_s,
            "ttft_s": second.ttft_s,
            "prompt_tokens": second.prompt_tokens,
            "cached_tokens": second.cached_tokens,
            "ttft_saved": 1 - second.ttft_s / first.ttft_s,
        }
    }


def measure(folder: Path, prompt_tokens: int, answer_tokens: int, rounds: int) -> dict[str, Any]:
    with localllm.load(folder, dtype="bfloat16", draft="off", context=8192) as llm:
        result = take_turns(
            rounds,
            lambda number: (
                measure_batching(llm, number, answer_tokens)
                | measure_long_prompt(llm, number, prompt_tokens)
                | measure_second_turn(llm, number, prompt_tokens // 2)
            ),
        )
        ratio = result["at once"]["requests_per_s"] / result["one after the other"]["requests_per_s"]
        sizes = {"prompt_tokens": prompt_tokens, "output_tokens": answer_tokens, "rounds": rounds}
        return sizes | {"requests": CONCURRENT, "at_once_ratio": ratio, "patience_s": MAX_TOKEN_GAP_S} | result


if __name__ == "__main__":
    run("serve", __doc__, measure)
