"""Prices every parallel layout of a model on a cluster. The public interface: load_problem, search, price, explain."""

from solver.api import configured_strategy, load_problem, price
from solver.explain import explain
from solver.search import search

__all__ = ["configured_strategy", "explain", "load_problem", "price", "search"]
