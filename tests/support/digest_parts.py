"""Digests of single steps for tests of the log: written field by field, put in as bins of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.live.digests import MEMORY, Bins

__all__ = ["StepDigest"]


@dataclass(frozen=True, kw_only=True)
class StepDigest:
    """One row of ``Bins``."""

    step: int
    ranks: int
    quantiles: NDArray[np.float32]
    mean: NDArray[np.float32]
    worst: NDArray[np.intp]
    values: NDArray[np.float32]
    memory: NDArray[np.float32] = field(default_factory=lambda: np.full(len(MEMORY), np.nan, np.float32))
    device: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    sampled: bool = False

    def bins(self, start_wall_ns: int = 0) -> Bins:
        step = np.array([self.step])
        return Bins(
            first=step,
            last=step,
            steps=np.array([1]),
            sampled=np.array([int(self.sampled)]),
            ranks=np.array([self.ranks], np.int32),
            quantiles=self.quantiles[None],
            mean=self.mean[None],
            worst=self.worst[None].astype(np.int32),
            worst_step=np.full((1, len(self.worst)), self.step),
            values=self.values[None],
            memory=self.memory[None],
            device=self.device[None],
            start_wall_ns=np.array([start_wall_ns]),
        )
