"""What the source of a measured row says: which laboratory timed it, and what its loops timed beside the kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler.profile.profile import Table

#: Rows whose source starts with one of these were timed by a different laboratory than the tables that the fits use.
OTHER_LABS = ("microsoft/vidur", "simumax", "MooreThreads/SimuMax")
#: Rows of these sources, where their operands are narrower than 16 bits, also time the quantisation of the first operand.
CASTING_SOURCES = ("ai-dynamo/aiconfigurator",)
#: Sources that timed serving kernels (a paged cache is written in the same call).
SERVING_SOURCES = ("aic", "ai-dynamo")


class LabScale(NamedTuple):
    """How another laboratory's times compare: the median of measured over predicted time, and of how many measurements."""

    factor: float
    rows: int


def other_lab(source: np.ndarray) -> np.ndarray:
    """True for rows of another laboratory (see OTHER_LABS); bool [rows]."""
    return _starts_with(source, OTHER_LABS)


def times_casts(source: np.ndarray) -> np.ndarray:
    """True for rows of CASTING_SOURCES; bool [rows]."""
    return _starts_with(source, CASTING_SOURCES)


def is_serving(source: np.ndarray) -> np.ndarray:
    """True for rows of SERVING_SOURCES; bool [rows]."""
    return _starts_with(source, SERVING_SOURCES)


def mostly_serving(rows: Table) -> bool:
    """Return whether most rows are of SERVING_SOURCES."""
    return bool(is_serving(rows["source"]).mean() > 0.5)


def _starts_with(source: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """True where an entry of ``source`` starts with one of ``names``, ignoring case; bool [rows]."""
    lower = np.char.lower(np.asarray(source, dtype=np.str_))
    return np.any([np.char.startswith(lower, name.lower()) for name in names], axis=0)
