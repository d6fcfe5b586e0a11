"""The capabilities of devices: memory available to a model, bandwidth and compute rate.

The catalogue `hardware.toml` contains what vendors publish; what this machine reaches is measured in `measure.py`.
Imports no torch, and detects nothing.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.errors import UsageError

# Minimum for the Triton kernels: older GPUs have no products of bfloat16, and would dequantize all weights in
# every step.
MIN_GPU_ARCH = 80  # of NVIDIA
RESERVED_BYTES = 500_000_000  # of a GPU: the CUDA context and workspaces of libraries
MAX_COUNT = 64  # devices of a machine
PCIE_BYTES_PER_S = 32e9  # in one direction over 16 lanes of PCIe 4.0
IGNORED_IN_NAMES = re.compile(r"nvidia|geforce|tesla|rtx|(?<=\d) ?gb\b|[^a-z0-9]+")  # optional in names
# Operations of dense 16-bit products, summed in 32 bits, per cycle and multiprocessor. Workstation and data centre
# GPUs of sm_86, 89 and 120 have twice as many: `flops_per_cycle` in the catalogue.
FLOPS_PER_CYCLE = {80: 2048, 86: 512, 89: 512, 90: 4096, 100: 8192, 120: 512}


@dataclass(frozen=True)
class GpuCores:
    """The processors of a GPU."""

    arch: int  # 90 is sm_90
    multiprocessors: int
    clock_hz: float  # at which the published rate is reached


@dataclass(frozen=True)
class DeviceSpec:
    """A device, catalogued or measured."""

    name: str
    device_type: str
    """`cpu` or `cuda`"""

    memory_bytes: int
    """Available to a model: of a catalogued GPU, its capacity without RESERVED_BYTES"""

    bandwidth: float
    """Bytes per second that are read sequentially: the published peak, or measured"""

    flops: float
    """Operations per second of dense 16-bit matrix products, counting multiplications and additions separately"""

    measured: bool
    source: str
    """The datasheet with its year, or how it was measured"""

    cores: GpuCores | None = None
    """Cores of a catalogued GPU"""

    link: float = PCIE_BYTES_PER_S
    """Bytes per second in one direction to other devices: of its NVLink where it is catalogued, otherwise PCIe"""

    watts: float | None = None
    """Maximum power of a catalogued GPU"""

    count: int = 1
    """Number of these devices in the machine"""

    stage_bytes: tuple[int, ...] = ()
    """Bytes of the device of each pipeline stage, if they are on several machines"""

    def machine_bytes(self) -> tuple[int, ...]:
        """Return the bytes available on each device of the machine."""
        return (self.memory_bytes,) * self.count


def find_devices(text: str) -> DeviceSpec:
    """Return the devices of a machine: a name, or with their number `h100:8`. Raises UsageError."""
    name, colon, number = text.rpartition(":")
    if not colon:
        return find_device(text)
    if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= MAX_COUNT:
        raise UsageError(
            f"{number!r} is not a number of devices", f"give one from 1 to {MAX_COUNT}, such as h100:8"
        )
    return replace(find_device(name), count=int(number))


def find_device(name: str) -> DeviceSpec:
    """Return the device of a name in any spelling: `H100 SXM`, `h100`, `rtx4090`, `4090`, `NVIDIA GeForce RTX
    4090`.

    Raises UsageError with similar names if it is not in the catalogue, or too old for the kernels.
    """
    devices = _by_spelling()
    if device := devices.get(_spelling(name)):
        return device
    if old := _unsupported_by_spelling().get(_spelling(name)):
        message = f"the {old[0]} is not supported: it is sm_{old[1]}, and kernels need sm_{MIN_GPU_ARCH} or newer"
        raise UsageError(message, "use a newer GPU, or plan for a CPU with --device cpu")
    similar = difflib.get_close_matches(_spelling(name), devices, n=8, cutoff=0.6)
    names = list(dict.fromkeys(devices[spelling].name for spelling in similar))[:4]
    suggestion = f"did you mean {' or '.join(names)}?" if names else f"these are: {', '.join(device_names())}"
    raise UsageError(f"the catalogue has no device {name!r}", suggestion)


def device_names() -> list[str]:
    """Return the names of all catalogued devices, in the order of the file."""
    return list(dict.fromkeys(device.name for device in _by_spelling().values()))


@functools.cache
def _by_spelling() -> Mapping[str, DeviceSpec]:
    """Return devices by names and aliases, in the order of the file."""
    content = _catalogue()
    devices: dict[str, DeviceSpec] = {}
    for name, fields in content["devices"].items():
        arch, multiprocessors, flops = fields["arch"], fields["multiprocessors"], fields["tflops"] * 1e12
        per_cycle = fields.get("flops_per_cycle", FLOPS_PER_CYCLE[arch])
        device = DeviceSpec(
            name=name,
            device_type="cuda",
            memory_bytes=int(fields["memory_gb"] * 1e9) - RESERVED_BYTES,
            bandwidth=fields["gb_per_s"] * 1e9,
            flops=flops,
            measured=False,
            source=content["sources"][fields["source"]],
            cores=GpuCores(arch, multiprocessors, flops / multiprocessors / per_cycle),
            link=fields["nvlink_gb_per_s"] * 1e9 / 2 if "nvlink_gb_per_s" in fields else PCIE_BYTES_PER_S,
            watts=fields.get("watts"),
        )
        devices |= {_spelling(spelling): device for spelling in (name, *fields.get("aliases", ()))}
    return devices


@functools.cache
def _unsupported_by_spelling() -> Mapping[str, tuple[str, int]]:
    """Return names and architectures of GPUs that are too old, by names and aliases."""
    return {
        _spelling(spelling): (name, fields["arch"])
        for name, fields in _catalogue()["unsupported"].items()
        for spelling in (name, *fields.get("aliases", ()))
    }


def unsupported_names() -> list[str]:
    """Return the names of all GPUs that are too old, in the order of the file."""
    return list(_catalogue()["unsupported"])


@functools.cache
def _catalogue() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))


def _spelling(name: str) -> str:
    return IGNORED_IN_NAMES.sub("", name.lower())
