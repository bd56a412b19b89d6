"""Many layouts as arrays: splits of the ranks, combined by index with the small axes (ZeRO stage, recomputation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from solver.layers.program import LayerKeys, micro_batch_tokens
from solver.schedule.kinds import AUTOMATIC, is_schedule, splits_backward
from solver.spec.choices import SCHEDULES, V_SHAPED, Recompute, TpMode
from solver.spec.run import Run
from solver.spec.strategy import Strategy, layout_of
from solver.step.distinct import distinct

#: Layout fields that are true or false; arrays hold 0 or 1.
LAYOUT_FLAGS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def schedule_code(schedule: str, vpp: int) -> int:
    """Return the index into SCHEDULES of a layout's schedule: several chunks are interleaved or V-shaped, one is not."""
    if schedule in V_SHAPED:
        return SCHEDULES.index(schedule)
    plain = "1f1b" if schedule == "interleaved" else schedule
    return SCHEDULES.index("interleaved" if vpp > 1 else plain)


@dataclass(frozen=True)
class Splits:
    """How ranks, layers and the batch are divided: int64 arrays of shape [splits].

    mode holds TpMode codes, schedule indexes into SCHEDULES, flags are 0 or 1.
    """

    mode: np.ndarray
    schedule: np.ndarray
    tp: np.ndarray
    wp: np.ndarray
    cp: np.ndarray
    ep: np.ndarray
    etp: np.ndarray
    pp: np.ndarray
    vpp: np.ndarray
    dp: np.ndarray
    zero_shard_size: np.ndarray
    micro_batch_size: np.ndarray
    num_micro_batches: np.ndarray
    micro_batch_group: np.ndarray
    num_layers_in_first_pipeline_stage: np.ndarray
    num_layers_in_last_pipeline_stage: np.ndarray
    account_for_embedding_in_pipeline_split: np.ndarray
    account_for_loss_in_pipeline_split: np.ndarray

    def __len__(self) -> int:
        return len(self.mode)

    def take(self, index: np.ndarray | slice) -> Splits:
        return Splits(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence[Splits]) -> Splits:
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def tokens(self, seq_len: int) -> np.ndarray:
        """Return the tokens of a micro batch on one context-parallel rank, int64 [splits]."""
        return micro_batch_tokens(self.micro_batch_size, seq_len, self.cp)

    @property
    def layer_columns(self) -> tuple[np.ndarray, ...]:
        """The columns of a split that its layers depend on, in the order of LayerKeys."""
        return tuple(getattr(self, f.name) for f in fields(LayerKeys))

    @property
    def v_shaped(self) -> np.ndarray:
        """Whether the schedule is V-shaped: bool [splits]."""
        return is_schedule(self.schedule, *V_SHAPED)

    @property
    def splits_backward(self) -> np.ndarray:
        """Whether the schedule computes weight gradients apart: int64 [splits]."""
        return splits_backward(self.schedule).astype(np.int64)

    @property
    def automatic(self) -> np.ndarray:
        """Whether the schedule is automatic: planned from measured times: bool [splits]."""
        return is_schedule(self.schedule, *AUTOMATIC)

    @property
    def stage_columns(self) -> tuple[np.ndarray, ...]:
        """The columns that say how many layers each stage holds, in the order of solver.schedule.stages.stage_layers."""
        return (
            self.pp,
            self.num_layers_in_first_pipeline_stage,
            self.num_layers_in_last_pipeline_stage,
            self.account_for_embedding_in_pipeline_split,
            self.account_for_loss_in_pipeline_split,
        )

    def layer_keys(self) -> tuple[LayerKeys, np.ndarray]:
        """Return the distinct layers of these splits, and for each split the index of its layer."""
        first, inverse = distinct(self.layer_columns)
        return LayerKeys(*(column[first] for column in self.layer_columns)), inverse


_SIZES = tuple(field.name for field in fields(Splits) if field.name not in ("mode", "schedule", *LAYOUT_FLAGS))


@dataclass(frozen=True)
class Layouts:
    """Layouts of shape [layouts]: ``row`` indexes the split; the small axes are int64 arrays of the same shape.

    recompute: Recompute codes. recompute_layers: number of layers per stage that are recomputed (-1: all).
    """

    splits: Splits
    row: np.ndarray
    zero: np.ndarray
    recompute: np.ndarray
    recompute_layers: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: np.ndarray) -> Layouts:
        """Return the chosen layouts, with only the splits that they use."""
        chosen, used = self.row[index], np.zeros(len(self.splits), dtype=bool)
        used[chosen] = True
        row = (np.cumsum(used) - 1)[chosen]
        rest = self.zero[index], self.recompute[index], self.recompute_layers[index]
        return Layouts(self.splits.take(np.flatnonzero(used)), row, *rest)

    @staticmethod
    def concatenate(parts: Sequence[Layouts]) -> Layouts:
        """Return one Layouts from several, splits and rows appended in order."""
        starts = np.cumsum([0, *(len(p.splits) for p in parts[:-1])])
        return Layouts(
            Splits.concatenate([p.splits for p in parts]),
            np.concatenate([p.row + start for p, start in zip(parts, starts, strict=True)]),
            *(np.concatenate([getattr(p, name) for p in parts]) for name in ("zero", "recompute", "recompute_layers")),
        )

    def at(self, index: np.ndarray) -> Layouts:
        """Return the chosen layouts, with all splits."""
        return Layouts(self.splits, self.row[index], self.zero[index], self.recompute[index], self.recompute_layers[index])

    @cached_property
    def zero_stages(self) -> np.ndarray:
        """The ZeRO stages that occur, in order."""
        return np.flatnonzero(np.bincount(self.zero, minlength=1))

    @cached_property
    def pipelines(self) -> tuple[np.ndarray, np.ndarray]:
        """(first, same): one layout of each distinct pipeline, and the pipeline of every layout.

        How ZeRO-0 to 2 shard states changes neither its passes nor its activations; ZeRO-3's all-gathers take time.
        """
        splits = self.splits
        rest = [getattr(splits, field.name) for field in fields(splits) if field.name != "zero_shard_size"]
        _, alike = distinct(rest)
        whole = np.where(self.zero == 3, len(splits) + self.row, alike[self.row])
        _, recomputation = distinct((self.recompute, self.recompute_layers + 1))
        return distinct((whole, recomputation))

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> Layouts:
        """Layouts of explicit strategies, one split each."""

        def column(values: Sequence[int]) -> np.ndarray:
            return np.array(values, dtype=np.int64)

        modes = column([TpMode[s.tp_mode.upper()] for s in strategies])
        schedules = column([schedule_code(s.schedule, s.vpp) for s in strategies])
        rest = {name: column([getattr(s, name) for s in strategies]) for name in (*_SIZES, *LAYOUT_FLAGS)}
        rest["zero_shard_size"] = column([s.zero_shard_size if s.zero else 1 for s in strategies])  # ZeRO-0 shards nothing
        return cls(
            Splits(mode=modes, schedule=schedules, **rest),
            np.arange(len(strategies)),
            column([s.zero for s in strategies]),
            column([Recompute[s.recompute.upper()] for s in strategies]),
            column([s.recompute_layers for s in strategies]),
        )

    @property
    def recomputes_groups(self) -> np.ndarray:
        """Whether groups of layers may share one kept input: where all are recomputed; bool [layouts]."""
        return (self.recompute == Recompute.FULL) & (self.recompute_layers < 0)

    def one(self, index: int) -> Layouts:
        """Return layout ``index`` alone."""
        return self.take(np.array([index]))

    def strategy(self, index: int, run: Run) -> Strategy:
        """Return layout ``index`` as a Strategy; fields that layouts do not vary come from ``run``."""
        split = self.splits.take(np.array([self.row[index]]))
        level = Recompute(int(self.recompute[index]))
        choices: dict[str, Any] = {name: int(getattr(split, name)[0]) for name in _SIZES}
        choices |= {name: bool(getattr(split, name)[0]) for name in LAYOUT_FLAGS}
        choices |= {"tp_mode": TpMode(int(split.mode[0])).name.lower(), "schedule": SCHEDULES[int(split.schedule[0])]}
        choices |= {"zero": int(self.zero[index]), "recompute": level.name.lower()}
        choices |= {"recompute_layers": int(self.recompute_layers[index])}
        choices |= {"recompute_modules": Run.recompute_modules} if level != Recompute.SELECTIVE else {}
        choices |= {"recompute_group": 1} if not self.recomputes_groups[index] else {}
        return layout_of(run, **choices)
