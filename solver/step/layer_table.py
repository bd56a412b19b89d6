"""The layers of a problem, estimated once for all splits that use the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from solver.layers.decoder import embedding_program, layer_program
from solver.layers.multi_token import last_program
from solver.layers.program import PARAMETER_GROUPS, LayerKeys
from solver.spec.choices import Recompute
from solver.step.collective_checks import with_checks
from solver.step.distinct import distinct
from solver.step.host import launch_seconds
from solver.step.layouts import Splits
from solver.step.op_estimates import LayerTimes, OpEstimates, estimate_ops, layer_times, ring_delays
from solver.step.paired_exchange import paired_seconds
from solver.step.power import at_power
from solver.step.problem import Problem


@dataclass(frozen=True)
class EstimatedProgram:
    """The layer, the embedding or the head: its estimated program and what is derived from it. Arrays over layer keys."""

    estimates: OpEstimates
    exposed: np.ndarray  #: seconds that each op adds to its pass, shape [ops, keys]
    times: LayerTimes
    paired: np.ndarray  #: seconds of both passes beside each other (solver.step.paired_exchange), [2, keys]; if they ever are
    saved: np.ndarray  #: bytes per micro batch, shape [levels, keys]
    offloaded: np.ndarray  #: those of them that wait on the host, shape [levels, keys]; empty without offloaded modules
    postponed: np.ndarray  #: bytes per micro batch that weight gradients need, shape [keys]
    transient: np.ndarray  #: bytes, shape [keys]
    buffer: np.ndarray  #: bytes that stay between layers, shape [keys]
    output: np.ndarray  #: bytes of LayerProgram.output_bytes and output_beside_loss, shape [2, keys]
    parameters_of: Mapping[str, np.ndarray]  #: parameters of one rank by group (PARAMETER_GROUPS), each of shape [keys]
    shaped_alike: Mapping[str, np.ndarray]  #: elements of the distinct shapes of its linears and experts, by name; [keys] each

    @property
    def parameters(self) -> np.ndarray:
        return np.sum(list(self.parameters_of.values()), axis=0)


@dataclass(frozen=True)
class LayerTable:
    """All parts for the distinct layer keys of a set of layouts."""

    keys: LayerKeys
    layers: tuple[EstimatedProgram, ...]  #: one of each kind (solver.spec.layer_kinds)
    embedding: EstimatedProgram
    head: EstimatedProgram

    @property
    def layer(self) -> EstimatedProgram:
        """The layer of a model whose layers are all of one kind."""
        (only,) = self.layers
        return only

    def rows_of(self, splits: Splits) -> np.ndarray:
        """Return each split's row in this table, which must hold the layers of all of them; shape [splits]."""
        mine, asked = self.keys.columns, splits.layer_columns
        _, group = distinct([np.concatenate(pair) for pair in zip(mine, asked, strict=True)])
        row = np.empty(len(self.keys), dtype=np.int64)
        row[group[: len(self.keys)]] = np.arange(len(self.keys))
        return row[group[len(self.keys) :]]

    def priced(self, problem: Problem, splits: Splits) -> PricedSplits:
        """Return splits of a problem beside this table, which must hold the layers of all of them."""
        return PricedSplits(problem, self, self.rows_of(splits), splits)


@dataclass(frozen=True)
class PricedSplits:
    """Splits of a problem beside the estimated layers that they use.

    key: each split's row in ``table``, int64 [splits].
    """

    problem: Problem
    table: LayerTable
    key: np.ndarray
    splits: Splits

    def take(self, index: np.ndarray) -> PricedSplits:
        """Return some of the splits."""
        return PricedSplits(self.problem, self.table, self.key[index], self.splits.take(index))


def layer_table(problem: Problem, keys: LayerKeys) -> LayerTable:
    """Build and estimate the programs of every kind of layer, of the embedding and of the head for ``keys``."""
    given, found = (keys, problem.model, problem.run, problem.cluster), problem.kinds
    programs = (
        *(layer_program(*given, kind) for kind in found.kinds),
        embedding_program(*given),
        last_program(*given, found.kinds[found.of_layer[-1]]),
    )
    parts, together = [], estimate_ops([op for program in programs for op in program.ops], len(keys), problem.cost)
    if problem.cost.kernels.deratings.power_slowdown > 1:
        of_kind = np.bincount(found.of_layer, minlength=len(found.kinds))
        sizes = [len(program.ops) for program in programs]
        together = at_power(together, np.repeat([*of_kind, 1, 1], sizes), problem.cost.kernels.deratings.power_slowdown)
    if problem.checks_collectives:
        together = with_checks(together)
    for program, estimates in zip(programs, together.split([len(program.ops) for program in programs]), strict=True):
        run = problem.run
        host = 0.0 if run.compile or run.graphs_layers else launch_seconds(problem.framework, problem.cost)
        exposed = estimates.exposed(run.launch_blocking)
        if delay := problem.framework.tensor_parallel.ring_step_delay:
            exposed = exposed + ring_delays(estimates, delay)
        times = layer_times(estimates, exposed, host, run.launch_blocking)
        pairs = run.moe_exchange_overlap and not run.launch_blocking
        parts.append(
            EstimatedProgram(
                estimates=estimates,
                exposed=exposed,
                times=times,
                paired=paired_seconds(estimates, exposed, times, run.moe_dispatcher)
                if pairs
                else np.full((2, len(keys)), np.inf),
                saved=np.array([program.saved_bytes(level) for level in Recompute]),
                offloaded=np.array([program.offloaded_bytes(level) for level in Recompute] if run.offload_modules else []),
                postponed=program.weight_gradient_operands() * problem.element_bytes.activation,
                transient=np.broadcast_to(np.asarray(program.transient_bytes, dtype=float), len(keys)),
                buffer=np.broadcast_to(np.asarray(program.buffer_bytes, dtype=float), len(keys)),
                output=np.zeros((2, len(keys))) + np.array([program.output_bytes, program.output_beside_loss]).reshape(2, -1),
                parameters_of={group: program.weight_elements(group) for group in PARAMETER_GROUPS},
                shaped_alike=program.distinct_elements(),
            )
        )
    *layers, embedding, head = parts
    return LayerTable(keys, tuple(layers), embedding, head)
