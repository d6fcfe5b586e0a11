"""What `localllm plan` predicts of a 1B-parameter Llama, beside what its answers reach.

    python -m bench.plan [--prompt 512] [--answer 64] [--rounds 5] [--save]

Predictions come from matrices of the model's format and size alone: of earlier answers they know nothing. The two
take turns, round by round, so that a noisy machine is noisy for both. A prediction must not promise more than was
measured divided by 0.95, as medians.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import localllm
from bench import checkpoint
from bench.decode import Sample, medians
from bench.report import finish
from localllm.checkpoint.header import read_header
from localllm.plan.expected import here
from localllm.plan.fit import Wish
from localllm.plan.plan import Plan, plan
from localllm.plan.speed import Speed
from localllm.settings import Settings

TOLERANCE = 0.95  # of what was predicted must be reached


def predict(folder: Path, home: Path, prompt: int, answer: int) -> Plan:
    """The plan of the model, with rates that are measured now."""
    settings = Settings.from_environment({"LOCALLLM_HOME": str(home)})
    header, wish = read_header(folder), Wish(prompt + answer, dtype="bfloat16")
    hardware, expectation = here(header, wish, "cpu", settings, name="llama-1b")
    return plan(header, hardware, wish, name="llama-1b", prompt=prompt, expectation=expectation)


def reached(llm: localllm.LLM, turn: int, prompt: int, answer: int) -> Sample:
    """By an answer to a new prompt, so that nothing is found in a cache."""
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(0, checkpoint.SHAPE["vocab_size"], (prompt,), generator=generator).tolist()
    params = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    metrics = llm.generate(ids, params).metrics
    return {"tokens_per_s": metrics.tokens_per_s, "ttft_s": metrics.ttft_s}


def measure(folder: Path, prompt: int, answer: int, rounds: int) -> dict[str, Any]:
    samples: dict[str, list[Sample]] = {"ceiling": [], "expected": [], "measured": []}
    with localllm.load(folder, device="cpu", dtype="bfloat16", context=prompt + answer) as llm:
        for turn in range(rounds + 1):
            with tempfile.TemporaryDirectory() as home:  # a new one: nothing is known of earlier answers
                predicted = predict(folder, Path(home), prompt, answer)
            assert predicted.expected
            got = {
                "ceiling": fields_of(predicted.chosen.ceiling),
                "expected": fields_of(predicted.expected),
                "measured": reached(llm, turn, prompt, answer),
            }
            print(f"round {turn}{' (warm-up)' if turn == 0 else ''}: {got}", file=sys.stderr)
            for name, sample in got.items():
                samples[name] += [sample] if turn else []
    result: dict[str, Any] = {name: medians(found) for name, found in samples.items()}
    expected, measured = result["expected"], result["measured"]
    return {
        "prompt_tokens": prompt,
        "output_tokens": answer,
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
        **result,
        "expected_by_measured": {key: expected[key] / measured[key] for key in expected},
        "within_promise": expected["tokens_per_s"] <= measured["tokens_per_s"] / TOLERANCE,
    }


def fields_of(speed: Speed) -> Sample:
    return {"tokens_per_s": speed.tokens_per_s, "ttft_s": speed.ttft_s}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prompt", type=int, default=512, help="tokens")
    options.add_argument("--answer", type=int, default=64, help="tokens")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--model", type=Path, help="keep the generated model here and use it again")
    options.add_argument("--save", action="store_true", help="append the result to bench/results/plan.jsonl")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.model or Path(scratch)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.make(folder)
        finish("plan", measure(folder, chosen.prompt, chosen.answer, chosen.rounds), chosen.save)


if __name__ == "__main__":
    main()
