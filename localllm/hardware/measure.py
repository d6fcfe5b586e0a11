"""Measures once how fast this machine copies, reads and multiplies, in less than a second, and stores the results.

Independent of models. torch is imported inside functions, like in `device.py`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import DamagedModel
from localllm.files import read_json, write_atomic
from localllm.hardware.catalog import DeviceSpec
from localllm.hardware.device import (
    device_count,
    device_name,
    dtype_name,
    free_bytes,
    resolve_device,
    resolve_dtype,
    usable_cores,
)
from localllm.settings import Settings

if TYPE_CHECKING:
    import torch

COLUMNS = 4096  # of a matrix, as in an 8B model
MATRIX_ROWS = {"cpu": 4096, "cuda": 32768}  # on a GPU, enough to make launch overhead negligible
BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}  # several times the size of caches (docs/hardware.md)
PREFILL_ROWS = {"cpu": 512, "cuda": 8192}  # rows of the other factor, as in a prefill step
REPEATS = 5  # whose median counts, after one warm-up
MAX_DURATION_S = 0.1  # fewer repeats suffice on a slow machine
MIN_CPU_SHARE = 0.9  # below this share of the cores, rates are those of a busy machine: noted, not stored
RATES_FILE = "rates.json"  # in the home folder
MAX_SETUPS = 64  # in the file; the oldest are dropped

Workload = Callable[[], object]
Clock = Callable[[Workload], float]  # returns the duration in seconds


@dataclass(frozen=True)
class RateSetup:
    """The properties that rates depend on; only rates with the same setup are reused."""

    device: str  # as reported by the device
    dtype: str
    cores: float | None  # usable ones; None on a GPU
    threads: int | None
    torch: str  # its version

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> RateSetup:
        import torch

        cpu = device.type == "cpu"
        cores, threads = (usable_cores(), torch.get_num_threads()) if cpu else (None, None)
        return cls(device_name(device), dtype_name(dtype), cores, threads, str(torch.__version__))


@dataclass(frozen=True)
class Rates:
    copy: float
    """Bytes per second that a copy reads and writes"""

    read: float
    """Bytes of weights per second in matrix products with one row, as in decoding"""

    flops: float
    """Operations per second in products with many rows, counting multiplications and additions separately"""

    share: float
    """Share of the threads' possible processor time that they got: 1 on a quiet machine, and on a GPU"""

    @property
    def from_busy_machine(self) -> bool:
        """Whether other programs kept the machine too busy for these rates to be stored."""
        return self.share < MIN_CPU_SHARE


def measure_this_machine(
    device: str = "auto",
    dtype: str = "auto",
    settings: Settings | None = None,
    *,
    remeasure: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> DeviceSpec:
    """Return a device of this machine with its measured rates and the memory that is free now.

    device, dtype: as for `resolve_device` and `resolve_dtype`; `auto` is what a bfloat16 model runs with
    remeasure: measure even if rates are stored
    note: receives a line if rates are not stored, or stored ones not used
    Raises NoSuchDevice and UsageError like those functions.
    """
    settings = settings or Settings.from_environment()
    target = resolve_device(settings.device if device == "auto" else device)
    torch_dtype = resolve_dtype(settings.dtype if dtype == "auto" else dtype, "BF16", target)
    rates = device_rates(target, torch_dtype, settings, remeasure=remeasure, note=note)
    return DeviceSpec(
        name=device_name(target),
        device_type=target.type,
        memory_bytes=free_bytes(target),
        bandwidth=rates.read,
        flops=rates.flops,
        measured=True,
        source=f"measured here in {dtype_name(torch_dtype)}",
        count=device_count(target),
    )


def device_rates(
    device: torch.device,
    dtype: torch.dtype,
    settings: Settings,
    *,
    remeasure: bool,
    note: Callable[[str], None],
) -> Rates:
    """Return the stored rates of a device, or measure and store them. See `measure_this_machine`."""
    import torch

    file, threads_before = settings.home / RATES_FILE, torch.get_num_threads()
    torch.set_num_threads(settings.threads or threads_before)
    try:
        setup = RateSetup.of(device, dtype)
        stored = _read(file, note)
        if setup in stored and not remeasure:
            return stored[setup]
        is_small = not can_measure(device)
        rates = measure(device, dtype)
        if is_small:
            note("note: so little memory is free that caches may have been measured; the result is not saved")
        elif rates.from_busy_machine:
            busy = f"other programs kept {1 - rates.share:.0%} of the cores busy"
            note(f"note: {busy}, so the measurement is not saved")
        else:
            stored.pop(setup, None)
            _write(file, stored | {setup: rates}, note)
        return rates
    finally:
        torch.set_num_threads(threads_before)


def stored_rates(device: torch.device, dtype: torch.dtype, settings: Settings) -> Rates | None:
    """Return the rates that `device_rates` stored; None if there are none."""
    setup = RateSetup.of(device, dtype)
    if setup.threads is not None and settings.threads:
        setup = replace(setup, threads=settings.threads)
    return _read(settings.home / RATES_FILE, lambda text: None).get(setup)


def buffer_bytes(device: torch.device) -> int:
    """Return the size of the buffer to stream through, smaller if little memory is free."""
    return min(BUFFER_BYTES[device.type], free_bytes(device) // 8)


def can_measure(device: torch.device) -> bool:
    """Return whether enough memory is free for rates that caches do not distort."""
    return buffer_bytes(device) >= BUFFER_BYTES[device.type] // 2


def measure(device: torch.device, dtype: torch.dtype, clock: Clock | None = None) -> Rates:
    """Measure all rates of a device with torch's current number of threads. clock: for tests"""
    import torch
    import torch.nn.functional as F

    clock = clock or device_clock(device)
    rows = MATRIX_ROWS[device.type]
    start, start_of_work = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        row = torch.rand(1, COLUMNS, device=device).to(dtype)  # varying values, because zeros heat a GPU less
        rows_input = row.repeat(PREFILL_ROWS[device.type], 1)
        count = max(1, buffer_bytes(device) // (rows * row.nbytes))
        matrices = torch.empty(count, rows, COLUMNS, dtype=dtype, device=device).copy_(row)
        source, target = matrices.flatten().chunk(2)
        copy_s = median_seconds(clock, lambda: target.copy_(source))
        read_s = median_seconds(clock, lambda: [F.linear(row, matrix) for matrix in matrices])
        multiply_s = median_seconds(clock, lambda: F.linear(rows_input, matrices[0]))
    available_s = (time.perf_counter() - start) * min(torch.get_num_threads(), usable_cores())
    used_s = min(time.process_time() - start_of_work, available_s)  # excludes other threads of the process
    return Rates(
        copy=(source.nbytes + target.nbytes) / copy_s,
        read=matrices.nbytes / read_s,
        flops=2 * rows * rows_input.numel() / multiply_s,
        share=1.0 if device.type == "cuda" else used_s / available_s,
    )


def median_seconds(clock: Clock, run: Workload) -> float:
    """Return the median duration of several runs in seconds, after one that is not counted."""
    clock(run)
    durations: list[float] = []
    while len(durations) < REPEATS and sum(durations) < MAX_DURATION_S:
        durations.append(clock(run))
    return statistics.median(durations)


def device_clock(device: torch.device) -> Clock:
    """Return a clock: the host's, or events on the stream of an asynchronous GPU."""
    import torch

    def by_host(run: Workload) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def by_events(run: Workload) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    return by_events if device.type == "cuda" else by_host


def _read(file: Path, note: Callable[[str], None]) -> dict[RateSetup, Rates]:
    """Return the stored rates; empty if the file is missing or invalid."""
    try:
        return {RateSetup(**entry["setup"]): _checked(entry["rates"]) for entry in read_json(file).get("kept", ())}
    except (DamagedModel, OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        reason = error.message if isinstance(error, DamagedModel) else f"{file} cannot be used ({error})"
        note(f"note: {reason}, so this machine will be measured again")
        return {}


def _checked(rates: dict[str, Any]) -> Rates:
    """Return the rates. Raises ValueError or TypeError unless they are positive numbers."""
    if not all(isinstance(rate, float) and 0 < rate < math.inf for rate in rates.values()):
        raise ValueError("a rate is not a positive number")
    return Rates(**rates)


def _write(file: Path, rates_by_setup: dict[RateSetup, Rates], note: Callable[[str], None]) -> None:
    latest = list(rates_by_setup.items())[-MAX_SETUPS:]
    entries = [{"setup": vars(setup), "rates": vars(rates)} for setup, rates in latest]
    try:
        write_atomic(file, json.dumps({"kept": entries}, indent=1))
    except OSError as error:
        note(f"note: the measurement could not be saved: {error}")
