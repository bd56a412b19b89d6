"""One result of the cost model: a time, its uncertainty and its basis."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np


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
