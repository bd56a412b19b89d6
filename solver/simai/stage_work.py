"""What one pipeline stage of a priced layout does for a micro batch: its kernels and messages in the order in which they run.

They are the ops of the layer programs (solver.layers) with the seconds that the cost model gave them (solver.step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from profiler.errors import InputError
from solver.layers.program import ATTENTION, COMPUTE, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Op
from solver.schedule.kinds import part_of
from solver.simai.pieces import Piece, piece_of
from solver.simai.step_work import sharded_messages
from solver.spec.choices import Recompute
from solver.spec.frameworks import framework_of
from solver.spec.rules.quantised import delays
from solver.spec.strategy import Strategy
from solver.step.layer_table import EstimatedProgram
from solver.step.per_stage import chunks_of, slowest_stage
from solver.step.solutions import Solutions
from solver.step.stage_seconds import end_recomputed, recomputed_limit

#: Ends the attention block of a layer; what follows is the MLP's or the experts'.
_END_OF_ATTENTION = "residual1"


@dataclass(frozen=True)
class Work:
    """Pieces in the order in which they run. recompute: what runs again before the backward pass. gathered, scattered: ZeRO-3's
    messages of its parameters, before either pass, and of its gradients, after the backward pass."""

    name: str
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    recompute: tuple[Piece, ...] = ()
    gathered: tuple[Piece, ...] = ()
    scattered: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class SimaiStageWork:
    """The works of a stage, those of each of its chunks in the order in which a micro batch passes them."""

    stage: int
    chunks: tuple[tuple[Work, ...], ...]

    @property
    def works(self) -> tuple[Work, ...]:
        return tuple(work for chunk in self.chunks for work in chunk)


def check_expressible(run: Strategy) -> None:
    """Raise InputError for a layout of groups that neither format of AICB and SimAI can name."""
    if run.cp > 1:
        raise InputError(f"cp is {run.cp}; workloads of AICB and SimAI have no context-parallel group: export a layout of cp 1")
    if run.tp_mode == "isp" and (run.tp > 1 or run.wp > 1):
        raise InputError(
            "tp_mode isp gathers weights over groups that workloads of AICB and SimAI cannot name: export mtp, msp or fsp"
        )


def notes_of(run: Strategy) -> list[str]:
    """Return what a workload of this layout cannot say, a sentence each."""
    found = []
    if run.ep > 1 and run.etp != run.tp:
        found.append(
            f"experts are split {run.etp} ways, but SimAI places an expert group as if they were split tp = {run.tp} ways"
        )
    if run.zero and run.zero_shard_size not in (1, run.dp):
        found.append(f"ZeRO shards over {run.zero_shard_size} of {run.dp} data-parallel ranks; SimAI knows only all of them")
    if run.tp_comm_overlap or run.moe_exchange_overlap or run.moe_shared_expert_overlap:
        found.append("tensor or expert communication overlaps with compute here; a workload states it whole (-tp_o, -ep_o)")
    if delays(framework_of(run.framework), run) and run.fp8_amax_reduction != "none":
        found.append("the all-reduce of FP8's largest values behind every pass is left out of a workload")
    return found


def stage_work(solutions: Solutions, index: int, stage: int | None = None) -> SimaiStageWork:
    """Return what a stage of layout ``index`` does. stage: from 0 (default: the one that the others wait for)."""
    split = solutions.layouts.one(index).splits
    pp, vpp = int(split.pp[0]), int(split.vpp[0])
    run = solutions.layouts.strategy(index, solutions.problem.run)
    check_expressible(run)
    stage = slowest_stage(solutions, index) if stage is None else stage
    if not 0 <= stage < pp:
        raise InputError(f"--stage is {stage}; the layout has stages 0 to {pp - 1}")
    row, terms, table = int(solutions.layouts.row[index]), solutions.terms, solutions.table
    key, level = int(terms.key[row]), Recompute[run.recompute.upper()]
    limits = recomputed_limit(solutions.problem, solutions.layouts)
    limit = int(limits[stage, index] if limits.ndim == 2 else limits[index]) if level else 0
    sharded = sharded_messages(solutions, index)
    layers = []
    for kind, part in enumerate(table.layers):
        compute = float(terms.layers.forward[kind, 0, row]), float(terms.layers.backward[kind, 0, row])
        layers.append(_work(part, key, "layer", level, sharded.get(f"layer{kind}", ()), compute))
    root = sharded.get("root", ())
    again = level if end_recomputed(solutions.problem, solutions.layouts)[index] else Recompute.NONE
    embedding, last = _work(table.embedding, key, "embedding", Recompute.NONE, root), pp * vpp - 1
    predicting = (piece for name, pieces in sharded.items() if name.startswith("predicting") for piece in pieces)
    head = _work(table.head, key, "head", again, (*predicting, *sharded.get("head", () if last == 0 else root)))
    sizes, of_layer = chunks_of(solutions, index), solutions.problem.kinds.of_layer
    starts, held, chunks = np.cumsum([0, *sizes]), 0, []
    for chunk in range(vpp):
        number = int(part_of(run.schedule, np.array(stage), np.array(chunk), pp))
        works = [embedding] if number == 0 else []
        for layer in range(int(starts[number]), int(starts[number + 1])):
            work = layers[int(of_layer[layer])]
            works.append(work if held < limit else replace(work, recompute=()))
            held += 1
        chunks.append((*works, head) if number == last else tuple(works))
    return SimaiStageWork(stage, tuple(chunks))


def _work(
    part: EstimatedProgram,
    key: int,
    name: str,
    level: Recompute,
    sharded: tuple[Piece, ...],
    compute: tuple[float, float] | None = None,
) -> Work:
    """Return the work of a part. compute: seconds of its two passes, waiting for the host included (default: the part's)."""
    seconds = part.estimates.seconds[:, key] * part.estimates.counts()[:, key]
    there = [i for i, op_seconds in enumerate(seconds) if op_seconds > 0]
    ops = [part.estimates.ops[i] for i in there]
    pieces = [piece_of(op, key, float(seconds[i]), len(part.transient)) for i, op in zip(there, ops, strict=True)]
    units = [sorted(unit, key=lambda i: _rank(ops[i])) for unit in _units(ops)]
    forward = [i for unit in units for i in unit if ops[i].phase == FORWARD]
    backward = [i for unit in reversed(units) for i in unit if ops[i].phase != FORWARD]
    again = tuple(pieces[i] for i in forward if level and level in ops[i].recomputed_by)
    whole = compute or (float(part.times.forward[0, key]), float(part.times.backward[0, key]))
    passes = [
        _waiting(tuple(pieces[i] for i in way), of_pass, phase)
        for way, of_pass, phase in zip((forward, backward), whole, (FORWARD, INPUT_GRAD), strict=True)
    ]
    gathered = tuple(piece for piece in sharded if piece.kind == "all_gather")
    scattered = tuple(piece for piece in sharded if piece.kind != "all_gather")
    return Work(name, passes[0], passes[1], again, gathered, scattered)


def _waiting(pieces: tuple[Piece, ...], seconds: float, phase: str) -> tuple[Piece, ...]:
    """Return the pieces of a pass, and what its ``seconds`` of compute are more: the device waits for the host's launches."""
    waits = seconds * 1e9 - sum(piece.ns for piece in pieces if not piece.is_message)
    return pieces if waits < 1 else (*pieces, Piece("launches", "host", COMPUTE, phase, waits))


def _units(ops: Sequence[Op]) -> list[list[int]]:
    """Group the ops of a program, in order, into units that forward runs one after the other and backward in reverse.

    A unit is all ops of one name and of its parts (``name.what``), and of the linears in between that share its collectives.
    """
    last = {_base(op): i for i, op in enumerate(ops)}
    units: list[list[int]] = []
    end = -1
    for i, op in enumerate(ops):
        if i > end:
            units.append([])
        end = max(end, last[_base(op)])
        units[-1].append(i)
    return units


def _base(op: Op) -> str:
    """Return the name without what belongs to it: two parts for ``experts.``, ``expert.`` and ``shared.``, else one."""
    parts = op.name.split(".")
    return ".".join(parts[: 2 if parts[0] in ("experts", "expert", "shared") else 1])


def _rank(op: Op) -> int:
    """Return the place of an op in its unit's pass: operands are gathered before they are multiplied, products summed after."""
    if op.name.endswith(".etp"):  # summed over the parts of an expert before the exchange, gathered after it
        return 0 if op.kind == "reduce_scatter" else 2
    if op.phase == WEIGHT_GRAD:
        return 3
    if op.stream == COMPUTE:
        return 1
    return {"all_gather": 0, "reduce_scatter": 2, "all_reduce": 2}.get(op.kind, 1)


def split_blocks(pieces: Sequence[Piece], backward: bool) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Return the pieces of a layer that are of its attention block, and those of its MLP or experts."""
    ends = [i for i, piece in enumerate(pieces) if piece.name == _END_OF_ATTENTION]
    if not ends:
        inside = [i for i, piece in enumerate(pieces) if piece.module == ATTENTION]
        ends = [min(inside) if backward else max(inside)] if inside else []
    if not ends:
        return (), tuple(pieces)
    if backward:
        return tuple(pieces[ends[0] :]), tuple(pieces[: ends[0]])
    return tuple(pieces[: ends[-1] + 1]), tuple(pieces[ends[-1] + 1 :])
