"""A priced layout as ``SIMAI_workload`` text: what one stage of its pipeline computes and sends in a step.

Unlike AICB's own, it has every kernel of a layer (a gated MLP's three matrices, the attention core, experts, recomputation, the
head), messages of the sizes that are sent in both directions, and chunks of the schedule as vpp. What the format cannot say is
in solver.simai.stage_work.notes_of and docs/simai.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from solver.layers.program import ATTENTION, MAMBA, WEIGHT_GRAD
from solver.simai.pieces import Piece
from solver.simai.stage_work import SimaiStageWork, Work, split_blocks
from solver.simai.step_work import StepWork
from solver.simai.workload_text import Pass, Row, TextWorkload, training_header
from solver.spec.strategy import Strategy

_WORDS = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "ALLGATHER",
    "reduce_scatter": "REDUCESCATTER",
    "all2all": "ALLTOALL",
    "broadcast": "ALLGATHER",  # each rank in turn, its share: as much as an all-gather of the whole
}
_SUFFIX = {"tp": "", "dp": "", "ep": "_EP", "ep_dp": "_DP_EP", "all": "", "embedding": ""}
_NOTHING = Pass()
_EXPERTS = ("experts", "expert_exchange", "router")


@dataclass(frozen=True)
class _Segment:
    """Compute up to a message: nanoseconds before it, those of weight gradients, and the message."""

    ns: float
    weight_ns: float
    message: Piece | None


def text_workload(run: Strategy, stage: SimaiStageWork, step: StepWork) -> TextWorkload:
    """Return the workload of a stage: rows of the step, then the rows of each micro batch."""
    header = training_header(run.tp, run.ep, run.pp, run.vpp, run.num_micro_batches, run.world_size, step.send)
    micro_batch = [row for work in stage.works for row in _rows(work)]
    return TextWorkload(header, (*_step_rows(step), *(micro_batch * run.num_micro_batches)))


def _step_rows(step: StepWork) -> Iterator[Row]:
    experts = {"ep_dp"}
    for name, messages, groups in (
        ("grad_gather", step.gathered, {"dp"}),
        ("grad_param_comm", step.reduced, {"dp"}),
        ("moe_grad_norm1", step.gathered, experts),
        ("moe_grad_norm2", step.reduced, experts),
        ("gradient_norm", step.other, {"all"}),
    ):
        for piece in messages:
            for size in piece.sizes if piece.group in groups else ():
                yield _row(name, weight_grad=_message(replace(piece, size=size)))
    if step.update:
        yield _row("grad_param_compute", input_grad=Pass(round(sum(piece.ns for piece in step.update))))


def _rows(work: Work) -> Iterator[Row]:
    """Yield the rows of a layer, the embedding or the head; what runs again in backward is below, as rows are walked up."""
    for piece in work.gathered:
        yield _row(f"{work.name}_gather_forward", weight_grad=_message(piece))
    if work.name == "layer":
        for forward, backward in zip(split_blocks(work.forward, False), split_blocks(work.backward, True), strict=True):
            yield from _block(_names(forward or backward), forward, backward)
    elif work.name == "embedding":
        yield from _block(("embedding_layer",), work.forward, work.backward)
    else:
        for name, of_loss in (("final_column", False), ("cross_entropy", True)):
            ways = [[p for p in way if (p.module == "loss") == of_loss] for way in (work.forward, work.backward)]
            yield from _block((name,), *ways)
    blocks = zip(("attention", "mlp"), split_blocks(work.recompute, False), strict=True)
    for name, again in reversed(list(blocks)) if work.name == "layer" else [("final", work.recompute)]:
        for segment in reversed(_segments(again)):
            yield _row(f"{name}_recompute", input_grad=_message(segment.message, segment.ns))
    for piece in work.gathered if work.name == "layer" else ():  # embedding and head stay whole
        yield _row(f"{work.name}_gather_backward", weight_grad=_message(piece))
    for piece in work.scattered:
        yield _row(f"{work.name}_grad_scatter", weight_grad=_message(piece))


def _names(pieces: Sequence[Piece]) -> tuple[str, ...]:
    """Return AICB's names for the rows of a block: one for a single row, or of the first and of the others."""
    modules = {piece.module for piece in pieces}
    if modules & {ATTENTION, MAMBA}:
        return "attention_layer", "attention_column", "attention_row"
    return ("mlp_moelayer",) if modules & set(_EXPERTS) else ("mlp_layer", "mlp_column", "mlp_row")


def _block(names: Sequence[str], forward: Sequence[Piece], backward: Sequence[Piece]) -> Iterator[Row]:
    """Yield the rows of a block. Backward's parts are those of the rows from the last one up, as rows are walked."""
    down, up = _segments(forward), _segments(backward)[::-1]
    nothing = _Segment(0.0, 0.0, None)
    for number, (there, back) in enumerate(zip_longest(down, up, fillvalue=nothing)):
        several = max(len(down), len(up)) > 1
        name = names[0] if len(names) == 1 or not several else names[1] if number == 0 else names[2]
        name = f"{name}{number + 1}" if name == "cross_entropy" else name
        back_pass = _message(back.message, back.ns)
        yield _row(name, _message(there.message, there.ns + there.weight_ns), back_pass, Pass(round(back.weight_ns)))


def _segments(pieces: Iterable[Piece]) -> list[_Segment]:
    """Cut a pass after each message; compute after the last one is charged before it."""
    found, ns, weight_ns = list[_Segment](), 0.0, 0.0
    for piece in pieces:
        if piece.is_message:
            found.append(_Segment(ns, weight_ns, piece))
            ns = weight_ns = 0.0
        elif piece.phase == WEIGHT_GRAD:
            weight_ns += piece.ns
        else:
            ns += piece.ns
    if ns or weight_ns:
        last = found.pop() if found else _Segment(0.0, 0.0, None)
        found.append(_Segment(last.ns + ns, last.weight_ns + weight_ns, last.message))
    return found


def _message(piece: Piece | None, ns: float = 0.0) -> Pass:
    if piece is None:
        return Pass(round(ns))
    return Pass(round(ns), f"{_WORDS[piece.kind]}{_SUFFIX[piece.group]}", round(piece.size))


def _row(name: str, forward: Pass = _NOTHING, input_grad: Pass = _NOTHING, weight_grad: Pass = _NOTHING) -> Row:
    return Row(name, forward, input_grad, weight_grad)
