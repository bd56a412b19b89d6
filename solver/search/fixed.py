"""What the user says of a search's axes: which are fixed (tp=8), which may not exceed a size, and which vary at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from profiler.errors import InputError, closest, shown
from solver.search.divisions import DIVIDING, Division
from solver.spec.bounds import WHOLE_NUMBERS, whole_number
from solver.spec.choices import SCHEDULES, Recompute, TpMode, check_choice
from solver.spec.strategy import AXES, Strategy
from solver.step.layouts import LAYOUT_FLAGS, Layouts, Splits

_OF_LAYOUTS = ("zero", "recompute", "recompute_layers")  #: the other axes are of Splits
LIMITED = ("tp", "cp", "pp")  #: sizes of groups that a search may be told not to exceed
_FILLING = ("dp", "num_micro_batches")  #: they fill the world and the batch
#: How a rank does its work: free where the config does not say, as a size that it does not state is 1.
_SETTINGS = ("tp_mode", "micro_batch_size", "zero", "recompute", "recompute_layers")


def stated_ends(fixed: Mapping[str, Any]) -> tuple[int, int]:
    """Return the layers that ``fixed`` states for the first and the last pipeline stage; 0: none."""
    first, last, *_ = Division._fields
    return int(fixed.get(first, 0)), int(fixed.get(last, 0))


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """Raise InputError for what is no axis of a search or no value of it."""
    for name, value in fixed.items():
        if name not in AXES:
            like = closest(str(name).lower(), AXES)
            raise InputError(f"{name} is no axis of a search{like}; axes are {', '.join(AXES)}")
        if name in WHOLE_NUMBERS:
            whole_number(name, value)
        elif name in LAYOUT_FLAGS:
            if not isinstance(value, bool):
                raise InputError(f"{name} is {shown(value)}; it must be true or false")
        else:
            check_choice(name, value)


def fixed_but(varied: tuple[str, ...], fixed: Mapping[str, Any], layout: Strategy, stated: Iterable[str]) -> dict[str, Any]:
    """Return the axes to hold fixed in a search that varies only ``varied``: all others, at their values in ``layout``.

    Left free unless ``stated`` names them: dp and num_micro_batches, which follow from world size and batch; the ranks of a
    ZeRO shard and the layers of the first and last stage, which must divide other axes; settings that are no axis of a layout;
    with recompute how many layers it is of.
    """
    both = [name for name in varied if name in fixed]
    if both:
        raise InputError(f"{both[0]} is both fixed and searched; leave one out")
    free = {*varied, *_FILLING, *(name for name in (*DIVIDING, *_SETTINGS) if name not in stated)}
    free |= {"recompute_layers"} if "recompute" in varied else set()
    kept = [name for name in AXES if name not in free]
    return {name: getattr(layout, name) for name in kept} | dict(fixed)


def check_max_sizes(max_sizes: Mapping[str, Any]) -> None:
    """Raise InputError for a limit on what is no size, or that is no size."""
    for name, value in max_sizes.items():
        if name not in LIMITED:
            raise InputError(f"{name} cannot be limited; sizes that can be are {', '.join(LIMITED)}")
        whole_number(name, value)


def agreeing(splits: Splits, fixed: Mapping[str, Any]) -> np.ndarray:
    """Return which splits agree with ``fixed`` in what is an axis of splits."""
    keep = np.ones(len(splits), dtype=bool)
    for name in (name for name in fixed if name not in _OF_LAYOUTS):
        keep &= (splits.mode if name == "tp_mode" else getattr(splits, name)) == _code(name, fixed[name])
    return keep


def within_max_sizes(splits: Splits, max_sizes: Mapping[str, int]) -> np.ndarray:
    """Return which splits exceed no size in ``max_sizes``."""
    keep = np.ones(len(splits), dtype=bool)
    for name, size in max_sizes.items():
        keep &= getattr(splits, name) <= size
    return keep


def _code(name: str, value: Any) -> int:
    """Return a value of an axis as the arrays of Splits and Layouts hold it."""
    if name == "schedule":
        return SCHEDULES.index(value)
    words: dict[str, Any] = {"tp_mode": TpMode, "recompute": Recompute}
    return int(words[name][value.upper()]) if name in words else int(value)


def fixed_layouts(layouts: Layouts, fixed: Mapping[str, Any]) -> Layouts:
    """Return the layouts that agree with ``fixed`` in ZeRO stage and recomputation."""
    keep = np.ones(len(layouts), dtype=bool)
    for name in (name for name in fixed if name in _OF_LAYOUTS):
        keep &= getattr(layouts, name) == _code(name, fixed[name])
    return layouts if keep.all() else layouts.take(np.flatnonzero(keep))
