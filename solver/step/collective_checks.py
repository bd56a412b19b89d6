"""What it costs that torch checks every collective, as TORCH_DISTRIBUTED_DEBUG=DETAIL makes it do.

torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp, as read: before each collective all ranks of the group meet in a barrier
over gloo, in which the first hears and answers the others one after the other, and gather a fingerprint of the call. The host
waits for both. Sends and receives are not checked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from predictor.network.stated_busbw import PROBE_BYTES, bus_bandwidth
from predictor.network_costs import NetworkCosts
from profiler.profile.profile import COLLECTIVES
from solver.layers.program import Op
from solver.spec.cluster import Cluster
from solver.spec.frameworks import framework_of
from solver.spec.run import Run
from solver.step.op_estimates import OpEstimates

#: Seconds of a check for each rank of the group that shares a node with its first one, and for each other: layers of nanotron's
#: checked runs take 7.7, 12.4 and 21 ms with tp 2, 4 and 8, those of others 4.5, and have ten collectives; with tp 16 and 32 a
#: check takes 4 and 9 ms. Their large all-reduces are late by 0.15 ms a rank in a node, and by 0.3 to 1.1 beyond.
SECONDS_PER_RANK, SECONDS_PER_FAR_RANK = 0.2e-3, 0.3e-3
CHECK_STD = 0.2  #: relative uncertainty of what they take (judged: nine of ten checked runs come out within 17 to 22%)
#: What a report says where nobody stated it.
CHECKS_INFERRED = (
    "the stated all-reduces are as late as where torch checks every collective (TORCH_DISTRIBUTED_DEBUG=DETAIL), which launch "
    "scripts of this framework turn on; it is taken to be on (else state collective_checks: false)"
)


def check_seconds(op: Op) -> np.ndarray | float:
    """Return the seconds of the host for one run of an op; 0 for what is no collective of several ranks."""
    if op.kind not in COLLECTIVES:
        return 0.0
    return group_seconds(np.asarray(op.dims["intra"]), np.asarray(op.dims["inter"]))


def group_seconds(intra: np.ndarray, inter: np.ndarray) -> np.ndarray:
    """Return the seconds of a check in groups of ``intra`` ranks in each of ``inter`` nodes."""
    return (SECONDS_PER_RANK * intra + SECONDS_PER_FAR_RANK * intra * (inter - 1)) * (intra * inter > 1)


def with_checks(estimates: OpEstimates, tensors: np.ndarray | float = np.inf) -> OpEstimates:
    """Return the estimates with the checks of all runs of their collectives.

    tensors: [keys] whose gradients are reduced in buckets. The tensor that fills a bucket still belongs to it, so that buckets
    are larger than stated by half a tensor on average.
    """
    checks = np.zeros(estimates.seconds.shape)
    for row, op in zip(checks, estimates.ops, strict=True):
        times = np.asarray(op.count, dtype=float)
        if op.name == "gradients.all_reduce":
            times = times / (1 + times / (2 * tensors))
        row[:] = check_seconds(op) * times
    return replace(estimates, checks=checks)


def are_collectives_checked(run: Run, cluster: Cluster, network: NetworkCosts) -> bool:
    """Whether torch checks the collectives of a run: as it states, or as the all-reduces that its cluster states tell.

    Only where the framework's own launch scripts turn the checks on: then each stated all-reduce must be late by at least half
    a check. A slow network is no reason, since a check is also late inside a node.
    """
    if run.collective_checks is not None:
        return run.collective_checks
    inside, everywhere = cluster.all_reduce_busbw_in_node, cluster.all_reduce_busbw
    if not (framework_of(run.framework).scripts_check_collectives and inside and everywhere):
        return False
    return as_late_as_checks(network, run.world_size, cluster.gpus_per_domain, inside, everywhere)


def as_late_as_checks(network: NetworkCosts, world: int, node: int, inside: float, everywhere: float) -> bool:
    """Whether both all-reduces, which reached these bus bandwidths [bytes/s], were late by at least half a check."""
    ranks = min(node, world)
    tests = ((ranks, 1, inside), (ranks, -(-world // node), everywhere))
    return all(_late(network, intra, inter, busbw) for intra, inter, busbw in tests if intra * inter > 1)


def _late(network: NetworkCosts, intra: int, inter: int, busbw: float) -> bool:
    """Whether an all-reduce that reached ``busbw`` was late by at least half a check."""
    law = float(network.collectives.predict("all_reduce", PROBE_BYTES, intra, inter, network.bandwidth).seconds)
    took = law * bus_bandwidth(law, PROBE_BYTES, intra * inter) / busbw
    return bool(took - law > group_seconds(np.asarray(intra), np.asarray(inter)) / 2)
