"""Orders of the passes of V-shaped schedules: a stage holds a chunk of the way down the pipeline and one of the way back.

Stage s of pp holds parts s and 2 pp - 1 - s of the model, so the first stage has both the embedding and the head. Sources:
zb-v, Qi et al. 2023 (arXiv 2401.10241 section 6), with the memory of 1F1B; v-half and v-min, about a half and a third of it, Qi
et al. 2024 (arXiv 2405.15362), which repeat one building block for every micro batch; dualpipev, DeepSeek's DualPipe cut in
half (arXiv 2412.19437 section 3.2.1). zb-v and dualpipev run the passes as torch.distributed.pipelining does.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np

from solver.schedule.kinds import BACKWARD, FORWARD, WEIGHT, WHOLE
from solver.spec.read_only import read_only

#: Delay from stage to stage, in passes, of the forwards of chunk 0 and 1 and of the backwards of chunk 1 and 0. Together they
#: are how long a chunk's activations live: 4 or 6 passes a stage, of 6 that a micro batch takes on every stage.
DELAYS = {"v-min": (1, 1, 1, 1), "v-half": (2, 1, 2, 1)}
PERIOD = 6  #: passes of one micro batch on one stage: F, B and W of two chunks


@lru_cache(maxsize=1024)
def v_shaped_order(schedule: str, stage: int, stages: int, micro_batches: int) -> np.ndarray:
    """Return the passes of ``stage`` in order: int64 [passes, 3] of kind, chunk and micro batch."""
    if schedule in DELAYS:
        order = _repeated(_building_block(schedule, stages)[stage], micro_batches)
    else:
        passes = _Passes()
        (_zb_v if schedule == "zb-v" else _dualpipev)(passes, stage, stages, micro_batches)
        order = np.array(passes.done, dtype=np.int64)
    return read_only(order)


@lru_cache(maxsize=256)
def _building_block(schedule: str, stages: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return (start, kind, chunk) of the six passes of a micro batch on every stage, each pass taking one unit of time.

    Blocks start a period apart, so the passes of a stage must differ modulo the period: where the delays alone do not see to
    that, the least waits are added where a micro batch turns back. Weight gradients fill the places that are left.
    """
    down, up, back_down, back_up = DELAYS[schedule]
    s = np.arange(stages)
    behind = stages - 1 - s
    for waits in sorted(product(range(PERIOD), repeat=3), key=lambda w: (sum(w), w)):
        f0 = down * s
        f1 = f0[-1] + 1 + waits[0] + up * behind
        b1 = f1[0] + 1 + waits[1] + back_down * s
        b0 = b1[-1] + 1 + waits[2] + back_up * behind
        starts = np.stack([f0, f1, b1, b0])
        if all(len(set(column % PERIOD)) == len(column) for column in starts.T):
            break
    else:
        raise ValueError(f"schedule {schedule} has no building block of {stages} stages")
    return tuple(_with_weights(*(int(start) for start in column)) for column in starts.T)


def _with_weights(f0: int, f1: int, b1: int, b0: int) -> tuple[tuple[int, int, int], ...]:
    """Return the passes of one stage's block with the weight gradients as soon after their backwards as a place is free."""
    taken = {start % PERIOD for start in (f0, f1, b1, b0)}
    weights = []
    for chunk, start in ((1, b1), (0, b0)):
        at = next(t for t in range(start + 1, start + 1 + PERIOD) if t % PERIOD not in taken)
        taken.add(at % PERIOD)
        weights.append((at, WEIGHT, chunk))
    return ((f0, FORWARD, 0), (f1, FORWARD, 1), (b1, BACKWARD, 1), (b0, BACKWARD, 0), *weights)


def _repeated(block: tuple[tuple[int, int, int], ...], micro_batches: int) -> np.ndarray:
    """Return the passes of all micro batches in the order of their starts, blocks a period apart."""
    start, kind, chunk = np.array(block, dtype=np.int64).T
    k = np.arange(micro_batches)
    starts = (start[:, None] + PERIOD * k).ravel()
    passes = [np.repeat(kind, micro_batches), np.repeat(chunk, micro_batches), np.tile(k, len(block))]
    return np.stack(passes, axis=1)[np.argsort(starts, kind="stable")]


class _Passes:
    """Passes of one stage as they are added: micro batches of each kind and chunk count up."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, int]] = []
        self.count = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD, WEIGHT) for chunk in (0, 1)}

    def run(self, *passes: tuple[int, int], times: int = 1) -> None:
        """Add passes of (kind, chunk); WHOLE counts as a backward pass and as its weight gradient."""
        for kind, chunk in passes * times:
            counted = BACKWARD if kind == WHOLE else kind
            self.done.append((kind, chunk, self.count[counted, chunk]))
            self.count[counted, chunk] += 1
            if kind == WHOLE:
                self.count[WEIGHT, chunk] += 1


def _zb_v(passes: _Passes, stage: int, stages: int, micro_batches: int) -> None:
    """Add the passes of zb-v (at least 2 pp - 1 micro batches): weight gradients wait only while the pipeline drains."""
    behind = stages - stage
    f0, f1, b0, b1, w0, w1 = ((kind, chunk) for kind in (FORWARD, BACKWARD, WEIGHT) for chunk in (0, 1))
    passes.run(f0, times=2 * behind - 1)
    passes.run(f1, f0, times=stage)
    passes.run(f1, b1, w1, times=behind)
    passes.run(f0, b0, w0, f1, b1, w1, times=micro_batches - (2 * behind - 1) - stage)
    passes.run(b0, w0, f1, b1, w1, times=micro_batches - passes.count[f1])
    passes.run(b0, b1, times=stage)
    passes.run(b0, w0, times=behind)
    passes.run(w1, times=micro_batches - passes.count[w1])
    passes.run(w0, times=micro_batches - passes.count[w0])


def _dualpipev(passes: _Passes, stage: int, stages: int, micro_batches: int) -> None:
    """Add DualPipeV's eight steps (at least 2 pp micro batches).

    In the main step a forward pass of one chunk runs beside a whole backward pass of the other; here they follow each other.
    Backward passes are split where the weight gradient fills a bubble.
    """
    behind, half = stages - 1 - stage, (stage + 1) // 2
    f0, f1, b0, b1, w0, w1 = ((kind, chunk) for kind in (FORWARD, BACKWARD, WEIGHT) for chunk in (0, 1))
    whole0, whole1 = (WHOLE, 0), (WHOLE, 1)
    passes.run(f0, times=2 * behind)
    passes.run(f0, f1, times=stage + 1)
    passes.run(b1, w1, f1, times=behind)
    passes.run(f0, whole1, f1, whole0, times=micro_batches - 2 * stages + stage + 1)
    passes.run(whole1, f1, whole0, times=behind)
    drained = [kind for whole, split in ((whole1, b1), (whole0, b0)) for kind in (whole, split)]
    sequence = [drained[2 * (i % 2) + (i >= 2 * half + (stage % 2 == 0))] for i in range(2 * (stage + 1))]
    passes.run(*sequence)
    waiting = [w1 if kind == b1 else w0 for kind in sequence if kind in (b0, b1)]
    for _ in range(behind):
        passes.run(waiting.pop(0), b0)
        waiting.append(w0)
    passes.run(*waiting)
