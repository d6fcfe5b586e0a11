"""What benchmarks of a generated model share: options, the model, rounds with new prompts, and medians."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import checkpoint
from bench.report import finish

Sample = dict[str, float]
# Of a folder, with tokens of prompt and answer, and rounds.
Measure = Callable[[Path, int, int, int], dict[str, Any]]


def run(name: str, about: str | None, measure: Measure) -> None:
    """The command line of a benchmark: measures a generated model, or the one of an earlier time."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prompt", type=int, default=512, help="tokens")
    options.add_argument("--answer", type=int, default=64, help="tokens")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--model", type=Path, help="keep the generated model here and use it again")
    options.add_argument("--save", action="store_true", help=f"append the result to bench/results/{name}.jsonl")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.model or Path(scratch)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.make(folder)
        finish(name, measure(folder, chosen.prompt, chosen.answer, chosen.rounds), chosen.save)


def take_turns(rounds: int, turn: Callable[[int], dict[str, Sample]]) -> dict[str, Sample]:
    """The medians of each contestant over all rounds but the first, which warms up."""
    samples: dict[str, list[Sample]] = {}
    for i in range(rounds + 1):
        got = turn(i)
        print(f"round {i}{' (warm-up)' if i == 0 else ''}: {got}", file=sys.stderr)
        for name, sample in got.items():
            samples.setdefault(name, []).extend([sample] if i else [])
    return {name: medians(found) for name, found in samples.items()}


def new_prompt(turn: int, tokens: int) -> list[int]:
    """Another one each round, so that nothing is found in a cache."""
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(0, checkpoint.SHAPE["vocab_size"], (tokens,), generator=generator).tolist()


def medians(samples: list[Sample]) -> Sample:
    return {key: statistics.median(s[key] for s in samples) for key in samples[0]}
