"""What a collective sends: lanes of equal flows and which flow waits for which.

A lane is a pair of nodes that sends one flow of the same size in every step; a flow is (lane, step). A dependency (parent,
child, lag, sent) means: the child's flow of step s starts after the parent's flow of step s - lag, where there is one, has been
received, or, with ``sent``, has left its source. So one ring of N ranks is N lanes of 2 (N - 1) steps, not 2 N (N - 1) flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pattern:
    """Lanes, int64 or float64 arrays of one length, and dependencies, arrays of another length.

    source, target: nodes. size: bytes of each flow. steps: flows of the lane. group: index of the group that the lane serves.
    parent, child: lanes. lag: steps between them (0 or 1). sent: whether leaving the source is enough.
    """

    source: np.ndarray
    target: np.ndarray
    size: np.ndarray
    steps: np.ndarray
    group: np.ndarray
    parent: np.ndarray
    child: np.ndarray
    lag: np.ndarray
    sent: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    @property
    def flows(self) -> int:
        return int(self.steps.sum())


def lanes(
    source: np.ndarray,
    target: np.ndarray,
    size: float,
    steps: int,
    waits: Sequence[tuple[np.ndarray, np.ndarray, int, bool]] = (),
) -> Pattern:
    """Return the pattern of one group: lanes of one size and number of steps, and ``waits``: (parents, children, lag, sent)."""
    count = len(source)
    parent, child, lag, sent = (
        np.concatenate([np.zeros(0, dtype=np.int64), *(np.broadcast_to(w[i], w[0].shape) for w in waits)]) for i in range(4)
    )
    return Pattern(
        np.asarray(source, dtype=np.int64),
        np.asarray(target, dtype=np.int64),
        np.full(count, float(size)),
        np.full(count, steps, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        parent,
        child,
        lag,
        sent.astype(bool),
    )


def together(patterns: Sequence[Pattern], groups: Sequence[int] | None = None) -> Pattern:
    """Return patterns that run at the same time as one; ``groups`` numbers them, by default in order."""
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in patterns])]).astype(np.int64)
    numbers = range(len(patterns)) if groups is None else groups

    def joined(name: str, shift: np.ndarray | None = None) -> np.ndarray:
        parts = [getattr(p, name) for p in patterns]
        return np.concatenate(parts if shift is None else [part + s for part, s in zip(parts, shift, strict=False)])

    group = np.concatenate([np.full(len(p), number, dtype=np.int64) for p, number in zip(patterns, numbers, strict=True)])
    return Pattern(
        joined("source"),
        joined("target"),
        joined("size"),
        joined("steps"),
        group,
        joined("parent", offsets),
        joined("child", offsets),
        joined("lag"),
        joined("sent"),
    )
