"""Times of work on a device: by its own events, after a warm-up, as medians."""

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]


def finished(device: torch.device) -> float:
    """Waits for the device -> the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(work: Work, device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    """The median of one run."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    with torch.cuda.device(device):
        for start, end in marks:
            start.record()
            work()
            end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def captured(work: Work, device: torch.device) -> Work:
    """The same work as a CUDA graph, so that the host's launches are not what is timed; on a CPU as it is."""
    if device.type != "cuda":
        return work
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # kernels are compiled and workspaces made before the capture
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    return graph.replay


def in_turns(works: dict[str, Work], device: torch.device, rounds: int = 5, repeats: int = 10) -> dict[str, float]:
    """The median seconds of each; they take turns, so that a clock that changes changes for all."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(seconds(work, device, repeats, warm_up=1))
    return {name: statistics.median(times) for name, times in found.items()}
