"""Interface of the parts: the setting that they measure in, and the rows that they return."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

Row = dict[str, str | float | None]  # a row of a part's table, by column; the name of a column includes the unit


@dataclass(frozen=True)
class Setting:
    device: torch.device
    tiny: bool = False  # use shapes that a CPU can run, to test the harness

    def room_for(self, size: int) -> bool:
        """Whether this many bytes are free on the device."""
        return self.tiny or self.device.type != "cuda" or size < torch.cuda.mem_get_info(self.device)[0]


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
