"""How much longer a step takes because every rank waits for the slowest of all."""

from __future__ import annotations

import math

#: Standard deviation of the speed of ranks: what measured over predicted step times grow by for each unit of the expected
#: maximum, the median over the weak-scaling series of three sizes or more among the published runs (`make scaling`;
#: docs/scaling.md). Leaving any out moves it by no more than 0.002.
SPEED_STD = 0.020


def straggler_share(ranks: int, ranks_per_node: int) -> float:
    """Return the share of a step's time that waiting for the slowest of ``ranks`` adds to that of one node."""
    return SPEED_STD * expected_wait(ranks, ranks_per_node)


def expected_wait(ranks: int, ranks_per_node: int) -> float:
    """Return how much longer the slowest of ``ranks`` is expected to take than that of a node, in standard deviations.

    The largest of n normal variables is expected at about sqrt(2 log n) standard deviations. What one node's ranks wait for
    each other is in the measurements of its kernels and collectives, so only what more ranks add counts.
    """
    expected = [math.sqrt(2 * math.log(max(n, 1))) for n in (ranks, ranks_per_node)]
    return max(expected[0] - expected[1], 0.0)
