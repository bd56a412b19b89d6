"""How long a pass takes between the host that launches its kernels and the device that runs them in order."""

from __future__ import annotations

import numpy as np

_ROUNDS = 3  #: passes that are played; the last takes as long as all later ones


def added(rows: np.ndarray) -> np.ndarray:
    """Return the sum of ``rows`` [ops, keys], added in order.

    np.sum may add those of a single key in another order, and then rounds differently.
    """
    return sum(rows, np.zeros(rows.shape[1]))


def pass_seconds(device: np.ndarray, host: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """Return the seconds of a pass among equal ones: [keys].

    device: seconds of each op, host: of its launches, [ops, keys] each, in the order of the program. waits: whether the host
    must have the results of all earlier ops before it launches this one, bool [ops, keys]. An op starts when it is launched and
    the one before it has ended. Without waits that is the larger of both sums.
    """
    if not waits.any():
        return np.maximum(added(device), added(host))
    launched, done, ended = (np.zeros(device.shape[1]) for _ in range(3))
    for _ in range(_ROUNDS):
        before = ended
        for seconds, launching, waiting in zip(device, host, waits, strict=True):
            launched = np.where(waiting, np.maximum(launched, done), launched) + launching
            done = np.maximum(done, launched) + seconds
        ended = done
    return ended - before
