"""Upper limits of this device: bandwidth of copies and reads, and the rate of bf16 products. Data is random,
because products of zeros are faster.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.gpu.setting import Row, Setting
from localllm.hardware.gpu_clock import seconds

BUDGET_S = 20
LARGE_BYTES, TINY_BYTES = 4 * 2**30, 2**20  # a multiple of any cache, except for tiny shapes
CUBE, TINY_CUBE = 8192, 64


def random_bytes(setting: Setting) -> Tensor:
    """Random int64 [LARGE_BYTES / 8]."""
    count = (TINY_BYTES if setting.tiny else LARGE_BYTES) // 8
    return torch.randint(-(2**62), 2**62, (count,), device=setting.device)


def copy_bandwidth(setting: Setting) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = random_bytes(setting)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), setting.device)


def read_bandwidth(setting: Setting) -> float:
    """Bytes per second that a maximum over all elements reads."""
    source = random_bytes(setting).view(torch.float32).nan_to_num_()
    return source.nbytes / seconds(source.amax, setting.device)


def matmul_peak(setting: Setting) -> float:
    """Operations per second of a product of square bfloat16 matrices."""
    size = TINY_CUBE if setting.tiny else CUBE
    a, b = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), setting.device)


def measure(setting: Setting) -> Iterator[Row]:
    ceilings = {
        "copy, GB/s read and written": (copy_bandwidth, 1e9),
        "read, GB/s": (read_bandwidth, 1e9),
        "bf16 product, TFLOP/s": (matmul_peak, 1e12),
    }
    for name, (measure_rate, unit) in ceilings.items():
        first, second = (measure_rate(setting) / unit for _ in range(2))
        yield {"what": name, "first": first, "second": second, "apart": abs(first - second) / max(first, second)}
