"""Where a part measures and what of: the one thing that all parts are given, and the rows that they give back."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

Row = dict[str, str | float | None]  # one line of a part's table, by column, which names the unit
# The wheels that a part needs, besides those of all: torch, triton, numpy, safetensors, psutil and llvmlite. They
# are imported by the same names.
WHEELS = {
    "correct": ("pytest",),
    "rivals": ("transformers",),
    "cold": ("tokenizers", "jinja2", "llguidance"),
}


def missing_wheels(part: str) -> str:
    """Their names, as `pip install` takes them; nothing, if the part can run."""
    return " ".join(wheel for wheel in WHEELS.get(part, ()) if find_spec(wheel) is None)


@dataclass(frozen=True)
class Setting:
    device: torch.device
    tiny: bool = False  # shapes that a processor can run, to see that the harness works

    def room_for(self, size: int) -> bool:
        """Are so many bytes free, once torch has given back what it caches of the models before?"""
        if self.tiny or self.device.type != "cuda":
            return True
        release()
        return size < torch.cuda.mem_get_info(self.device)[0]


def release() -> None:
    """Give back the memory of what nobody refers to any more, which torch's allocator caches."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Part(Protocol):
    """A module of this package that measures something."""

    BUDGET_S: int  # of its process, from its start

    def measure(self, setting: Setting) -> Iterator[Row]:
        """Rows as soon as they are known."""
        ...


def judged(value: float, accept: float, goal: float | None = None) -> Row:
    """Beside the lines that it is held against; larger is better."""
    verdict = "goal" if goal is not None and value >= goal else "accepted" if value >= accept else "below"
    return {"accept": accept, "goal": goal, "verdict": verdict}
