"""A machine as `plan` sees it: memory and two rates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    name: str
    kind: str  # "cpu" or "cuda"
    memory_bytes: int  # what a model may use
    bandwidth: float  # bytes/s
    flops: float  # 16-bit, dense, a second
    measured: bool
    source: str
