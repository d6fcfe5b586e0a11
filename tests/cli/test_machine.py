"""Models of this machine: offers, loading and cancelling."""

import gc
import socket
import threading
import time
import weakref

import pytest

from localllm.cli.machine import connect_or_load, connect_to_server
from localllm.client import model as client_model
from localllm.client import server as client_server
from localllm.errors import ModelNotFound, ServerTooSlow
from localllm.hub.catalog import PACKAGE_FOLDER
from localllm.hub.partial_file import PARTIAL_SUFFIX
from localllm.quantize.store import list_artefacts
from localllm.tui.machine import Cancelled
from tests.shared import shared
from tests.tui.host import NO_FLAGS, this_machine

DEMO = PACKAGE_FOLDER / "boxed" / "demo"
FLAGS = {**NO_FLAGS, "local": True, "verbose": False}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class RecordingWatch:
    """A `Watch` that records all reports, and cancels when `until` returns true."""

    def __init__(self, until=lambda told: False):
        self.until = until
        self.phases, self.parts, self.notes = [], [], []
        self.came, self.offer, self.order = 0, None, None

    @property
    def pull(self):
        return self

    def check(self):
        if self.until(self):
            raise Cancelled

    def about(self, offer):
        self.offer = offer

    def phase(self, name):
        self.phases.append(name)
        self.check()

    def part(self, done, total):
        self.parts.append((self.phases[-1], done, total))
        self.check()

    def note(self, text):
        self.notes.append(text)

    say = note

    def begin(self, order):
        self.order = order
        self.check()

    def advance(self, file, count):
        self.came += count
        self.check()

    def finish(self, file):
        self.check()


PHASES = ["import", "header", "tokenizer", "device", "weights", "cache", "compile"]


@pytest.mark.parametrize("phase", PHASES)
def test_loading_can_be_cancelled_in_any_phase_and_leaves_nothing(phase):
    connect_or_load({**FLAGS, "model": "demo"}, observer=RecordingWatch()).close()
    before = {thread.name for thread in threading.enumerate()}
    told = RecordingWatch(lambda told: told.phases[-1:] == [phase])
    with pytest.raises(Cancelled):
        connect_or_load({**FLAGS, "model": "demo"}, observer=told)
    assert told.phases[-1] == phase
    assert {thread.name for thread in threading.enumerate()} <= before
    connect_or_load({**FLAGS, "model": "demo"}, observer=RecordingWatch()).close()


def layers():
    return [thing for thing in gc.get_objects() if type(thing).__name__ == "Layer"]


def test_weights_that_were_read_are_let_go_when_loading_is_interrupted():
    made, before = [], {id(layer) for layer in layers()}  # of models of other tests

    def half(told):
        if told.parts and told.parts[-1][1] > told.parts[-1][2] / 2:
            made.extend(weakref.ref(layer) for layer in layers() if id(layer) not in before)
            return True
        return False

    with pytest.raises(Cancelled):
        connect_or_load({**FLAGS, "model": "demo"}, observer=RecordingWatch(half))
    gc.collect()
    assert made
    assert not [reference for reference in made if reference() is not None]


def stored_bytes(path):
    """Bytes of tensors, without the header, whose length is in the first 8 bytes."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def test_progress_covers_all_weight_bytes():
    told = RecordingWatch()
    with connect_or_load({**FLAGS, "model": "demo"}, observer=told):
        done = [done for phase, done, _ in told.parts if phase == "weights"]
        [total] = {total for phase, _, total in told.parts if phase == "weights"}
        assert done == sorted(done)
        assert done[0] == 0
        assert done[-1] == total
        assert total == stored_bytes(DEMO / "model.safetensors")  # in memory they may be wider
    assert list(dict.fromkeys(told.phases)) == PHASES


def test_a_cancelled_pull_resumes(hub, cache):
    hub.add("org/tiny", DEMO)
    hub.rate = 20_000_000
    with pytest.raises(Cancelled):
        connect_or_load(
            {**FLAGS, "model": "org/tiny"}, observer=RecordingWatch(lambda told: told.came > 2_000_000)
        )
    assert list(cache.rglob(f"*{PARTIAL_SUFFIX}"))
    again = RecordingWatch()
    connect_or_load({**FLAGS, "model": "org/tiny"}, observer=again).close()
    assert 0 < again.order.missing_bytes < again.order.total_bytes - 1_000_000
    assert again.came == again.order.missing_bytes
    assert again.offer.bytes == again.order.total_bytes
    assert again.offer.fits


def test_cancelled_quantization_resumes(home):
    flags = {**FLAGS, "model": str(shared("TinyStories-656K-hf")), "quant": "int8"}
    with pytest.raises(Cancelled):
        connect_or_load(flags, observer=RecordingWatch(lambda told: told.parts[-1:] and told.parts[-1][1] == 2))
    [left] = list_artefacts(home)
    assert not left.complete
    again = RecordingWatch()
    connect_or_load(flags, observer=again).close()
    [left] = list_artefacts(home)
    assert left.complete
    assert "the result is cached for later runs" in again.notes[0]
    assert again.phases[0] == "quantize"
    assert again.parts[-1][0] == "weights"


def test_a_wrong_name_is_reported_before_anything_is_loaded():
    told = RecordingWatch()
    with pytest.raises(ModelNotFound):
        connect_or_load({**FLAGS, "model": "qwen3:0.6"}, observer=told)
    assert not told.phases


def test_the_flags_of_the_command_count_for_each_model_that_is_opened():
    with this_machine(context=64, dtype="float32").open("demo", RecordingWatch()) as model:
        assert (model.context, model.dtype) == (64, "float32")


def test_a_slow_server_is_waited_for_and_its_model_not_loaded_again(monkeypatch):
    """It accepts connections at once, but answers later than the connection timeout."""
    monkeypatch.setattr(client_server, "CONNECT_TIMEOUT_S", 0.2)
    reply = b'{"error": {"kind": "ModelNotFound", "message": "not loaded"}}'
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("LOCALLLM_HOST", f"127.0.0.1:{listener.getsockname()[1]}")

        def answer():
            connected = listener.accept()[0]
            with connected:
                connected.recv(2**16)
                time.sleep(0.6)
                connected.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply)

        thread = threading.Thread(target=answer)
        thread.start()
        notes = []
        assert connect_to_server({**FLAGS, "model": "demo", "local": False, "verbose": True}, notes.append) is None
        thread.join()
    assert notes == ["note: not loaded; loading the model in this process"]


def test_a_server_that_accepts_and_never_answers_is_an_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("LOCALLLM_HOST", f"127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(client_model, "REPLY_TIMEOUT_S", 0.3)
        with pytest.raises(ServerTooSlow, match=r"did not answer within 0\.3 s; try again, or .* `run --local`"):
            connect_or_load({**FLAGS, "model": "demo", "local": False})


def test_without_a_server_the_model_is_loaded_here(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("LOCALLLM_HOST", f"127.0.0.1:{listener.getsockname()[1]}")
    assert connect_to_server({**FLAGS, "model": "demo", "local": False}) is None
