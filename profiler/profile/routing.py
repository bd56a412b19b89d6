"""To how many places the tokens of a mixture of experts go."""

from __future__ import annotations

from typing import Any

import numpy as np


def expected_groups(groups: Any, experts: Any, top_k: Any) -> np.ndarray:
    """Expected number of distinct groups that hold a token's experts; arguments broadcast.

    A token chooses ``top_k`` of ``experts`` at random without repetition; the experts are spread evenly over ``groups`` (ranks
    or nodes). A group of s experts holds none of the chosen with probability prod (E - s - i) / (E - i) over i < top_k.
    """
    g, e, k = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (groups, experts, top_k)))
    g = np.minimum(g, e)  # an expert that several ranks share is still one place to send to
    size = e / np.maximum(g, 1.0)
    missed = np.ones(g.shape)
    for i in range(int(k.max()) if k.size else 0):
        left = np.maximum(e - size - i, 0.0) / np.maximum(e - i, 1.0)
        missed = np.where(i < k, missed * left, missed)
    return g * (1.0 - missed)


def expected_places(places: Any, experts: Any, top_k: Any, groups: Any = 0, chosen: Any = 0) -> np.ndarray:
    """Expected number of distinct places (ranks or nodes) that hold a token's experts; arguments broadcast.

    groups, chosen: of a router that first chooses ``chosen`` of ``groups`` equal groups of experts which follow each other (0:
    it chooses among all). Places that hold whole groups are reached by each chosen one, since its best experts are among the
    token's; of a group over several places, those with chosen experts, as expected_groups has it.
    """
    limited = np.asarray(groups) > 0
    share = np.where(limited, np.minimum(chosen, groups) / np.maximum(groups, 1), 1.0)
    whole = expected_groups(places, np.maximum(groups, 1), np.minimum(chosen, groups))
    parts = expected_groups(places * share, experts * share, top_k)
    return np.where(limited & (np.asarray(places) <= groups), whole, parts)
