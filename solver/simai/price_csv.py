"""The step of an AICB ``Workload`` CSV on a measured profile: its messages by group and kind, and its computations as stated.

The file is of one rank and has no overlap in it, so that the sum is that of a step in which nothing runs at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.simai.workload_csv import COMPUTATION, EPOCH_END, CsvWorkload, Item
from solver.spec.cluster import placement

#: Operations of the cost model that stand for a kind of item; of a send both ends are busy, so a receive counts as one too.
_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all2all",
    "broadcast": "broadcast",
    "reduce": "broadcast",
    "isend": "p2p",
    "irecv": "p2p",
    "barrier": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
_BARRIER_BYTES = 4


@dataclass(frozen=True)
class Line:
    """Items of one group and kind in a step: how many, the bytes of their buffers, and seconds."""

    group: str
    kind: str
    count: float
    size: float
    seconds: float


@dataclass(frozen=True)
class GroupSizes:
    """Ranks of the groups, as the items of a file state them; ep may have to be given, because AICB states none."""

    tp: int
    dp: int
    pp: int
    ep: int | None

    def place(self, group: str) -> tuple[int, int]:
        """Return (ranks, stride) of a group: tensor ranks adjacent, data and expert ranks tp apart, stages tp * dp apart."""
        stage = self.tp * self.dp
        if group in ("ep_group", "ep_dp_group", "ep_tp_group") and self.ep is None:
            raise InputError(
                f"{group} has no size in the file, as AICB writes it; say with --ep how many ranks share the experts"
            )
        ep = self.ep or 1
        return {
            "tp_group": (self.tp, 1),
            "dp_group": (self.dp, self.tp),
            "pp_group": (self.pp, stage),
            "ep_group": (ep, self.tp),
            "ep_dp_group": (max(self.dp // ep, 1), self.tp * ep),
            "ep_tp_group": (ep * self.tp, 1),
            "embedding_group": (2, stage * max(self.pp - 1, 1)),
        }.get(group, (stage * self.pp, 1))


def group_sizes(workload: CsvWorkload, ep: int | None = None) -> GroupSizes:
    """Return the sizes that the items state: the largest of each group; sends say nothing, as AICB writes 1 for them."""
    found = defaultdict[str, int](lambda: 1)
    for item in workload.items:
        if item.group is not None and item.group_size is not None:
            found[item.group] = max(found[item.group], int(item.group_size))
    stated = found.get("ep_group")
    sends = any(item.kind in ("isend", "irecv") for item in workload.items)
    pp = found["pp_group"] if found["pp_group"] > 1 or not sends else 2
    return GroupSizes(found["tp_group"], found["dp_group"], pp, ep or (stated if stated and stated > 1 else None))


def step_items(workload: CsvWorkload) -> tuple[Sequence[Item], int]:
    """Return (the items of all steps, their number): those after the first epoch_end, which closes the setup."""
    ends = [i for i, item in enumerate(workload.items) if item.kind == EPOCH_END]
    if len(ends) < 2:
        return workload.items, 1
    return workload.items[ends[0] + 1 :], len(ends) - 1


def table_prices(workload: CsvWorkload, cost: CostModel, node: int, ep: int | None = None) -> tuple[Line, ...]:
    """Return the lines of a step, computations first and messages by their seconds. node: GPUs of the fastest links.

    Raises InputError for expert groups of unknown size, and for messages without a size.
    """
    sizes, (items, steps) = group_sizes(workload, ep), step_items(workload)
    numbers: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    known: dict[tuple[str, str, float], float] = {}
    for item in items:
        if item.kind == EPOCH_END:
            continue
        size, seconds = _priced(item, sizes, cost, node, known)
        line = numbers[item.group or "compute", item.kind]
        for i, value in enumerate((1.0, size, seconds)):
            line[i] += value / steps
    lines = [Line(group, kind, *values) for (group, kind), values in numbers.items()]
    return tuple(sorted(lines, key=lambda line: (line.kind != COMPUTATION, -line.seconds)))


def _priced(
    item: Item, sizes: GroupSizes, cost: CostModel, node: int, known: dict[tuple[str, str, float], float]
) -> tuple[float, float]:
    """Return (bytes, seconds) of an item."""
    if item.kind == COMPUTATION:
        return 0.0, float(item.elapsed or 0) / 1e9
    if item.kind != "barrier" and not isinstance(item.size, int | float):
        raise InputError(f"{item.kind} of {item.group} in {item.stage or 'no stage'} has no bytes; give them in msg_size")
    size = float(_BARRIER_BYTES if item.kind == "barrier" else item.size)  # type: ignore[arg-type]
    group = item.group or "all"
    if (group, item.kind, size) not in known:
        ranks, stride = sizes.place(group)
        ranks = 2 if _OPS[item.kind] == "p2p" else ranks
        place = placement(np.array([ranks]), np.array([stride]), node)
        there = ranks > 1 and size > 0
        found = cost.network.collective(_OPS[item.kind], np.array([max(size, 1.0)]), *place).seconds if there else [0.0]
        known[group, item.kind, size] = float(found[0])
    return size, known[group, item.kind, size]
