"""Rank skew: how much longer a collective takes in a training step than in a test loop."""

from __future__ import annotations

import numpy as np

from profiler.profile.profile import Profile

#: Seconds for each further rank of the node: the kernel is launched when its input is ready, not ahead of time, and waits for
#: the last rank. SimuMax's constants for 8 B200, fitted in a training framework, exceed NCCL's tests on the same GPUs by 7 us
#: on 2 ranks, 18 on 4 and 53 on 8 (medians of all-reduce, all-gather and reduce-scatter, 1 to 64 MiB).
SECONDS_PER_RANK = 7e-6
MOST_RANKS = 8  #: the most ranks measured; more ranks are not known to wait longer
#: Collectives that start when their input is ready; point-to-point send/recv and series of broadcasts are queued ahead.
SKEWED_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all2all")
#: Rows whose source starts with one of these come from loops of nccl-tests or similar loops.
_LOOPS = (
    "ai-dynamo/aiconfigurator",
    "xxrjun/nccl-tests",
    "VIA-Research/vTrain",
    "microsoft/vidur",
    "MooreThreads/SimuMax:nccl-tests",
    "nccl-tests log",
)


def rank_skew_seconds(profile: Profile) -> float:
    """SECONDS_PER_RANK where the profile's collectives were timed in loops.

    0 where it has none, or where each call was timed on its own.
    """
    sources = np.concatenate([profile.table(op)["source"] for op in SKEWED_COLLECTIVES])
    return SECONDS_PER_RANK if any(str(source).startswith(_LOOPS) for source in np.unique(sources)) else 0.0
