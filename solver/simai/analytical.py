"""SimAI-Analytical's step: every collective of a workload in closed form, what of it is exposed, and the pipeline's bubble.

Source: SimAI's Layer.cc (report) and Workload.cc of release 1.6 (Apache-2.0), restated from reading them, with the errors that
docs/simai.md names. Nanoseconds are unsigned integers there, and what is exposed passes through 32-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from profiler.errors import InputError
from profiler.units import GIB
from solver.simai.collective_time import Machine, Sizes, collective_ns
from solver.simai.workload_text import (
    CHECKPOINTS,
    EP,
    FWD_IN_BCKWD,
    GA,
    GPUS,
    INITIATES,
    PP,
    PP_COMM,
    TP,
    TRANSFORMER,
    VPP,
    Group,
    Header,
    Pass,
    Row,
    TextWorkload,
)

#: Below this a forward buffer is raised to it, where it is not empty (in the policy that AICB writes).
_LEAST_FORWARD = 4096
_NOT_IN_BUBBLE = "embedding_layer"
#: Parts of a step in the order of the summary line.
PARTS = ("DP", "DP_EP", "TP", "EP", "PP", "bubble", "compute")


@dataclass(frozen=True)
class Overlaps:
    """Shares of communication that overlap with compute, by group; SimAI-Analytical's defaults."""

    dp: float = 0.0
    tp: float = 0.0
    ep: float = 0.0
    pp: float = 1.0


@dataclass(frozen=True)
class PassTime:
    """One row in one direction. compute, exposed, comm: nanoseconds; size: bytes as priced; ranks: of its group."""

    compute: int
    exposed: int
    comm: int
    size: int
    group: Group
    ranks: int
    part: Pass


@dataclass(frozen=True)
class RowTime:
    """One row in its three directions."""

    name: str
    forward: PassTime
    input_grad: PassTime
    weight_grad: PassTime


@dataclass(frozen=True)
class StepTime:
    """A step. parts: microseconds by PARTS; exposed: of all groups but PP; total: all of it."""

    rows: tuple[RowTime, ...]
    parts: Mapping[str, float]
    exposed: float
    total: float
    assumed: tuple[str, ...] = field(default=())  #: keys that the header lacks, read as 1


def sizes_of(header: Header, gpus: int | None = None) -> Sizes:
    """Return the group sizes of a workload on ``gpus`` (default: those that its header states).

    Raises InputError where the GPUs do not hold one copy of the model. Sizes that do not divide are rounded down, as in SimAI.
    """
    gpus = header.value(GPUS) if gpus is None else gpus
    if not gpus:
        raise InputError("the workload's first line states no all_gpus:; say with -g how many GPUs there are")
    found = Sizes(header.size(TP), header.size(EP), header.size(PP), gpus)
    if found.dp < 1:
        raise InputError(
            f"{gpus} GPUs hold no copy of a model of tp {found.tp} * pp {found.pp}; give -g {found.tp * found.pp} or more"
        )
    return found


def analytical_step(
    workload: TextWorkload, machine: Machine, gpus: int | None = None, overlaps: Overlaps | None = None
) -> StepTime:
    """Price a workload as SimAI-Analytical does.

    gpus: all of them (default: the header's). overlaps: default SimAI-Analytical's own. Raises InputError for a policy of which
    SimAI-Analytical prices nothing, for sizes that do not fit and for what bus_bandwidth and the ratio tables cannot answer.
    """
    header, overlaps = workload.header, overlaps or Overlaps()
    if header.policy not in (FWD_IN_BCKWD, TRANSFORMER):
        raise InputError(
            f"{header.policy} states no groups, and SimAI-Analytical divides by their sizes; it prices {FWD_IN_BCKWD} and "
            f"{TRANSFORMER}"
        )
    sizes = sizes_of(header, gpus)
    again = _computed_again(header, len(workload.rows))
    rows, known = list[RowTime](), dict[tuple[Row, int], RowTime]()
    for number, row in enumerate(workload.rows):
        priced = row, 2 if number in again else 1
        if priced not in known:  # rows repeat for every layer of every micro batch
            known[priced] = _row_time(row, header.policy, machine, sizes, overlaps, priced[1])
        rows.append(known[priced])
    parts = _exposed_by_group(rows)
    exposed = sum(_us(t.exposed) for row in rows for t in (row.forward, row.weight_grad, row.input_grad))
    parts["compute"] = sum(_us(t.compute) for row in rows for t in (row.forward, row.weight_grad, row.input_grad))
    chunks = header.size(GA) * header.size(VPP)
    parts["bubble"] = _bubble_us(rows) * ((sizes.pp - 1) / chunks)
    parts["PP"] = float(_pp_us(header.value(PP_COMM) or 0, chunks, overlaps.pp))
    total = parts["compute"] + exposed + parts["bubble"] + parts["PP"]
    return StepTime(tuple(rows), {name: parts[name] for name in PARTS}, exposed, total, header.missing)


def _row_time(row: Row, policy: str, machine: Machine, sizes: Sizes, overlaps: Overlaps, forward_runs: int) -> RowTime:
    raised = policy == FWD_IN_BCKWD and 0 < row.forward.size < _LEAST_FORWARD
    forward, input_grad, weight_grad = (
        row.forward.group(Group.TP),
        row.input_grad.group(Group.TP),
        row.weight_grad.group(Group.DP),
    )
    beside = overlaps.ep if forward is Group.EP else overlaps.tp  # also of the input gradient, whatever its group

    def priced(part: Pass, group: Group, ranks: int, overlap: float, runs: int = 1, size: int | None = None) -> PassTime:
        size = part.size if size is None else size
        comm = collective_ns(machine, sizes, part.collective, group, ranks, size)
        return PassTime(part.compute * runs, _times(comm, overlap), comm, size, group, ranks, part)

    def inside(group: Group) -> int:
        return sizes.ep if group is Group.EP else sizes.tp

    copies = sizes.dp // sizes.ep if weight_grad is Group.DP_EP else sizes.dp
    size = _LEAST_FORWARD if raised else row.forward.size
    return RowTime(
        row.name,
        priced(row.forward, forward, inside(forward), beside, forward_runs, size),
        priced(row.input_grad, input_grad, inside(input_grad), beside),
        priced(row.weight_grad, weight_grad, copies, overlaps.dp),
    )


def _times(ns: int, overlap: float) -> int:
    """Return what is exposed of ``ns``, as an unsigned integer multiplied in place by a 32-bit float."""
    return int(np.float32(ns) * (np.float32(1) - np.float32(overlap)))


def _us(ns: int) -> float:
    return ns / 1000.0


def _exposed_by_group(rows: Sequence[RowTime]) -> dict[str, float]:
    """Return the exposed microseconds of each group; both passes of a row count for the group of its forward pass."""
    parts = dict.fromkeys(("DP", "DP_EP", "TP", "EP"), 0.0)
    for row in rows:
        parts["DP_EP" if row.weight_grad.group is Group.DP_EP else "DP"] += _us(row.weight_grad.exposed)
        parts["EP" if row.forward.group is Group.EP else "TP"] += _us(row.forward.exposed + row.input_grad.exposed)
    return parts


def _bubble_us(rows: Sequence[RowTime]) -> float:
    """Return the microseconds of which the bubble is a share: compute and tensor or expert communication before overlap."""
    return sum(
        _us(r.forward.comm + r.forward.compute + r.weight_grad.compute + r.input_grad.compute + r.input_grad.comm)
        for r in rows
        if r.name != _NOT_IN_BUBBLE
    )


def _pp_us(size: int, chunks: int, overlap: float) -> int:
    """Return the exposed microseconds of sends between stages.

    SimAI divides the bytes by the overlap ratio, where a bandwidth should stand; so a ratio of 1 hides all of it.
    """
    if overlap == 0:
        raise InputError(
            "-pp_o is 0, by which SimAI-Analytical divides (its ratio stands where a bandwidth should); give 0.01 or more"
        )
    ratio = np.float32(overlap)
    whole = 2 * chunks * (size / GIB / float(ratio) * 1e9) / 1000.0 if ratio else np.inf
    if whole >= 1 << 63:
        raise InputError(f"-pp_o {overlap:g} makes sends longer than SimAI's integers hold; give 0.01 or more")
    return int(np.float32(int(whole)) * (np.float32(1) - ratio))


def _computed_again(header: Header, rows: int) -> range:
    """Return the rows whose forward pass runs again before the backward pass of the row that initiates it.

    SimAI reads the first number of each list as often as there are numbers.
    """
    starts, ends = header.rows_of(CHECKPOINTS), header.rows_of(INITIATES)
    if header.policy != FWD_IN_BCKWD or not ends:
        return range(0)
    if not starts or not starts[0] < ends[0] < rows:
        raise InputError(
            f"checkpoint_initiates: {ends[0]} needs a checkpoint in an earlier row, and a row of that number; there are {rows}"
        )
    return range(starts[0], ends[0])
