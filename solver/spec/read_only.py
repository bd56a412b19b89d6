"""Arrays that a cache shares with later callers."""

from __future__ import annotations

import numpy as np


def read_only(array: np.ndarray) -> np.ndarray:
    """Return ``array``, which nobody can write to from now on."""
    array.flags.writeable = False
    return array
