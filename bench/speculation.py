"""What guessing saves: decode speed with guesses over that without, and tokens a step.

    python -m bench.speculation [--answer 96] [--rounds 5] [--quant int8] [--model FOLDER] [--save]
    python -m bench.speculation --texts FOLDER --small MODEL ...

On a model of 1B parameters whose output is forced to be one token, guesses are right with a chance that is set; so
it is known what can be won, and what is lost where nothing can be. `lookup, random` is prompt lookup with what a
random model says to a random prompt. On small models of text, guesses are those of prompt lookup, on texts that
are to be quoted, edited and repeated. Plain and guessing runs take turns, and medians of their ratios are told: of
the time from the first token to the last, by the clock and of the processor, which others disturb less.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import localllm
from bench import checkpoint
from bench.report import finish
from bench.rounds import Sample, medians, new_prompt
from localllm.metrics import Metrics
from localllm.plan.memory import MAX_VERIFIED_TOKENS
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.draft_budget import DraftBudget
from localllm.runtime.speculation.lookup import PromptLookup
from localllm.runtime.speculation.policy import DraftTrack, SpeculativeDrafter
from localllm.runtime.speculation.step_cost import StepCost, estimate_cpu_cost
from localllm.settings import Settings

TOKEN, OTHER = 7, 8  # what the output is forced to be, and a wrong guess
CHANCES = (0.8, 0.0, 0.5, 0.95)
SHORT, LONG = 300, 500  # characters of a prompt: stories260K has a context of 512 tokens


class Controlled(PromptLookup):
    """Always finds a match, and is right with a chance that is set."""

    def __init__(self, token_ids: list[int], accepts: float):
        super().__init__(token_ids)
        self.accepts, self.rng = accepts, random.Random(0)

    def match(self) -> int:
        return 8

    def continuation(self, max_tokens: int) -> list[int]:
        return [TOKEN if self.rng.random() < self.accepts else OTHER for _ in range(max_tokens)]


class ControlledSpeculation(SpeculativeDrafter):
    def __init__(self, accepts: float):
        super().__init__(StepCost(estimate_cpu_cost), MAX_VERIFIED_TOKENS["cpu"])
        self.accepts = accepts

    def track(self, sequence: Sequence) -> DraftTrack:
        if sequence not in self.tracks:
            self.tracks[sequence] = DraftTrack(
                Controlled(sequence.token_ids, self.accepts), DraftBudget(self.last_budget)
            )
        return self.tracks[sequence]


@dataclass
class Run:
    tokens: list[int]
    clock_s: float
    cpu_s: float
    metrics: Metrics


def lookup() -> SpeculativeDrafter:
    return SpeculativeDrafter(StepCost(estimate_cpu_cost), MAX_VERIFIED_TOKENS["cpu"])


def pairs(
    llm: localllm.LLM,
    drafter: SpeculativeDrafter,
    prompts: Callable[[int], str | list[int]],
    params: localllm.SamplingParams,
    rounds: int,
) -> dict[str, Any]:
    """Medians over all rounds but the first, which warms up; plain steps and guesses take turns going first."""
    samples: list[Sample] = []

    def go(prompt: str | list[int], by: SpeculativeDrafter | None) -> Run:
        def use() -> None:
            llm.worker.engine.drafter = by

        llm.worker.call(use)
        tokens, times, last = [], [], None
        for event in llm.stream(prompt, params):
            tokens += event.token_ids
            times.append((time.perf_counter(), time.process_time()))
            last = event.metrics
        assert last
        return Run(tokens, times[-1][0] - times[0][0], times[-1][1] - times[0][1], last)

    for turn in range(rounds + 1):
        prompt = prompts(turn)
        kinds = (None, drafter) if turn % 2 else (drafter, None)
        done = {kind is None: go(prompt, kind) for kind in kinds}
        plain, guessing = done[True], done[False]
        sample = {
            "speedup": plain.clock_s / guessing.clock_s,
            "cpu_speedup": plain.cpu_s / guessing.cpu_s,
            "tokens_per_step": guessing.metrics.tokens_per_step,
            "acceptance": guessing.metrics.acceptance_rate if guessing.metrics.draft_tokens else 0.0,
            "same": float(plain.tokens == guessing.tokens),
        }
        print(f"  {turn}: { ({key: round(value, 2) for key, value in sample.items()}) }", file=sys.stderr)
        samples += [sample] if turn else []
    prices = {str(count): round(price, 2) for count, price in sorted(drafter.step_cost.measured_costs(1).items())}
    return {key: round(value, 3) for key, value in medians(samples).items()} | {"prices": prices}


def controlled(folder: Path, quant: str | None, chances: list[float], answer: int, rounds: int) -> dict[str, Any]:
    settings = Settings.from_environment()
    with localllm.load(folder, quant=quant, settings=settings) as llm:
        forced = localllm.SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, logit_bias={TOKEN: 10_000}
        )
        free = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        found = {}
        for accepts in chances:
            print(f"right with a chance of {accepts}", file=sys.stderr)
            drafter = ControlledSpeculation(accepts)
            found[f"accepts {accepts}"] = pairs(llm, drafter, lambda turn: new_prompt(turn, 64), forced, rounds)
        print("lookup, random", file=sys.stderr)
        found["lookup, random"] = pairs(llm, lookup(), lambda turn: new_prompt(turn, 512), free, rounds)
    return found


def tasks(texts: Path) -> dict[str, Callable[[int], str]]:
    """Prompts of a turn, whose answers would hold much of what they say."""
    prose, code = (texts / "tiny.txt").read_text(), (texts / "code.txt").read_text()

    def cut(text: str, turn: int, size: int) -> str:
        return text[turn * 2 * size : turn * 2 * size + size]

    def items(turn: int) -> str:
        sentences = [s.strip() for s in cut(prose, turn, LONG).replace("\n", " ").split(".") if len(s) > 20]
        return "\n".join(f"- {sentence}" for sentence in sentences[:6])

    def begun(text: str, words: str) -> str:
        return f"{text}\n\n{words}{text[: len(text) // 5]}"

    return {
        "summarise with quotes": lambda turn: begun(cut(prose, turn, SHORT), 'The story says: "'),
        "edit this code": lambda turn: begun(cut(code, turn, SHORT), ""),
        "repeat this list": lambda turn: begun(items(turn), "The list again:\n"),
    }


def copying(model: str, texts: Path, answer: int, rounds: int) -> dict[str, Any]:
    params = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    found = {}
    with localllm.load(model, dtype="float32") as llm:
        for name, prompt in tasks(texts).items():
            print(f"{llm.name}: {name}", file=sys.stderr)
            found[f"{llm.name}: {name}"] = pairs(llm, lookup(), prompt, params, rounds)
    return found


def command() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--answer", type=int, default=96, help="tokens")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--quant", help="of the generated model: int8 or int4")
    options.add_argument("--model", type=Path, help="keep the generated model here and use it again")
    options.add_argument("--chances", type=float, nargs="*", default=CHANCES, help="that a guess is right")
    options.add_argument("--texts", type=Path, help="folder with tiny.txt and code.txt")
    options.add_argument("--small", nargs="*", default=[], help="models of text, to copy from --texts")
    options.add_argument("--save", action="store_true", help="keep the result in bench/results/")
    return options.parse_args()


def main() -> None:
    chosen = command()
    result: dict[str, Any] = {"answer": chosen.answer, "rounds": chosen.rounds}
    for model in chosen.small:
        result |= copying(model, chosen.texts, chosen.answer, chosen.rounds)
    if not chosen.small:
        with tempfile.TemporaryDirectory() as scratch:
            folder = chosen.model or Path(scratch)
            if not (folder / "config.json").exists():
                folder.mkdir(parents=True, exist_ok=True)
                checkpoint.make(folder)
            result |= {
                "quant": chosen.quant,
                **controlled(folder, chosen.quant, chosen.chances, chosen.answer, chosen.rounds),
            }
    finish("speculation", result, chosen.save)


if __name__ == "__main__":
    main()
