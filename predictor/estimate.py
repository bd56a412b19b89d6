"""One answer of the cost model: a time, its doubt, and what it rests on."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np


class Basis(IntEnum):
    """What an estimate rests on, from best to worst."""

    MEASURED = 0  #: this very shape was measured
    INTERPOLATED = 1  #: inside the range of the measurements
    EXTRAPOLATED = 2  #: outside it, carried by the fitted law
    ROOFLINE = 3  #: no measurement of this op: datasheet peak and bandwidth, with a stated efficiency


class Estimate(NamedTuple):
    """Vectorised: all three arrays have the broadcast shape of the arguments asked for.

    seconds: float64, positive and finite. relative_std: standard deviation of log(time). basis: int8 of Basis.
    """

    seconds: np.ndarray
    relative_std: np.ndarray
    basis: np.ndarray
