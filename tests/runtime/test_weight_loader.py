"""Tensors read by threads through a ring of buffers equal those of the mapped files, in any order, with any buffer
size, and with late copies; nothing is left behind."""

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.tensors import Weights
from localllm.errors import DamagedModel
from localllm.hub.resolve import resolve_model
from localllm.runtime.model import Decoder
from localllm.runtime.weight_loader import CpuCopier, PendingCopy, WeightLoader
from localllm.runtime.weight_source import WeightSource
from tests.checkpoint.quantized.test_mxfp4 import write_published
from tests.models.families import FAMILIES
from tests.shared import shared
from tests.tiny import CPU, make_checkpoint


class CopyEvent:
    """Event of a copy by another thread."""

    def __init__(self, copy: Future[None]):
        self.copy = copy

    def synchronize(self) -> None:
        self.copy.result()


class LateCopier(CpuCopier):
    """Starts copies after `send` returns, one after another, like a GPU stream."""

    def __init__(self) -> None:
        self.stream = ThreadPoolExecutor(1)

    def start_copy(self, target: Tensor, source: Tensor) -> CopyEvent:  # pyright: ignore[reportIncompatibleMethodOverride]
        def copy() -> None:
            time.sleep(0.0005)
            with torch.inference_mode():
                target.copy_(source)

        return CopyEvent(self.stream.submit(copy))

    def wait_for_copies(self, copies: Iterable[PendingCopy]) -> None:
        for each in copies:
            each.synchronize()


def models(folder: Path) -> Iterator[Path]:
    for family in ("Llama 3.x", "gpt-oss", "Qwen3-MoE"):
        make_checkpoint(folder / family, FAMILIES[family][0], **FAMILIES[family][1])
        yield folder / family
    (folder / "mxfp4").mkdir()
    write_published(folder / "mxfp4")
    yield folder / "mxfp4"
    yield resolve_model("demo").path


@contextmanager
def nothing_left() -> Iterator[None]:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def check_same(header: Header, transfer: WeightLoader, names: Iterable[str]) -> None:
    mapped = Weights(header)
    for name in names:
        entry = header.tensors[name]
        got, wanted = transfer.read(entry), mapped.read(entry)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(bytes_of(got), bytes_of(wanted))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def test_read_tensors_equal_mapped_tensors(tmp_path: Path) -> None:
    for folder in models(tmp_path):
        header = read_header(folder)
        for buffer, ahead in ((2**16, 2**29), (1000, 20_000), (999, 0)):
            with nothing_left(), WeightLoader(header.tensors, CpuCopier(), buffer, ahead) as transfer:
                check_same(header, transfer, reversed(header.tensors))
            assert transfer.nbytes == header.stored_bytes
            assert transfer.bytes_per_s > 0


@pytest.mark.parametrize("file", ["model-q4_k_m.gguf", "model-q8_0.gguf", "model-f16.gguf"])
def test_read_gguf_tensors_equal_mapped_tensors(file: str) -> None:
    header = read_header(shared(f"gguf/{file}"))
    with nothing_left(), WeightLoader(header.tensors, CpuCopier(), 5000, 10**5) as transfer:
        check_same(header, transfer, header.tensors)


def test_late_copies_hold_their_buffers_and_their_readers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    header = read_header(tmp_path)
    way = LateCopier()
    with WeightLoader(header.tensors, way, 3000, 10**5) as transfer:
        check_same(header, transfer, header.tensors)
    way.stream.shutdown()


@pytest.mark.parametrize("family", ["Llama, tied", "Gemma 3", "Mixtral", "gpt-oss"])
def test_a_loaded_model_has_the_weights_of_the_mapped_files(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, FAMILIES[family][0], **FAMILIES[family][1])
    header = read_header(tmp_path)
    config = parse_config(header.config)
    with torch.inference_mode():
        mapped = Decoder(config, WeightSource(Weights(header), CPU, torch.bfloat16), 64)
        with nothing_left(), WeightLoader(header.tensors, CpuCopier(), 4096) as transfer:
            read = Decoder(config, WeightSource(Weights(header, reader=transfer), CPU, torch.bfloat16), 64)
            transfer.check_unchanged()
    wanted = list(tensors_in(mapped))
    assert len(wanted) > 10
    for one, other in zip(wanted, tensors_in(read), strict=True):
        assert torch.equal(bytes_of(one), bytes_of(other))


def tensors_in(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        yield from itertools.chain.from_iterable(map(tensors_in, part))
    elif type(part).__module__.startswith("localllm.runtime"):
        yield from itertools.chain.from_iterable(map(tensors_in, vars(part).values()))


def test_no_more_is_read_ahead_than_may_be(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    header = read_header(tmp_path)
    largest = max(tensor.nbytes for tensor in header.tensors.values())
    with WeightLoader(header.tensors, CpuCopier(), 4096, largest) as transfer:
        for entry in header.tensors.values():
            transfer.read(entry)
            assert sum(waiting.nbytes for waiting in transfer.pending) == transfer.pending_bytes <= 2 * largest
        assert not transfer.pending


def test_tensors_are_read_ahead_in_the_order_of_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", num_hidden_layers=12)
    header = read_header(tmp_path)
    with WeightLoader(header.tensors, CpuCopier(), 4096) as transfer:
        transfer.read_ahead()
        layers = [entry.name.split(".")[2] for entry in transfer.pending if ".layers." in entry.name]
        assert list(dict.fromkeys(layers)) == [str(layer) for layer in range(12)]
        first, *_, last = (entry.name for entry in transfer.pending)
        assert first == "model.embed_tokens.weight"
        assert last in ("model.norm.weight", "lm_head.weight")  # as they lie in the file


def test_a_shortened_file_is_reported_and_nothing_leaks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    header = read_header(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with (
        nothing_left(),
        pytest.raises(DamagedModel, match=r"model\.safetensors is damaged: it ends after \d+ bytes, inside '.*'"),
    ):
        decode(header, WeightLoader(header.tensors, CpuCopier(), 4096))


def test_a_file_changed_while_reading_is_reported(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    header = read_header(tmp_path)
    file = tmp_path / "model.safetensors"
    with WeightLoader(header.tensors, CpuCopier()) as transfer:
        transfer.read(next(iter(header.tensors.values())))
        transfer.check_unchanged()
        with file.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"x")
        os.utime(file, ns=(1, 1))
        with pytest.raises(DamagedModel, match="it was modified while it was being read"):
            transfer.check_unchanged()


def test_a_removed_file_is_reported(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    header = read_header(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with nothing_left(), pytest.raises(DamagedModel, match="No such file"):
        decode(header, WeightLoader(header.tensors, CpuCopier()))


def test_nan_weights_give_the_same_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    header = read_header(tmp_path)
    said = []
    with pytest.raises(DamagedModel) as mapped:
        Decoder(parse_config(header.config), WeightSource(Weights(header), CPU, torch.float32), 64)
    said.append(str(mapped.value))
    with nothing_left(), pytest.raises(DamagedModel) as read:
        decode(header, WeightLoader(header.tensors, CpuCopier()))
    assert [str(read.value)] == said


def decode(header: Header, transfer: WeightLoader) -> None:
    with transfer:
        Decoder(
            parse_config(header.config), WeightSource(Weights(header, reader=transfer), CPU, torch.float32), 64
        )
