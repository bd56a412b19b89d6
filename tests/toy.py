"""A made-up machine whose times can be computed by hand, and a model small enough for that.

One FLOP takes 1e-15 s, one byte of a kernel 1e-12 s, one byte of a message 1e-11 s inside a node and 1 / bandwidth between
nodes (2e-11 s by default); there is no latency, and groups of one rank send nothing. A collective takes a tenth of the
device from the compute that it overlaps with; a chain of eager kernels moves the bytes that the program counts for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from predictor.cost_model import CostModel
from predictor.estimate import Basis, Estimate
from predictor.kernel_costs import KernelCosts
from predictor.network.overlap import Contention
from predictor.network_costs import NetworkCosts
from profiler.profile.profile import Device
from solver.layers.program import LayerKeys, LayerProgram
from solver.search.space import cross, enumerate_splits
from solver.spec.choices import TpMode
from solver.spec.cluster import Cluster, cluster_of
from solver.spec.model import ModelSpec
from solver.spec.model_size import attention_linears, mlp_linears
from solver.spec.run import Run
from solver.spec.strategy import Strategy, layout_of
from solver.step.layouts import Layouts, Splits
from solver.step.problem import Problem, problem_of
from solver.step.solutions import Solutions, estimate_layouts

FLOP, BYTE, LINK, NETWORK = 1e-15, 1e-12, 1e-11, 2e-11
CONTENTION = 0.1
#: Bytes that a chain of eager kernels moves for each byte of the fused kernel, counted from eager code on 16-bit values (by
#: element: rope 20 and 24 of 4; gated activation 10 of 6, 18 of 10; norm 36 of 4, 88 of 6; cross entropy 38 and
#: 16 of 4; softmax 24 of 4, 28 of 6; the second of each pair is backward).
EAGER = {
    "rope_eager": 20 / 4,
    "rope_eager_grad": 24 / 4,
    "gated_act_eager": 10 / 6,
    "gated_act_eager_grad": 18 / 10,
    "norm_eager": 36 / 4,
    "norm_eager_grad": 88 / 6,
    "cross_entropy_eager": 38 / 4,
    "cross_entropy_eager_grad": 16 / 4,
    "softmax_eager": 24 / 4,
    "softmax_eager_grad": 28 / 6,
}

DEVICE = Device(
    name="toy",
    peak_flops={"bf16": 1e15, "fp8": 2e15},
    memory_bytes=80 * 2.0**30,
    memory_bandwidth=1e12,
    num_sms=240,
    gpus_per_node=8,
    link_bandwidth=1 / LINK,
    network_bandwidth=1 / NETWORK,
)

BEFORE_HOPPER = replace(DEVICE, peak_flops={"bf16": 1e15})

#: Grouped-query attention and a gate: 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128 = 36,864 weights in the linears.
TINY = ModelSpec(
    name="tiny",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
)


def _estimate(seconds: Any) -> Estimate:
    seconds = np.asarray(seconds, dtype=float)
    return Estimate(seconds, np.full(seconds.shape, 0.05), np.full(seconds.shape, Basis.MEASURED, dtype=np.int8))


class _Linear:
    def predict(self, m: Any, n: Any, k: Any, batch: Any, *, layout: Any, accumulate: Any, dtype: str) -> Estimate:
        return _estimate(2.0 * m * n * k * batch * FLOP)


class _Attention:
    def predict(
        self,
        batch: Any,
        seq_q: Any,
        seq_kv: Any,
        heads: Any,
        kv_heads: Any,
        head_dim: Any,
        v_head_dim: Any,
        causal: Any,
        backward: Any,
    ) -> Estimate:
        area = seq_q * (seq_kv - np.where(causal, (seq_q - 1) / 2, 0.0))
        return _estimate(batch * heads * area * (head_dim + v_head_dim) * np.where(backward, 5, 2) * FLOP)


class _Kernel:
    def predict(self, kind: str, size: Any) -> Estimate:
        return _estimate(np.asarray(size, dtype=float) * BYTE * EAGER.get(kind, 1.0))


class _Collective:
    def for_world(self, world: int, per_domain: int) -> _Collective:
        return self

    def predict(self, op: str, size: Any, intra: Any, inter: Any, network_bandwidth: float = 1 / NETWORK) -> Estimate:
        rate = np.where(np.asarray(inter) > 1, 1 / network_bandwidth, LINK)
        alone = np.asarray(intra) * np.asarray(inter) <= 1
        return _estimate(np.where(alone, 0.0, np.asarray(size) * rate))


def toy_cost(device: Device = DEVICE, **changes: Any) -> CostModel:
    """Return the real CostModel with hand-made fits; ``changes`` replace fields of its kernels and its network, by name."""
    kernels: Any = {"linears": _Linear(), "grouped": None, "attention": _Attention(), "memory": _Kernel()}
    network: Any = {"collectives": _Collective(), "bandwidth": device.network_bandwidth, "contention": Contention(CONTENTION)}
    for name, value in changes.items():
        (kernels if name in KernelCosts.__dataclass_fields__ else network)[name] = value
    return CostModel(device, KernelCosts(device, **kernels), NetworkCosts(device, **network))


def toy_layout(world_size: int, seq_len: int = 4096, **choices: Any) -> Strategy:
    """Return a layout with these axes and constants, whose dp fills the world."""
    return layout_of(Run(world_size=world_size, seq_len=seq_len), **choices)


def make_problem(
    model: ModelSpec, world_size: int, cost: CostModel, seq_len: int = 4096, cluster: Cluster | None = None, **constants: Any
) -> Problem:
    """Return a problem on ``cluster`` (None: the default cluster of the cost model's device)."""
    return problem_of(model, Run(world_size=world_size, seq_len=seq_len, **constants), cluster or cluster_of(cost.device), cost)


def layer_keys(
    mode: str, tp: Any = 1, cp: Any = 1, wp: Any = 1, micro_batch_size: Any = 1, ep: Any = 1, etp: Any = 1, split: Any = 0
) -> LayerKeys:
    """Return the layer keys of one mode; arguments broadcast."""
    columns = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(v)) for v in (int(TpMode[mode.upper()]), tp, cp, wp, ep, etp, micro_batch_size, split))
    )
    return LayerKeys(*(column.astype(np.int64) for column in columns))


def all_layouts(problem: Problem, sequences: int) -> Layouts:
    """Return every layout of the search space."""
    return cross(problem, enumerate_splits(problem, sequences).splits)


def some_layouts(problem: Problem, sequences: int, count: int, seed: int) -> Layouts:
    """Return ``count`` random layouts of the search space."""
    layouts = all_layouts(problem, sequences)
    chosen = np.random.default_rng(seed).choice(len(layouts), min(count, len(layouts)), replace=False)
    return layouts.take(np.sort(chosen))


def changed(layouts: Layouts, **columns: Any) -> Layouts:
    """Return the layouts with other values in some columns (of the splits, or zero, recompute, recompute_layers)."""
    splits = layouts.splits.take(layouts.row)
    n = len(layouts)
    fields = {
        name: np.broadcast_to(np.asarray(columns.get(name, getattr(splits, name)), dtype=np.int64), n)
        for name in Splits.__dataclass_fields__
    }
    small = (
        np.broadcast_to(np.asarray(columns.get(name, getattr(layouts, name)), dtype=np.int64), n)
        for name in ("zero", "recompute", "recompute_layers")
    )
    return Layouts(Splits(**fields), np.arange(n), *small)


def column(layouts: Layouts, name: str) -> np.ndarray:
    """Return a column of the splits, [layouts]."""
    return getattr(layouts.splits, name)[layouts.row]


def estimated(problem: Problem, strategies: list[Strategy]) -> Solutions:
    """Estimate the given strategies."""
    return estimate_layouts(problem, Layouts.of(strategies))


def layer_linear_parameters(model: ModelSpec) -> int:
    """Weights of the linears of one dense layer."""
    return attention_linears(model) + mlp_linears(model, model.intermediate_size)


def tiny(
    framework: str, world_size: int = 1, model: ModelSpec = TINY, run: dict[str, Any] | None = None, **layout: Any
) -> Solutions:
    """Estimate one layout of TINY under a framework, with sequences of 32 tokens."""
    problem = make_problem(model, world_size, toy_cost(), 32, framework=framework, **(run or {}))
    return estimated(problem, [problem.layout(**layout)])


def part(solutions: Solutions, name: str) -> np.ndarray:
    """Return the seconds of one part of the step, [layouts]."""
    from solver.step.time import TIME_PARTS

    return solutions.times.parts[TIME_PARTS.index(name)]


def dims_of(layer: LayerProgram, label: str) -> dict[str, float]:
    """Return the dims of the op with a label, of a program of one key."""
    (found,) = [op for op in layer.ops if op.label == label]
    return {name: float(np.ravel(value)[0]) for name, value in found.dims.items()}


def saved_bytes(layer: LayerProgram) -> dict[str, float]:
    """Return the bytes of each saved tensor, of a program of one key."""
    return {tensor.name: float(np.ravel(tensor.bytes)[0]) for tensor in layer.saved}


def moved(layer: LayerProgram) -> dict[str, tuple[str, float]]:
    """Return the kernel and the bytes of each memory-bound op by label, of a program of one key."""
    return {op.label: (op.variant, float(np.ravel(op.dims["bytes"])[0])) for op in layer.ops if op.kind == "memory_bound"}
