"""The result of `--quant` is reused for the same source weights only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import localllm
from localllm.checkpoint.header import read_header
from localllm.errors import ModelNotFound, UsageError
from localllm.quantize.quantizer import find_or_quantize
from localllm.quantize.source import source_identity
from localllm.quantize.store import artefact_lock, artefact_path, find_artefact, find_artefacts, list_artefacts
from localllm.settings import Settings
from tests.hub.downloaded import download
from tests.shared import shared
from tests.tiny import make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(
        tmp_path / "tiny", "Llama", hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16
    )
    return tmp_path / "tiny"


def test_it_is_made_once_and_reused(model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    home = tmp_path / "home"
    assert find_artefact(home, model, "int4") is None
    made = find_or_quantize(read_header(model), "int4", home, lambda part, done, count: told.append(part))
    assert told[0] == "tables" and "layers.2" in told
    told.clear()
    again = find_or_quantize(read_header(model), "int4", home, lambda part, done, count: told.append(part))
    assert (again, told, find_artefact(home, model, "int4")) == (made, [], made)
    assert find_artefact(home, model, "int8") is None


def test_weights_that_have_changed_have_none_and_the_old_one_is_still_listed(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    find_or_quantize(read_header(model), "int8", home)
    os.utime(model / "model.safetensors", ns=(0, 0))
    assert find_artefact(home, model, "int8") is None
    find_or_quantize(read_header(model), "int8", home)
    assert [(one.source, one.complete) for one in list_artefacts(home)] == [(str(model.resolve()), True)] * 2
    freed = sum(one.remove() for one in find_artefacts(home, str(model.resolve()), "int8"))
    assert freed > 100_000 and not list(list_artefacts(home))
    with pytest.raises(ModelNotFound, match="has not been quantized to int8"):
        find_artefacts(home, str(model.resolve()), "int8")


def test_a_model_of_the_hub_is_its_commit_wherever_the_cache_lies(hub, cache, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", "Llama")
    files = {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}
    snapshot = download(hub, "org/tiny-model", {**files, "tokenizer.json": b"{}"})
    assert source_identity(snapshot) == {"repo": "org/tiny-model", "commit": snapshot.name}
    assert artefact_path(tmp_path, snapshot, "int8").parent.name == f"org--tiny-model@{snapshot.name[:12]}"


def test_an_interrupted_artefact_is_never_used(model: Path, tmp_path: Path) -> None:
    home, header = tmp_path / "home", read_header(model)

    def stop(part: str, done: int, count: int) -> None:
        if part == "layers.1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_or_quantize(header, "int4", home, stop)
    assert find_artefact(home, model, "int4") is None
    [left] = list_artefacts(home)
    assert (left.quant, left.complete, left.path.name) == ("int4", False, "int4.partial")
    find_or_quantize(header, "int4", home)
    [whole] = list_artefacts(home)
    assert whole.complete and whole.path == find_artefact(home, model, "int4")


@pytest.mark.slow
def test_a_second_process_waits_and_reuses_the_result(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = f"""
from pathlib import Path
from localllm.checkpoint.header import read_header
from localllm.quantize.quantizer import find_or_quantize
print("begin", flush=True)
find_or_quantize(read_header(Path({str(model)!r})), "int4", Path({str(home)!r}), lambda *_: print("made"), print)
"""
    with artefact_lock(artefact_path(home, model, "int4")):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "begin\n"
        assert "another process is quantizing" in process.stdout.readline()
        with (
            pytest.raises(UsageError, match="another process is writing"),
            artefact_lock(artefact_path(home, model, "int4")),
        ):
            pass
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "made" in out
    assert find_artefact(home, model, "int4")


def test_load_runs_it_and_refuses_quantized_sources(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "home", "cpu", "auto", 1)
    source = shared("TinyStories-656K-hf")
    with (
        localllm.load(source, settings=settings) as exact,
        localllm.load(source, quant="int8", settings=settings) as small,
    ):
        ids = exact.tokenizer.encode("Once upon a time, there was a")
        reference = exact.logits(ids)
        assert (small.logits(ids) - reference).abs().mean() < reference.abs().mean() / 20
        assert small.name == "TinyStories-656K-hf in INT8"
        assert small.path == find_artefact(settings.home, source, "int8")
        assert not torch.equal(small.logits(ids), reference)
    for quantized in ("demo", small.path, shared("stories260K-f32.gguf")):
        with pytest.raises(UsageError, match="leave out --quant"):
            localllm.load(quantized, quant="int8", settings=settings)
    with pytest.raises(UsageError, match=r"there is no quantization 'int3'; use one of int8, int4$"):
        localllm.load(source, quant="int3", settings=settings)
