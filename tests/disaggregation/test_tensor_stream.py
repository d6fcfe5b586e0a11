"""Keys and values that come over a network: the bits of one engine, bounded memory at both ends, and prompts that
are computed elsewhere when the other machine is slow, silent or gone.
"""

import contextlib
import dataclasses
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from localllm.disaggregation import connection, tensor_stream
from localllm.disaggregation.connection import PrefillProcess, WorkerAddress
from localllm.disaggregation.prefill_engine import HANG_S, Peer, PrefillEngine
from localllm.disaggregation.tensor_stream import TensorStream
from localllm.disaggregation.transport import CANCEL, PING, PONG, PROMPT, SEGMENT, SLOTS, TENSORS, Message
from localllm.errors import Busy, ServerUnreachable
from localllm.parallel.channel import FAILED, FRAME, LOADED, Channel
from localllm.runtime.kv_cache.prefix_copy import frequencies_digest
from localllm.runtime.kv_cache.snapshot import DamagedSnapshot
from tests.disaggregation.peers import CONTEXT, attach, start_prefill_thread, tcp_pair
from tests.disaggregation.test_prefill_tier import QUICK, answers, prompt_of, wait_for
from tests.models.families import FAMILIES
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine


@pytest.fixture
def ends() -> Iterator[tuple[TensorStream, Channel]]:
    """A stream, and the bare channel at its other end."""
    near, far = tcp_pair()
    stream, channel = TensorStream(Channel(near), 2**20), Channel(far)
    yield stream, channel
    stream.close()
    channel.close()


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_answers_have_the_bits_of_one_engine(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    one, prefill, decode = (make_engine(tmp_path, deterministic=True) for _ in range(3))
    thread = start_prefill_thread(prefill, over_tcp=True)
    tier = attach(decode, [thread.process])
    assert answers(decode) == answers(one)
    assert prefill.scheduler.prompt_tokens == 204 + 135 + 128 + 206
    moves = tier.moves
    assert moves["worker_to_host"].bytes == moves["prefill_to_decode"].bytes > 0
    thread.kill()
    wait_for(lambda: tier.process_counts == (0, 1))
    tier.read_arrived()
    assert tier.moves == moves  # also of those that have ended
    thread.close()
    prefill.pool.check_all_free()


def test_tensors_arrive_as_they_were_sent() -> None:
    near, far = tcp_pair()
    sender, receiver = (TensorStream(Channel(end), 2**20) for end in (near, far))
    tensors = {
        "0.0": torch.arange(7, dtype=torch.float32),
        "0.1": torch.arange(6, dtype=torch.uint8).view(2, 3),
        "state.8.1.0": torch.randn(3, 5).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
    }
    with contextlib.closing(sender), contextlib.closing(receiver):
        for _ in range(SLOTS + 1):  # a slot is used again when it is free
            location = sender.put(tensors)
            sender.send(SEGMENT, Message({"location": location}).encode())
            message = receiver.receive()
            assert message and message[0] == SEGMENT
            got = receiver.get(Message.decode(message[1]).fields["location"])
            for name, tensor in tensors.items():
                assert got[name].shape == tuple(tensor.shape)
                assert bytes(got[name].data) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            sender.release(location)


def test_a_peer_that_does_not_read_holds_up_no_engine_and_little_memory(model: Path) -> None:
    prefill = PrefillEngine(make_engine(model, deterministic=True), CONTEXT)
    near, far = tcp_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stream, server = TensorStream(Channel(near), 2**20), Channel(far)
    peer = Peer(stream, stream)
    threads = [threading.Thread(target=prefill.run), threading.Thread(target=prefill.serve, args=(peer,))]
    for thread in threads:
        thread.start()
    for number in range(6):
        fields = {"number": number, "start": 0, "scope": ""}
        server.send(PROMPT, Message(fields, prompt_of(200, number)).encode())
    wait_for(lambda: not stream.has_room and not prefill.engine.has_unfinished_requests)
    assert stream.outbox.qsize() <= 2 * SLOTS  # with each segment, the message about it
    assert len(peer.prompts) >= 6 - SLOTS / 2
    for number in range(6):
        server.send(CANCEL, Message({"number": number}).encode())
    wait_for(lambda: not peer.prompts)
    server.close()
    wait_for(lambda: not prefill.peers)
    prefill.stop()
    for thread in threads:
        thread.join(60)
    prefill.engine.pool.check_all_free()


def test_messages_that_are_not_read_end_the_connection(
    ends: tuple[TensorStream, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_stream, "MAX_WAITING_BYTES", 10**6)
    stream, _ = ends

    def flood() -> None:
        for _ in range(1000):
            stream.send(PROMPT, bytes(10**5))

    with pytest.raises(ConnectionError, match="does not read"):
        flood()
    assert stream.receive() is None


@pytest.mark.parametrize("size", [2**20 + 1, 2**40, -1])
def test_larger_messages_end_the_connection(ends: tuple[TensorStream, Channel], size: int) -> None:
    stream, channel = ends
    channel.connection.sendall(FRAME.pack(TENSORS, size))
    assert stream.receive() is None


def test_tensors_of_no_slot_end_the_connection(ends: tuple[TensorStream, Channel]) -> None:
    stream, channel = ends
    for slot in (*range(SLOTS), 0, SLOTS):
        channel.send(TENSORS, slot.to_bytes(64, "little") + bytes(1000))
    assert stream.receive() is None
    assert sorted(stream.arrived) == list(range(SLOTS))


@pytest.mark.parametrize("offset", [0, 100, -4])
def test_tensors_outside_of_what_came_are_refused(ends: tuple[TensorStream, Channel], offset: int) -> None:
    stream, channel = ends
    channel.send(TENSORS, bytes(64) + bytes(40))
    channel.send(SEGMENT, b"")
    assert stream.receive() == (SEGMENT, b"")
    with pytest.raises(DamagedSnapshot, match="incomplete"):
        stream.get({"slot": 0, "parts": {"0.0": ["F32", [40], offset]}})
    with pytest.raises(DamagedSnapshot):  # taken, and nothing new came
        stream.get({"slot": 0, "parts": {"0.0": ["F32", [1], 64]}})


def test_segments_without_tensors_are_computed_here(model: Path, ends: tuple[TensorStream, Channel]) -> None:
    stream, channel = ends
    engine = make_engine(model, deterministic=True)
    process = PrefillProcess(1, stream, stream)
    process.frequencies, process.context = frequencies_digest(engine.runner), CONTEXT
    tier = attach(engine, [process])

    def answer() -> None:
        message = channel.receive()
        assert message and message[0] == PROMPT
        location = {"slot": 0, "parts": {"0.0": ["F32", [128, 2, 8], 64]}, "bytes": 8192}
        fields = {"number": 1, "start": 0, "end": 128, "states": [], "location": location}
        channel.send(SEGMENT, Message(fields).encode())

    threading.Thread(target=answer, daemon=True).start()
    [answered] = run(engine, [sequence(prompt_of(200), max_tokens=4)]).values()
    [expected] = run(make_engine(model, deterministic=True), [sequence(prompt_of(200), max_tokens=4)]).values()
    assert tokens(answered) == tokens(expected) and not tier.move.bytes


def test_prompts_of_a_silent_machine_are_computed_here(
    model: Path, ends: tuple[TensorStream, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_stream, "PING_S", 0.05)
    monkeypatch.setattr(tensor_stream, "SILENCE_S", 1.0)  # time to send the prompt
    stream, channel = ends
    engine = make_engine(model)
    process = PrefillProcess(1, stream, stream)
    channel.send(LOADED, f'{{"frequencies": "{frequencies_digest(engine.runner)}", "context": 256}}'.encode())
    process.wait_until_loaded()
    tier = attach(engine, [process])
    assert run(engine, [sequence(prompt_of(200), max_tokens=4)])
    wait_for(lambda: tier.process_counts == (0, 1))
    kinds = list[int]()
    while message := channel.receive():
        kinds.append(message[0])
    assert {PROMPT, PING} <= set(kinds)


def test_an_engine_answers_during_a_step_unless_it_hangs(model: Path, ends: tuple[TensorStream, Channel]) -> None:
    stream, channel = ends
    prefill = PrefillEngine(make_engine(model), CONTEXT)
    threading.Thread(target=prefill.serve, args=(Peer(stream, stream),), daemon=True).start()
    ping = Message({}).encode()
    for step_began in (math.inf, time.monotonic()):
        prefill.step_began = step_began
        channel.send(PING, ping)
        message = channel.receive()
        assert message and message[0] == PONG
    prefill.step_began = time.monotonic() - HANG_S
    channel.send(PING, ping)
    channel.send(CANCEL, ping)
    wait_for(lambda: prefill.inbox.qsize() == 2)  # the peer itself, and what followed the ping
    assert not stream.outbox.qsize()
    with pytest.raises(BlockingIOError):
        channel.connection.recv(1, socket.MSG_DONTWAIT)


# Connecting again


def worker_address(**changes: Any) -> WorkerAddress:
    return WorkerAddress(1, "10.0.0.2:1", b"secret", lambda worker: None, "m", None, (), {}, 0, **changes)


def test_a_worker_is_asked_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    closed = Mock()
    closed.is_set.return_value = closed.wait.return_value = False
    unreachable, busy = ServerUnreachable("it is off", "start it"), Busy("in use", "wait")
    process = Mock()
    attempts = [unreachable] * 3 + [busy] * 5 + [process]
    monkeypatch.setattr(WorkerAddress, "connect", Mock(side_effect=attempts))
    address = worker_address()
    assert address.connect_again("has ended", closed) is process
    assert [call.args[0] for call in closed.wait.call_args_list] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "the worker at 10.0.0.2:1 has ended; its prompts are computed elsewhere, next attempt in 1 s",
        "it is off; start it; the attempt is repeated",
        "in use; wait; the attempt is repeated",
        "the worker at 10.0.0.2:1 computes prompts again",
    ]
    monkeypatch.setattr(WorkerAddress, "connect", Mock(return_value=process))
    closed.wait.reset_mock()
    address.connect_again("has ended", closed)  # soon after it was loaded
    address.loaded_at -= connection.STEADY_S
    address.connect_again("has ended", closed)
    assert [call.args[0] for call in closed.wait.call_args_list] == [60, 1]
    assert "secret" not in repr(dataclasses.replace(address))


def test_a_closed_engine_does_not_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerAddress, "connect", Mock(side_effect=AssertionError))
    closed = threading.Event()
    closed.set()
    assert worker_address().connect_again("has ended", closed) is None
    address, waiting = worker_address(failures=6), threading.Event()
    threading.Timer(0.05, waiting.set).start()
    assert address.connect_again("has ended", waiting) is None


def test_an_idle_engine_leaves_a_worker_that_breaks_the_rules(
    model: Path, ends: tuple[TensorStream, Channel]
) -> None:
    stream, channel = ends
    attach(make_engine(model), [PrefillProcess(1, stream, stream)])
    channel.connection.sendall(FRAME.pack(SEGMENT, 2**40))
    assert channel.receive() is None


def test_why_a_worker_has_ended_is_reported(model: Path, ends: tuple[TensorStream, Channel]) -> None:
    stream, channel = ends
    address = Mock()
    address.connect_again.return_value = None
    tier = attach(make_engine(model), [PrefillProcess(1, stream, stream, address)])
    channel.send_failure(ServerUnreachable("its process has ended", "start it"), FAILED)
    wait_for(lambda: address.connect_again.called)
    assert address.connect_again.call_args.args[0] == "failed: its process has ended"
    tier.close()
