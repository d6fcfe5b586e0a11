"""Prompts that `localllm worker` computes for a server on another machine: its answers are those of one engine,
whatever happens to the worker or the network.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.disaggregation import tensor_stream
from localllm.disaggregation.connection import WorkerAddress
from localllm.errors import AccessDenied, Busy, DoesNotFit, ServerUnreachable, UsageError
from localllm.files import write_token
from localllm.llm.llm import LLM
from localllm.request import SamplingParams
from tests.disaggregation.test_prefill_tier import wait_for
from tests.disaggregation.test_processes import (
    DEMO,
    SETUP,
    TEXT,
    complete,
    handed_over,
    one,
    submit,
    tier_of,
)
from tests.models.families import FAMILIES
from tests.parallel.test_workers import (
    other_namespace,
    run_without_links,
    running_worker,
    stage_of,
    worker_with_other_files,
)
from tests.parallel.test_workers import wait_for as wait_for_line
from tests.shared import shared
from tests.tiny import make_checkpoint

__all__ = ["one"]  # a fixture
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    with running_worker(tmp_path_factory.mktemp("worker"), host="127.0.0.2") as started:
        yield started


def load(model: str | Path, address: str, token: Path, **options: Any) -> LLM:
    return localllm.load(model, prefill=address.split(","), token_file=token, **SETUP | options)


@pytest.fixture(scope="module")
def apart(process: tuple[str, Path, Any]) -> Iterator[LLM]:
    address, token, _ = process
    with contextlib.closing(load("demo", address, token)) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "seeded", "stop", "grammar", "tools", "prompt logprobs"])
def test_answers_are_those_of_one_process(one: LLM, apart: LLM, name: str) -> None:
    before = handed_over(apart)
    expected, answer = complete(one, name), complete(apart, name)
    for field in dataclasses.fields(answer):
        if field.name not in ("metrics", "seed"):
            assert getattr(answer, field.name) == getattr(expected, field.name)
    assert (handed_over(apart) > before) == (name != "prompt logprobs")


@pytest.mark.slow
def test_a_closed_stream_cancels_its_prompt(apart: LLM) -> None:
    streams = [submit(apart, f"cancelled {i}. {TEXT}") for i in range(4)]
    for stream in streams:
        stream.close()
    assert complete(apart, "greedy").token_ids
    assert not tier_of(apart).loads
    assert apart.stats().used_blocks == 0


@pytest.mark.slow
def test_a_worker_computes_for_one_machine(process: tuple[str, Path, Any], apart: LLM) -> None:
    address, token, _ = process
    assert tier_of(apart).process_counts == (1, 1)
    with pytest.raises(Busy, match=rf"the worker at {address}: it computes for 127\.0\.0"):
        load("demo", address, token)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "DeepSeek-V3", "Gemma 3"])
def test_families_answer_as_one_process(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes | {"vocab_size": 3072, "max_position_embeddings": 1024})
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    check_answers(
        tmp_path, tmp_path, [[3 + (seed + i * i) % 3000 for i in range(300 + seed)] for seed in range(3)]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("stories260K", {"context": 512}),
        ("gguf/model-q4_k_m.gguf", {"context": 512}),
        ("stories260K", {"context": 512, "kv_dtype": "int8", "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_models_given_by_a_path(tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    check_answers(
        shared(model), tmp_path, [[3 + (seed + 7 * i) % 200 for i in range(300)] for seed in range(2)], options
    )


def check_answers(
    model: Path, folder: Path, prompts: Sequence[Sequence[int]], options: dict[str, Any] | None = None
) -> None:
    options = SETUP | (options or {})
    with contextlib.closing(localllm.load(model, **options)) as one:
        expected = [one.generate(prompt, GREEDY) for prompt in prompts]
    with (
        running_worker(folder) as (address, token, _),
        contextlib.closing(load(model, address, token, **options)) as llm,
    ):
        for prompt, answer in zip(prompts, expected, strict=True):
            got = llm.generate(prompt, GREEDY)
            assert (got.token_ids, got.logprobs) == (answer.token_ids, answer.logprobs)
        assert llm.stats().moves["worker_to_host"].bytes == handed_over(llm) > 0


@pytest.mark.slow
def test_without_deterministic_the_text_is_the_same(tmp_path: Path, one: LLM) -> None:
    with (
        running_worker(tmp_path, host="127.0.0.3") as (address, token, _),
        contextlib.closing(load("demo", address, token, deterministic=False)) as llm,
    ):
        assert complete(llm, "greedy").text == complete(one, "greedy").text
        assert handed_over(llm) > 0


@pytest.mark.slow
def test_killed_workers_lose_no_request_and_are_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage's process is killed, then both workers, of which one starts again."""
    caplog.set_level(logging.INFO)
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    shutil.copy(write(folders[0] / "token"), folders[1] / "token")
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(running_worker(folder)) for folder in folders]
        addresses, token = [address for address, _, _ in workers], workers[0][1]
        llm = stack.enter_context(contextlib.closing(load("demo", ",".join(addresses), token)))
        tier = tier_of(llm)
        assert tier.process_counts == (2, 2)
        streams = [submit(llm, f"{i} {TEXT}") for i in range(6)]
        os.kill(stage_of(workers[0][2]), signal.SIGKILL)
        assert all(list(stream)[-1].finish_reason for stream in streams)
        wait_for(lambda: f"the worker at {addresses[0]} computes prompts again" in caplog.text)
        wait_for(lambda: tier.process_counts == (2, 2))
        streams = [submit(llm, f"again {i} {TEXT}") for i in range(6)]
        for _, _, worker in workers:
            worker.kill()
        assert all(list(stream)[-1].finish_reason for stream in streams)
        wait_for(lambda: tier.process_counts == (0, 2))
        assert list(submit(llm, f"alone {TEXT}"))[-1].finish_reason
        port = addresses[1].rpartition(":")[2]
        stack.enter_context(running_worker(folders[1], port=port))
        wait_for(lambda: tier.process_counts == (1, 2))
        before = handed_over(llm)
        assert list(submit(llm, f"back {TEXT}"))[-1].finish_reason
        assert handed_over(llm) > before
    assert f"{addresses[0]} failed: its process has ended (signal 9, SIGKILL); its prompts are" in caplog.text
    assert f"{addresses[1]} has ended, or the network to it is cut; its prompts are" in caplog.text


def write(token: Path) -> Path:
    write_token(token)
    return token


@pytest.mark.slow
def test_a_worker_that_hangs_loses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensor_stream, "PING_S", 0.2)
    monkeypatch.setattr(tensor_stream, "SILENCE_S", 3.0)
    hangs = "has not answered for 3 s; its prompts are computed elsewhere"
    with (
        running_worker(tmp_path) as (address, token, worker),
        contextlib.closing(load("demo", address, token)) as llm,
    ):
        stage = stage_of(worker)
        os.kill(stage, signal.SIGSTOP)
        streams = [submit(llm, f"{i} {TEXT}") for i in range(3)]
        assert all(list(stream)[-1].finish_reason for stream in streams)
        assert tier_of(llm).process_counts == (0, 1)
        assert f"the worker at {address} {hangs}" in caplog.text
        os.kill(stage, signal.SIGKILL)
        wait_for(lambda: tier_of(llm).process_counts == (1, 1))
        before = handed_over(llm)
        assert list(submit(llm, f"again {TEXT}"))[-1].finish_reason
        assert handed_over(llm) > before


@pytest.mark.slow
def test_what_a_worker_cannot_compute_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_worker(tmp_path) as (address, token, _):
        wrong = write(tmp_path / "wrong")
        with pytest.raises(AccessDenied, match=f"the worker at {address} has another token"):
            load("demo", address, wrong)
        with monkeypatch.context() as patch:
            patch.setattr("localllm.llm.build.processor_features", lambda device: "AVX3")
            with pytest.raises(UsageError, match=f"{address} has another processor .*leave out --deterministic"):
                load("demo", address, token)
            load("demo", address, token, deterministic=False).close()
        before = WorkerAddress.connect
        with monkeypatch.context() as patch:  # less memory there
            patch.setattr(
                WorkerAddress,
                "connect",
                lambda own: before(dataclasses.replace(own, setup=own.setup | {"max_memory": 10**6})),
            )
            with pytest.raises(DoesNotFit, match=f"the worker at {address}: "):
                load("demo", address, token)
        load("demo", address, token).close()  # it waits for the next machine
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        load("demo", address, token)


@pytest.mark.slow
def test_other_files_at_the_same_path_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match=r"model.safetensors of .* differs from that of the first machine")
    with worker_with_other_files(tmp_path) as (model, address, token), refused:
        load(model, address, token, context=256)


@pytest.mark.slow
def test_two_network_namespaces_whose_link_is_cut(tmp_path: Path) -> None:
    """Prompts sent over a link that is cut are computed by the server; later, the worker is used again."""
    run_without_links(__name__, tmp_path, timeout=300)


def use_a_link(folder: Path) -> None:
    """The server of the test above, in a network namespace without any link."""
    with (
        other_namespace() as (inside, ip),
        running_worker(folder, *inside, host="10.9.0.2") as (address, token, _),
        contextlib.closing(load("demo", address, token)) as llm,
    ):
        tier = tier_of(llm)
        assert list(submit(llm, TEXT))[-1].finish_reason and handed_over(llm) > 0
        ip("link", "set", "near", "down")
        streams = [submit(llm, f"{i} {TEXT}") for i in range(3)]
        assert all(list(stream)[-1].finish_reason for stream in streams)
        assert tier.process_counts == (0, 1)
        wait_for_line(folder / "log", "waiting for the next machine", 60)
        ip("link", "set", "near", "up")
        wait_for(lambda: tier.process_counts == (1, 1), 120)
        before = handed_over(llm)
        assert list(submit(llm, f"again {TEXT}"))[-1].finish_reason
        assert handed_over(llm) > before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": ["127.0.0.1:1"]}, "cannot be combined with --prefill"),
        ({"tensor_parallel": 2}, "a model that is divided among processes"),
        ({"prefill": ["127.0.0.1:1", "127.0.0.1:1"]}, "a worker is named twice"),
        ({"prefill": ["127.0.0.1:1", Path("/none/1")]}, "leave one kind out"),
        ({"prefill": ["host:a"]}, "not the address of a worker"),
        ({"prefill": "127.0.0.1:1,127.0.0.1:1"}, "a worker is named twice"),
        ({"prefill": 1}, "--token-file is for workers"),
        ({}, "cannot read the token"),
    ],
)
def test_what_cannot_be_combined_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given = {"prefill": ["127.0.0.1:1"], "token_file": tmp_path / "none", "device": "cpu"}
    with pytest.raises(UsageError, match=message):
        localllm.load("demo", **given | options)
