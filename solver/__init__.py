"""Prices every parallel layout of a model on a cluster. The public interface: load_problem, search, price, explain;
time_attention measures attention first, where the device is here."""

from solver.api import configured_strategy, estimate, load_problem, time_attention
from solver.report.explain import explain
from solver.search.search import search

__all__ = ["configured_strategy", "estimate", "explain", "load_problem", "search", "time_attention"]
