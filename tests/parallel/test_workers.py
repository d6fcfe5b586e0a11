"""Pipeline stages on other machines: workers answer only who has their token, compute the bits of one process, and
are free again when a first machine has left, however it ends.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import localllm
from localllm.arch.stages import Position
from localllm.checkpoint.digest import digest_model
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import part_of_model
from localllm.cli.worker import worker as worker_command
from localllm.errors import (
    AccessDenied,
    Busy,
    LocalLLMError,
    ModelNotFound,
    NotLocalLLMServer,
    RankFailed,
    ServerUnreachable,
    UsageError,
)
from localllm.files import read_token, write_token
from localllm.llm.llm import LLM
from localllm.llm.stage_process import compare_files, find_files
from localllm.parallel import handshake, listener
from localllm.parallel.channel import FACTS, FRAME, HIDDEN, STEP, VERSIONS, Channel
from localllm.parallel.handshake import format_address, open_connection, parse_address, prove_as_first
from localllm.parallel.listener import WorkerListener
from localllm.parallel.rank import Setup
from localllm.parallel.remote import RemoteLeader, RemoteWorker, connect_workers
from localllm.request import SamplingParams
from localllm.runtime.engine import Engine
from localllm.settings import Settings
from tests.models.families import FAMILIES
from tests.models.proofs import token_ids
from tests.parallel.machines_in_threads import machines_in_threads
from tests.shared import shared
from tests.tiny import make_checkpoint, make_engine

TOKEN, OTHER_TOKEN = b"a" * 64, b"b" * 64
IDS = token_ids(70)
PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


# What a worker answers before it starts a process


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerListener]:
    """A worker whose processes say what their device has, and nothing more."""

    def run_stage(
        self: WorkerListener, connection: socket.socket, channel: Channel, peer: str, processes: int
    ) -> None:
        facts = {"device": "cpu", "device_type": "cpu", "free_bytes": 2**30, "auto_dtype": "float32"}
        facts["processor"] = f"AVX2 for {processes}"
        channel.send(FACTS, json.dumps(facts).encode())
        channel.receive()

    monkeypatch.setattr(WorkerListener, "run_stage", run_stage)
    monkeypatch.setattr(listener, "LEAVE_S", 0.1)
    messages: list[str] = []
    worker = WorkerListener("127.0.0.1", 0, TOKEN, "cpu", messages.append)
    worker.messages = messages  # type: ignore[attr-defined]
    threading.Thread(target=worker.serve, daemon=True).start()
    with contextlib.closing(worker):
        yield worker


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(worker: WorkerListener, token: bytes = TOKEN) -> RemoteWorker:
    [connected] = connect_workers([worker.address], token)
    return connected


def test_a_worker_says_what_it_has_and_is_in_use_until_its_user_leaves(worker: WorkerListener) -> None:
    [first] = connect_workers([worker.address], TOKEN, 3)
    assert (first.free_bytes, first.processor) == (2**30, "AVX2 for 3")
    with pytest.raises(Busy, match=f"the worker at {worker.address}: it computes for 127.0.0.1:"):
        connect(worker)
    first.channel.close()
    wait_until(lambda: not worker.in_use.locked())
    connect(worker).channel.close()


def test_another_token_is_refused_on_both_sides(worker: WorkerListener) -> None:
    with pytest.raises(AccessDenied, match="has another token; copy its token file here") as refused:
        connect(worker, OTHER_TOKEN)
    assert refused.value.exit_code == 8
    wait_until(lambda: worker.messages)  # type: ignore[attr-defined]
    assert "another token" in worker.messages[0]  # type: ignore[attr-defined]
    connect(worker).channel.close()


def test_a_worker_that_does_not_have_the_token_is_refused() -> None:
    """It cannot send back what it was sent, and a proof of one role is none of the other."""

    def echo(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            while content := connection.recv(4096):
                connection.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        with pytest.raises(AccessDenied, match="another token"):
            open_connection(format_address(server.getsockname()), TOKEN)


def test_versions_are_compared_on_both_sides(worker: WorkerListener, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # the first machine has another version than the worker
        patch.setattr(listener, "own_versions", lambda: {"localllm": "0.0.9", "torch": "2.0.0"})
        with pytest.raises(UsageError, match=r"it runs localllm 0.0.9, torch 2.0.0, and this machine localllm"):
            connect(worker)
    with socket.create_connection(parse_address(worker.address)) as connection:
        prove_as_first(connection, TOKEN)
        channel = Channel(connection)
        channel.send(VERSIONS, b'{"localllm": "0.0.8"}')
        answer = channel.receive()
        assert answer and json.loads(answer[1]) == handshake.own_versions()
        assert channel.receive() is None
    wait_until(lambda: worker.messages)  # type: ignore[attr-defined]
    assert "it runs localllm 0.0.8" in worker.messages[-1]  # type: ignore[attr-defined]


def test_nothing_but_the_protocol_is_read(worker: WorkerListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    rng = random.Random(1)
    own = handshake.MAGIC + bytes(handshake.NONCE_BYTES)
    attempts = [b"GET / HTTP/1.1\r\n\r\n" * 5, b"", own, own + bytes(32), *(rng.randbytes(200) for _ in range(20))]
    for content in attempts:
        connection = socket.create_connection(parse_address(worker.address), 5)
        with connection, contextlib.suppress(OSError):
            connection.sendall(content)
            received = b""
            while more := connection.recv(4096):
                received += more
            assert len(received) <= len(own) + handshake.PROOF_BYTES
    # More connections than may wait are closed, and none keeps the worker from answering later.
    waiting = [socket.create_connection(parse_address(worker.address)) for _ in range(20)]
    for connection in waiting:
        connection.close()
    deadline = time.monotonic() + 60
    while True:
        try:
            connect(worker).channel.close()
            break
        except LocalLLMError:
            assert time.monotonic() < deadline


def test_large_messages_are_refused(worker: WorkerListener) -> None:
    with contextlib.closing(connect(worker).channel) as first:
        first.connection.sendall(FRAME.pack(HIDDEN, 2**40))
        assert first.receive() is None
    for count in (101, -1):
        near, far = socket.socketpair()
        with near, far:
            one, other = Channel(near, limit=100), Channel(far)
            other.send(STEP, b"x" * 100)
            assert one.receive() == (STEP, b"x" * 100)
            far.sendall(FRAME.pack(STEP, count))
            assert one.receive() is None


def test_hidden_states_of_a_decode_step_arrive_whole_or_not_at_all() -> None:
    """What a process killed between two writes has begun would swallow the message about its end."""

    connection = Mock()
    Channel(connection).send_parts(HIDDEN, [b"ab", memoryview(b"c")])
    connection.sendall.assert_called_once_with(FRAME.pack(HIDDEN, 3) + b"abc")


def test_what_is_no_worker_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = format_address(server.getsockname())

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n" + bytes(50))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(NotLocalLLMServer, match="is not a worker"):
            open_connection(address, TOKEN)
    with pytest.raises(ServerUnreachable, match=r"cannot be reached .*; run `localllm worker` there"):
        open_connection(address, TOKEN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", 11435)),
        ("10.0.0.2:80", ("10.0.0.2", 80)),
        ("[::1]:80", ("::1", 80)),
        ("::1", ("::1", 11435)),
        ("[::1]", ("::1", 11435)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", ":80", "host:", "host:0", "host:65536", "host:a"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not the address of a worker"):
        parse_address(text)


def test_a_token_is_for_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "token"
    write_token(file)
    assert file.stat().st_mode & 0o777 == 0o600
    token = read_token(file)
    assert len(bytes.fromhex(token.decode())) == 32
    write_token(file)
    assert read_token(file) == token
    file.chmod(0o640)
    with pytest.raises(UsageError, match=r"other users can read .*chmod 600"):
        read_token(file)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(UsageError, match="no token of 64 hexadecimal digits"):
        read_token(file)
    with pytest.raises(UsageError, match="cannot read the token"):
        read_token(tmp_path / "missing")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"host": "example.org"}, "'example.org' is not an IP address"),
        ({"host": "192.0.2.1", "port": 0}, r"cannot listen on 192\.0\.2\.1:0 "),
        ({"device": "gpu"}, "there is no device 'gpu'"),
        ({"token_file": "/nowhere/token"}, "cannot read the token in /nowhere/token"),
    ],
)
def test_what_the_command_refuses(
    flags: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=message):
        worker_command(**flags)


# The same files


def two_revisions(folder: Path) -> tuple[Path, Path]:
    """Return two folders with a model, whose weights differ in a bit."""
    paths = folder / "one", folder / "other"
    for path in paths:
        shutil.copytree(shared("stories260K"), path)
    weights = paths[1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return paths


def test_another_revision_is_refused(tmp_path: Path) -> None:
    one, other = (digest_model(path) for path in two_revisions(tmp_path))

    def fields(files: Sequence[Any]) -> list[list[Any]]:
        return [[f.path, f.size, f.sha256, f.samples] for f in files if f.affects_logits]

    compare_files("m", fields(one), one)
    with pytest.raises(UsageError, match=r"model.safetensors of m differs from that of the first machine"):
        compare_files("m", fields(one), other)
    with pytest.raises(UsageError, match=r"m has model.safetensors, which the first machine lacks"):
        compare_files("m", [each for each in fields(one) if "json" in each[0]], one)


def test_a_missing_model_has_a_remedy(tmp_path: Path) -> None:
    settings = Settings(tmp_path, device="cpu", dtype="auto", threads=1)
    with pytest.raises(ModelNotFound, match="no model some/model; run `localllm pull some/model` there"):
        find_files("some/model", None, settings)
    with pytest.raises(ModelNotFound, match="copy the same files to that path there"):
        find_files("/nowhere/model", None, settings)


# The same bits


def check_bits(path: Path, shares: Sequence[float]) -> None:
    alone = make_engine(path, torch.float32, context=len(IDS))
    with torch.inference_mode(), machines_in_threads(path, shares, 1, len(IDS)) as engine:
        for count in (len(IDS), 1, 3):
            logits = engine.logits(IDS[:count])
            assert logits.std() > 0.1
            assert torch.equal(logits, alone.logits(IDS[:count]))


@pytest.mark.parametrize("family", ["Qwen3.5", "Gemma 4, like E2B"])
def test_stages_have_the_bits_of_one_process(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    check_bits(tmp_path, (1.0, 1.0))


def test_messages_between_workers_are_passed_on() -> None:
    check_bits(shared("stories260K"), (2.0, 1.0, 1.0))


def test_stages_of_a_gguf_file_have_the_bits_of_one_process() -> None:
    check_bits(shared("gguf/model-q4_k_m.gguf"), (1.0, 1.0))


# Processes


@contextlib.contextmanager
def running_worker(
    folder: Path, *prefix: str, host: str = "127.0.0.1", port: str = "0"
) -> Iterator[tuple[str, Path, Any]]:
    """The command `localllm worker`; yields its address, its token file and its process."""
    token, log = folder / "token", folder / "log"
    write_token(token)
    command = [*prefix, sys.executable, "-m", "localllm", "worker", "--host", host, "--port", port]
    with (
        log.open("w") as err,
        subprocess.Popen(
            [*command, "--token-file", str(token), "--device", "cpu"],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        ) as process,
    ):
        assert process.stdout
        line = process.stdout.readline()
        try:
            yield line.split("--workers ")[1].split()[0], token, process
        finally:
            process.terminate()
            process.wait(60)


def wait_for(file: Path, text: str, seconds: float = 60.0) -> str:
    deadline = time.monotonic() + seconds
    while text not in (content := file.read_text()):
        assert time.monotonic() < deadline, content
        time.sleep(0.05)
    return content


def stage_of(worker: Any) -> int:
    """Return the process of a worker's stage."""
    [pid] = children_of(worker.pid)
    return pid


def children_of(pid: int) -> set[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}


def load(model: str, address: str, token: Path, **options: Any) -> LLM:
    return localllm.load(model, device="cpu", context=512, workers=address.split(","), token_file=token, **options)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    with running_worker(tmp_path_factory.mktemp("worker"), host="127.0.0.2") as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": "float32", "draft": "lookup"}, {"deterministic": True}], ids=str)
def test_a_worker_answers_as_one_process(process: tuple[str, Path, Any], options: dict[str, Any]) -> None:
    address, token, _ = process
    with contextlib.closing(localllm.load("demo", device="cpu", context=512, **options)) as one:
        expected, ids = one.generate(PROMPT, GREEDY).text, list(range(3, 90))
        logits, vectors = one.logits(ids), one.embed([PROMPT]).vectors
    with contextlib.closing(load("demo", address, token, **options)) as two:
        assert two.generate(PROMPT, GREEDY).text == expected
        assert torch.equal(two.logits(ids), logits)
        assert (two.embed([PROMPT]).vectors == vectors).all()
        leader = two.worker.engine.runner.model.ranks
        assert isinstance(leader, RemoteLeader)
        header = read_header(two.path)
        part, _ = part_of_model(header, two.config, replace(leader.position, rank=1))
        assert leader.read_bytes == [part.stored_bytes]
        assert two.memory.weights.total < header.stored_bytes  # of the largest stage
        for context in (64, 512):
            two.resize(context)
            assert two.context == context
            assert two.generate(PROMPT, GREEDY).text == expected
    wait_for(token.parent / "log", "waiting for the next machine")


@pytest.mark.slow
def test_steps_of_several_answers_overlap(process: tuple[str, Path, Any]) -> None:
    """Each answer has the text of one process; a change of the context and an end of the model come between."""
    address, token, _ = process
    prompts = [f"{PROMPT}, {number} times," for number in range(5)]
    with contextlib.closing(localllm.load("demo", device="cpu", context=512, dtype="float32")) as one:
        expected = [one.generate(prompt, GREEDY).text for prompt in prompts]
    most = 0

    def note(engine: Engine) -> None:
        step = engine.step

        def noted() -> Any:
            nonlocal most
            events = step()
            most = max(most, len(engine.in_flight))
            return events

        engine.step = noted

    with contextlib.closing(load("demo", address, token, dtype="float32")) as two, ThreadPoolExecutor(5) as pool:
        note(two.worker.engine)
        for context in (512, 256):
            answers = [pool.submit(two.generate, prompt, GREEDY) for prompt in prompts]
            two.resize(context)
            assert [answer.result().text for answer in answers] == expected
        streams = [two.stream(prompt, LONG) for prompt in prompts]
        for stream in streams:
            next(stream)
    assert most == 1
    log = wait_for(token.parent / "log", "waiting for the next machine")
    assert "failed" not in log


@pytest.mark.slow
def test_a_killed_stage_ends_all_answers_under_way(process: tuple[str, Path, Any]) -> None:
    address, token, worker = process
    with contextlib.closing(load("demo", address, token)) as llm:
        streams = [llm.stream(PROMPT, LONG) for _ in range(3)]
        for events in streams:
            next(events)
        os.kill(stage_of(worker), signal.SIGKILL)
        for events in streams:
            with pytest.raises(RankFailed, match=f"the worker at {address} failed"):
                list(events)


@pytest.mark.slow
def test_prompts_stored_by_one_process_are_used_with_a_worker(
    process: tuple[str, Path, Any], tmp_path: Path
) -> None:
    address, token, _ = process
    prompt = PROMPT * 60
    with contextlib.closing(localllm.load("demo", device="cpu", context=512, cache_dir=tmp_path)) as one:
        expected = one.generate(prompt, GREEDY).text
    with contextlib.closing(load("demo", address, token, cache_dir=tmp_path)) as two:
        completion = two.generate(prompt, GREEDY)
    assert completion.text == expected
    assert completion.metrics.disk_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gguf/model-q4_k_m.gguf", "stories260K"])
def test_models_given_by_a_path(process: tuple[str, Path, Any], name: str) -> None:
    address, token, _ = process
    path = str(shared(name))
    with contextlib.closing(localllm.load(path, device="cpu", context=128)) as one:
        logits = one.logits(IDS)
    with contextlib.closing(
        localllm.load(path, device="cpu", context=128, workers=[address], token_file=token)
    ) as two:
        assert torch.equal(two.logits(IDS), logits)


@pytest.mark.slow
def test_the_command_answers_as_with_one_process(process: tuple[str, Path, Any]) -> None:
    address, token, _ = process

    def answer(*flags: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "localllm", "run", "demo", "--local", "--temperature", "0", *flags, "hi"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert result.returncode == code, result.stderr
        return result.stdout if code == 0 else result.stderr

    assert answer("--workers", address, "--token-file", str(token)) == answer()
    shares = ("--pipeline-parallel", "1,2")
    assert answer("--workers", address, "--token-file", str(token), *shares) == answer()
    wrong = token.parent / "wrong"
    write_token(wrong)
    assert "has another token" in answer("--workers", address, "--token-file", str(wrong), code=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": 1}, "cannot be combined with --prefill yet"),
        ({"pipeline_parallel": 3}, "make 2 stages, and --pipeline-parallel asks for 3"),
        ({"keep_layout": True}, "layout of divided weights"),
        ({"workers": ()}, "--token-file is for workers"),
    ],
)
def test_what_cannot_be_combined_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        localllm.load("demo", device="cpu", **{"workers": ["127.0.0.1:1"], "token_file": tmp_path} | options)


@pytest.mark.slow
def test_a_killed_stage_ends_the_model_with_an_error(process: tuple[str, Path, Any]) -> None:
    address, token, worker = process
    with contextlib.closing(load("demo", address, token)) as llm:
        events = llm.stream(PROMPT, LONG)
        next(events)
        os.kill(stage_of(worker), signal.SIGKILL)
        expected = rf"the worker at {address} failed: its process has ended \(signal 9, SIGKILL\)"
        with pytest.raises(RankFailed, match=expected):
            list(events)
        with pytest.raises(LocalLLMError, match=f"the worker at {address} failed"):
            llm.generate(PROMPT, GREEDY)
    with contextlib.closing(load("demo", address, token)) as llm:  # the worker waits for the next machine
        assert llm.generate(PROMPT, GREEDY).text


@pytest.mark.slow
def test_a_killed_worker_ends_the_model_with_an_error(tmp_path: Path) -> None:
    with running_worker(tmp_path) as (address, token, worker):
        with contextlib.closing(load("demo", address, token)) as llm:
            events = llm.stream(PROMPT, LONG)
            next(events)
            stage = stage_of(worker)
            worker.kill()
            with pytest.raises(
                RankFailed, match=f"the worker at {address} has ended, or the network to it is cut"
            ):
                list(events)
        wait_until(lambda: not Path(f"/proc/{stage}").exists())


@pytest.mark.slow
def test_a_killed_first_machine_frees_its_workers(process: tuple[str, Path, Any]) -> None:
    address, token, worker = process
    script = (
        "import localllm, sys, time\n"
        "llm = localllm.load('demo', device='cpu', workers=[sys.argv[1]], token_file=sys.argv[2])\n"
        "print(flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, address, str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout
        first.stdout.readline()
        assert stage_of(worker)
        with pytest.raises(Busy, match=r"it computes for 127\.0\.0"):
            load("demo", address, token)
        first.kill()
    with contextlib.closing(connect_when_free(address, token)) as llm:
        assert llm.generate(PROMPT, GREEDY).text


def connect_when_free(address: str, token: Path) -> LLM:
    deadline = time.monotonic() + 60
    while True:
        try:
            return load("demo", address, token)
        except Busy:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_other_files_at_the_same_path_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match=r"model.safetensors of .* differs from that of the first machine")
    with worker_with_other_files(tmp_path) as (model, address, token), refused:
        localllm.load(model, device="cpu", context=64, workers=[address], token_file=token)


@contextlib.contextmanager
def worker_with_other_files(folder: Path) -> Iterator[tuple[Path, str, Path]]:
    """A worker that has another model where this machine has its own: in a file system of its own. Yields the path
    of the models, the worker's address and its token file."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces")
    (model, other), home = two_revisions(folder), folder / "worker"
    home.mkdir()
    mount = f'mount --bind {other} {model} && exec "$@"'
    with running_worker(home, "unshare", "-rm", "sh", "-c", mount, "sh") as (address, token, _):
        yield model, address, token


@pytest.mark.slow
def test_two_network_namespaces_whose_link_is_cut(tmp_path: Path) -> None:
    """A link that is cut shows in half a minute on both sides; afterwards, the worker answers again."""
    run_without_links(__name__, tmp_path, timeout=200)


def run_without_links(module: str, folder: Path, *, timeout: float) -> None:
    """Run `use_a_link` of a module of tests in a network namespace without any link."""
    if subprocess.run(["unshare", "-rnm", "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces, or no `ip`")
    call = f"import pathlib, {module} as tests; tests.use_a_link(pathlib.Path({str(folder)!r}))"
    command = ["unshare", "-rnm", sys.executable, "-c", call]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert result.returncode == 0, result.stderr


@contextlib.contextmanager
def other_namespace() -> Iterator[tuple[tuple[str, ...], Callable[..., None]]]:
    """A second network namespace, 10.9.0.2, linked to this one, 10.9.0.1, by `near`; yields a command's beginning
    that runs it there, and `ip` here."""

    def ip(*arguments: str, inside: Sequence[str] = ()) -> None:
        subprocess.run([*inside, "ip", *arguments], check=True)

    with subprocess.Popen(["unshare", "-n", "sleep", "200"]) as other:
        own = os.stat("/proc/self/ns/net").st_ino
        while os.stat(f"/proc/{other.pid}/ns/net").st_ino == own:
            time.sleep(0.01)
        inside = ("nsenter", "-t", str(other.pid), "-n")
        ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(other.pid))
        ip("address", "add", "10.9.0.1/24", "dev", "near")
        ip("link", "set", "near", "up")
        ip("address", "add", "10.9.0.2/24", "dev", "far", inside=inside)
        ip("link", "set", "far", "up", inside=inside)
        yield inside, ip
        other.kill()


def use_a_link(folder: Path) -> None:
    """The first machine of the test above, in a network namespace without any link."""
    with other_namespace() as (inside, ip):
        with contextlib.closing(localllm.load("demo", device="cpu", context=512)) as one:
            expected = one.generate(PROMPT, GREEDY).text
        with running_worker(folder, *inside, host="10.9.0.2") as (address, token, _):
            with contextlib.closing(load("demo", address, token)) as llm:
                assert llm.generate(PROMPT, GREEDY).text == expected
                events = llm.stream(PROMPT, LONG)
                next(events)
                ip("link", "set", "near", "down")
                began = time.monotonic()
                with pytest.raises(RankFailed, match="the network to it is cut"):
                    list(events)
                assert time.monotonic() - began < 60
            wait_for(folder / "log", "waiting for the next machine", 60)
            ip("link", "set", "near", "up")
            with contextlib.closing(load("demo", address, token)) as llm:
                assert llm.generate(PROMPT, GREEDY).text == expected


def test_setups_come_as_json() -> None:
    fields = {name: 1 for name in Setup.__dataclass_fields__} | {"position": vars(Position(1, 1, (0, 2, 4)))}
    setup = Setup.from_fields(json.loads(json.dumps(fields)))
    assert setup.position == Position(1, 1, (0, 2, 4))
    with pytest.raises(TypeError):
        Setup.from_fields(fields | {"other": 1})
