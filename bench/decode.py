"""Load time, TTFT, prefill and decode speed of a 1B-parameter Llama in bfloat16, compared with `transformers` on
the same weights.

    python -m bench.decode [--prompt 512] [--answer 64] [--rounds 5] [--save]

The two alternate in every round, so that noise of the machine affects both; medians are compared as ratios.
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
from localllm.runtime.kernels.threads import end_openmp_threads


class TokenTimes(BaseStreamer):
    """Records when `transformers` passes the prompt and then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure_localllm(llm: localllm.LLM, prompt: list[int], answer: int) -> Sample:
    m = llm.generate(prompt, localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)).metrics
    assert m.output_tokens == answer and m.cached_tokens == 0
    return {"ttft_s": m.ttft_s, "tokens_per_s": m.tokens_per_s, "prefill_tokens_per_s": m.prefill_tokens_per_s}


def measure_transformers(model: Any, prompt: list[int], answer: int) -> Sample:
    streamer, start = TokenTimes(), time.perf_counter()
    model.generate(
        torch.tensor([prompt]), max_new_tokens=answer, min_new_tokens=answer, do_sample=False, streamer=streamer
    )
    end_openmp_threads()  # of this thread, which would slow down the engine's
    token_times = streamer.times[1:]
    assert len(token_times) == answer
    ttft = token_times[0] - start
    return {
        "ttft_s": ttft,
        "tokens_per_s": (answer - 1) / (token_times[-1] - token_times[0]),
        "prefill_tokens_per_s": len(prompt) / ttft,
    }


def measure(folder: Path, prompt_tokens: int, answer: int, rounds: int) -> dict[str, Any]:
    loads: list[Sample] = []
    for _ in range(3):
        start = time.perf_counter()
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        middle = time.perf_counter()
        localllm.load(folder, dtype="bfloat16").close()
        loads.append({"localllm": time.perf_counter() - middle, "transformers": middle - start})
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    llm = localllm.load(folder, dtype="bfloat16", draft="off")

    def run_round(number: int) -> dict[str, Sample]:
        prompt = new_prompt(number, prompt_tokens)
        return {
            "localllm": measure_localllm(llm, prompt, answer),
            "transformers": measure_transformers(model, prompt, answer),
        }

    load_s = medians(loads)
    result: dict[str, Any] = {
        name: sample | {"load_s": load_s[name]} for name, sample in take_turns(rounds, run_round).items()
    }
    ours, theirs = result["localllm"], result["transformers"]
    ratios = {f"{key}_ratio": ours[key] / theirs[key] for key in ours}
    sizes = {"parameters": parameter_count(llm.config), "prompt_tokens": prompt_tokens, "output_tokens": answer}
    llm.close()
    return sizes | {"rounds": rounds} | result | ratios


if __name__ == "__main__":
    run("decode", __doc__, measure)
