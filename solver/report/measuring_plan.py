"""Which kernels and collectives of a step to measure first: those whose uncertainty counts most in its time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.estimate import Basis
from solver.report.explain import Explanation, Line

MOST = 50  #: rows; more bring little


@dataclass(frozen=True)
class Measurement:
    """kernel: kind, variant and number format; shape: its sizes in words. seconds: that it takes of the step. relative_std: of
    its time. share: of the step's squared uncertainty, as far as that comes from kernels and collectives."""

    kernel: str
    shape: str
    seconds: float
    relative_std: float
    share: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "seconds": self.seconds,
            "relative_std": self.relative_std,
            "share_of_uncertainty": self.share,
        }


def measuring_plan(why: Explanation, most: int = MOST) -> tuple[Measurement, ...]:
    """Return what to measure of a step, what counts most first; each shape is listed once; measured shapes are left out.

    Times of one kind err alike and kinds apart (as in Explanation.relative_std), so the squared uncertainty is the sum over
    kinds of (sum of seconds * std)^2, of which a shape has its seconds * std times its kind's sum.
    """
    priced = [line for line in why.lines if line.basis is not None]
    of_kind: dict[str, float] = defaultdict(float)
    for line in priced:
        of_kind[line.kind] += line.seconds * line.relative_std
    whole = sum(uncertainty**2 for uncertainty in of_kind.values()) or 1.0
    sums: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(3))
    for line in priced:
        if line.op is not None and line.basis != Basis.MEASURED:
            uncertainty = line.seconds * line.relative_std
            sums[_kernel(line), _shape(line)] += line.seconds, uncertainty, uncertainty * of_kind[line.kind] / whole
    found = [
        Measurement(*key, float(time), float(uncertainty / time), float(share))
        for key, (time, uncertainty, share) in sums.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.share)[:most])


def _kernel(line: Line) -> str:
    assert line.op is not None
    return " ".join(filter(None, (line.op.kind, line.op.variant, line.op.dtype)))


def _shape(line: Line) -> str:
    """Return the sizes of a line's op, without those that are left at 0 or false."""
    assert line.op is not None
    sizes = {name: float(np.ravel(values)[line.key if np.size(values) > 1 else 0]) for name, values in line.op.dims.items()}
    return ", ".join(f"{name} {value:.12g}" for name, value in sizes.items() if value)
