"""Speedup of speculative decoding, and tokens per step.

    python -m bench.speculation [--answer 96] [--rounds 5] [--quant int8] [--model FOLDER] [--save]
    python -m bench.speculation --texts FOLDER --small MODEL ...

A generated model of 1B parameters, whose output is forced to be one token, gets draft tokens that are correct with
a given probability, which shows the possible gain, and the loss without any gain. `lookup, random` is prompt
lookup on a random prompt and answer of that model. Small models of text use prompt lookup on prompts that ask to
quote, edit and repeat a text. Runs with and without draft tokens alternate. Results are medians of their ratios of
the time from the first token to the last: wall time, and CPU time, which other processes affect less.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import localllm
from bench.report import finish
from bench.rounds import Sample, generated_model, medians, new_prompt
from localllm.metrics import Metrics
from localllm.plan.memory import MAX_VERIFIED_TOKENS
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.draft_budget import DraftBudget
from localllm.runtime.speculation.lookup import PromptLookup
from localllm.runtime.speculation.policy import DraftTrack, SpeculativeDrafter
from localllm.runtime.speculation.step_cost import StepCost, estimate_cpu_cost
from localllm.settings import Settings

TOKEN, WRONG_TOKEN = 7, 8  # the forced output, and a draft token that is rejected
ACCEPTANCE_RATES = (0.8, 0.0, 0.5, 0.95)
SHORT, LONG = 300, 500  # characters of a prompt: stories260K has a context of 512 tokens


class ControlledLookup(PromptLookup):
    """Always finds a match, whose tokens are correct with a given probability."""

    def __init__(self, token_ids: list[int], acceptance_rate: float):
        super().__init__(token_ids)
        self.acceptance_rate, self.rng = acceptance_rate, random.Random(0)

    def match(self) -> int:
        return 8

    def continuation(self, max_tokens: int) -> list[int]:
        return [TOKEN if self.rng.random() < self.acceptance_rate else WRONG_TOKEN for _ in range(max_tokens)]


class ControlledDrafter(SpeculativeDrafter):
    def __init__(self, acceptance_rate: float):
        super().__init__(StepCost(estimate_cpu_cost), MAX_VERIFIED_TOKENS["cpu"])
        self.acceptance_rate = acceptance_rate

    def track(self, sequence: Sequence) -> DraftTrack:
        if sequence not in self.tracks:
            self.tracks[sequence] = DraftTrack(
                ControlledLookup(sequence.token_ids, self.acceptance_rate), DraftBudget(self.last_budget)
            )
        return self.tracks[sequence]


@dataclass
class Run:
    token_ids: list[int]
    wall_s: float  # from the first token to the last
    cpu_s: float
    metrics: Metrics


def lookup_drafter() -> SpeculativeDrafter:
    return SpeculativeDrafter(StepCost(estimate_cpu_cost), MAX_VERIFIED_TOKENS["cpu"])


def compare(
    llm: localllm.LLM,
    drafter: SpeculativeDrafter,
    make_prompt: Callable[[int], str | list[int]],
    params: localllm.SamplingParams,
    rounds: int,
) -> dict[str, Any]:
    """Return medians over all rounds except the first, which warms up.

    In each round the model answers with the drafter and without, in alternating order. make_prompt: by round.
    """
    samples: list[Sample] = []

    def answer(prompt: str | list[int], with_drafter: SpeculativeDrafter | None) -> Run:
        def set_drafter() -> None:
            llm.worker.engine.drafter = with_drafter

        llm.worker.call(set_drafter)
        token_ids, times, metrics = [], [], None
        for event in llm.stream(prompt, params):
            token_ids += event.token_ids
            times.append((time.perf_counter(), time.process_time()))
            metrics = event.metrics
        assert metrics
        return Run(token_ids, times[-1][0] - times[0][0], times[-1][1] - times[0][1], metrics)

    for number in range(rounds + 1):
        prompt = make_prompt(number)
        order = (None, drafter) if number % 2 else (drafter, None)
        runs = {with_drafter is not None: answer(prompt, with_drafter) for with_drafter in order}
        plain, drafted = runs[False], runs[True]
        sample = {
            "speedup": plain.wall_s / drafted.wall_s,
            "cpu_speedup": plain.cpu_s / drafted.cpu_s,
            "tokens_per_step": drafted.metrics.tokens_per_step,
            "acceptance": drafted.metrics.acceptance_rate if drafted.metrics.draft_tokens else 0.0,
            "same": float(plain.token_ids == drafted.token_ids),
        }
        print(f"  {number}: { ({key: round(value, 2) for key, value in sample.items()}) }", file=sys.stderr)
        samples += [sample] if number else []
    costs = {str(count): round(cost, 2) for count, cost in sorted(drafter.step_cost.measured_costs(1).items())}
    return {key: round(value, 3) for key, value in medians(samples).items()} | {"prices": costs}


def compare_controlled(
    folder: Path, quant: str | None, acceptance_rates: list[float], answer: int, rounds: int
) -> dict[str, Any]:
    """Measure a generated model with draft tokens of known acceptance rates, then with prompt lookup."""
    settings = Settings.from_environment()
    with localllm.load(folder, quant=quant, settings=settings) as llm:
        free = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        forced = replace(free, logit_bias={TOKEN: 10_000})
        results = {}
        for rate in acceptance_rates:
            print(f"acceptance rate {rate}", file=sys.stderr)
            drafter = ControlledDrafter(rate)
            results[f"accepts {rate}"] = compare(llm, drafter, lambda seed: new_prompt(seed, 64), forced, rounds)
        print("lookup, random", file=sys.stderr)
        results["lookup, random"] = compare(
            llm, lookup_drafter(), lambda seed: new_prompt(seed, 512), free, rounds
        )
    return results


def copy_tasks(texts: Path) -> dict[str, Callable[[int], str]]:
    """Prompts by task and round, whose answers repeat much of the prompt."""
    prose, code = (texts / "tiny.txt").read_text(), (texts / "code.txt").read_text()

    def excerpt(text: str, number: int, size: int) -> str:
        return text[number * 2 * size : number * 2 * size + size]

    def bullet_list(number: int) -> str:
        sentences = [s.strip() for s in excerpt(prose, number, LONG).replace("\n", " ").split(".") if len(s) > 20]
        return "\n".join(f"- {sentence}" for sentence in sentences[:6])

    def with_beginning(text: str, introduction: str) -> str:
        return f"{text}\n\n{introduction}{text[: len(text) // 5]}"

    return {
        "summarise with quotes": lambda number: with_beginning(excerpt(prose, number, SHORT), 'The story says: "'),
        "edit this code": lambda number: with_beginning(excerpt(code, number, SHORT), ""),
        "repeat this list": lambda number: with_beginning(bullet_list(number), "The list again:\n"),
    }


def compare_copying(model: str, texts: Path, answer: int, rounds: int) -> dict[str, Any]:
    """Measure a model of text with prompt lookup."""
    params = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    results = {}
    with localllm.load(model, dtype="float32") as llm:
        for task, make_prompt in copy_tasks(texts).items():
            name = f"{llm.name}: {task}"
            print(name, file=sys.stderr)
            results[name] = compare(llm, lookup_drafter(), make_prompt, params, rounds)
    return results


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", type=int, default=96, help="answer length in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quant", help="quantize the generated model to int8 or int4")
    parser.add_argument("--model", type=Path, help="folder to store the generated model in, and to reuse it from")
    parser.add_argument(
        "--chances", type=float, nargs="*", default=ACCEPTANCE_RATES, help="acceptance rates of draft tokens"
    )
    parser.add_argument("--texts", type=Path, help="folder with tiny.txt and code.txt")
    parser.add_argument("--small", nargs="*", default=[], help="models to measure with prompts from --texts")
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/speculation.jsonl")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    result: dict[str, Any] = {"answer": options.answer, "rounds": options.rounds}
    for model in options.small:
        result |= compare_copying(model, options.texts, options.answer, options.rounds)
    if not options.small:
        with generated_model(options.model) as folder:
            rates = options.chances
            measured = compare_controlled(folder, options.quant, rates, options.answer, options.rounds)
        result |= {"quant": options.quant, **measured}
    finish("speculation", result, options.save)


if __name__ == "__main__":
    main()
