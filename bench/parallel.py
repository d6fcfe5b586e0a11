"""Decoding by one process and by two: tensor parallel with a core each, pipeline stages, stages whose messages are
delayed, and stages over TCP on loopback (`localllm worker`), with the generated 1.2B model; and 1, 2 and 4 answers
at a time by one process and by two stages over TCP with a core each, which compute at once.

`python -m bench.parallel --prompt 64 --answer 48 --rounds 3`. All models are loaded at once, about 3 GB each, and
take turns. Tokens/s of several answers are of all together, from the first request to the last token, prompts
included. Delays are slept in the first process, before each message to the second stage and after each one from
it, as the two directions of a link would take; bandwidth is not limited.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

import localllm
from bench.rounds import Sample, new_prompt, run, take_turns
from localllm.files import write_token
from localllm.llm.llm import LLM
from localllm.parallel.group import ProcessLeader
from localllm.request import SamplingParams
from localllm.settings import Settings

CORES = 2
DELAYS_MS = (0.1, 1.0, 10.0)
STREAMS = (1, 2, 4)  # answers at a time


def delay_messages(leader: ProcessLeader, seconds: float) -> None:
    """Make the first stage's messages take so much longer in each direction; 0: no longer."""
    send, receive = ProcessLeader.send_to_next_stage, ProcessLeader.receive_from_previous_stage

    def send_late(x: Tensor) -> None:
        time.sleep(seconds)
        send(leader, x)

    def receive_late(x: Tensor) -> Tensor:
        receive(leader, x)
        time.sleep(seconds)
        return x

    leader.send_to_next_stage = send_late
    leader.receive_from_previous_stage = receive_late


@contextmanager
def running_worker(token: Path, threads: int) -> Iterator[str]:
    """The command `localllm worker` on loopback; yields its address."""
    write_token(token)
    command = [
        sys.executable,
        "-m",
        "localllm",
        "worker",
        "--port",
        "0",
        "--device",
        "cpu",
        "--token-file",
        str(token),
    ]
    environment = os.environ | {"LOCALLLM_THREADS": str(threads)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().split("--workers ")[1].split()[0]
        finally:
            process.terminate()


def leader_of(llm: LLM) -> ProcessLeader:
    leader = llm.worker.engine.runner.model.ranks
    assert isinstance(leader, ProcessLeader)
    return leader


def measure(folder: Path, prompt: int, answer: int, rounds: int) -> dict[str, Any]:
    settings = Settings(home=folder / "home", device="cpu", dtype="bfloat16", threads=CORES)

    def load(threads: int = CORES, **options: Any) -> LLM:
        chosen = replace(settings, threads=threads)
        return localllm.load(folder, settings=chosen, context=prompt + answer, draft="off", **options)

    with ExitStack() as stack:
        one = stack.enter_context(load())
        tensor = stack.enter_context(load(tensor_parallel=2))
        stages = stack.enter_context(load(pipeline_parallel=2))
        token = folder / "worker-token"
        address = stack.enter_context(running_worker(token, CORES))
        over_tcp = stack.enter_context(load(workers=[address], token_file=token))
        address = stack.enter_context(running_worker(token, CORES // 2))
        core_each = stack.enter_context(load(CORES // 2, workers=[address], token_file=token))
        [stage_read] = leader_of(stages).read_bytes
        [rank_read] = leader_of(tensor).read_bytes

        def decode(llm: LLM, seed: int) -> Sample:
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            completion = llm.generate(new_prompt(seed, prompt), params)
            return {
                "tokens_per_s": completion.metrics.tokens_per_s,
                "ttft_ms": 1000 * completion.metrics.ttft_s,
            }

        def decode_streams(llm: LLM, seed: int, streams: int) -> Sample:
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            prompts = [new_prompt(1000 + STREAMS[-1] * seed + index, prompt) for index in range(streams)]
            began = time.perf_counter()
            with ThreadPoolExecutor(streams) as pool:
                done = list(pool.map(lambda each: llm.generate(each, params), prompts))
            seconds = time.perf_counter() - began
            ttft_s = max(completion.metrics.ttft_s for completion in done)
            return {"tokens_per_s": streams * answer / seconds, "ttft_ms": 1000 * ttft_s}

        def run_round(number: int) -> dict[str, Sample]:
            samples = {
                "one process": decode(one, number),
                "tensor parallel 2": decode(tensor, number),
                "stages over TCP": decode(over_tcp, number),
            }
            delays = (0.0, *DELAYS_MS)
            for index, delay in enumerate(delays):
                delay_messages(leader_of(stages), delay / 1000)
                samples[f"pipeline 2, {delay:g} ms"] = decode(stages, len(delays) * number + index)
            for index, streams in enumerate(STREAMS):
                seed = len(STREAMS) * number + index
                for name, llm in (("one process", one), ("stages of a core", core_each)):
                    samples[f"{name}, {streams} at a time"] = decode_streams(llm, seed, streams)
            return samples

        medians = take_turns(rounds, run_round)
    for name, sample in medians.items():
        print(f"{name:30} {sample['tokens_per_s']:7.2f} tokens/s, first after {sample['ttft_ms']:.0f} ms")
    return {
        "prompt": prompt,
        "answer": answer,
        "rounds": rounds,
        "cores": CORES,
        "second_rank_read_bytes": rank_read,
        "second_stage_read_bytes": stage_read,
        "medians": medians,
    }


if __name__ == "__main__":
    run("parallel", __doc__, measure)
