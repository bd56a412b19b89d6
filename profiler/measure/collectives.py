"""Collectives, timed in all groups of one shape at once; the slowest rank counts, as in training.

A group of intra x inter ranks is {base + node * ranks_per_node + i}: neighbours in a node, on adjacent nodes. Bytes are those
of the whole buffer (see profiler.profile.profile). On GPUs the times are device times, otherwise wall-clock times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from profiler.measure.arena import DTYPES
from profiler.measure.session import Session
from profiler.measure.timing import Measurement, Work, measure
from profiler.measure.try_kernel import is_out_of_memory
from profiler.profile.item import Item


@dataclass(frozen=True)
class Group:
    """The group of one shape that this rank belongs to; ``handle`` is None on a rank without a group."""

    ranks: tuple[int, ...]
    handle: Any


def groups_of(intra: int, inter: int, ranks_per_node: int, nodes: int) -> list[tuple[int, ...]]:
    """Return all disjoint groups of a shape: aligned blocks of ``intra`` ranks on aligned blocks of ``inter`` nodes."""
    return [
        tuple((first + node) * ranks_per_node + base + i for node in range(inter) for i in range(intra))
        for first in range(0, nodes - inter + 1, inter)
        for base in range(0, ranks_per_node - intra + 1, intra)
    ]


def join_group(session: Session, intra: int, inter: int) -> Group:
    """Create this rank's group of a shape. Called by all ranks."""
    mine = [g for g in groups_of(intra, inter, session.ranks_per_node, session.nodes) if session.rank in g]
    if not mine:
        return Group((), None)
    return Group(mine[0], dist.new_group(list(mine[0]), use_local_synchronization=True))


def leave_group(group: Group) -> None:
    """Free the group's communicator: there are too many shapes to keep all of them."""
    if group.handle is not None:
        dist.destroy_process_group(group.handle)


def time_collective(session: Session, item: Item, group: Group, seconds: float) -> Measurement | None:
    """Return this rank's times; None if the buffers do not fit in some rank's memory. Called by all ranks together."""
    work: Work | None = None
    try:
        work = collective_work(session, item, group)
        lacking = 0.0
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        lacking = 1.0
    if session.agree(lacking):
        return None
    found = measure(work or _idle, session.device, seconds, session.agree)
    return found * 0.5 if item.op == "p2p" else found  # a round trip


def slowest(session: Session, found: Measurement, group: Group) -> tuple[float, float]:
    """Return the median and spread of the slowest rank of all groups."""
    median = session.agree(found.median if group.handle is not None else 0.0)
    spread = session.agree(found.spread if group.handle is not None and found.median == median else 0.0)
    return median, spread


def _idle(_: int) -> None:
    """Do nothing: the work of a rank without a group."""


def collective_work(session: Session, item: Item, group: Group) -> Work:
    """Return the collective of ``item`` in this rank's group.

    A call returns when it is done (on a GPU, it blocks the stream it is called on). Raises MemoryError or
    torch.OutOfMemoryError if the buffers do not fit.
    """
    if group.handle is None:
        return _idle
    dtype = DTYPES[str(item.columns["dtype"])]
    elements = item.number("bytes") // dtype.itemsize
    whole = torch.zeros(elements, dtype=dtype, device=session.device)
    return WORKS[item.op](whole, group, session.rank)


def _all_reduce(whole: torch.Tensor, group: Group, _: int) -> Work:
    return lambda _: dist.all_reduce(whole, group=group.handle)


def _part(whole: torch.Tensor, group: Group) -> torch.Tensor:
    return torch.zeros(len(whole) // len(group.ranks), dtype=whole.dtype, device=whole.device)


# PyTorch 2.13 renamed two calls and warns about the old names; clusters run older releases too
_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather(whole: torch.Tensor, group: Group, _: int) -> Work:
    part = _part(whole, group)
    return lambda _: _GATHER(whole, part, group=group.handle)


def _reduce_scatter(whole: torch.Tensor, group: Group, _: int) -> Work:
    part = _part(whole, group)
    return lambda _: _SCATTER(part, whole, group=group.handle)


def _all2all(whole: torch.Tensor, group: Group, _: int) -> Work:
    received = torch.empty_like(whole)
    return lambda _: dist.all_to_all_single(received, whole, group=group.handle)


def _broadcast(whole: torch.Tensor, group: Group, _: int) -> Work:
    return lambda _: dist.broadcast(whole, group.ranks[0], group=group.handle)


def _there_and_back(whole: torch.Tensor, group: Group, rank: int) -> Work:
    first, second = group.ranks

    def call(_: int) -> None:
        if rank == first:
            dist.send(whole, second, group=group.handle)
            dist.recv(whole, second, group=group.handle)
        else:
            dist.recv(whole, first, group=group.handle)
            dist.send(whole, first, group=group.handle)

    return call


#: op -> (whole buffer, group, rank) -> work
WORKS: dict[str, Callable[[torch.Tensor, Group, int], Work]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all2all": _all2all,
    "broadcast": _broadcast,
    "p2p": _there_and_back,
}
