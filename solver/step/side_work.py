"""Work on side streams: what collectives, and the copies that go with them, add to the compute they run beside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.layers.program import MEMORY_BOUND
from solver.step.pricing import PricedOps, hidden_rest


@dataclass(frozen=True)
class SideWork:
    """Seconds, float64 arrays of one shape.

    communication: of the collectives, alone. contention: by which they delay compute if all of it runs beside them. kernels:
    of copies between parameters and buffers, which fill the multiprocessors: compute waits for them on any stream.
    """

    communication: np.ndarray
    contention: np.ndarray
    kernels: np.ndarray

    @property
    def alone(self) -> np.ndarray:
        """With nothing beside it."""
        return self.communication + self.kernels

    def beside(self, cover: np.ndarray, tail: np.ndarray | float = 0.0) -> np.ndarray:
        """What it adds to ``cover`` seconds of compute; ``tail``: share of the communication that cannot hide."""
        rate = self.contention / np.maximum(self.communication, 1e-30)
        return hidden_rest(self.communication, cover, rate, tail) + self.kernels

    def take(self, index: np.ndarray) -> SideWork:
        return SideWork(self.communication[index], self.contention[index], self.kernels[index])

    def __mul__(self, times: np.ndarray) -> SideWork:
        """So often."""
        return SideWork(self.communication * times, self.contention * times, self.kernels * times)

    def __add__(self, other: SideWork) -> SideWork:
        return SideWork(
            self.communication + other.communication, self.contention + other.contention, self.kernels + other.kernels
        )

    @staticmethod
    def either(first: np.ndarray, yes: SideWork, no: SideWork) -> SideWork:
        """``yes`` where ``first``, else ``no``."""
        pairs = ((yes.communication, no.communication), (yes.contention, no.contention), (yes.kernels, no.kernels))
        return SideWork(*(np.where(first, a, b) for a, b in pairs))


def side_work(priced: PricedOps, name: str) -> SideWork:
    """All ops of ``priced`` called ``name``, together; arrays of shape [keys]."""
    total = priced.seconds * priced.counts()
    nothing = np.zeros(total.shape[1])
    parts = [nothing, nothing, nothing]
    for i, op in enumerate(priced.ops):
        if op.name == name and op.kind == MEMORY_BOUND:
            parts[2] = parts[2] + total[i]
        elif op.name == name:
            parts[0] = parts[0] + total[i]
            parts[1] = parts[1] + total[i] * priced.contention[i]
    return SideWork(*parts)
