"""Compares the speed that `localllm plan` predicts for a 1B-parameter Llama with the speed of its answers.

    python -m bench.plan [--prompt 512] [--answer 64] [--rounds 5] [--save]

Predictions use only measurements of matrices of the model's format and size, not of earlier answers. Prediction
and measurement alternate in every round, so that noise of the machine affects both. The median prediction must not
exceed the median measurement divided by 0.95.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import localllm
from bench.rounds import Sample, new_prompt, run, take_turns
from localllm.checkpoint.header import read_header
from localllm.plan.expected import expect_on_device
from localllm.plan.fit import LoadOptions
from localllm.plan.plan import Plan, plan_model
from localllm.plan.speed import Speed
from localllm.settings import Settings

TOLERANCE = 0.95  # fraction of the prediction that must be reached


def predict(folder: Path, home: Path, prompt: int, answer: int) -> Plan:
    """Plan for the model, with rates that are measured now."""
    settings = Settings.from_environment({"LOCALLLM_HOME": str(home)})
    header, options = read_header(folder), LoadOptions(prompt + answer, dtype="bfloat16")
    hardware, expectation = expect_on_device(header, options, "cpu", settings, name="llama-1b")
    return plan_model(header, hardware, options, name="llama-1b", prompt=prompt, expectation=expectation)


def measure_answer(llm: localllm.LLM, seed: int, prompt: int, answer: int) -> Sample:
    """Measure one answer to a new prompt."""
    params = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    metrics = llm.generate(new_prompt(seed, prompt), params).metrics
    return {"tokens_per_s": metrics.tokens_per_s, "ttft_s": metrics.ttft_s}


def measure(folder: Path, prompt: int, answer: int, rounds: int) -> dict[str, Any]:
    with localllm.load(folder, device="cpu", dtype="bfloat16", context=prompt + answer, draft="off") as llm:

        def run_round(number: int) -> dict[str, Sample]:
            with tempfile.TemporaryDirectory() as home:  # a new one, without measurements of earlier answers
                predicted = predict(folder, Path(home), prompt, answer)
            assert predicted.expected
            return {
                "ceiling": speed_sample(predicted.chosen.ceiling),
                "expected": speed_sample(predicted.expected),
                "measured": measure_answer(llm, number, prompt, answer),
            }

        result = take_turns(rounds, run_round)
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


def speed_sample(speed: Speed) -> Sample:
    return {"tokens_per_s": speed.tokens_per_s, "ttft_s": speed.ttft_s}


if __name__ == "__main__":
    run("plan", __doc__, measure)
