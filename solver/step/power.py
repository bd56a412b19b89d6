"""The clocks of a device at its power limit: how much longer its GEMMs take follows from what runs between them.

A GEMM at full clocks takes more power than a GPU may draw, so that clocks fall until the average over some tenths of a second
is at the limit. Measured on H100 and H200 (docs/measured_gpus.md): GEMMs that take x times as long draw 1 / x^2 of the power,
and copies take as long as ever.
"""

from __future__ import annotations

import numpy as np

from solver.layers.program import COMPUTE, FLASH_ATTN, GROUPED_LINEAR, LINEAR
from solver.step.op_estimates import OpEstimates

#: Power over its limit while kernels that are bound by memory run: copies of 256 MiB take 408 of 700 W on H100, 399 on H200.
MEMORY_BOUND_POWER = 0.575
#: The same while only a collective runs: a kernel that copies 770 GB/s on 24 multiprocessors takes 220 W on H100.
COLLECTIVE_POWER = 0.31

_LIMITED = (LINEAR, GROUPED_LINEAR, FLASH_ATTN)


def slowdown_at(limited: np.ndarray, spare: np.ndarray, alone: float) -> np.ndarray:
    """Return how many times as long as in a burst GEMMs and attention take, at most ``alone``; arrays of one shape.

    limited: their seconds in a burst. spare: seconds of all other work, each times 1 - its power over the limit. alone: the
    slowdown where nothing else runs, which the limit makes draw ``alone``^2 in a burst. The slowdown x is where the average is
    at the limit: limited * (x - alone^2 / x) + spare = 0.
    """
    root = np.sqrt(spare**2 + (2 * alone * limited) ** 2)
    return np.clip((root - spare) / np.where(limited > 0, 2 * limited, 1.0), 1.0, alone)


def at_power(estimates: OpEstimates, layers: np.ndarray, alone: float) -> OpEstimates:
    """Return the ops of a model's layers with GEMMs and attention as long as they take among all others.

    estimates: with the times of GEMMs and attention where nothing else runs, ``alone`` times those of a burst. layers: how many
    layers have each op, [ops]. What runs once a step, or waits for other stages, lasts longer than what clocks average over.
    """
    seconds = estimates.exposed() * layers[:, None]
    compute = np.array([op.stream == COMPUTE for op in estimates.ops])
    limited = np.array([op.kind in _LIMITED for op in estimates.ops])
    rows = limited, compute & ~limited, ~compute
    of_limited, of_kernels, of_collectives = (seconds[chosen].sum(axis=0) for chosen in rows)
    spare = of_kernels * (1 - MEMORY_BOUND_POWER) + of_collectives * (1 - COLLECTIVE_POWER)
    faster = slowdown_at(of_limited / alone, spare, alone) / alone
    return estimates.scaled(np.where(limited[:, None], faster, 1.0))
