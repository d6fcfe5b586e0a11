"""How fast this machine copies, reads and multiplies: measured once, in less than a second, and kept in the user's
home.

Knows nothing of models. torch is imported inside functions, as in `device.py`.
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
MATRIX_ROWS = {"cpu": 4096, "cuda": 32768}  # on a GPU as many as make it forget the time of a launch
BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}  # streamed through: several times what caches hold (docs/hardware.md)
PREFILL_ROWS = {"cpu": 512, "cuda": 8192}  # rows of the other factor, as in a step of a long prompt
REPEATS = 5  # the median of them counts, after one that warms up
MAX_DURATION_S = 0.1  # on a slow machine fewer repeats do
MIN_CPU_SHARE = 0.9  # share of the cores below which rates are those of a busy machine: noted, not kept
RATES_FILE = "rates.json"  # in the home folder
MAX_SETUPS = 64  # setups in the file, the oldest of them forgotten

Workload = Callable[[], object]
Clock = Callable[[Workload], float]  # seconds that a run takes


@dataclass(frozen=True)
class RateSetup:
    """What rates depend on; rates of another setup are not those of this one."""

    device: str  # by the name it gives itself
    dtype: str
    cores: float | None  # that may be used; None on a GPU, where the host's count does not matter
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
    """Bytes a second that a copy moves, those read and those written"""

    read: float
    """Bytes of weights a second that products of matrices with one row, as in decoding, get through"""

    flops: float
    """Operations a second of products of matrices with many rows, a multiplication and an addition being two"""

    share: float
    """Of the processor time that its threads could have had, what they got: 1 on a quiet machine, and on a GPU"""


def measure_this_machine(
    device: str = "auto",
    dtype: str = "auto",
    settings: Settings | None = None,
    *,
    remeasure: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> DeviceSpec:
    """A device of this machine, as fast as it was measured to be, and with the memory that is free now.

    device, dtype: as `resolve_device` and `resolve_dtype` take them, `auto` being what runs a bfloat16 model
    remeasure: measure again what is known already
    note: takes a line for the person where rates are not kept, or those kept not used
    Raises NoSuchDevice and UsageError as those two do.
    """
    settings = settings or Settings.from_environment()
    place = resolve_device(settings.device if device == "auto" else device)
    kind = resolve_dtype(settings.dtype if dtype == "auto" else dtype, "BF16", place)
    rates = device_rates(place, kind, settings, remeasure=remeasure, note=note)
    return DeviceSpec(
        name=device_name(place),
        device_type=place.type,
        memory_bytes=free_bytes(place),
        bandwidth=rates.read,
        flops=rates.flops,
        measured=True,
        source=f"measured here in {dtype_name(kind)}",
    )


def device_rates(
    device: torch.device,
    dtype: torch.dtype,
    settings: Settings,
    *,
    remeasure: bool,
    note: Callable[[str], None],
) -> Rates:
    """The kept rates of a device, else measured and kept; `remeasure` and `note` as in `this_machine`."""
    import torch

    file, before = settings.home / RATES_FILE, torch.get_num_threads()
    torch.set_num_threads(settings.threads or before)
    try:
        setup = RateSetup.of(device, dtype)
        kept = _read(file, note)
        if setup in kept and not remeasure:
            return kept[setup]
        small = buffer_bytes(device) < BUFFER_BYTES[device.type] // 2
        rates = measure(device, dtype)
        if small:
            note("note: so little memory is free that caches may have been measured, which is not kept")
        elif rates.share < MIN_CPU_SHARE:
            busy = f"other programs kept {1 - rates.share:.0%} of the cores busy"
            note(f"note: {busy}, so what was measured is not kept")
        else:
            kept.pop(setup, None)
            _write(file, kept | {setup: rates}, note)
        return rates
    finally:
        torch.set_num_threads(before)


def stored_rates(device: torch.device, dtype: torch.dtype, settings: Settings) -> Rates | None:
    """Those of a device as `rates_of` keeps them; None where it was not measured so far."""
    setup = RateSetup.of(device, dtype)
    if setup.threads is not None and settings.threads:
        setup = replace(setup, threads=settings.threads)
    return _read(settings.home / RATES_FILE, lambda text: None).get(setup)


def buffer_bytes(device: torch.device) -> int:
    """What is streamed through: little of a memory that is nearly full."""
    return min(BUFFER_BYTES[device.type], free_bytes(device) // 8)


def measure(device: torch.device, dtype: torch.dtype, clock: Clock | None = None) -> Rates:
    """All rates of a device with as many threads as torch uses now; `clock` is for tests."""
    import torch
    import torch.nn.functional as F

    clock = clock or device_clock(device)
    rows = MATRIX_ROWS[device.type]
    start, start_of_work = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        one = torch.rand(1, COLUMNS, device=device).to(dtype)  # numbers that vary: zeros heat a GPU less
        many = one.repeat(PREFILL_ROWS[device.type], 1)
        count = max(1, buffer_bytes(device) // (rows * one.nbytes))
        matrices = torch.empty(count, rows, COLUMNS, dtype=dtype, device=device).copy_(one)
        source, target = matrices.flatten().chunk(2)
        copy_s = median_seconds(clock, lambda: target.copy_(source))
        read_s = median_seconds(clock, lambda: [F.linear(one, matrix) for matrix in matrices])
        multiply_s = median_seconds(clock, lambda: F.linear(many, matrices[0]))
    possible = (time.perf_counter() - start) * min(torch.get_num_threads(), usable_cores())
    taken = min(time.process_time() - start_of_work, possible)  # other threads of the process may work too
    return Rates(
        copy=(source.nbytes + target.nbytes) / copy_s,
        read=matrices.nbytes / read_s,
        flops=2 * rows * many.numel() / multiply_s,
        share=1.0 if device.type == "cuda" else taken / possible,
    )


def median_seconds(clock: Clock, run: Workload) -> float:
    """Seconds of a run: the median of several, after one that does not count."""
    clock(run)
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < MAX_DURATION_S:
        taken.append(clock(run))
    return statistics.median(taken)


def device_clock(device: torch.device) -> Clock:
    """The host's clock, or events on the stream of a GPU, which works on by itself."""
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
    """What is kept; nothing where the file is not there, or cannot be used."""
    try:
        return {RateSetup(**entry["setup"]): _checked(entry["rates"]) for entry in read_json(file).get("kept", ())}
    except (DamagedModel, OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        why = error.message if isinstance(error, DamagedModel) else f"{file} cannot be used ({error})"
        note(f"note: {why}, so this machine is measured again")
        return {}


def _checked(rates: dict[str, Any]) -> Rates:
    """Raises ValueError or TypeError unless they are positive numbers."""
    if not all(isinstance(rate, float) and 0 < rate < math.inf for rate in rates.values()):
        raise ValueError("a rate is no positive number")
    return Rates(**rates)


def _write(file: Path, kept: dict[RateSetup, Rates], note: Callable[[str], None]) -> None:
    newest = list(kept.items())[-MAX_SETUPS:]
    entries = [{"setup": vars(setup), "rates": vars(rates)} for setup, rates in newest]
    try:
        write_atomic(file, json.dumps({"kept": entries}, indent=1))
    except OSError as error:
        note(f"note: what was measured is not kept: {error}")
