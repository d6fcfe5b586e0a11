"""What the inputs of a matrix were over a calibration text, in bounded memory."""

import torch
from torch import Tensor

ROWS = 1024  # most that are kept as they are


class Inputs:
    """count: rows seen; mean, largest: [in] float32, of magnitudes; rows: [<= ROWS, in] float32, taken evenly;
    hessian: [in, in] float32, X^T X, where it was asked for."""

    def __init__(self, columns: int, calls: int, hessian: bool):
        """calls: of `add` that are to come, so that each gives its share of the kept rows."""
        self.count = 0
        self.share = max(1, ROWS // calls)
        self.total = torch.zeros(columns)
        self.largest = torch.zeros(columns)
        self.kept: list[Tensor] = []
        self.hessian = torch.zeros(columns, columns) if hessian else None

    def add(self, x: Tensor) -> None:
        """x: [T, in]"""
        x = x.float()
        self.count += len(x)
        self.total += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        places = torch.linspace(0, len(x) - 1, min(self.share, len(x))).round().long()
        if sum(map(len, self.kept)) < ROWS:
            self.kept.append(x[places])
        if self.hessian is not None:
            self.hessian.addmm_(x.T, x)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.total).all())

    @property
    def mean(self) -> Tensor:
        return self.total / max(1, self.count)

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.kept) if self.kept else torch.zeros(0, len(self.total))

    def divided(self, scale: Tensor) -> None:
        """From now on every input is divided by scale [in], as what comes before it gives less."""
        self.total, self.largest = self.total / scale, self.largest / scale
        self.kept = [rows / scale for rows in self.kept]
        if self.hessian is not None:
            self.hessian = self.hessian / scale / scale[:, None]
