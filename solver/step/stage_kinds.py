"""What pipeline stages hold where a model has layers of several kinds: layers of each kind, and how many are recomputed.

Only stages that can be the slowest or the fullest are looked at: the first, the last, and of the middle stages those that no
earlier one exceeds in every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from solver.schedule.stages import StageLayers
from solver.spec.pipeline_layout import layers_of_chunks
from solver.step.distinct import distinct


@dataclass(frozen=True)
class StageKinds:
    """Stages of every split. Where a split has fewer stages than others, its first stage is repeated.

    counts: float64 [stages, kinds, splits]. index: number of the stage in its pipeline, 0 is the first; int64 [stages, splits].
    totals: layers of each kind in the model, float64 [kinds].
    """

    counts: np.ndarray
    index: np.ndarray
    totals: np.ndarray
    has_end: np.ndarray  #: bool [stages, splits]: whether it holds the model's last layer, and so the head
    division: np.ndarray  #: [splits] row of ``first_layers``
    first_layers: np.ndarray  #: [stages + 1, kinds, divisions, n + 1]: of the first n layers of a stage (of all)
    later_layers: np.ndarray  #: [stages, kinds, divisions, n + 1]: of the first n layers of each later stage, together

    @property
    def has_embedding(self) -> np.ndarray:
        """0.0 or 1.0: [stages, splits]."""
        return (self.index == 0) * 1.0

    @property
    def has_head(self) -> np.ndarray:
        return self.has_end * 1.0

    @property
    def layers(self) -> np.ndarray:
        """Layers of all kinds: [stages, splits]."""
        return self.counts.sum(axis=1)

    def recomputed(self, limit: np.ndarray, row: np.ndarray, counts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the recomputed layers where every stage recomputes its first ``limit``: of the stages, and of all together.

        limit: at most the layers of the model, [layouts], or (where these are all stages) of each stage, [stages, layouts];
        row: index of each layout's split. Shapes [stages, kinds, layouts] and
        [kinds, layouts]. counts: those of the layouts, [stages, kinds, layouts], if they are at hand.
        """
        division = self.division[row]
        if limit.ndim == 2:
            stage = np.arange(len(limit))[:, None]
            found = self.first_layers[stage, :, division, limit].transpose(0, 2, 1)
            return found, found.sum(axis=0)
        if len(self.totals) == 1:  # of one kind the first layers are as many as there are
            counts = self.counts[:, :, row] if counts is None else counts
            return np.minimum(counts, limit), self.first_layers[-1, 0][division, limit][None]
        found = self.first_layers[:, :, division, limit]
        return found[:-1], found[-1]

    def after(self, limit: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the layers of all stages after each one, and those of them that are recomputed: [stages, kinds, layouts].

        limit, row: as in ``recomputed``.
        """
        division = self.division[row]
        if limit.ndim == 2:
            later = [
                np.flip(np.cumsum(np.flip(each, 0), axis=0), 0) - each
                for each in (self.counts[:, :, row], self.recomputed(limit, row)[0])
            ]
            return later[0], later[1]
        return self.later_layers[:, :, division, -1], self.later_layers[:, :, division, limit]


def over_kinds(count: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Return the sum over kinds of layers of ``count`` times ``each``; both [kinds, ...]."""
    total: np.ndarray = count[0] * each[0]
    for kind in range(1, len(each)):
        total = total + count[kind] * each[kind]
    return total


def stage_kinds(
    of_layer: np.ndarray,
    kinds: int,
    stages: StageLayers,
    columns: tuple[np.ndarray, ...],
    every: bool = False,
    stated: tuple[int, ...] = (),
    first_covers: bool = True,
) -> StageKinds:
    """Return what the stages of the splits hold.

    of_layer: kind of every layer. columns: pp, vpp, whether embedding and loss count as layers, and whether the schedule is
    V-shaped, so that the first stage has the head; all of shape [splits].
    every: all stages in order, instead of those that can be the slowest or the fullest. stated: layers of every chunk, of which
    all splits have as many; (): as ``stages`` says. first_covers: the first stage stands for middle ones of no more layers.
    """
    pp, vpp, embedding, loss, v_shaped = columns
    assigned = _Division(pp, vpp, stages.first, stages.middle, stages.last, embedding, loss, v_shaped)
    first, division = distinct(assigned)
    order, choice = tuple(of_layer.tolist()), _Choice(stages.fuller_last, every, stated, first_covers)
    parts = [_composition(order, kinds, _Division(*(int(column[i]) for column in assigned)), choice) for i in first]
    most = max(len(part.index) for part in parts)
    index = np.array([part.padded(part.index, most) for part in parts]).T
    table = np.array([[*part.padded(part.first_layers, most), part.first_of_all] for part in parts])
    later = np.array([part.padded(part.later_layers, most) for part in parts])
    return StageKinds(
        counts=table[:, :-1, :, -1].transpose(1, 2, 0)[:, :, division],
        index=index[:, division],
        totals=np.bincount(of_layer, minlength=kinds) * 1.0,
        has_end=index[:, division] == np.where(v_shaped, 0, pp - 1),
        division=division,
        first_layers=np.ascontiguousarray(table.transpose(1, 2, 0, 3)),
        later_layers=np.ascontiguousarray(later.transpose(1, 2, 0, 3)),
    )


@dataclass(frozen=True)
class _Composition:
    """Stages of one division. index: their numbers. first_layers, later_layers: [kinds, layers + 1] of each, and of those after
    it. first_of_all: of all."""

    index: tuple[int, ...]
    first_layers: tuple[np.ndarray, ...]
    later_layers: tuple[np.ndarray, ...]
    first_of_all: np.ndarray

    def padded(self, values: tuple[np.ndarray, ...] | tuple[int, ...], length: int) -> list[np.ndarray | int]:
        return [*values, *[values[0]] * (length - len(values))]


class _Division(NamedTuple):
    """How splits divide the layers: arrays [splits], or the numbers of one split.

    first, most, last: layers of the first, the fullest middle and the last stage. embedding, loss: whether it counts as a
    layer. v_shaped: whether the schedule is V-shaped.
    """

    pp: Any
    vpp: Any
    first: Any
    most: Any
    last: Any
    embedding: Any
    loss: Any
    v_shaped: Any


class _Choice(NamedTuple):
    """What all splits have in common: the order of middle stages, and which stages are looked at; as of stage_kinds."""

    fuller_last: bool
    every: bool
    stated: tuple[int, ...]
    first_covers: bool


@lru_cache(maxsize=8192)
def _composition(order: tuple[int, ...], kinds: int, of: _Division, choice: _Choice) -> _Composition:
    """Return the stages of one division; order: kind of each of the model's layers."""
    pp, v_shaped, ends = of.pp, bool(of.v_shaped), (of.first, of.most, of.last)
    sizes = choice.stated or chunk_sizes(
        len(order), pp, of.vpp, ends, of.embedding, of.loss, v_shaped=v_shaped, fuller_last=choice.fuller_last
    )
    held = layers_of_chunks(sizes, pp, v_shaped)
    kind_of = np.array(order)
    tables = []
    for layers in held:
        table = np.zeros((kinds, len(order) + 1))
        table[:, 1 : len(layers) + 1] = np.cumsum(kind_of[layers] == np.arange(kinds)[:, None], axis=1)
        table[:, len(layers) + 1 :] = table[:, len(layers) : len(layers) + 1]
        tables.append(table)
    middle: list[int] = []
    for i in range(1, pp - 1):
        exceeded = any((tables[j][:, -1] >= tables[i][:, -1]).all() for j in middle)
        # the first also holds the embedding, and more in flight
        covered = choice.first_covers and (tables[0] >= tables[i]).all()
        if not exceeded and not covered:
            middle.append(i)
    chosen = list(range(pp)) if choice.every else [0, *([pp - 1] if pp > 1 else []), *middle]
    every_first = np.sum(tables, axis=0)
    later = every_first - np.cumsum(tables, axis=0)
    return _Composition(tuple(chosen), tuple(tables[i] for i in chosen), tuple(later[i] for i in chosen), every_first)


def first_chunk(held: Any, embedding: Any, loss: Any) -> Any:
    """Return the layers of the first of the two chunks that the first stage of a V-shaped schedule holds, numbers or arrays.

    held: layers of both. embedding, loss: 1 where it takes the place of a layer of the first or of the last chunk.
    """
    return (held + embedding + loss) // 2 - embedding


def chunk_sizes(
    layers: int,
    pp: int,
    vpp: int,
    counts: tuple[int, int, int],
    embedding: int = 0,
    loss: int = 0,
    *,
    v_shaped: bool = False,
    fuller_last: bool = False,
) -> tuple[int, ...]:
    """Return the layers of every chunk, in the order in which a micro batch passes them.

    counts: layers of the first, the fullest middle and the last stage. Where middle stages differ, the fuller ones come first,
    or, with fuller_last, last. embedding, loss: 1 where it takes the place of a layer of the very first or the very last chunk.
    v_shaped: under a V-shaped schedule, whose first stage holds both.
    """
    first, most, last = counts
    each = [first, last][:pp]
    if pp > 2:
        middle = layers - first - last
        full = middle - (most - 1) * (pp - 2)
        few = [most] * (middle // most) + [middle % most] if most else []  # some middle stages hold none
        assigned = [most] * full + [most - 1] * (pp - 2 - full) if full > 0 else (few + [0] * pp)[: pp - 2]
        each = [first, *(assigned[::-1] if fuller_last else assigned), last]
    sizes = np.repeat(np.array([each]) // vpp, vpp, axis=0)
    if v_shaped:
        begins = int(first_chunk(first, embedding, loss))
        sizes[:, 0] = begins, first - begins
        return tuple(int(size) for size in (*sizes[0], *sizes[1, ::-1]))
    if vpp > 1:
        sizes[:, 0], sizes[:, -1] = (first + embedding) // vpp, (last + loss) // vpp
        sizes[0, 0], sizes[-1, -1] = sizes[0, 0] - embedding, sizes[-1, -1] - loss
    return tuple(int(size) for size in sizes.ravel())
