"""A priced layout as AICB ``Workload`` CSV: what one rank of a stage runs in a step, in the order of its pipeline schedule.

Computations are GEMMs, as AICB's replay needs them; the nanoseconds of a kernel that is none (norms, activations, rotary
embedding, losses) are added to the next GEMM of its pass, so that all of them together take what was predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from solver.layers.program import WEIGHT_GRAD
from solver.schedule.kinds import BACKWARD, FORWARD, WEIGHT, WHOLE, part_of, splits_backward
from solver.schedule.op_orders import stage_order
from solver.simai.pieces import Piece
from solver.simai.stage_work import SimaiStageWork, Work
from solver.simai.step_work import StepWork
from solver.simai.workload_csv import COMPUTATION, EPOCH_END, CsvWorkload, Gemm, Item
from solver.spec.choices import V_SHAPED
from solver.spec.strategy import Strategy

_KINDS = {"all2all": "all_to_all"}
_GROUPS = {
    "tp": "tp_group",
    "dp": "dp_group",
    "ep": "ep_group",
    "ep_dp": "ep_dp_group",
    "all": "all",
    "embedding": "embedding_group",
}
_NO_GEMM = Gemm(((1, 1, 1), (1, 1)))  #: where a pass has no GEMM at all


@dataclass(frozen=True)
class _Passes:
    """The items of one chunk's passes; weight: those of a schedule that runs weight gradients apart."""

    forward: tuple[Item, ...]
    backward: tuple[Item, ...]
    without_weight: tuple[Item, ...]
    weight: tuple[Item, ...]


def csv_workload(run: Strategy, stage: SimaiStageWork, step: StepWork) -> CsvWorkload:
    """Return the workload of a rank of a stage. The first epoch_end closes an empty setup, as AICB's files have one."""
    sizes = {"tp": run.tp, "dp": run.dp, "ep": run.ep, "ep_dp": run.edp, "all": run.world_size, "embedding": 2}
    chunks = [_passes(works, sizes) for works in stage.chunks]
    items = [_epoch_end()]
    name = "interleaved" if run.schedule == "1f1b" and run.vpp > 1 else run.schedule
    order = stage_order(name, stage.stage, run.pp, run.num_micro_batches, run.vpp, run.micro_batch_group)
    for kind, chunk, _ in order.tolist():
        items += _with_sends(kind, chunks[chunk], int(part_of(name, stage.stage, chunk, run.pp)), run, step.send)
    for pieces in (step.reduced, step.other, step.update, step.gathered):
        items += _items(pieces, "step", sizes)
    return CsvWorkload((*items, _epoch_end()))


def _epoch_end() -> Item:
    return Item(EPOCH_END, None, 0, "")


def _passes(works: Sequence[Work], sizes: dict[str, int]) -> _Passes:
    forward = [item for work in works for item in _items((*work.gathered, *work.forward), "forward", sizes)]
    backward, without, weight = list[Item](), list[Item](), list[Item]()
    for work in reversed(works):
        gathered = work.gathered if work.name == "layer" else ()  # embedding and head stay whole
        again = [*_items(gathered, "backward", sizes), *_items(work.recompute, "recompute", sizes)]
        inputs = [piece for piece in work.backward if piece.phase != WEIGHT_GRAD]
        weights = [piece for piece in work.backward if piece.phase == WEIGHT_GRAD]
        scattered = _items(work.scattered, "backward", sizes)
        backward += [*again, *_items(work.backward, "backward", sizes), *scattered]
        without += [*again, *_items(inputs, "backward", sizes)]
        weight += [*_items(weights, "backward", sizes), *scattered]
    return _Passes(*(tuple(items) for items in (forward, backward, without, weight)))


def _with_sends(kind: int, chunk: _Passes, part: int, run: Strategy, send: int) -> Iterator[Item]:
    """Yield a pass between its receive and its send; parts of the model are numbered as a micro batch passes them."""
    forward, last = kind == FORWARD, run.pp * run.vpp - 1

    def message(way: str, other: int, stage: str) -> Iterator[Item]:
        turns = run.schedule in V_SHAPED and {part, other} == {run.pp - 1, run.pp}  # both on the last stage
        if 0 <= other <= last and run.pp > 1 and not turns:
            sends = "isend" if way.startswith("send") else "irecv"
            yield Item(sends, "pp_group", send, stage, run.pp, additional=way)

    if kind == WEIGHT:
        yield from chunk.weight
    elif forward:
        yield from message("recv_prev", part - 1, "forward_step")
        yield from chunk.forward
        yield from message("send_next", part + 1, "forward_step")
    else:
        yield from message("recv_next", part + 1, "backward_step")
        yield from chunk.without_weight if kind == BACKWARD and splits_backward(run.schedule) else chunk.backward
        yield from message("send_prev", part - 1, "backward_step")
    assert kind in (FORWARD, BACKWARD, WEIGHT, WHOLE)


def _items(pieces: Iterable[Piece], way: str, sizes: dict[str, int]) -> list[Item]:
    """Return a pass's messages and GEMMs, with the time of other kernels in the next GEMM, or in the last one."""
    items, waiting = list[Item](), 0.0
    last = -1
    for piece in pieces:
        stage = f"{way}.{piece.module}.{piece.name}".replace(" ", "_")
        if piece.is_message:
            kind = _KINDS.get(piece.kind, piece.kind)
            items += [Item(kind, _GROUPS[piece.group], size, stage, sizes[piece.group]) for size in piece.sizes]
            continue
        waiting += piece.ns
        if piece.shapes:
            share, last, waiting = waiting / len(piece.shapes), len(items) + len(piece.shapes) - 1, 0.0
            items += [Item(COMPUTATION, None, Gemm(shapes), stage, elapsed=round(share)) for shapes in piece.shapes]
    if waiting and last >= 0:
        items[last] = replace(items[last], elapsed=round((items[last].elapsed or 0) + waiting))
    elif waiting:
        items.append(Item(COMPUTATION, None, _NO_GEMM, f"{way}.kernels", elapsed=round(waiting)))
    return items
