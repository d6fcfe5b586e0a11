"""What `localllm plan` predicts of a 1B-parameter Llama, beside what its answers reach.

    python -m bench.plan [--prompt 512] [--answer 64] [--rounds 5] [--save]

Predictions come from matrices of the model's format and size alone: of earlier answers they know nothing. The two
take turns, round by round, so that a noisy machine is noisy for both. A prediction must not promise more than was
measured divided by 0.95, as medians.
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

TOLERANCE = 0.95  # of what was predicted must be reached


def predict(folder: Path, home: Path, prompt: int, answer: int) -> Plan:
    """The plan of the model, with rates that are measured now."""
    settings = Settings.from_environment({"LOCALLLM_HOME": str(home)})
    header, wish = read_header(folder), LoadOptions(prompt + answer, dtype="bfloat16")
    hardware, expectation = expect_on_device(header, wish, "cpu", settings, name="llama-1b")
    return plan_model(header, hardware, wish, name="llama-1b", prompt=prompt, expectation=expectation)


def reached(llm: localllm.LLM, turn: int, prompt: int, answer: int) -> Sample:
    """By an answer to a new prompt."""
    params = localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    metrics = llm.generate(new_prompt(turn, prompt), params).metrics
    return {"tokens_per_s": metrics.tokens_per_s, "ttft_s": metrics.ttft_s}


def measure(folder: Path, prompt: int, answer: int, rounds: int) -> dict[str, Any]:
    with localllm.load(folder, device="cpu", dtype="bfloat16", context=prompt + answer, draft="off") as llm:

        def turn(i: int) -> dict[str, Sample]:
            with tempfile.TemporaryDirectory() as home:  # a new one: nothing is known of earlier answers
                predicted = predict(folder, Path(home), prompt, answer)
            assert predicted.expected
            return {
                "ceiling": fields_of(predicted.chosen.ceiling),
                "expected": fields_of(predicted.expected),
                "measured": reached(llm, i, prompt, answer),
            }

        result = take_turns(rounds, turn)
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


if __name__ == "__main__":
    run("plan", __doc__, measure)
