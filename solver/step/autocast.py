"""16-bit copies of fp32 weights that autocast makes for each linear, which saves them for its backward pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from solver.layers.program import EXPERTS, LINEARS, OTHERS
from solver.spec.choices import Recompute
from solver.spec.recipes import HALF
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Layouts
from solver.step.parameter_groups import elements_of
from solver.step.stage_kinds import StageKinds


class Casts(NamedTuple):
    """Bytes of copies, arrays over layouts: saved by the layers for the backward pass, of the head, which are there at the
    loss, and of a recomputed layer, made anew for its backward pass."""

    saved: np.ndarray
    at_loss: np.ndarray
    at_a_time: np.ndarray


def cast_weights(priced: PricedSplits, stages: StageKinds, stage: int) -> np.ndarray:
    """Return the bytes of the copies of a stage in one forward pass: of its layers' linears, and of the head, a linear among
    the others, [2, splits]. None where weights have 16 bits."""
    problem, table, key = priced.problem, priced.table, priced.key
    if not problem.framework.memory.fp32_weights or problem.element_bytes.activation != HALF:
        return np.zeros((2, len(key)))
    elements = sum(elements_of(priced, stages, stage, name) for name in (LINEARS, EXPERTS))
    return HALF * np.array([elements, stages.has_head[stage] * table.head.parameters_of[OTHERS][key]])


def casts_of(copies: np.ndarray, flight: np.ndarray, layers: np.ndarray, layouts: Layouts) -> Casts:
    """Return what of the ``copies`` (cast_weights) of a stage is there.

    flight: micro batches in flight; layers: of the stage, [splits] each. A recomputed layer's copies go with it, as peaks on an
    H100 and an H200 show. Weights that ZeRO-3 shards are gathered in 16 bits.
    """
    if not copies.any():
        return Casts(*np.zeros((3, 1)))
    row = layouts.row
    of_layers, of_head = copies[:, row] * (layouts.zero < 3)
    every = np.maximum(layers, 1)[row]
    recomputed = np.where(layouts.recompute_layers < 0, every, np.minimum(layouts.recompute_layers, every))
    again = recomputed / every * (layouts.recompute == Recompute.FULL)
    return Casts(of_layers * flight[row] * (1 - again), of_head, np.where(again > 0, of_layers / every, 0.0))
