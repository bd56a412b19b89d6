"""Ops in seconds: the cost model is called once for every distinct GEMM, attention, kernel and message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from predictor.cost_model import CostModel
from predictor.estimate import Estimate
from predictor.kernels.measured_attention import SHAPE
from solver.layers.program import (
    BEFORE_ANOTHER,
    CHUNK_SCAN,
    COMBINE,
    COMPUTE,
    DISPATCH,
    FLASH_ATTN,
    FORWARD,
    GROUPED_LINEAR,
    HOST_LINK,
    HOST_MEMORY,
    LINEAR,
    MEMORY_BOUND,
    ONE_KERNEL,
    STATE_SPACE,
    WEIGHT_GRAD,
    Op,
)
from solver.spec.choices import Recompute
from solver.step.distinct import distinct
from solver.step.launching import added, pass_seconds

_DIMS = {
    LINEAR: ("m", "n", "k", "batch", "layout", "accumulate", "parts"),
    GROUPED_LINEAR: ("groups", "tokens_per_group", "n", "k", "passes", "accumulate"),
    FLASH_ATTN: SHAPE,
    CHUNK_SCAN: ("batch", "seq", "heads", "key_dim", "value_dim", "backward"),
    STATE_SPACE: ("batch", "seq", "heads", "head_dim", "state_dim", "groups", "chunk", "backward"),
    **dict.fromkeys((MEMORY_BOUND, HOST_LINK, HOST_MEMORY), ("bytes",)),
    **dict.fromkeys((DISPATCH, COMBINE), ("tokens", "row_bytes", "top_k", "experts", "intra", "inter", "groups", "chosen")),
}
_MESSAGE = ("bytes", "intra", "inter", "strided")


@dataclass(frozen=True)
class OpEstimates:
    """Ops with their times: float64 arrays of shape [ops, keys] for one run of each op (counts not applied).

    contention: seconds by which each second of a collective delays the compute that it overlaps with. checks: seconds in which
    the host checks all runs of it, and launches nothing; None where nothing is checked.
    """

    ops: tuple[Op, ...]
    seconds: np.ndarray
    relative_std: np.ndarray
    basis: np.ndarray
    contention: np.ndarray
    checks: np.ndarray | None = None

    def split(self, sizes: Sequence[int]) -> list[OpEstimates]:
        """Return the first ``sizes[0]`` ops, the next ``sizes[1]``, and so on."""
        ends = np.cumsum(sizes)
        rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        columns = {name: column for name, column in vars(self).items() if column is not None}
        return [replace(self, **{name: column[r] for name, column in columns.items()}) for r in rows]

    def scaled(self, factor: np.ndarray) -> OpEstimates:
        """Return the ops with times that are ``factor`` times as long, [ops, keys]."""
        return replace(self, seconds=self.seconds * factor)

    def counts(self) -> np.ndarray:
        """Return the number of times each op runs, shape [ops, keys]."""
        found = np.empty(self.seconds.shape)
        for row, op in zip(found, self.ops, strict=True):
            row[:] = op.count
        return found

    def row(self, name: str) -> np.ndarray:
        """Return the seconds of all runs of the ops called ``name``, with their checks; shape [keys]."""
        chosen = [i for i, op in enumerate(self.ops) if op.name == name]
        if not chosen:
            raise KeyError(name)
        seconds = (self.seconds * self.counts())[chosen].sum(axis=0)
        return seconds if self.checks is None else seconds + self.checks[chosen].sum(axis=0)

    def exposed(self, blocking: bool = False) -> np.ndarray:
        """Return the seconds that each op adds to its pass, counts applied; shape [ops, keys]. blocking: nothing overlaps.

        A collective that overlaps with compute ops adds the part that outlasts them, its exposed_share, and its contention
        times the part that ran at the same time. Collectives with the same ``overlaps_with`` share that compute in order.
        """
        total = self.seconds * self.counts()
        out = total.copy()
        computed: dict[str, np.ndarray] = {}  # by label, which the kernels of one norm may share
        for seconds, op in zip(total, self.ops, strict=True):
            if op.stream == COMPUTE:
                computed[op.label] = computed.get(op.label, 0.0) + seconds
        used: dict[tuple[str, ...], np.ndarray] = {}
        for i, op in enumerate(self.ops):
            if op.stream == COMPUTE or not op.overlaps_with or blocking:
                continue
            if op.overlaps_with not in used:
                used[op.overlaps_with] = sum((computed[label] for label in op.overlaps_with), np.zeros(total.shape[1]))
            compute = used[op.overlaps_with]
            out[i] = exposed_seconds(total[i], compute, self.contention[i], op.exposed_share)
            used[op.overlaps_with] = compute - np.minimum(total[i] * (1 - op.exposed_share), compute)
        return out


def exposed_seconds(communication: np.ndarray, compute: np.ndarray, contention: Any, exposed_share: Any = 0.0) -> np.ndarray:
    """Return the seconds that a collective adds when it overlaps with ``compute`` seconds of compute.

    These are the part that outlasts the compute or cannot overlap (exposed_share, a share), and ``contention`` times the
    overlapped part, by which it slows the compute.
    """
    hidden = np.minimum(communication * (1 - exposed_share), compute)
    return communication - hidden * (1 - contention)


class _Signature(NamedTuple):
    """What ops have in common that one call of the cost model answers; dtype: of GEMMs."""

    kind: str
    variant: str
    dtype: str


def estimate_ops(ops: Sequence[Op], keys: int, cost: CostModel) -> OpEstimates:
    """Call the cost model for every op, whose dims are arrays of shape [keys]; once per distinct shape, and not for ops that no
    key runs, whose seconds are 0."""
    shape = (len(ops), keys)
    seconds, std, basis, contention = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.int8), np.zeros(shape)
    targets: tuple[np.ndarray, ...] = (seconds, std, basis, contention)
    for signature, rows in _by_signature(ops).items():
        names = _DIMS.get(signature.kind, _MESSAGE)
        columns = _dims([ops[i] for i in rows], names, keys)
        for target, values in zip(targets, _distinct_answers(cost, signature, names, columns), strict=False):
            target[rows] = values.reshape(len(rows), keys)
    return OpEstimates(tuple(ops), seconds, std, basis, contention)


def _dims(ops: Sequence[Op], names: Sequence[str], keys: int) -> list[np.ndarray]:
    """Return the dims of ``ops``, one after the other: for each name an int64 array of shape [ops * keys].

    A GEMM that does not say in how many parts it runs does so in one.
    """
    columns = np.empty((len(names), len(ops), keys), dtype=np.int64)
    for column, name in zip(columns, names, strict=True):
        for row, op in zip(column, ops, strict=True):
            row[:] = op.dims.get(name, 1) if name == "parts" else op.dims[name]
    return list(columns.reshape(len(names), -1))


def _distinct_answers(
    cost: CostModel, signature: _Signature, names: Sequence[str], columns: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Return the cost model's answer for every row of ``columns``, computed once per distinct row.

    Collectives also have their contention.
    """
    if signature.kind in (MEMORY_BOUND, HOST_LINK, HOST_MEMORY):  # a division is cheaper than finding out which sizes are equal
        return _ask(cost, signature, dict(zip(names, columns, strict=True)))
    first, inverse = distinct(columns)
    dims = {name: column[first] for name, column in zip(names, columns, strict=True)}
    answer: tuple[np.ndarray, ...] = _ask(cost, signature, dims)
    if names is _MESSAGE:
        delay = cost.network.contention_seconds(signature.kind, dims["bytes"], dims["inter"], answer[0])
        answer = (*answer, delay / np.maximum(answer[0], 1e-30))
    elif signature.kind in (DISPATCH, COMBINE):
        answer = (*answer, cost.network.contention.over(dims["inter"]))
    return tuple(values[inverse] for values in answer)


def _by_signature(ops: Sequence[Op]) -> dict[_Signature, list[int]]:
    """Group the ops that run and that one call of the cost model can answer."""
    groups: dict[_Signature, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        if np.any(op.count):
            groups[_Signature(op.kind, op.variant, op.dtype if op.kind in (LINEAR, GROUPED_LINEAR) else "")].append(i)
    return groups


def _ask(cost: CostModel, signature: _Signature, dims: dict[str, np.ndarray]) -> Estimate:
    kind, variant, dtype = signature
    if kind == LINEAR:
        return cost.kernels.linear(**dims, dtype=dtype)
    if kind == GROUPED_LINEAR:
        return cost.kernels.grouped_linear(**dims, dtype=dtype, launched=variant != ONE_KERNEL)
    if kind == FLASH_ATTN:
        return cost.kernels.flash_attn(**dims, dtype=variant)
    if kind == CHUNK_SCAN:
        return cost.kernels.chunk_scan(**dims)
    if kind == STATE_SPACE:
        return cost.kernels.state_space(**dims)
    if kind == MEMORY_BOUND:
        return cost.kernels.memory_bound(variant, dims["bytes"])
    if kind in (HOST_LINK, HOST_MEMORY):
        return cost.host.transfer(kind, dims["bytes"])
    if kind in (DISPATCH, COMBINE):
        return cost.network.expert_exchange(kind, dispatcher=variant, **dims)
    place = dims["intra"], dims["inter"], dims["strided"]
    return cost.network.collective(kind, dims["bytes"], *place, waits=variant != BEFORE_ANOTHER)


#: Parts of a pass in the order of LayerTimes arrays; compute first, then exposed communication by group.
STREAMS = (COMPUTE, "tp", "cp", "wp", "ep")


@dataclass(frozen=True)
class LayerTimes:
    """Exposed seconds per micro batch by stream: float64 arrays of shape [streams, keys].

    recompute: shape [levels, streams, keys], what each recompute level adds to the backward pass. weight_grad: shape [keys],
    the part of backward that zero-bubble schedules may postpone. host: shape [2, keys], seconds in which the host launches
    forward and backward. waits: shape [keys], in which neither works at all, since the host waits for a result first.
    """

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    weight_grad: np.ndarray
    host: np.ndarray
    waits: np.ndarray


def _launches_and_waits(ops: Sequence[Op], keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often the host launches kernels for all runs of each op, where runs of a ring count once, and whether it must
    know a result of the device before it launches them, bool; shape [ops, keys] each."""
    launches, waits = np.empty((len(ops), keys)), np.zeros((len(ops), keys), dtype=bool)
    for row, waiting, op in zip(launches, waits, ops, strict=True):
        row[:] = np.minimum(op.count, 1.0) * op.launches
        if op.after_host_sync is not False:
            waiting[:] = np.asarray(op.after_host_sync, dtype=bool) & (np.asarray(op.count) > 0)
    return launches, waits


def ring_delays(estimates: OpEstimates, delay: float) -> np.ndarray:
    """Return ``delay`` seconds for each ring step of each tensor-parallel collective between nodes, of which an all-reduce has
    twice as many as the others; shape [ops, keys]."""
    delays = np.zeros(estimates.seconds.shape)
    for row, op in zip(delays, estimates.ops, strict=True):
        if op.stream == "tp" and op.variant != BEFORE_ANOTHER:
            steps = (2 if op.kind == "all_reduce" else 1) * (op.dims["intra"] * op.dims["inter"] - 1)
            row[:] = delay * (op.dims["inter"] > 1) * steps * op.count
    return delays


def layer_times(estimates: OpEstimates, exposed: np.ndarray, host_op_seconds: float, blocking: bool = False) -> LayerTimes:
    """Sum ``exposed`` seconds (from OpEstimates.exposed) by pass and stream.

    Where the host, which takes host_op_seconds for each launch beside its checks, keeps the device waiting
    (solver.step.launching), the rest of its time is added to compute. blocking: the host waits for each kernel, so that all of
    its time is added.
    """
    ops, keys = estimates.ops, exposed.shape[1]
    launches, waits = _launches_and_waits(ops, keys)
    host = host_op_seconds * launches + (0.0 if estimates.checks is None else estimates.checks)
    works = bool(host.any())

    def total(chosen: list[int]) -> np.ndarray:
        sums = np.array([sum((exposed[i] for i in chosen if ops[i].stream == s), np.zeros(keys)) for s in STREAMS])
        sums[0] += late(chosen)
        return sums

    def late(chosen: list[int]) -> np.ndarray:
        """Return the seconds by which the host delays a pass of the ops ``chosen``."""
        if blocking or not works:
            return added(host[chosen])
        device = exposed[chosen]
        return pass_seconds(device, host[chosen], waits[chosen]) - added(device)

    forward = [i for i, op in enumerate(ops) if op.phase == FORWARD]
    backward = [i for i, op in enumerate(ops) if op.phase != FORWARD]
    recompute = [total([i for i in forward if level in ops[i].recomputed_by]) for level in Recompute]
    later = [i for i in backward if ops[i].phase == WEIGHT_GRAD]
    hosts = np.array([added(host[chosen]) for chosen in (forward, backward)])
    # of what the host delays the backward pass they have the share of their launches
    weight_grad = added(exposed[later]) + late(backward) * added(host[later]) / np.maximum(hosts[1], 1e-30)
    busy = np.maximum(sum((exposed[i] for i in forward), np.zeros(keys)), hosts[0])
    idle = np.maximum(added(exposed[forward]) + late(forward) - busy, 0.0)
    return LayerTimes(total(forward), total(backward), np.array(recompute), weight_grad, hosts, idle)
