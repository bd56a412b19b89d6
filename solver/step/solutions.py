"""Layouts with their estimates: the table that search, reports and exports read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from predictor.kernels.dtypes import FAMILIES
from profiler.errors import InputError
from solver.spec.model_size import flops_per_token
from solver.step.layer_table import LayerTable, PricedSplits, layer_table
from solver.step.layouts import Layouts
from solver.step.memory import Memory
from solver.step.peak_memory import peak_memory
from solver.step.problem import Problem
from solver.step.terms import SplitTerms, split_terms
from solver.step.time import StepTimes, step_times

#: Bandwidths, over that of a GPU's usual network, that clouds offer with the same GPU (A100: 200, 100 and 50 Gbit/s each).
SLOWER_NETWORKS = (0.5, 0.25)


@dataclass(frozen=True, eq=False)
class Solutions:
    """Estimated layouts; arrays of shape [layouts]. Each is equal to itself only, so that what is found of it can be kept."""

    problem: Problem
    table: LayerTable
    terms: SplitTerms
    layouts: Layouts
    times: StepTimes
    memory: Memory

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def priced(self) -> PricedSplits:
        """The splits of the layouts, beside their layers."""
        return PricedSplits(self.problem, self.table, self.terms.key, self.layouts.splits)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens per step."""
        s, row = self.layouts.splits, self.layouts.row
        return s.dp[row] * s.micro_batch_size[row] * s.num_micro_batches[row] * float(self.problem.run.seq_len)

    @property
    def tgs(self) -> np.ndarray:
        """Tokens per accelerator per second."""
        return self.tokens / self.times.seconds / self.problem.run.world_size

    @property
    def fits(self) -> np.ndarray:
        """Whether each layout's expected peak fits in the cluster's memory; bool."""
        return self.memory.device <= self.problem.cluster.memory_bytes

    def verdict(self, index: int) -> str:
        """Return whether a layout fits in the cluster's memory: one of VERDICTS."""
        return self.memory.verdict(index, self.problem.cluster.memory_bytes)

    @property
    def flops_per_second(self) -> np.ndarray:
        """Model FLOP/s per accelerator, attention counted with its causal half."""
        return self.tgs * self._model_flops(whole_square=False)

    @property
    def mfu(self) -> np.ndarray:
        """Model FLOP/s over the datasheet's peak for the arithmetic of the run's precision (TF32 where fp32 runs in it)."""
        return self.flops_per_second / self._peak

    @property
    def mfu_whole_square(self) -> np.ndarray:
        """The same with the whole square of attention counted, as some frameworks print it."""
        return self.tgs * self._model_flops(whole_square=True) / self._peak

    @cached_property
    def on_slower_networks(self) -> np.ndarray:
        """Seconds of each step on SLOWER_NETWORKS, [networks, layouts]; no rows where the network is stated or the job stays
        inside a node."""
        problem, cluster = self.problem, self.problem.cluster
        if not cluster.usual_network or problem.run.world_size <= cluster.gpus_per_domain:
            return np.empty((0, len(self)))
        costs = [problem.cost.with_network(share * cluster.network_bandwidth) for share in SLOWER_NETWORKS]
        found = [estimate_layouts(replace(problem, cost=cost), self.layouts, memory=self.memory) for cost in costs]
        return np.stack([solutions.times.seconds for solutions in found])

    def _model_flops(self, whole_square: bool) -> float:
        """FLOPs per token of the sequences, or of their packed documents, and of what is trained."""
        run = self.problem.run
        return flops_per_token(self.problem.model, run.attended_tokens, whole_square, run.lora_rank > 0)

    @property
    def _peak(self) -> float:
        run, device = self.problem.run, self.problem.cost.device
        arithmetic = self.problem.framework.kernels.arithmetic(run.precision)
        return device.peak_flops.get(FAMILIES.get(arithmetic, arithmetic)) or device.half_peak


def estimate_layouts(
    problem: Problem, layouts: Layouts, table: LayerTable | None = None, memory: Memory | None = None
) -> Solutions:
    """Estimate every layout. table: a LayerTable that holds all their layers, memory: their peaks, if made before."""
    if table is None:
        keys, key = layouts.splits.layer_keys()
        table = layer_table(problem, keys)
    else:
        key = table.rows_of(layouts.splits)
    priced = PricedSplits(problem, table, key, layouts.splits)
    terms = split_terms(priced)
    times = step_times(problem, terms, layouts)
    memory = memory or peak_memory(priced, layouts)
    for name, values in (("step times", times.seconds), ("memory", memory.device)):
        if not ((values > 0) & (values < np.inf)).all():  # no comparison with nan holds
            raise InputError(
                f"{name} of {problem.model.name} on {problem.cost.device.name} are not positive and finite: the profile or the "
                "sizes of this problem cannot be right"
            )
    return Solutions(problem, table, terms, layouts, times, memory)
