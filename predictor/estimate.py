"""One result of the cost model: a time, its uncertainty and its basis."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

#: Half width of a 90% interval of a normal distribution, in standard deviations.
Z90 = 1.645


def std_of_errors(errors: np.ndarray) -> float:
    """Return the standard deviation of a normal distribution whose 90% interval is that of ``errors`` of log(time)."""
    return float(np.quantile(np.abs(errors), 0.9)) / Z90


class Basis(IntEnum):
    """How an estimate was obtained, from best to worst."""

    MEASURED = 0  #: this exact shape was measured
    INTERPOLATED = 1  #: inside the range of the measurements
    EXTRAPOLATED = 2  #: outside that range, from the fit
    ROOFLINE = 3  #: no measurement of this op: datasheet peak and bandwidth, with a stated efficiency
    SIMULATED = 4  #: messages on a network that nobody measured, flow by flow


class Estimate(NamedTuple):
    """A vectorised estimate; all three arrays have the broadcast shape of the arguments.

    seconds: float64, positive and finite. relative_std: standard deviation of log(time). basis: int8 of Basis.
    """

    seconds: np.ndarray
    relative_std: np.ndarray
    basis: np.ndarray


def roofline(seconds: np.ndarray, relative_std: float) -> Estimate:
    """Return an estimate without any measurement, of one uncertainty for all ``seconds``."""
    return Estimate(seconds, np.full(seconds.shape, relative_std), np.full(seconds.shape, np.int8(Basis.ROOFLINE)))
