"""Activations of a stage: what its micro batches in flight save, what of it is on the host, and messages that stay."""

from __future__ import annotations

import numpy as np

from solver.spec.choices import TpMode
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Layouts
from solver.step.offload import RESIDENT_LAYERS, RESIDENT_MODULES
from solver.step.stage_kinds import StageKinds, over_kinds
from solver.step.stage_seconds import recomputed_limit


class Activations:
    """Bytes of activations of every pipeline's stages. pipelines: layouts that differ in what a pipeline depends on; priced:
    their splits.
    """

    def __init__(self, priced: PricedSplits, pipelines: Layouts, stages: StageKinds) -> None:
        problem, table, key = priced.problem, priced.table, priced.key
        self._problem, self._stages, self._splits, self._row = problem, stages, pipelines.splits, pipelines.row
        level, row = pipelines.recompute, pipelines.row
        saved = np.array([part.saved[:, key] for part in table.layers])
        self._kept, self._whole = saved[:, level, row], saved[:, 0][:, row]
        if problem.run.offload_modules:
            offloaded = np.array([part.offloaded[:, key] for part in table.layers])
            self._kept_offloaded, self._whole_offloaded = offloaded[:, level, row], offloaded[:, 0][:, row]
        self._group = np.where(pipelines.recomputes_groups, problem.run.recompute_group, 1)
        self._transient = np.array([part.transient[key] for part in table.layers])[:, row]
        self._recomputed, _ = stages.recomputed(recomputed_limit(problem, pipelines), row)

    def in_flight(self, stage: int, flight: np.ndarray) -> np.ndarray:
        """Return what layers save and what stays beside it; [pipelines]. flight: micro batches in flight, [splits]."""
        run, row, stages = self._problem.run, self._row, self._stages
        counts, recomputed = stages.counts[stage], self._recomputed[stage]
        every, rest = np.ones(len(counts)), counts[:, row] - recomputed
        saved = flight[row] * over_kinds(every, recomputed * self._inputs(stage) * self._kept + rest * self._whole)
        if run.offload_layers:  # of a single stage
            moved, _ = stages.recomputed(np.full(len(row), run.offload_layers), row)
            offloaded = over_kinds(every, moved[stage] * self._whole)
            saved = np.minimum(saved, saved - offloaded + RESIDENT_LAYERS * self._whole.max(axis=0))
        if run.offload_modules:
            offloaded = flight[row] * over_kinds(every, recomputed * self._kept_offloaded + rest * self._whole_offloaded)
            # the last layer of a stage with multi-token prediction is that module's
            before_last = np.where(self._problem.model.num_nextn_predict_layers * stages.has_head[stage, row] > 0, 1, 0)
            here = (RESIDENT_MODULES - before_last) * np.where(rest > 0, self._whole_offloaded, self._kept_offloaded).max(
                axis=0
            )
            saved = np.minimum(saved, saved - offloaded + here)
        if self._problem.framework.pipeline.keeps_messages:
            saved = saved + self._messages(stage, flight * self._splits.vpp)[row]
        return saved

    def _messages(self, stage: int, flight: np.ndarray) -> np.ndarray:
        """Return the bytes of messages between stages that stay, beside the inputs of layers in flight; shape [splits].

        flight: passes of chunks in flight. Received are activations of all passes, except by the first stage, and gradients,
        except by the last one.
        """
        splits, run, passes = self._splits, self._problem.run, self._splits.num_micro_batches * self._splits.vpp
        index, is_last = self._stages.index[stage], self._stages.has_end[stage]
        shared = np.where(splits.mode == TpMode.MTP, 1, splits.tp)
        each = splits.tokens(run.seq_len) * self._problem.model.hidden_size / shared
        received = np.where((index > 0) | (splits.vpp > 1), np.maximum(passes - flight, 0.0), 0.0)
        of_gradients = np.where(~is_last | (splits.vpp > 1), passes + flight, 0.0)
        stay = np.where(splits.pp > 1, each * (received + of_gradients), 0.0)
        return stay * self._problem.element_bytes.activation

    def _inputs(self, stage: int) -> np.ndarray | float:
        """Return the kept inputs of a recomputed layer: less than one where several layers share it, [pipelines].

        Each chunk of a stage has groups of its own, the last one perhaps of fewer layers (Megatron-Core's transformer_block.py,
        _checkpointed_forward).
        """
        if self._problem.run.recompute_group == 1:
            return 1.0
        each = self._layers_of_chunk(stage)
        return np.where(self._group > 1, np.ceil(each / self._group) / each, 1.0)

    def _layers_of_chunk(self, stage: int) -> np.ndarray:
        """Return the layers of a chunk, on average over those of the stage, at least one; [pipelines]."""
        return np.maximum(self._stages.counts[stage][:, self._row].sum(axis=0) / self._splits.vpp[self._row], 1)

    def backward(self, stage: int) -> np.ndarray:
        """Return the bytes of the layer whose backward pass runs, of the kind that needs most; [pipelines].

        These are all its saved tensors where it was recomputed, with those of the layers before it that were recomputed at
        once, and its largest gradients.
        """
        there, recomputed = self._stages.counts[stage][:, self._row] > 0, self._recomputed[stage] > 0
        again = np.where(recomputed, self._whole - self._kept, 0.0)
        one: np.ndarray = np.where(there, again + self._transient, 0.0).max(axis=0)
        return np.maximum(one, self._group_at_once(stage)) if self._problem.run.recompute_group > 1 else one

    def _group_at_once(self, stage: int) -> np.ndarray:
        """Return the bytes of a group of layers that are recomputed at once and of the largest gradients of one, [pipelines].

        The group is of the largest layers that a chunk holds.
        """
        recomputed = self._recomputed[stage]
        whole = np.where(recomputed > 0, self._whole, 0.0)
        order = np.argsort(-whole, axis=0)
        held = np.take_along_axis(np.ceil(recomputed / self._splits.vpp[self._row]), order, axis=0)
        before = np.cumsum(held, axis=0) - held
        number = np.clip(self._group - before, 0.0, held)
        together: np.ndarray = (number * np.take_along_axis(whole, order, axis=0)).sum(axis=0)
        kept = np.take_along_axis(np.where(recomputed > 0, self._kept, 0.0), order[:1], axis=0)[0]
        return together - kept + np.where(recomputed > 0, self._transient, 0.0).max(axis=0)
