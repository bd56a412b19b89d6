"""Shapes that were measured: one key per shape, and whether a shape is among them."""

from __future__ import annotations

import numpy as np


def shape_keys(*sizes: np.ndarray) -> np.ndarray:
    """Return one 64-bit hash per shape, of arrays of whole numbers of equal shape.

    The probability that two of 10,000 shapes share one is 3 in 10^12.
    """
    key = np.zeros(sizes[0].shape, dtype=np.uint64)
    for size in sizes:
        key = (key ^ size.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def find(ascending: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (at, known): the index of each key in ``ascending``, and whether it is there (else ``at`` is meaningless)."""
    if not len(ascending):
        return np.zeros(keys.shape, dtype=np.intp), np.zeros(keys.shape, dtype=bool)
    at = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return at, ascending[at] == keys
