"""Collectives without rings: all_to_all, one message, and all_reduce inside the NVSwitch (NVLS)."""

from __future__ import annotations

import numpy as np

from predictor.network.flows.pattern import Pattern, lanes

#: Pieces of an all_reduce inside the switch; sending one overlaps with receiving the one before.
NVLS_PIECES = 4


def all_to_all(ranks: np.ndarray, size: float) -> Pattern:
    """Return flows of size / ranks bytes between all pairs of ranks, all at once."""
    source, target = (side.ravel() for side in np.meshgrid(ranks, ranks, indexing="ij"))
    other = source != target
    return lanes(source[other], target[other], size / len(ranks), 1)


def point_to_point(ranks: np.ndarray, size: float) -> Pattern:
    """Return one flow from the first rank to the second."""
    return lanes(ranks[:1], ranks[1:2], size, 1)


def nvls(ranks: np.ndarray, switches: np.ndarray, size: float) -> Pattern:
    """Return the all_reduce of ranks of one server that its NVSwitches add up and send back; each switch takes a share.

    A rank sends the next piece when the one before has left it. A switch sends a piece to all when all have sent theirs.
    """
    source = np.tile(ranks, len(switches))
    switch = np.repeat(switches, len(ranks))
    up = np.arange(len(source))
    down = len(source) + up
    same = switch[:, None] == switch[None, :]
    pairs_up, pairs_down = np.nonzero(same)
    waits = [(up, up, 1, True), (up[pairs_up], down[pairs_down], 0, False)]
    part = size / len(switches) / NVLS_PIECES
    return lanes(np.concatenate([source, switch]), np.concatenate([switch, source]), part, NVLS_PIECES, waits)
