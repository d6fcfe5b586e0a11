"""Load time, TTFT, prefill and decode speed of a 1B-parameter Llama in bfloat16, beside `transformers` on the same
weights in the same run.

    python -m bench.decode [--prompt 512] [--answer 64] [--rounds 5] [--save]

The two take turns, round by round, so that a noisy machine is noisy for both; medians are compared as ratios.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import localllm
from bench import checkpoint
from bench.report import finish
from localllm.arch.cost import parameters

Sample = dict[str, float]


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


def medians(samples: list[Sample]) -> Sample:
    return {key: statistics.median(s[key] for s in samples) for key in samples[0]}


def measure(folder: Path, prompt_tokens: int, answer: int, rounds: int) -> dict[str, Any]:
    loads: list[Sample] = []
    for _ in range(3):
        start = time.perf_counter()
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        between = time.perf_counter()
        localllm.load(folder, dtype="bfloat16").close()
        loads.append({"localllm": time.perf_counter() - between, "transformers": between - start})
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    llm = localllm.load(folder, dtype="bfloat16")
    samples: dict[str, list[Sample]] = {"localllm": [], "transformers": []}
    for turn in range(rounds + 1):
        # A new prompt each round, so that nothing is found in a cache.
        generator = torch.Generator().manual_seed(turn)
        prompt = torch.randint(0, checkpoint.SHAPE["vocab_size"], (prompt_tokens,), generator=generator).tolist()
        got = {"localllm": ours(llm, prompt, answer), "transformers": theirs(model, prompt, answer)}
        print(f"round {turn}{' (warm-up)' if turn == 0 else ''}: {got}", file=sys.stderr)
        for name, sample in got.items():
            samples[name] += [sample] if turn else []
    result: dict[str, Any] = {name: medians(s) | {"load_s": medians(loads)[name]} for name, s in samples.items()}
    mine, rival = result["localllm"], result["transformers"]
    ratios = {f"{key}_ratio": mine[key] / rival[key] for key in mine}
    sizes = {"parameters": parameters(llm.config), "prompt_tokens": prompt_tokens, "output_tokens": answer}
    llm.close()
    return sizes | {"rounds": rounds} | result | ratios


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prompt", type=int, default=512, help="tokens")
    options.add_argument("--answer", type=int, default=64, help="tokens")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--model", type=Path, help="keep the generated model here and use it again")
    options.add_argument("--save", action="store_true", help="append the result to bench/results/decode.jsonl")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.model or Path(scratch)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.make(folder)
        finish("decode", measure(folder, chosen.prompt, chosen.answer, chosen.rounds), chosen.save)


if __name__ == "__main__":
    main()
