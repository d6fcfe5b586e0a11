"""Measures work on a device: with its own events, after a warm-up, as medians."""

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]


def finished(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(work: Work, device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    """Return the median seconds of one run."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    with torch.cuda.device(device):
        for start, end in events:
            start.record()
            work()
            end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def capture(work: Work, device: torch.device) -> Work:
    """Capture the work as a CUDA graph, so that its time excludes launches. On a CPU, return it unchanged."""
    if device.type != "cuda":
        return work
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and allocates workspaces before the capture
            for _ in range(3):
                work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def interleaved_seconds(
    works: dict[str, Work], device: torch.device, rounds: int = 5, repeats: int = 10
) -> dict[str, float]:
    """Return the median seconds of each work. They alternate, so that a changing clock affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work, device, repeats, warm_up=1))
    return {name: statistics.median(of_name) for name, of_name in times.items()}
