"""Rows of a mixture of experts: those that a rank sends, receives, and computes with its experts; a token has top-k rows."""

from __future__ import annotations

import numpy as np

from profiler.profile.routing import expected_places
from solver.layers.program import Array
from solver.layers.shapes import Shapes
from solver.spec.model import ModelSpec


def sent_rows(shapes: Shapes) -> np.ndarray:
    """Return the rows that a rank sends: its tokens, once for each expert that they go to; shape [keys].

    With a capacity factor every expert gets the same number of rows from a rank, and missing ones are padded.
    """
    model, factor = shapes.model, shapes.run.moe_capacity_factor
    rows = shapes.norm_tokens * model.num_experts_per_tok * 1.0
    if factor:
        rows = np.ceil(rows * factor / model.num_experts) * model.num_experts
    return rows


def expert_rows(shapes: Shapes) -> np.ndarray:
    """Return the rows of a rank's grouped GEMMs: what the ranks of its group send to it, on the rank that gets most; [keys].

    All ranks send as much as this one, so a rank receives on average what it sends; those of one expert-tensor group work on
    the same rows. moe_imbalance: load of the hottest rank over the mean, without a capacity factor, which evens it out.
    """
    load = np.where(shapes.keys.ep > 1, shapes.run.moe_imbalance, 1.0)
    return sent_rows(shapes) * shapes.keys.etp * load


def reached_ranks(shapes: Shapes) -> Array:
    """Return the expert-parallel ranks that hold experts of a token, on average; [keys]."""
    keys, model = shapes.keys, shapes.model
    if shapes.run.moe_routing == "consecutive":
        return blocks_of_token(shapes, keys.ep)
    return expected_places(keys.ep, model.num_experts, model.num_experts_per_tok, *router_choice(model))


def router_choice(model: ModelSpec) -> tuple[int, int]:
    """Return the groups of experts, and how many of them a token's router chooses first; (0, 0): it chooses among all."""
    return (model.router_groups, model.router_topk_groups) if model.router_topk_groups else (0, 0)


def blocks_of_token(shapes: Shapes, groups: Array) -> Array:
    """Return how many of ``groups`` equal blocks of experts a token reaches whose experts are consecutive."""
    return np.maximum(np.ceil(shapes.model.num_experts_per_tok * groups / shapes.model.num_experts), 1.0)


def arriving_rows(shapes: Shapes) -> Array:
    """Return the rows that a permutation reads: a rank's own tokens before all-to-alls; else received rows, of which an
    all-gather delivers all, and DeepEP's and hybrid-EP's kernels one for each rank that a token goes to; [keys]."""
    keys, tokens = shapes.keys, shapes.norm_tokens
    if shapes.run.moe_dispatcher == "alltoall":
        return tokens
    ranks = keys.ep * keys.etp
    if shapes.run.moe_dispatcher == "allgather":
        return tokens * ranks
    reached = reached_ranks(shapes) * keys.etp
    return tokens * reached * np.where(keys.ep > 1, shapes.run.moe_imbalance, 1.0)
