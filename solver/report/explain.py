"""Explanation of a layout's step time: a list of named lines, read from the tables that the estimate used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from predictor.estimate import Z90, Basis
from predictor.host_costs import HOST_STD
from predictor.learned import Learned
from solver.layers.program import (
    FLASH_ATTN,
    FORWARD,
    HOST_LINK,
    HOST_MEMORY,
    ONCE_PER_STEP,
    Op,
)
from solver.report.uncertainty import (
    LAUNCH_STD,
    STRAGGLER_STD,
    attention_std,
    difference_std,
    network_std,
    spread_of,
    system_std,
)
from solver.spec.choices import Recompute
from solver.spec.layer_kinds import LayerKind
from solver.step.amax_reduction import estimate_amax_reduction
from solver.step.collective_checks import CHECK_STD
from solver.step.data_parallel_ops import buffer_op
from solver.step.layer_table import EstimatedProgram
from solver.step.offload import TO_HOST
from solver.step.op_estimates import STREAMS, OpEstimates
from solver.step.sharded_weights import UNITS
from solver.step.solutions import Solutions
from solver.step.stage_seconds import end_recomputed
from solver.step.synchronisation import reduces_whole
from solver.step.terms import estimate_send_recv
from solver.step.time import TIME_PARTS


@dataclass(frozen=True)
class Line:
    """One op's share of the step: exposed seconds on the slowest stage, what it belongs to, its uncertainty and basis.

    op: what was priced, where it is one op of a layer; key: its place in the arrays of the op's sizes.
    """

    name: str
    module: str
    part: str  #: one of solver.step.time.TIME_PARTS
    kind: str
    seconds: float
    relative_std: float
    basis: Basis | None
    op: Op | None = field(default=None, repr=False, compare=False)
    key: int = field(default=0, repr=False, compare=False)


def priced_seconds(lines: Iterable[Line]) -> float:
    """Return the seconds of the lines whose time has a basis; 1 where none has."""
    return sum(line.seconds for line in lines if line.basis is not None) or 1.0


@dataclass(frozen=True)
class Explanation:
    """The lines of one layout; their seconds add up to the step time (to rounding)."""

    lines: tuple[Line, ...]
    seconds: float
    system_std: float  #: standard deviation of log(step time) that no kernel explains (solver.report.uncertainty)
    learned: Learned | None = None  #: from own runs, whose uncertainty then replaces that of the kernels

    @property
    def relative_std(self) -> float:
        """Standard deviation of log(step time): errors of ops of one kind add up, different kinds are independent."""
        if self.learned is not None:
            return self.learned.relative_std(self.kind_shares(), self.system_std)
        return math.hypot(*self.kind_uncertainties().values(), self.system_std)

    def kind_uncertainties(self) -> dict[str, float]:
        """Standard deviation of log(step time) by the kind of ops whose errors make it."""
        known = priced_seconds(self.lines)
        by_kind: dict[str, float] = {}
        for line in self.lines:
            if line.basis is not None:
                by_kind[line.kind] = by_kind.get(line.kind, 0.0) + line.seconds * line.relative_std / known
        return by_kind

    @property
    def interval(self) -> tuple[float, float]:
        """90% prediction interval of the step time: (low, high) in seconds."""
        factor = float(np.exp(Z90 * self.relative_std))
        return self.seconds / factor, self.seconds * factor

    def kind_shares(self) -> dict[str, float]:
        """Share of the time whose basis is known by kind of line; adds up to 1."""
        known = priced_seconds(self.lines)
        sums = self._sum(lambda line: line.kind if line.basis is not None else "")
        return {kind: seconds / known for kind, seconds in sums.items()}

    def by_part(self) -> dict[str, float]:
        return self._sum(lambda line: line.part, TIME_PARTS)

    def by_module(self) -> dict[str, float]:
        """Compute and recomputation by module of the model."""
        return self._sum(lambda line: line.module if line.part in ("compute", "recompute") else "")

    def by_basis(self) -> dict[str, float]:
        """Share of the time by basis of the estimates: measured, interpolated, ... (Basis)."""
        sums = self._sum(lambda line: line.basis.name.lower() if line.basis is not None else "")
        total = sum(sums.values()) or 1.0
        return {basis.name.lower(): sums.get(basis.name.lower(), 0.0) / total for basis in Basis}

    def _sum(self, label: Callable[[Line], str], order: Sequence[str] = ()) -> dict[str, float]:
        sums = dict.fromkeys(order, 0.0)
        for line in self.lines:
            if label(line):
                sums[label(line)] = sums.get(label(line), 0.0) + line.seconds
        return sums


#: A difference between two layouts that one standard deviation of their errors covers.
TIE_THRESHOLD = math.expm1(difference_std(0.0, 0.0))


def tied(solutions: Solutions, index: int) -> bool:
    """Whether layout ``index`` differs from the first by less than one standard deviation of such a difference."""
    seconds = solutions.times.seconds
    std = difference_std(spread_of(solutions, 0), spread_of(solutions, index))
    return bool(abs(np.log(seconds[index] / seconds[0])) < std)


def explain(solutions: Solutions, index: int) -> Explanation:
    """Explain layout ``index`` of ``solutions``."""
    chosen = solutions.layouts.one(index)
    row = int(solutions.layouts.row[index])
    key = int(solutions.terms.key[row])
    parts = dict(zip(TIME_PARTS, solutions.times.parts[:, index].tolist(), strict=True))
    stage = solutions.times.slowest.take(index)
    has_embedding, has_head = float(stage.has_embedding), float(stage.has_head)
    m = float(chosen.splits.num_micro_batches[0])
    level = Recompute(int(chosen.recompute[0]))
    lines: list[Line] = []
    table, names = solutions.table, kind_names(solutions.problem.kinds.kinds)
    for part, times, name in (
        *zip(table.layers, m * stage.layers, names, strict=True),
        (table.embedding, m * has_embedding, ""),
        (table.head, m * has_head, ""),
    ):
        lines += _part_lines(part, key, times, name)
    for part, times, name in zip(table.layers, m * stage.recomputed, names, strict=True):
        lines += _recompute_lines(part, key, times, level, name)
    if end_recomputed(solutions.problem, solutions.layouts)[index]:
        lines += _recompute_lines(solutions.table.head, key, m * has_head, level)
    hidden = -m * float(stage.layers @ solutions.times.hidden[:, index])
    beside = "exchange beside another micro batch"
    lines.append(Line(beside, "expert_exchange", "ep_exposed", "network", hidden, 0.0, None))
    lines += _step_lines(solutions, index, parts)
    for name in ("compute", "recompute"):
        rest = parts[name] - sum(line.seconds for line in lines if line.part == name)
        if rest > 1e-9 * parts[name]:
            why, std = ("checks", CHECK_STD) if solutions.problem.checks_collectives else ("launches", LAUNCH_STD)
            lines.append(Line(f"waiting for the host's {why}", "host", name, "host", rest, std, Basis.ROOFLINE))
    lines.append(Line("pipeline bubble", "pipeline", "bubble", "bubble", parts["bubble"], 0.0, None))
    late = parts["offload_exposed"]
    lines.append(Line("activations to and from the host", "host", "offload_exposed", "host", late, HOST_STD, Basis.ROOFLINE))
    late = parts["stragglers"]
    lines.append(
        Line("waiting for the slowest rank", ONCE_PER_STEP, "stragglers", "stragglers", late, STRAGGLER_STD, Basis.INTERPOLATED)
    )
    used = tuple(line for line in lines if line.seconds != 0.0)
    layout = solutions.layouts.strategy(index, solutions.problem.run)
    seconds, learned = float(solutions.times.seconds[index]), solutions.problem.cost.corrections.learned
    attention = sum(line.seconds for line in used if line.kind == FLASH_ATTN) / priced_seconds(used)
    unstated = attention_std(solutions.problem, layout, attention)
    network = network_std(solutions, index)
    return Explanation(used, seconds, math.hypot(system_std(solutions.problem, layout), unstated, network), learned)


def kind_names(kinds: Sequence[LayerKind]) -> list[str]:
    """Return what tells the kinds of layers of one model apart, to stand before the names of their ops; "" for an only kind."""
    if len(kinds) == 1:
        return [""]
    words = [
        (
            _mlp_of(kind),
            f"window {kind.window}" * (kind.window > 0),
            f"chunks {kind.chunk}" * (kind.chunk > 0),
            _mixer_of(kind),
            "no rope" * (not kind.rope and kind.softmax and kind.has_mlp),
        )
        for kind in kinds
    ]
    differ = [i for i in range(5) if len({word[i] for word in words}) > 1]
    return [" ".join(filter(None, (word[i] for i in differ))) or "full" for word in words]


def _mlp_of(kind: LayerKind) -> str:
    """Return what the MLP of a kind of layer is, in a word; "" where it has none."""
    return ("experts" if kind.experts else "dense") * kind.has_mlp


def _mixer_of(kind: LayerKind) -> str:
    """Return what mixes tokens in a layer, in a word; "" for softmax attention beside an MLP, and where nothing does."""
    return "linear" * kind.linear + "mamba" * kind.state_space + "attention" * (kind.softmax and not kind.has_mlp)


def _kind(op: Op, column: int) -> str:
    """Return what an op is bound by: its kind, or where a collective's group is, in a ``column`` of its dims."""
    if "inter" not in op.dims:
        return op.kind
    inter = np.ravel(op.dims["inter"])
    return "network" if inter[min(column, len(inter) - 1)] > 1 else "links"


_HOST = (HOST_LINK, HOST_MEMORY)
_STREAM_PARTS = {"compute": "compute"} | {stream: f"{stream}_exposed" for stream in STREAMS[1:]}


def _named(kind: str, name: str) -> str:
    return f"{kind}: {name}" if kind else name


def _part_lines(part: EstimatedProgram, key: int, times: float, kind: str) -> list[Line]:
    ops = part.estimates.ops
    return [
        _op_line(part, i, key, times, _named(kind, ops[i].label), _STREAM_PARTS[ops[i].stream])
        for i in np.flatnonzero(part.exposed[:, key] * times).tolist()
    ]


def _recompute_lines(part: EstimatedProgram, key: int, times: float, level: Recompute, kind: str = "") -> list[Line]:
    return [
        _op_line(part, i, key, times, _named(kind, f"{op.name}.recompute"), "recompute")
        for i, op in enumerate(part.estimates.ops)
        if op.phase == FORWARD and level in op.recomputed_by
    ]


def _op_line(part: EstimatedProgram, row: int, key: int, times: float, name: str, belongs_to: str) -> Line:
    estimates = part.estimates
    seconds, std = float(part.exposed[row, key]) * times, float(estimates.relative_std[row, key])
    basis = Basis(int(estimates.basis[row, key]))
    op = estimates.ops[row]
    return Line(name, op.module, belongs_to, _kind(op, key), seconds, std, basis, op, key)


def _step_parts(solutions: Solutions, index: int) -> dict[str, tuple[str, ...]]:
    """Return the beginnings of the names of the once-per-step ops of each part of a layout's step."""
    zero, pp = int(solutions.layouts.zero[index]), int(solutions.layouts.one(index).splits.pp[0])
    whole = reduces_whole(solutions.problem.framework, solutions.problem.run, zero)
    return {
        "fsdp_exposed": UNITS,
        "gradient_accumulation": ("accumulation",),
        "gradient_sync": ("gradients.all_reduce" if whole else "gradients.reduce_scatter", TO_HOST),
        "parameter_gather": ("parameters.all_gather",),
        "optimizer": (
            "optimizer.shard" if zero else "optimizer.whole",
            "gradient_norm",
            "tied_embedding",
            buffer_op(solutions.problem, zero, pp),
            "weight_casts",
        ),
    }


def _step_lines(solutions: Solutions, index: int, parts: dict[str, float]) -> list[Line]:
    """Return the once-per-step parts.

    Their uncertainty is that of their ops, weighted by seconds; their basis is that of the longest op.
    """
    sync = solutions.terms.once.estimates
    at = int(solutions.terms.once.row[solutions.layouts.row[index]])
    sends = estimate_send_recv(solutions.problem, solutions.layouts.one(index).splits)
    found = [_step_line(part, parts[part], sync, at, names) for part, names in _step_parts(solutions, index).items()]
    found.append(_step_line("pp_transfer", parts["pp_transfer"], sends, 0, ("send_recv",)))
    amax = estimate_amax_reduction(solutions.problem, solutions.layouts.one(index).splits)
    found.append(_step_line("amax", parts["amax"], amax, 0, ("amax",)))
    return [line for line in found if line is not None]


def _step_line(part: str, seconds: float, estimates: OpEstimates, column: int, names: tuple[str, ...]) -> Line | None:
    """Return the line of ``seconds`` of the ops whose names begin with one of ``names``; None where there are none."""
    total = (estimates.seconds * estimates.counts())[:, column]
    rows = [i for i, op in enumerate(estimates.ops) if op.name.startswith(names) and total[i] > 0]
    if not rows or seconds == 0.0:
        return None
    main = max(rows, key=lambda i: total[i])
    std = float(np.average(estimates.relative_std[rows, column], weights=total[rows]))
    basis = Basis(int(estimates.basis[main, column]))
    return Line(part, ONCE_PER_STEP, part, _kind(estimates.ops[main], column), seconds, std, basis)
