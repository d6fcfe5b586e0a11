"""Shared by benchmarks of a generated model: command line, the model, rounds with new prompts, and medians."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import checkpoint
from bench.report import finish

Sample = dict[str, float]
Measure = Callable[[Path, int, int, int], dict[str, Any]]  # folder, prompt tokens, answer tokens, rounds


def run(name: str, about: str | None, measure: Measure) -> None:
    """Parse the command line of a benchmark, measure a generated model, and report the result."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="prompt length in tokens")
    parser.add_argument("--answer", type=int, default=64, help="answer length in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="folder to store the generated model in, and to reuse it from")
    parser.add_argument("--save", action="store_true", help=f"append the result to bench/results/{name}.jsonl")
    options = parser.parse_args()
    with generated_model(options.model) as folder:
        finish(name, measure(folder, options.prompt, options.answer, options.rounds), options.save)


@contextmanager
def generated_model(folder: Path | None) -> Iterator[Path]:
    """Yield the folder of the generated model, which is created if missing. None: a temporary folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or Path(scratch)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.make(folder)
        yield folder


def take_turns(rounds: int, run_round: Callable[[int], dict[str, Sample]]) -> dict[str, Sample]:
    """Return the medians of each contestant over all rounds except the first, which warms up."""
    samples: dict[str, list[Sample]] = {}
    for number in range(rounds + 1):
        measured = run_round(number)
        print(f"round {number}{' (warm-up)' if number == 0 else ''}: {measured}", file=sys.stderr)
        for name, sample in measured.items():
            samples.setdefault(name, []).extend([sample] if number else [])
    return {name: medians(of_name) for name, of_name in samples.items()}


def new_prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids; a new seed for every prompt avoids hits in the prefix cache."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, checkpoint.SHAPE["vocab_size"], (tokens,), generator=generator).tolist()


def medians(samples: list[Sample]) -> Sample:
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
