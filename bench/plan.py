"""What `localllm plan` predicts of a 1B-parameter Llama before any answer of it, beside what answers then reach.

    python -m bench.plan [--prompt 512] [--answer 64] [--rounds 5] [--save]

The prediction comes from matrices of the model's format and size alone: no answer is recorded before it. It must
not promise more than was measured divided by 0.95.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import localllm
from bench import checkpoint
from bench.report import finish
from localllm.checkpoint.header import read_header
from localllm.metrics import Metrics
from localllm.plan.expected import here
from localllm.plan.fit import Wish
from localllm.plan.plan import Plan, plan
from localllm.settings import Settings

TOLERANCE = 0.95  # of what was predicted must be reached


def predict(folder: Path, home: Path, prompt: int, answer: int) -> Plan:
    """The plan of the model, with rates that are measured now."""
    settings = Settings.from_environment({"LOCALLLM_HOME": str(home)})
    header, wish = read_header(folder), Wish(prompt + answer, dtype="bfloat16")
    hardware, expectation = here(header, wish, "cpu", settings, name="llama-1b")
    return plan(header, hardware, wish, name="llama-1b", prompt=prompt, expectation=expectation)


def answers(folder: Path, prompt: int, answer: int, rounds: int) -> list[Metrics]:
    """Of new prompts, so that nothing is found in a cache; the first answer, which warms up, is left out."""
    found = []
    with localllm.load(folder, device="cpu", dtype="bfloat16", context=prompt + answer) as llm:
        for turn in range(rounds + 1):
            generator = torch.Generator().manual_seed(turn)
            ids = torch.randint(0, checkpoint.SHAPE["vocab_size"], (prompt,), generator=generator).tolist()
            params = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            found.append(llm.generate(ids, params).metrics)
            print(f"answer {turn}: {found[-1].tokens_per_s:.2f} tokens/s", file=sys.stderr)
    return found[1:]


def measure(folder: Path, prompt: int, answer: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        predicted = predict(folder, Path(home), prompt, answer)
    assert predicted.expected and predicted.expectation
    metrics = answers(folder, prompt, answer, rounds)
    reached = {
        "tokens_per_s": statistics.median(m.tokens_per_s for m in metrics),
        "ttft_s": statistics.median(m.ttft_s for m in metrics),
    }
    return {
        "prompt_tokens": prompt,
        "output_tokens": answer,
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
        "ceiling": {name: getattr(predicted.chosen.ceiling, name) for name in reached},
        "expected": {name: getattr(predicted.expected, name) for name in reached},
        "measured": reached,
        "expected_by_measured": {name: getattr(predicted.expected, name) / reached[name] for name in reached},
        "within_promise": predicted.expected.tokens_per_s <= reached["tokens_per_s"] / TOLERANCE,
    }


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
