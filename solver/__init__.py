"""Estimate every parallel layout of a model on a cluster.

Public interface: best_layout, in three lines; load_problem, configured_strategy, search, estimate, explain, piece by piece;
time_attention measures attention first, where this machine has the device.
"""

from typing import TYPE_CHECKING, Any

from solver.api import configured_strategy, estimate, load_problem, time_attention
from solver.report.explain import explain
from solver.search.search import search

if TYPE_CHECKING:
    from solver.answers import Answer, best_layout

__all__ = ["Answer", "best_layout", "configured_strategy", "estimate", "explain", "load_problem", "search", "time_attention"]


def __getattr__(name: str) -> Any:
    """Import what shows answers, which needs rich and more, when it is asked for."""
    if name in ("Answer", "best_layout"):
        from solver import answers

        return getattr(answers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
