"""Headers read from a hub equal those read from disk, and transfer little more than themselves."""

import pytest

from localllm.checkpoint import remote
from localllm.checkpoint.header import read_header
from localllm.checkpoint.remote import remote_header
from localllm.errors import DamagedModel
from localllm.hub.catalog import PACKAGE_FOLDER
from localllm.hub.names import parse_name
from localllm.hub.pull import plan_pull, pull
from tests.hub import faults
from tests.hub.models import Watcher, model_files, weights
from tests.shared import shared
from tests.tiny import make_checkpoint

DEMO = PACKAGE_FOLDER / "boxed" / "demo"


def header_of(name):
    watcher = Watcher()
    return remote_header(plan_pull(parse_name(name), watcher.say), watcher.say)


def described(header):
    tensors = {name: (t.name, t.dtype, t.shape, t.offset, t.file.name) for name, t in header.tensors.items()}
    return tensors, header.config, header.generation_config, header.stored_bytes


def test_header_of_one_file(hub, cache):
    hub.add("org/tiny", DEMO)
    assert described(header_of("org/tiny")) == described(read_header(DEMO))
    assert hub.sent("model.safetensors") <= remote.SAFETENSORS_FIRST_BYTES
    assert not cache.exists()


def test_header_of_several_files(hub, cache, tmp_path):
    make_checkpoint(tmp_path / "one", "Qwen3").save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    (tmp_path / "many" / "tokenizer.json").write_text("{}")
    hub.add("org/many", tmp_path / "many")
    assert described(header_of("org/many")) == described(read_header(tmp_path / "many"))


@pytest.mark.parametrize("first", [2**21, 1000])
def test_of_a_gguf_file_whose_header_ends_somewhere(hub, cache, monkeypatch, first):
    monkeypatch.setattr(remote, "GGUF_FIRST_BYTES", first)
    file = shared("gguf") / "model-q4_k_m.gguf"
    hub.add("org/g", {file.name: file.read_bytes() + bytes(3_000_000)})
    header = header_of("org/g")
    assert described(header) == described(read_header(file))
    assert header.gguf == read_header(file).gguf
    ends = min(tensor.offset for tensor in header.tensors.values())
    assert hub.sent(file.name) <= max(first, 2 * ends)


def test_cached_files_are_not_requested(hub, cache):
    hub.add("org/tiny", DEMO)
    watcher = Watcher()
    pull(plan_pull(parse_name("org/tiny"), watcher.say), watcher)
    before = hub.sent("resolve|cdn")
    assert described(header_of("org/tiny")) == described(read_header(DEMO))
    assert hub.sent("resolve|cdn") == before


def test_a_header_longer_than_the_first_request(hub, cache, monkeypatch):
    monkeypatch.setattr(remote, "SAFETENSORS_FIRST_BYTES", 100)
    hub.add("org/tiny", DEMO)
    assert described(header_of("org/tiny")) == described(read_header(DEMO))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header should have 0 bytes, but the file has 0"),
        (b"\xff" * 100, "its header should have"),
        (b"GGUF but no header", "its header should have"),
        (weights()[:-1], "its tensors need"),
    ],
)
def test_a_damaged_header_is_reported_as_the_hubs(hub, cache, content, message):
    hub.add("org/tiny", model_files(**{"model.safetensors": content}))
    with pytest.raises(DamagedModel, match=f"^org/tiny/model.safetensors is damaged: {message}"):
        header_of("org/tiny")


def test_a_damaged_gguf_file_costs_no_more_than_its_most(hub, cache, monkeypatch):
    monkeypatch.setattr(remote, "GGUF_FIRST_BYTES", 1000)
    monkeypatch.setattr(remote, "GGUF_MAX_BYTES", 8000)
    hub.add("org/g", {"g.gguf": b"GGUF\3\0\0\0" + b"\1" * 100_000})
    with pytest.raises(DamagedModel, match=r"org/g/g.gguf is damaged"):
        header_of("org/g")
    assert hub.sent("g.gguf") <= 8000


def test_a_damaged_config_is_rejected(hub, cache):
    hub.add("org/tiny", DEMO)
    hub.disturb(faults.flipped(3), "config.json", times=None)
    with pytest.raises(DamagedModel, match=r"config.json of org/tiny does not have the digest that the Hub"):
        header_of("org/tiny")


def test_a_config_of_absurd_size_is_not_fetched(hub, cache):
    hub.add("org/tiny", DEMO)

    def grow(entries):
        next(entry for entry in entries if entry["path"] == "config.json").update(size=2**40)

    hub.disturb(faults.edited(grow), "/tree/", times=None)
    with pytest.raises(Exception, match=r"config.json of org/tiny has \d+ bytes"):
        header_of("org/tiny")
    assert not hub.sent("/config.json")
