"""Interface of the parts: the setting that they measure in, and the rows that they return."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

Row = dict[str, str | float | None]  # a row of a part's table, by column; column names include the unit
# Wheels that a part needs besides those of all parts (torch, triton, numpy, safetensors, psutil and llvmlite).
# Their modules have the same names.
WHEELS = {
    "correct": ("pytest",),
    "rivals": ("transformers",),
    "cold": ("tokenizers", "jinja2", "llguidance"),
}


def missing_wheels(part: str) -> str:
    """Names of missing wheels for `pip install`; empty if the part can run."""
    return " ".join(wheel for wheel in WHEELS.get(part, ()) if find_spec(wheel) is None)


@dataclass(frozen=True)
class Setting:
    device: torch.device
    tiny: bool = False  # use shapes that a CPU can run, to test the harness

    def room_for(self, size: int) -> bool:
        """Whether this many bytes are free on the device, after releasing torch's cache of earlier models."""
        if self.tiny or self.device.type != "cuda":
            return True
        release()
        return size < torch.cuda.mem_get_info(self.device)[0]


def release() -> None:
    """Release unreferenced memory that torch's allocator caches."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Part(Protocol):
    """A module of this package that measures something."""

    BUDGET_S: int  # time limit of its process

    def measure(self, setting: Setting) -> Iterator[Row]:
        """Yield each row as soon as it is measured."""
        ...


def judged(value: float, accept: float, goal: float | None = None) -> Row:
    """Columns that compare a value with the lines to reach; larger is better."""
    verdict = "goal" if goal is not None and value >= goal else "accepted" if value >= accept else "below"
    return {"accept": accept, "goal": goal, "verdict": verdict}
