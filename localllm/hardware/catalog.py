"""What a device can do: how much a model may use of its memory, how fast it reads and how fast it computes. The
catalogue of `hardware.toml` holds what makers publish; what this machine reaches is measured in `measure.py`.

Imports no torch, and knows nothing of what is here.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import UsageError

RESERVED_BYTES = 500_000_000  # of a GPU: the CUDA context and the libraries' workspaces
IGNORED_IN_NAMES = re.compile(
    r"nvidia|geforce|tesla|rtx|(?<=\d) ?gb\b|[^a-z0-9]+"
)  # what a name may have or leave out


@dataclass(frozen=True)
class DeviceSpec:
    """One device, catalogued or measured."""

    name: str
    device_type: str
    """`cpu` or `cuda`"""

    memory_bytes: int
    """What a model may use: of a catalogued GPU its capacity without RESERVED_BYTES"""

    bandwidth: float
    """Bytes a second that a stream through the memory reads: catalogued the peak, measured what is reached"""

    flops: float
    """Operations a second of dense matrix products in 16 bits, one multiplication and addition being two"""

    measured: bool
    source: str
    """The datasheet with its year, or how it was measured"""


def find_device(name: str) -> DeviceSpec:
    """The device of a name in any spelling: `H100 SXM`, `h100`, `rtx4090`, `4090`, `NVIDIA GeForce RTX 4090`.

    Raises UsageError, with near names, where it is not in the catalogue.
    """
    known = _by_spelling()
    if found := known.get(_spelling(name)):
        return found
    close = difflib.get_close_matches(_spelling(name), known, n=8, cutoff=0.6)
    near = list(dict.fromkeys(known[spelling].name for spelling in close))[:4]
    guess = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(device_names())}"
    raise UsageError(f"no device is catalogued as {name!r}", guess)


def device_names() -> list[str]:
    """Every catalogued device, in the order of the file."""
    return list(dict.fromkeys(device.name for device in _by_spelling().values()))


@functools.cache
def _by_spelling() -> Mapping[str, DeviceSpec]:
    """Each device under its name and its aliases; the devices in the order of the file."""
    content = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
    known: dict[str, DeviceSpec] = {}
    for name, fields in content["devices"].items():
        device = DeviceSpec(
            name=name,
            device_type="cuda",
            memory_bytes=int(fields["memory_gb"] * 1e9) - RESERVED_BYTES,
            bandwidth=fields["gb_per_s"] * 1e9,
            flops=fields["tflops"] * 1e12,
            measured=False,
            source=content["sources"][fields["source"]],
        )
        known |= {_spelling(spelling): device for spelling in (name, *fields.get("aliases", ()))}
    return known


def _spelling(name: str) -> str:
    return IGNORED_IN_NAMES.sub("", name.lower())
