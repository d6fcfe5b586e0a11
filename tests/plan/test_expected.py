"""The expected speed of a model on this machine, and how its answers refine it."""

from pathlib import Path

import pytest
import torch

import localllm
from localllm.arch.cost import SequenceStep, bytes_read
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.hub.resolve import resolve_model
from localllm.plan import expected
from localllm.plan.fit import LoadOptions
from localllm.plan.runs import Run, read
from localllm.request import SamplingParams
from localllm.settings import Settings

CPU = torch.device("cpu")


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_recorded_answer_refines_the_expectation(tmp_path: Path) -> None:
    header = read_header(resolve_model("demo").path)
    config = parse_config(header.config)
    with localllm.load("demo", device="cpu", draft="off") as llm:
        kind = getattr(torch, llm.dtype)
        read_bytes = bytes_read(config, llm.memory.weights, (SequenceStep(1, 128),), kind.itemsize)
        like = expected.run_setup("demo", header, kind, CPU, llm.origin.setup.threads, read_bytes)
        before = expected.expected_rates(header, config, like, kind, CPU, tmp_path, silent)
        assert before.source == "matrix products in this model's format and size"
        assert before.bandwidth > 0 and before.flops > 0 and before.step_s > 0

        short = llm.generate([5] * 80, SamplingParams(max_tokens=8, ignore_eos=True))
        llm.record(short.metrics, tmp_path, silent)
        assert read(tmp_path / "runs.jsonl", silent) == []  # too short to tell
        done = llm.generate([7] * 80, SamplingParams(max_tokens=32, ignore_eos=True))
        llm.record(done.metrics, tmp_path, silent)
    [run] = read(tmp_path / "runs.jsonl", silent)
    assert isinstance(run, Run)
    assert (run.model, run.form, run.context, run.tokens_per_s) == ("demo", "INT8", 112, done.metrics.tokens_per_s)
    after = expected.expected_rates(header, config, like, kind, CPU, tmp_path, silent)
    assert after.source == "one answer of this machine"
    assert after.bandwidth == pytest.approx(run.bytes_per_token * done.metrics.tokens_per_s)


@pytest.mark.slow
def test_unsupported_models_have_no_expected_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(resolve_model("demo").path)
    settings = Settings.from_environment({"LOCALLLM_HOME": str(tmp_path), "LOCALLLM_DEVICE": "cpu"})
    assert expected.expect_on_device(header, LoadOptions(), "auto", settings, name="demo")[1]
    monkeypatch.setattr("localllm.hardware.measure.free_bytes", lambda _: 1_000_000)
    hardware, nothing = expected.expect_on_device(header, LoadOptions(), "auto", settings, name="demo")
    assert (hardware.memory_bytes, nothing) == (1_000_000, None)
