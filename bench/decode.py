"""Load time, TTFT, prefill and decode speed of a 1B-parameter Llama in bfloat16, beside `transformers` on the same
weights in the same run.

    python -m bench.decode [--prompt 512] [--answer 64] [--rounds 5] [--save]

The two take turns, round by round, so that a noisy machine is noisy for both; medians are compared as ratios.
"""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import localllm
from bench.rounds import Sample, medians, new_prompt, run, take_turns
from localllm.arch.cost import parameter_count


class TokenTimes(BaseStreamer):
    """transformers hands over the prompt first and then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def ours(llm: localllm.LLM, prompt: list[int], answer: int) -> Sample:
    done = llm.generate(prompt, localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    m = done.metrics
    assert m.output_tokens == answer and m.cached_tokens == 0
    return {"ttft_s": m.ttft_s, "tokens_per_s": m.tokens_per_s, "prefill_tokens_per_s": m.prefill_tokens_per_s}


def theirs(model: Any, prompt: list[int], answer: int) -> Sample:
    times, start = TokenTimes(), time.perf_counter()
    model.generate(
        torch.tensor([prompt]), max_new_tokens=answer, min_new_tokens=answer, do_sample=False, streamer=times
    )
    tokens = times.times[1:]
    assert len(tokens) == answer
    ttft = tokens[0] - start
    return {
        "ttft_s": ttft,
        "tokens_per_s": (answer - 1) / (tokens[-1] - tokens[0]),
        "prefill_tokens_per_s": len(prompt) / ttft,
    }


def measure(folder: Path, prompt_tokens: int, answer: int, rounds: int) -> dict[str, Any]:
    loads: list[Sample] = []
    for _ in range(3):
        start = time.perf_counter()
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        between = time.perf_counter()
        localllm.load(folder, dtype="bfloat16").close()
        loads.append({"localllm": time.perf_counter() - between, "transformers": between - start})
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    llm = localllm.load(folder, dtype="bfloat16", draft="off")

    def turn(i: int) -> dict[str, Sample]:
        prompt = new_prompt(i, prompt_tokens)
        return {"localllm": ours(llm, prompt, answer), "transformers": theirs(model, prompt, answer)}

    taken = take_turns(rounds, turn)
    result: dict[str, Any] = {name: s | {"load_s": medians(loads)[name]} for name, s in taken.items()}
    mine, rival = result["localllm"], result["transformers"]
    ratios = {f"{key}_ratio": mine[key] / rival[key] for key in mine}
    sizes = {"parameters": parameter_count(llm.config), "prompt_tokens": prompt_tokens, "output_tokens": answer}
    llm.close()
    return sizes | {"rounds": rounds} | result | ratios


if __name__ == "__main__":
    run("decode", __doc__, measure)
