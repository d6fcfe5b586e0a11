"""The Python API pulls missing models."""

import logging

import pytest

import localllm
from localllm.errors import DoesNotFit
from localllm.hub.catalog import PACKAGE_FOLDER
from localllm.plan.fit import FreeMemory

DEMO = PACKAGE_FOLDER / "boxed" / "demo"


def test_load_pulls_a_missing_model_and_logs_it(hub, cache, caplog):
    hub.add("org/tiny", DEMO)
    with caplog.at_level(logging.INFO, "localllm"), localllm.load("org/tiny") as llm:
        there = llm.generate("Once", localllm.SamplingParams(max_tokens=8, temperature=0)).token_ids
    assert "pulling org/tiny: 6.17 MB" in caplog.messages
    assert "model.safetensors: 5.97 MB, verified" in caplog.messages
    asked = len(hub.requests)
    with localllm.load("org/tiny") as again, localllm.load("demo") as here:
        for llm in (again, here):
            assert llm.generate("Once", localllm.SamplingParams(max_tokens=8, temperature=0)).token_ids == there
    assert len(hub.requests) == asked


def test_load_says_in_the_log_which_edition_a_plain_name_is(hub, cache, caplog, monkeypatch):
    hub.add("unsloth/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q4_K_M.gguf": b"GGUF"})
    hub.add("Qwen/Qwen3-0.6B", DEMO)
    monkeypatch.setattr("localllm.llm.find.memory_of", lambda *machine: FreeMemory("cpu", 8 * 10**9, 1e13))
    with caplog.at_level(logging.INFO, "localllm"), localllm.load("qwen3:0.6b") as llm:
        assert llm.context == 1024
    line = "qwen3:0.6b: the original, 6.17 MB, fits with 1,024 tokens of context; qwen3:0.6b-q4_k_m for 4 bits"
    assert line in caplog.messages


def test_load_refuses_a_model_that_does_not_fit_before_the_download(hub, cache, monkeypatch):
    monkeypatch.setattr("localllm.llm.find.free_bytes", lambda device: 1_000_000)
    hub.add("org/tiny", DEMO)
    with pytest.raises(DoesNotFit, match=r"1\.00 MB are free"):
        localllm.load("org/tiny")
    assert hub.sent("model.safetensors") <= 2**17


def test_a_forced_model_answers_with_the_least_memory(monkeypatch):
    monkeypatch.setattr("localllm.llm.find.free_bytes", lambda device: 1_000_000)
    with pytest.raises(DoesNotFit):
        localllm.load("demo", context=64)
    with localllm.load("demo", context=64, force=True) as llm:
        assert llm.context == 64
        assert llm.generate("Once", localllm.SamplingParams(max_tokens=8)).token_ids
