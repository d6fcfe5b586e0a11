"""Compares simulated latencies with those of the same requests on this machine.

    python -m bench.simulate [--models demo,PATH] [--requests 200] [--loads 30,60,85] [--save]

For each model, steps are measured in answers to other requests and fitted. Then each load, in percent of the
highest throughput, is run on the engine and simulated with the arrivals that it had. Errors are those of
percentiles of TTFT and TPOT, and of the throughput. A second prediction is fitted to the steps of the run itself:
what remains there is the error of the form of the cost alone. Run it on an idle machine.
"""

import argparse
import random
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

import localllm
from bench.report import finish
from localllm.llm.llm import LLM
from localllm.llm.worker import Delivered, Stream
from localllm.request import Request, SamplingParams
from localllm.simulate.cost import FittedCost, TimedStep, entry_delay
from localllm.simulate.load import Lengths, LoadPlan, Turn
from localllm.simulate.simulation import PERCENTILES, EngineSetup, Simulated, simulate
from localllm.simulate.target import engine_setup

MOST_STEPS = 10**6  # that are kept between two loads


class Sender:
    """Sends requests to an LLM at their times, and collects the metrics of the answers.

    `seed` must differ from those of other senders, or the prefix cache has their prompts.
    """

    def __init__(self, llm: LLM, seed: int):
        self.llm, self.rng = llm, random.Random(seed)
        self.metrics: list[localllm.Metrics] = []
        self.unanswered, self.done = 0, threading.Condition()
        self.sent: list[Turn] = []  # as they arrived at the LLM

    def run(self, turns: list[Turn]) -> float:
        """Send the turns, and return the seconds from the first arrival to the last token."""
        vocabulary = range(3, self.llm.config.vocab_size)
        prompts = [tuple(self.rng.choices(vocabulary, k=turn.prompt_len)) for turn in turns]
        start = time.perf_counter()
        streams: list[Stream] = []  # one that is not referenced is cancelled
        for turn, ids in zip(turns, prompts, strict=True):
            if (left := start + turn.arrival - time.perf_counter()) > 0:
                time.sleep(left)
            params = SamplingParams(temperature=0, max_tokens=turn.answer_len, ignore_eos=True)
            with self.done:
                self.unanswered += 1
            at = time.perf_counter()  # late, where the engine's thread lets this one wait for the interpreter
            self.sent.append(turn._replace(arrival=at - start))
            streams.append(self.llm.submit(Request(ids, params, at), self.receive))
        with self.done:
            self.done.wait_for(lambda: not self.unanswered)
        return time.perf_counter() - start - self.sent[0].arrival

    def receive(self, events: list[Delivered]) -> None:
        last = events[-1]
        if isinstance(last, BaseException):
            raise last
        if last.finish_reason:
            assert last.metrics
            with self.done:
                self.metrics.append(last.metrics)
                self.unanswered -= 1
                self.done.notify()


def plan_of(llm: LLM, seed: int, requests: int, rate: float) -> LoadPlan:
    """Return a load whose requests fit into an eighth of the context."""
    room = min(llm.context, 1024)
    prompt, output = Lengths(room // 12, 0.8), Lengths(room // 24, 0.6)
    return LoadPlan(rate=rate, requests=requests, prompt=prompt, output=output, seed=seed, max_len=llm.context)


def turns_of(plan: LoadPlan) -> list[Turn]:
    load, turns = plan.start(), []
    while load.next_at() < float("inf"):
        turns.append(load.pop())
    return turns


def take_steps(llm: LLM) -> list[TimedStep]:
    steps = list(llm.worker.step_times)
    llm.worker.step_times.clear()
    return steps


def percentiles(values: list[float]) -> list[float]:
    return [localllm.metrics.percentile([v for v in values if v == v], p) for p in PERCENTILES]


def compare(simulated: Simulated, measured: dict[str, list[float]], tokens_per_s: float) -> dict[str, Any]:
    """Return predicted figures and their relative errors."""
    result: dict[str, Any] = {}
    for name, values in measured.items():
        for percent, predicted, real in zip(PERCENTILES, simulated.percentiles(name), values, strict=True):
            result[f"{name}_p{percent}"] = {
                "predicted_ms": round(predicted * 1e3, 3),
                "measured_ms": round(real * 1e3, 3),
                "error": round(predicted / real - 1, 4),
            }
    predicted = simulated.output_tokens / simulated.duration_s
    result["tokens_per_s"] = {
        "predicted": round(predicted, 1),
        "measured": round(tokens_per_s, 1),
        "error": round(predicted / tokens_per_s - 1, 4),
    }
    return result


def measure(model: str, requests: int, loads: list[float]) -> dict[str, Any]:
    with localllm.load(model, draft="off") as llm:
        llm.worker.step_times = deque(maxlen=MOST_STEPS)
        setup: EngineSetup = engine_setup(llm.memory, "cpu" if llm.device == "cpu" else "cuda")
        Sender(llm, 0).run(turns_of(plan_of(llm, 0, 20, 1e4)))  # first uses of everything
        take_steps(llm)
        burst = min(requests, llm.worker.max_queue // 2)
        highest = burst / Sender(llm, 1).run(turns_of(plan_of(llm, 1, burst, 1e6)))  # requests per second
        llm.worker.entry_waits.clear()  # those of arrivals at random follow
        steps = take_steps(llm)
        for seed, share in enumerate((0.2, 0.5, 0.8), start=2):
            Sender(llm, seed).run(turns_of(plan_of(llm, round(100 * share), requests // 2, share * highest)))
            steps += take_steps(llm)
        fitted = FittedCost(steps, f"of {model}")
        setup = replace(setup, entry_s=entry_delay(llm.worker.entry_waits))
        result: dict[str, Any] = {
            "model": model,
            "requests": requests,
            "highest_requests_per_s": round(highest, 2),
            "held_out_steps": fitted.error.steps,
            "step_error_median": round(fitted.error.median, 4),
            "step_error_total": round(fitted.error.total, 4),
            "entry_ms": round(setup.entry_s * 1e3, 3),
            "loads": {},
        }
        for seed, load in enumerate(loads, start=5):
            plan = plan_of(llm, 7, requests, load / 100 * highest)
            sender = Sender(llm, seed)
            seconds = sender.run(turns_of(plan))
            plan = LoadPlan(trace=tuple(sender.sent), requests=requests, max_len=llm.context)
            own_steps = take_steps(llm)
            measured = {
                name: percentiles([getattr(metrics, f"{name}_s") for metrics in sender.metrics])
                for name in ("ttft", "tpot")
            }
            tokens_per_s = sum(metrics.output_tokens for metrics in sender.metrics) / seconds
            costs = {"fitted_before": fitted, "fitted_to_its_own_steps": FittedCost(own_steps, "of the run")}
            result["loads"][f"{load:g}%"] = {
                name: compare(simulate(plan, setup, cost), measured, tokens_per_s) for name, cost in costs.items()
            }
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo", help="names or paths, separated by commas")
    parser.add_argument(
        "--requests", type=int, default=200, help="600 or more for small models: p99 of 200 is two requests"
    )
    parser.add_argument("--loads", default="30,60,85", help="percent of the highest throughput")
    parser.add_argument("--save", action="store_true", help="append the results to bench/results/simulate.jsonl")
    arguments = parser.parse_args()
    loads = [float(load) for load in arguments.loads.split(",")]
    for model in arguments.models.split(","):
        finish("simulate", measure(model, arguments.requests, loads), arguments.save)


if __name__ == "__main__":
    main()
