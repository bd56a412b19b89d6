"""Work on side streams: what collectives, and the copies that belong to them, add to the compute that they overlap with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.layers.program import MEMORY_BOUND
from solver.step.op_estimates import OpEstimates, exposed_seconds


@dataclass(frozen=True)
class SideStreamWork:
    """Seconds, float64 arrays of one shape.

    communication: of the collectives, without overlap. contention: seconds by which they delay compute if all of it overlaps.
    kernels: of copies between parameters and buffers, which fill the multiprocessors, and of the host: compute waits for them
    on any stream.
    """

    communication: np.ndarray
    contention: np.ndarray
    kernels: np.ndarray

    @property
    def exposed(self) -> np.ndarray:
        """Seconds without overlap."""
        return self.communication + self.kernels

    def overlapped_with(self, compute: np.ndarray, exposed_share: np.ndarray | float = 0.0) -> np.ndarray:
        """Return what it adds to ``compute`` seconds of compute; exposed_share: share of communication that cannot overlap."""
        rate = self.contention / np.maximum(self.communication, 1e-30)
        return exposed_seconds(self.communication, compute, rate, exposed_share) + self.kernels

    def added_to(self, compute: np.ndarray, overlaps: bool) -> np.ndarray:
        """Return what it adds to ``compute`` seconds of compute: it ``overlaps`` with that, or else runs after it."""
        return self.overlapped_with(compute) if overlaps else self.exposed

    def take(self, index: np.ndarray) -> SideStreamWork:
        return SideStreamWork(self.communication[index], self.contention[index], self.kernels[index])

    def __mul__(self, times: np.ndarray) -> SideStreamWork:
        """The work, repeated ``times`` times."""
        return SideStreamWork(self.communication * times, self.contention * times, self.kernels * times)

    def __add__(self, other: SideStreamWork) -> SideStreamWork:
        return SideStreamWork(
            self.communication + other.communication, self.contention + other.contention, self.kernels + other.kernels
        )

    @staticmethod
    def where(first: np.ndarray, yes: SideStreamWork, no: SideStreamWork) -> SideStreamWork:
        """Return ``yes`` where ``first``, else ``no``."""
        pairs = ((yes.communication, no.communication), (yes.contention, no.contention), (yes.kernels, no.kernels))
        return SideStreamWork(*(np.where(first, a, b) for a, b in pairs))


def host_work(seconds: np.ndarray) -> SideStreamWork:
    """Return the work of a host that launches nothing else for ``seconds``."""
    return SideStreamWork(np.zeros_like(seconds), np.zeros_like(seconds), seconds)


def side_stream_work(estimates: OpEstimates, name: str) -> SideStreamWork:
    """Return the sum of all ops of ``estimates`` called ``name``; arrays of shape [keys]."""
    total = estimates.seconds * estimates.counts()
    nothing = np.zeros(total.shape[1])
    parts = [nothing, nothing, nothing]
    for i, op in enumerate(estimates.ops):
        if op.name == name and estimates.checks is not None:
            parts[2] = parts[2] + estimates.checks[i]
        if op.name == name and op.kind == MEMORY_BOUND:
            parts[2] = parts[2] + total[i]
        elif op.name == name:
            parts[0] = parts[0] + total[i]
            parts[1] = parts[1] + total[i] * estimates.contention[i]
    return SideStreamWork(*parts)
