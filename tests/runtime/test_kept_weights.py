"""Weights that `--keep-layout` has kept: the same bits, mapped, and never a damaged or outdated file."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import localllm
from localllm.checkpoint import digest
from localllm.checkpoint.kept_layouts import kept_files, writing
from localllm.errors import UsageError
from localllm.runtime import kept_weights
from localllm.runtime.kept_weights import KeptWeightsWriter
from localllm.settings import Settings
from tests.checkpoint import published
from tests.runtime.kernels.harness import needs_compiled
from tests.shared import shared

pytestmark = needs_compiled
PARAMS = localllm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


class Loaded(NamedTuple):
    """What a load reports, and an answer."""

    tokens: list[int]
    logprobs: list[Any]
    file: Path | None
    note: str


Load = Callable[..., Loaded]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file of this test alone."""
    return Path(shutil.copy(shared("gguf/model-q8_0.gguf"), tmp_path / "model.gguf"))


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a model with a cache of this test alone, and answers."""
    settings = replace(Settings.from_environment(), cache=tmp_path / "cache")

    def load(model: Path, **options: Any) -> Loaded:
        with localllm.load(model, device="cpu", context=64, settings=settings, draft="off", **options) as llm:
            answer = llm.generate([1, 5, 9, 2], PARAMS)
            return Loaded(answer.token_ids, answer.logprobs, llm.layout_file, llm.layout_note)

    return load


def only_file(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache" / "layouts").glob("*.weights*")
    assert path.suffix == ".weights"
    return path


def flip(file: Path, offset: int) -> None:
    """Flip a bit. offset: negative ones count from the end"""
    with file.open("r+b") as stream:
        stream.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        [byte] = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 4]))


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("form", ["q4_0", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "q3_k_m", "iq4_xs"])
def test_gguf_answers_have_the_same_bits(form: str, load: Load, tmp_path: Path) -> None:
    file = shared(f"gguf/model-{form}.gguf")
    without = load(file)
    assert (without.file, without.note) == (None, "")
    first = load(file, keep_layout=True)
    path = only_file(tmp_path)
    assert first.file is None
    assert first.note.startswith(f"laid-out weights are kept in {path}")
    kept = load(file)
    assert (kept.file, kept.note) == (path, "")
    assert without[:2] == first[:2] == kept[:2]


@pytest.mark.parametrize("layout", ["awq", "gptq, desc_act", "W4A16, zero points"])
def test_answers_of_published_layouts_have_the_same_bits(layout: str, load: Load, tmp_path: Path) -> None:
    published.write(tmp_path / "model", *published.LAYOUTS[layout])
    shutil.copy(shared("stories260K/tokenizer.json"), tmp_path / "model")
    first, kept = load(tmp_path / "model", keep_layout=True), load(tmp_path / "model")
    assert kept.file == only_file(tmp_path)
    assert first[:2] == kept[:2]


def test_weights_are_mapped_read_only(model: Path, load: Load, tmp_path: Path) -> None:
    load(model, keep_layout=True)
    kept = kept_weights.KeptWeights(only_file(tmp_path))
    maps = Path("/proc/self/maps")
    if maps.exists():
        [line] = (line for line in maps.read_text().splitlines() if line.endswith(str(kept.path)))
        assert line.split()[1].startswith("r--")
    key, entries = next(iter(kept.index.weights.items()))
    weights = kept.find(key, tuple(entries[0]["shape"]))
    assert weights
    for part in weights[0].parts.values():
        begin = kept.content.data_ptr()
        assert begin <= part.data_ptr() < begin + len(kept.content)
        assert part.data_ptr() % 64 == 0
    assert kept.find(key, (7, 8)) is None
    assert kept.find("layers.99.mlp.down_proj", (7, 8)) is None


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("offset", [0, 5000, 100_000, -1, -30, -50, -2000])
def test_a_flipped_bit_is_found_and_named(offset: int, model: Path, load: Load, tmp_path: Path) -> None:
    first = load(model, keep_layout=True)
    path = only_file(tmp_path)
    flip(path, offset)
    damaged = load(model)
    assert damaged.file is None
    assert damaged.note == (
        f"{path}, the kept layout of this model, is damaged and was not used; "
        "load the model with --keep-layout to write it again"
    )
    assert damaged[:2] == first[:2]
    assert load(model, keep_layout=True).file is None
    assert load(model).file == path


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("size", [0, 10, 70_000])
def test_a_truncated_file_is_found_and_named(size: int, model: Path, load: Load, tmp_path: Path) -> None:
    load(model, keep_layout=True)
    os.truncate(only_file(tmp_path), size)
    assert "is damaged and was not used" in load(model).note


def test_a_changed_model_is_laid_out_again(model: Path, load: Load, tmp_path: Path) -> None:
    first = load(model, keep_layout=True)
    flip(model, -5)
    changed = load(model)
    assert (changed.file, changed.note) == (None, "")
    assert changed.logprobs != first.logprobs
    shutil.rmtree(tmp_path / "cache")
    load(model, keep_layout=True)
    model.rename(tmp_path / "other.gguf")
    # The kept layout of a model that has gone is removed when another is written.
    load(shared("gguf/model-q4_0.gguf"), keep_layout=True)
    assert kept_files(tmp_path / "cache", shared("gguf/model-q4_0.gguf"))[0].path == only_file(tmp_path)


def test_other_code_lays_weights_out_again(
    model: Path, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, keep_layout=True)
    before = only_file(tmp_path)
    monkeypatch.setattr(kept_weights, "layout_digest", lambda: "0" * 64)
    assert load(model).file is None
    load(model, keep_layout=True)
    assert only_file(tmp_path) != before
    assert load(model).file == only_file(tmp_path)


def test_without_kernels_nothing_is_kept_or_used(
    model: Path, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, keep_layout=True)
    monkeypatch.setattr(kept_weights, "cpu_supported", lambda: False)
    assert load(model).file is None
    assert load(model, keep_layout=True).note == "--keep-layout has no effect here: weights are not laid out"


def test_a_model_without_packed_weights(load: Load, tmp_path: Path) -> None:
    loaded = load(shared("stories260K"), keep_layout=True)
    assert loaded.note == "there is no layout to keep: no weights of this model were laid out"
    assert not list((tmp_path / "cache" / "layouts").glob("*.weights*"))


def test_a_load_without_the_flag_looks_for_no_digest(
    model: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(digest, "digest_model", refuse)
    assert load(model).note == ""


def test_only_one_process_writes(model: Path, load: Load, tmp_path: Path) -> None:
    load(model, keep_layout=True)
    path = only_file(tmp_path)
    [file] = kept_files(tmp_path / "cache", model)
    with writing(path):
        assert load(model, keep_layout=True).file == path  # it is complete
        with pytest.raises(UsageError, match="another process is writing"):
            file.remove()
        path.unlink()
        loaded = load(model, keep_layout=True)
        assert loaded.note == f"another process is writing {path}"
        assert not path.exists()
    load(model, keep_layout=True)
    size = path.stat().st_size
    mapped = kept_weights.KeptWeights(path)
    [file] = kept_files(tmp_path / "cache", model)
    assert file.remove() == size
    assert mapped.content.sum() > 0  # a process that has mapped it keeps it


def test_a_full_disk(model: Path, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=2**30)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        note = load(model, keep_layout=True).note
    assert "is not kept: the disk with" in note
    assert not list((tmp_path / "cache" / "layouts").glob("*.weights*"))
    writes = []

    def write(writer: KeptWeightsWriter, *arguments: Any) -> dict[str, Any]:
        writes.append(arguments)
        if len(writes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, *arguments)

    original = KeptWeightsWriter.write
    monkeypatch.setattr(KeptWeightsWriter, "write", write)
    loaded = load(model, keep_layout=True)
    assert loaded.note.endswith("(No space left on device)")
    assert not list((tmp_path / "cache" / "layouts").glob("*.weights*"))
    assert len(writes) == 3


def test_a_cache_that_cannot_be_written(model: Path, load: Load, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    loaded = load(model, keep_layout=True)
    assert loaded.note.startswith("laid-out weights cannot be kept in")


def test_an_interrupted_load_leaves_nothing(model: Path, load: Load, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(model, keep_layout=True, on_part=interrupt)
    assert not list((tmp_path / "cache" / "layouts").glob("*.weights*"))
    # A process that was killed leaves a part, which the next one replaces.
    load(model, keep_layout=True)
    path = only_file(tmp_path)
    path.rename(path.with_name(path.name + ".partial"))
    assert load(model).file is None
    load(model, keep_layout=True)
    assert load(model).file == only_file(tmp_path)


@pytest.mark.slow
def test_two_processes_at_once(model: Path, load: Load, tmp_path: Path) -> None:
    expected = load(model)
    command = [sys.executable, "-m", "localllm", "run", str(model), "--raw", "--keep-layout", "--quiet"]
    command += ["--temperature", "0", "--max-tokens", "8", "hi"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home")}
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    (first, _), (second, _) = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert first == second
    [path] = (tmp_path / "home" / "localllm" / "layouts").glob("*.weights*")
    (tmp_path / "cache").mkdir(exist_ok=True)
    path.parent.rename(tmp_path / "cache" / "layouts")
    kept = load(model)
    assert kept.file and kept.file.name == path.name
    assert kept[:2] == expected[:2]


def test_a_model_whose_weights_are_missing_has_none(model: Path, load: Load, tmp_path: Path) -> None:
    load(model, keep_layout=True)
    assert len(kept_files(tmp_path / "cache", model)) == 1
    (tmp_path / "empty").mkdir()
    assert kept_files(tmp_path / "cache", tmp_path / "empty") == []


def test_a_checksum_differs_for_each_page(tmp_path: Path) -> None:
    pages = torch.arange(4096 * 3, dtype=torch.int64).to(torch.uint8)
    sums = kept_weights.page_sums(pages)
    swapped = pages.view(3, 4096)[[1, 0, 2]].flatten()
    swapped[0] += 1
    assert kept_weights.checksum(sums) != kept_weights.checksum(kept_weights.page_sums(swapped))
