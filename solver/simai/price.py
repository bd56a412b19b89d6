"""The step of a SIMAI_workload with the collectives of a measured profile, beside SimAI-Analytical's, term by term.

Groups are placed as SimAI names them: tensor-parallel ranks are neighbours, data-parallel ranks tp apart, expert-parallel ranks
tp apart, copies of experts tp * ep apart, stages gpus / pp apart. Compute is as the file states it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from predictor.cost_model import CostModel
from solver.simai.analytical import Overlaps, PassTime, RowTime, StepTime, analytical_step
from solver.simai.collective_time import SMALL, Machine, Sizes
from solver.simai.workload_text import GA, PP_COMM, VPP, Collective, Group, TextWorkload
from solver.spec.cluster import placement

_OPS = {
    Collective.ALL_REDUCE: "all_reduce",
    Collective.ALL_GATHER: "all_gather",
    Collective.REDUCE_SCATTER: "reduce_scatter",
    Collective.ALL_TO_ALL: "all2all",
}
_MIRRORED = {
    Collective.ALL_REDUCE: Collective.ALL_REDUCE,
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
}
#: Rows once per step, which are in no micro batch.
_ONCE = (
    "grad_norm",
    "grad_gather",
    "grad_param_comm",
    "grad_param_compute",
    "layernorm",
    "embedding_grads",
    "moe_grad_norm1",
    "moe_grad_norm2",
    "gradient_norm",
    "optimizer1",
    "optimizer2",
    "optimizer3",
    "optimizer4",
)
#: Rows whose input gradient needs the mirror of what forward sends.
_MIRRORING = ("attention_layer", "mlp_layer", "attention_column", "attention_row", "mlp_column", "mlp_row", "final_column")


@dataclass(frozen=True)
class Term:
    """Microseconds of one part of the step by SimAI-Analytical and by foretrain, and why they differ."""

    name: str
    simai: float
    ours: float
    why: str


@dataclass(frozen=True)
class Prices:
    """The step by parts, which add up to both totals. vpp: chunks of a stage by which our bubble is divided; 0: none."""

    terms: tuple[Term, ...]
    vpp: int

    @property
    def simai(self) -> float:
        return sum(term.simai for term in self.terms)

    @property
    def ours(self) -> float:
        return sum(term.ours for term in self.terms)


#: Parts by key: (name, why the two differ).
_TERMS: Mapping[str, tuple[str, str]] = {
    "compute": ("compute", "as the file states it, in both"),
    "TP": ("tensor-parallel messages", "SimAI: no latency, ratio tables of 8-GPU nodes; here: those of the machine"),
    "EP": ("expert-parallel exchange", "SimAI: all-to-all by a share of the NICs; here: the profile's all-to-all"),
    "DP": ("data-parallel messages", "SimAI: each rank a node of its own, ratio 1 (line rate); here: ranks as placed"),
    "DP_EP": ("expert copies' messages", "SimAI: one GPU a node, ratio 1; here: ranks as placed"),
    "small": ("messages below 1 MiB", "SimAI: a constant by ranks (0 for other than 2, 4, ... 128); here: a latency"),
    "grad_norm": ("all-gather in grad_norm", "SimAI: parameters over the tensor group; here: over the data-parallel group"),
    "layernorm": ("all-reduce in layernorm", "SimAI: all parameters; without sequence parallelism no gradient is summed there"),
    "embedding_norm": ("all-reduce in embedding_norm", "SimAI: the embedding in every micro batch; nothing is sent there"),
    "lost": ("backward messages that are lost", "AICB states none, or 0 bytes, for the mirror of a forward collective"),
    "bubble": ("pipeline bubble", "SimAI: all rows over vpp, where AICB writes the layers of a stage; here: micro batches"),
    "PP": ("sends between stages", "SimAI: bytes over the overlap ratio, so 0 by default; here: the machine's sends"),
    "parameters": ("parameters of the model", "AICB counts the embedding four times and a gated MLP without its gate"),
}


def collective_prices(cost: CostModel, sizes: Sizes, node: int) -> Callable[[Collective, Group, int], float]:
    """Return a function of (collective, group, bytes) that gives seconds by the cost model. node: GPUs of the fastest links."""
    of_group = {
        Group.TP: (sizes.tp, 1),
        Group.DP: (sizes.dp, sizes.tp),
        Group.EP: (sizes.ep, sizes.tp),
        Group.DP_EP: (max(sizes.dp // sizes.ep, 1), sizes.tp * sizes.ep),
    }
    known: dict[tuple[Collective, Group, int], float] = {}

    def seconds(collective: Collective, group: Group, size: int) -> float:
        ranks, stride = of_group.get(group, (1, 1))
        if collective is Collective.NONE or ranks <= 1 or size <= 0:
            return 0.0
        if (collective, group, size) not in known:
            place = placement(np.array([ranks]), np.array([stride]), node)
            found = cost.network.collective(_OPS[collective], np.array([float(size)]), *place)
            known[collective, group, size] = float(found.seconds[0])
        return known[collective, group, size]

    return seconds


def prices(
    workload: TextWorkload,
    machine: Machine,
    cost: CostModel,
    node: int,
    gpus: int,
    *,
    overlaps: Overlaps | None = None,
    vpp: int | None = None,
    true_parameters: tuple[float, float] | None = None,
) -> Prices:
    """Price a workload both ways.

    machine: SimAI-Analytical's. node: GPUs of the cluster's fastest links. vpp: chunks of a stage (default: those of the first
    line, unless they are AICB's layers of a stage; then 1). true_parameters: of one rank, without and of experts, that the
    model really has. Raises InputError as analytical_step does.
    """
    overlaps = overlaps or Overlaps()
    step, header = analytical_step(workload, machine, gpus, overlaps), workload.header
    sizes = Sizes(header.size("model_parallel_NPU_group:"), header.size("ep:"), header.size("pp:"), gpus)
    chunks, seconds = vpp or chunks_of(workload), collective_prices(cost, sizes, node)
    simai, ours = dict.fromkeys(_TERMS, 0.0), dict.fromkeys(_TERMS, 0.0)
    micro_batches = 0.0
    for time in step.rows:
        found = _row_terms(time, seconds, overlaps)
        for key, theirs, mine, _ in found:
            simai[key] += theirs
            ours[key] += mine
        if time.name not in _ONCE:
            micro_batches += sum(mine for key, _, mine, of_pass in found if of_pass != "weight_grad" or key == "compute")
    ours["bubble"] = (sizes.pp - 1) / (header.size(GA) * chunks) * micro_batches
    ours["PP"] = 2 * chunks * header.size(GA) * _send_us(cost, header.value(PP_COMM) or 0, sizes, node)
    simai["bubble"], simai["PP"] = step.parts["bubble"], step.parts["PP"]
    if true_parameters is not None:
        ours["parameters"] = _of_true_parameters(step, seconds, true_parameters) * (1 - overlaps.dp)
    kept = [key for key in _TERMS if simai[key] or ours[key]]
    return Prices(
        tuple(Term(_TERMS[key][0], simai[key], ours[key], _TERMS[key][1]) for key in kept), chunks if sizes.pp > 1 else 0
    )


_Part = tuple[str, float, float, str]  #: key of the term, SimAI's and our microseconds, which pass


def _row_terms(time: RowTime, seconds: Callable[[Collective, Group, int], float], overlaps: Overlaps) -> list[_Part]:
    found: list[_Part] = []
    beside = overlaps.ep if time.forward.group is Group.EP else overlaps.tp
    for way, part, hidden in (
        ("forward", time.forward, beside),
        ("input_grad", time.input_grad, beside),
        ("weight_grad", time.weight_grad, overlaps.dp),
    ):
        found.append(("compute", part.compute / 1e3, part.compute / 1e3, way))
        collective, group = part.part.collective, part.group
        key = _key(time.name, way, part, collective, group)
        if key == "grad_norm":
            group, hidden = Group.DP, overlaps.dp
        mine = 0.0 if key in ("layernorm", "embedding_norm") else seconds(collective, group, part.size) * 1e6
        found.append((key, part.exposed / 1e3, mine * (1 - hidden), way))
    there, back = time.forward.part, time.input_grad.part
    if time.name in _MIRRORING and there.collective in _MIRRORED and (back.collective is Collective.NONE or back.size == 0):
        lost = seconds(_MIRRORED[there.collective], time.forward.group, there.size) * 1e6
        found.append(("lost", 0.0, lost * (1 - beside), "input_grad"))
    return found


def _key(name: str, way: str, part: PassTime, collective: Collective, group: Group) -> str:
    if name == "grad_norm" and way == "forward" and collective is Collective.ALL_GATHER:
        return "grad_norm"
    if name == "layernorm" and way == "input_grad":
        return "layernorm"
    if name == "embedding_norm" and way == "forward":
        return "embedding_norm"
    if part.size in SMALL:
        return "small"
    return group.value if group is not Group.NONE else "small"


def _send_us(cost: CostModel, size: int, sizes: Sizes, node: int) -> float:
    if sizes.pp == 1 or not size:
        return 0.0
    apart = sizes.gpus // sizes.pp
    place = placement(np.array([2]), np.array([node if sizes.gpus > node else apart]), node)
    return float(cost.network.collective("p2p", np.array([float(size)]), *place).seconds[0]) * 1e6


def chunks_of(workload: TextWorkload) -> int:
    """Return the chunks of a stage: ``vpp`` of the first line, or 1 where that is the number of layers, as AICB writes it."""
    names = [row.name for row in workload.rows]
    ga, vpp = workload.header.size(GA), workload.header.size(VPP)
    layers = max(names.count(name) for name in ("attention_layer", "attention_column", "attention_o_row")) / ga
    return 1 if layers == vpp else vpp


def _of_true_parameters(step: StepTime, seconds: Callable[[Collective, Group, int], float], true: tuple[float, float]) -> float:
    """Return the microseconds by which gradients and parameters of the model's own size change our data-parallel messages.

    The stated number is that of the one reduce-scatter over a group, 4 bytes a parameter, as AICB writes it; files with several
    (buckets, as our exports have) are left as they are.
    """
    change = 0.0
    for group, parameters in zip((Group.DP, Group.DP_EP), true, strict=True):
        parts = [time.weight_grad for time in step.rows if time.weight_grad.group is group]
        scattered = [part.size for part in parts if part.part.collective is Collective.REDUCE_SCATTER and part.size]
        if len(scattered) != 1 or not parameters:
            continue
        if group is Group.DP:
            parts += [time.forward for time in step.rows if time.name == "grad_norm"]
        for part in parts:
            own = round(part.size * 4 * parameters / scattered[0])
            change += seconds(part.part.collective, group, own) - seconds(part.part.collective, group, part.size)
    return change * 1e6
