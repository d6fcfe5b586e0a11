"""Planted faults: each kind of error that the lagging device is for is found, in the product and by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from localllm.checkpoint.header import read_header
from localllm.runtime import batch
from localllm.runtime.cuda_graphs import CudaGraphs, GraphKey
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.tensors import KVCache
from localllm.runtime.layers.rope import Rope
from localllm.runtime.runner import Runner
from localllm.runtime.step import Readback
from localllm.runtime.weight_loader import CudaCopier, PendingCopy, WeightLoader
from tests.lagging.device import CUDA, LaggingDevice
from tests.lagging.kernels import use_references
from tests.lagging.streams import DeviceFault, Event, Graph, Stream
from tests.models.families import FAMILIES
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

PROMPTS = (list(range(3, 20)), [7, 8, 9])


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lagging")
    kind, changes = FAMILIES["Llama 3.x"]
    make_checkpoint(path, kind, **changes)
    return path


@contextmanager
def fault(message: str) -> Iterator[None]:
    with pytest.raises(DeviceFault, match=message):
        yield


def answer(
    folder: Path, length: int = 6, change: Callable[[Engine], object] = lambda engine: None, **kw: Any
) -> None:
    """Let an engine on a lagging device answer two prompts. change: what is planted in it"""
    with LaggingDevice():
        engine = make_engine(folder, device=CUDA, **kw)
        change(engine)
        run(engine, [sequence(prompt, temperature=0, max_tokens=length, ignore_eos=True) for prompt in PROMPTS])


def test_nothing_is_found_where_nothing_is_planted(folder: Path) -> None:
    answer(folder)


# Pinned memory


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_staging_buffer_that_is_overwritten_before_its_copy_ran(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """Found at any timing: also where the copy happens to have run."""
    buffers: dict[tuple[object, ...], Tensor] = {}

    def reuse_buffer(values: Tensor, device: torch.device) -> Tensor:
        key = (values.shape, values.dtype)
        if key not in buffers:
            buffers[key] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return buffers[key].copy_(values).to(device, non_blocking=True)

    monkeypatch.setattr(batch, "upload_tensor", reuse_buffer)
    with fault("the host writes pinned memory"), LaggingDevice(seed):
        engine = make_engine(folder, device=CUDA)
        run(engine, [sequence(prompt, temperature=0, max_tokens=4) for prompt in PROMPTS])


def test_a_staging_buffer_that_numpy_overwrites() -> None:
    with fault("overwritten before the copy ran"), LaggingDevice():
        staging = torch.zeros(4, pin_memory=True)
        array = staging.numpy()
        array[:] = 1
        sent = staging.to(CUDA, non_blocking=True)
        array[:] = 2
        sent.tolist()


def test_a_copy_that_is_known_to_be_complete_frees_its_buffer() -> None:
    with LaggingDevice():
        staging = torch.zeros(4, pin_memory=True)
        for value in range(3):
            staging.fill_(value)
            sent, copied = staging.to(CUDA, non_blocking=True), torch.cuda.Event()
            copied.record()
            copied.synchronize()
            assert sent.tolist() == [value] * 4


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_result_that_is_read_before_its_event(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    monkeypatch.setattr(Readback, "wait", lambda self: self.results)
    with fault("the host reads pinned memory"), LaggingDevice(seed):
        run(make_engine(folder, device=CUDA), [sequence(PROMPTS[0], temperature=0)])


def test_a_copy_to_the_host_that_is_not_waited_for() -> None:
    with fault("the host reads pinned memory"), LaggingDevice():
        torch.ones(3, device=CUDA).to("cpu", non_blocking=True).add(1)


def test_a_late_value_is_not_there_before_its_time() -> None:
    """The device really lags, whatever the checks find."""
    with LaggingDevice() as device:
        target = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        bare = target.numpy()
        target.copy_(torch.arange(3, device=CUDA), non_blocking=True)
        assert list(bare) == [0, 0, 0]
        device.synchronize()
        assert list(bare) == [0, 1, 2]


# Streams, and memory that is reused


def test_blocks_that_are_copied_on_another_stream_without_a_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is freed and written by the next step, while the copy to the host tier is queued."""
    apply_copies, side = Runner.apply_copies, list[Stream]()

    def elsewhere(self: Runner, copies: Any) -> None:
        side.append(torch.cuda.Stream(CUDA))
        with torch.cuda.stream(side[0]):
            apply_copies(self, copies)

    monkeypatch.setattr(Runner, "apply_copies", elsewhere)
    with fault("without an order"):
        answer_in_turns(folder)


def answer_in_turns(folder: Path) -> list[list[int]]:
    """Answer prompts that only fit one after another, with a host tier."""
    with LaggingDevice():
        engine = make_engine(folder, device=CUDA, blocks=6, aside=8)
        prompts = [[*range(first, first + 20)] for first in (3, 40, 3, 80, 40)]
        answers = []
        for prompt in prompts:
            [events] = run(engine, [sequence(prompt, temperature=0, max_tokens=6)]).values()
            answers.append(tokens(events))
        assert engine.pool.evicted_count > 0
    return answers


def test_blocks_that_move_between_tiers_keep_their_order(folder: Path) -> None:
    plain = make_engine(folder)
    prompts = [[*range(first, first + 20)] for first in (3, 40, 3, 80, 40)]
    expected = [tokens(*run(plain, [sequence(p, temperature=0, max_tokens=6)]).values()) for p in prompts]
    assert answer_in_turns(folder) == expected


def test_a_graph_that_is_launched_on_another_stream_without_a_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Graph.replay

    def elsewhere(self: Graph) -> None:
        with torch.cuda.stream(self.stream):
            replay(self)

    monkeypatch.setattr(Graph, "replay", elsewhere)
    with fault("without an order"):
        answer(folder)


def test_memory_that_is_freed_while_another_stream_reads_it() -> None:
    with fault("the next owner of block .* without an order"), LaggingDevice():
        side = torch.cuda.Stream(CUDA)
        x = torch.ones(8, device=CUDA)
        side.wait_stream(torch.cuda.current_stream(CUDA))
        with torch.cuda.stream(side):
            y = x * 2
        del x
        torch.zeros(8, device=CUDA)
        y.tolist()


def test_freed_memory_is_reused_at_once_and_late_work_would_read_it() -> None:
    """Without the check, the values are wrong: the model of the allocator is adversarial."""
    with LaggingDevice() as device:
        side, main = torch.cuda.Stream(CUDA), torch.cuda.current_stream(CUDA)
        x = torch.ones(8, device=CUDA)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 2
        used = side.record_event()
        address = x.on_cpu().data_ptr()  # pyright: ignore[reportAttributeAccessIssue]
        main.wait_event(used)  # the remedy
        del x
        other = torch.zeros(8, device=CUDA)
        assert other.on_cpu().data_ptr() == address  # pyright: ignore[reportAttributeAccessIssue]
        assert device.allocator.reused == 1
        side.synchronize()
        with torch.cuda.stream(side):
            assert y.tolist() == [2] * 8


def multiply_elsewhere(waits: bool) -> list[float]:
    with LaggingDevice():
        side = torch.cuda.Stream(CUDA)
        x = torch.ones(2, device=CUDA)
        if waits:
            side.wait_stream(torch.cuda.current_stream(CUDA))
        with torch.cuda.stream(side):
            x.mul_(2)
        if waits:
            torch.cuda.current_stream(CUDA).wait_stream(side)
        return x.tolist()


def test_work_on_another_stream_without_a_wait() -> None:
    assert multiply_elsewhere(waits=True) == [2, 2]
    with fault("without an order"):
        multiply_elsewhere(waits=False)


# Loading weights


class NoWait(CudaCopier):
    """Lets the model use tensors while they are copied."""

    def wait_for_copies(self, copies: Any) -> None:
        list(copies)


class ReuseAtOnce(CudaCopier):
    """Copies to memory that earlier work may still use."""

    def device_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


class NotSynchronized(CudaCopier):
    """Lets the readers fill a buffer while its last copy is queued."""

    def start_copy(self, target: Tensor, source: Tensor) -> Event:
        event = super().start_copy(target, source)
        event.synchronize = lambda: None
        return event


def load_twice(folder: Path, copier: type[CudaCopier]) -> list[Tensor]:
    """Load a checkpoint's tensors with small buffers, computing with each and freeing it."""
    header = read_header(folder)
    with LaggingDevice():
        sums = []
        with WeightLoader(header.tensors, copier(CUDA), buffer_bytes=4096, read_ahead_bytes=50_000) as loader:
            for _ in range(2):
                for entry in header.tensors.values():
                    sums.append(loader.read(entry).double().sum())
        torch.cuda.synchronize()
        return [torch.tensor(s.item()) for s in sums]


def test_weights_are_loaded_in_order(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    names = [entry.name for entry in read_header(folder).tensors.values()]
    expected = [stored[name].double().sum() for name in names] * 2
    torch.testing.assert_close(load_twice(folder, CudaCopier), [s.float() for s in expected], check_dtype=False)


@pytest.mark.parametrize(
    ("copier", "message"),
    [
        (NoWait, "without an order"),
        (ReuseAtOnce, "without an order"),
        (NotSynchronized, "the host writes pinned memory|overwritten before the copy ran"),
    ],
)
def test_weights_that_are_loaded_without_an_order(folder: Path, copier: type[CudaCopier], message: str) -> None:
    with fault(message):
        load_twice(folder, copier)


# Captures


def in_capture(monkeypatch: pytest.MonkeyPatch, plant: Callable[[CudaGraphs], object]) -> None:
    """Do something within each captured step, and before."""
    make_batch = CudaGraphs.batch

    def planted(self: CudaGraphs, key: GraphKey, columns: Any) -> Any:
        plant(self)
        return make_batch(self, key, columns)

    monkeypatch.setattr(CudaGraphs, "batch", planted)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda graphs: graphs.inputs[0, 0].item(), "reading a value .* not permitted while a graph is captured"),
        (lambda graphs: bool((graphs.inputs > 0).any()), "reading a value .* not permitted"),
        (lambda graphs: graphs.inputs.tolist(), "copy to the host is not permitted"),
        (lambda graphs: torch.ones(2).to(CUDA, non_blocking=True), "pageable copy to the device is not permitted"),
        (lambda graphs: torch.tensor([1, 2], device=CUDA), "pageable copy to the device is not permitted"),
        (lambda graphs: graphs.inputs[torch.tensor([0])], "pageable copy to the device is not permitted"),
        (lambda graphs: graphs.inputs.nonzero(), "nonzero is not permitted"),
        (lambda graphs: torch.cuda.synchronize(), "synchronize is not permitted"),
        (lambda graphs: torch.cuda.Event().query(), "query is not permitted"),
    ],
    ids=["item", "bool", "tolist", "pageable", "torch.tensor", "host index", "nonzero", "synchronize", "query"],
)
def test_calls_that_wait_in_a_capture(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[CudaGraphs], object], message: str
) -> None:
    in_capture(monkeypatch, plant)
    with fault(message):  # although the engine goes on without graphs
        answer(folder, length=3)


def test_a_graph_that_uses_memory_which_has_been_freed(folder: Path) -> None:
    def plant(engine: Engine) -> None:
        run(engine, [sequence(PROMPTS[0], temperature=0, max_tokens=3)])
        assert engine.runner.graphs and engine.runner.graphs.captured
        engine.runner.graphs.tables = engine.runner.graphs.tables.clone()  # those of the graph are freed
        run(engine, [sequence(PROMPTS[0], temperature=0, max_tokens=3)])

    with fault("freed after its capture"):
        answer(folder, change=plant)


def test_a_graph_of_a_pool_that_ended_with_its_last_graph() -> None:
    """torch 2.11 has an assertion of its allocator fail, and leaves the device's random generator capturing."""
    with LaggingDevice():
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool)
            graph.capture_end()
            del graph
            with fault("has ended with its last graph"):
                torch.cuda.CUDAGraph().capture_begin(pool)


def test_steps_are_captured_again_after_all_graphs_were_released(folder: Path) -> None:
    def release(engine: Engine) -> None:
        run(engine, [sequence(PROMPTS[0], temperature=0, max_tokens=3)])
        assert engine.runner.graphs and engine.runner.graphs.captured
        engine.runner.graphs.captured.clear()

    answer(folder, change=release)


# Devices and dtypes


def test_tensors_on_mixed_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = Rope.__init__

    def on_host(self: Rope, config: Any, max_len: int, device: torch.device) -> None:
        init(self, config, max_len, torch.device("cpu"))

    monkeypatch.setattr(Rope, "__init__", on_host)
    with fault("cuda:0 and cpu"):
        answer(folder)


def test_a_wrong_dtype(folder: Path) -> None:
    def plant(engine: Engine) -> None:
        for cache in engine.runner.paged_caches:
            assert isinstance(cache, KVCache)
            cache.k = cache.k.half()

    with fault("dtype"):
        answer(folder, change=plant)


def test_a_kernel_that_gets_tensors_of_the_host(folder: Path) -> None:
    def plant(engine: Engine) -> None:
        assert engine.runner.graphs
        engine.runner.graphs.newest_tokens = torch.zeros(16, dtype=torch.int64)

    with fault("gets tensors of the host and of the device"):
        answer(folder, change=plant)


def test_an_index_out_of_range_fails_when_it_is_computed() -> None:
    with fault("index"), LaggingDevice():
        table, index = torch.zeros(4, device=CUDA), torch.full((1,), 9, device=CUDA)
        table[index].tolist()


def test_a_fault_that_is_caught_fails_at_the_end() -> None:
    with fault("1 faults, first: .*two devices"), LaggingDevice(), pytest.raises(DeviceFault):
        _ = torch.ones(2, device=CUDA) + torch.ones(2)


assert PendingCopy  # the interface of the planted copiers
