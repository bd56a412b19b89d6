"""Which of the shapes that a plan asks for this machine and job measure."""

from __future__ import annotations

import sys
from collections import defaultdict

from profiler.measure.attention import package_kernels
from profiler.measure.grouped import lacking
from profiler.measure.hardware import attention_kernels
from profiler.measure.session import Session
from profiler.profile.plan import WORK, Item, Limits, group_shapes
from profiler.profile.wanted import Wanted


def measured_here(session: Session, size: Limits, wanted: Wanted) -> dict[str, list[Item]]:
    """Return the wanted items of each table that are measured here; rank 0 prints the others and why."""
    found: dict[str, list[Item]] = defaultdict(list)
    left_out = list(wanted.left_out)
    # a plan names no attention kernel: predictions are of the best one
    best = (*attention_kernels(session.device), *package_kernels(session.device))[0]
    for item in wanted.items:
        if why := _why_not(session, size, item):
            left_out.append(f"{item.label}: {why}")
        else:
            found[item.op].append(Item.of(item.op, {**item.columns, "kernel": best}) if item.op == "flash_attn" else item)
    if session.leads and left_out:
        print("not measured of what was asked for:\n  " + "\n  ".join(left_out), file=sys.stderr)
    return found


def _why_not(session: Session, size: Limits, item: Item) -> str:
    group = None if item.op in WORK else (item.number("intra"), item.number("inter"))
    if group and group not in group_shapes(session.ranks_per_node, session.nodes):
        return f"no such group among {session.ranks_per_node} ranks on each of {session.nodes} nodes"
    if item.op == "grouped_linear" and (reason := lacking(session.device)):
        return reason
    return "" if size.allows(item) else "larger than what is measured on this machine"
