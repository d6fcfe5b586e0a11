"""Statistics of a matrix's inputs over a calibration text, in bounded memory."""

import torch
from torch import Tensor

MAX_SAMPLES = 1024  # rows that are stored unchanged


class InputStatistics:
    """count: number of rows; mean_magnitude, max_magnitude: [in] float32; samples: [<= MAX_SAMPLES, in] float32,
    evenly spaced; hessian: [in, in] float32, X^T X, if requested.
    """

    def __init__(self, columns: int, calls: int, hessian: bool):
        """calls: expected number of calls of `add`, so that each contributes its share of samples."""
        self.count = 0
        self.samples_per_call = max(1, MAX_SAMPLES // calls)
        self.magnitude_sum = torch.zeros(columns)
        self.max_magnitude = torch.zeros(columns)
        self.sampled: list[Tensor] = []
        self.hessian = torch.zeros(columns, columns) if hessian else None

    def add(self, x: Tensor) -> None:
        """Add inputs x [T, in]."""
        x = x.float()
        self.count += len(x)
        self.magnitude_sum += x.abs().sum(0)
        self.max_magnitude = torch.maximum(self.max_magnitude, x.abs().amax(0))
        indices = torch.linspace(0, len(x) - 1, min(self.samples_per_call, len(x))).round().long()
        if sum(map(len, self.sampled)) < MAX_SAMPLES:
            self.sampled.append(x[indices])
        if self.hessian is not None:
            self.hessian.addmm_(x.T, x)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.magnitude_sum).all())

    @property
    def mean_magnitude(self) -> Tensor:
        return self.magnitude_sum / max(1, self.count)

    @property
    def samples(self) -> Tensor:
        return torch.cat(self.sampled) if self.sampled else torch.zeros(0, len(self.magnitude_sum))

    def divide(self, scale: Tensor) -> None:
        """Divide all inputs so far by scale [in], as their producer has been divided by it."""
        self.magnitude_sum, self.max_magnitude = self.magnitude_sum / scale, self.max_magnitude / scale
        self.sampled = [rows / scale for rows in self.sampled]
        if self.hessian is not None:
            self.hessian = self.hessian / scale / scale[:, None]
