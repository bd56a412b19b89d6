"""Two passes of a layer at once: small cases by hand, the graph of what waits for what, and bounds that hold for all times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.layers.program import EXCHANGE, FORWARD, INPUT_GRAD, MEMORY_BOUND, WEIGHT_GRAD, Op
from solver.layers.program import EXPERT_MODULE as EXPERTS
from solver.step.op_estimates import OpEstimates, layer_times
from solver.step.paired_exchange import MOVED_CONTENTION, paired_seconds

#: name of a time -> (op, module, pass)
PARTS = {
    "attention_f": ("attention", "attention", FORWARD),
    "attention_b": ("attention", "attention", INPUT_GRAD),
    "attention_w": ("attention", "attention", WEIGHT_GRAD),
    "experts_f": ("experts.w13", EXPERTS, FORWARD),
    "experts_b": ("experts.w13", EXPERTS, INPUT_GRAD),
    "experts_w": ("experts.w13", EXPERTS, WEIGHT_GRAD),
    "dispatch_f": ("dispatch", EXCHANGE, FORWARD),
    "dispatch_b": ("dispatch", EXCHANGE, INPUT_GRAD),
    "combine_f": ("combine", EXCHANGE, FORWARD),
    "combine_b": ("combine", EXCHANGE, INPUT_GRAD),
}
#: What waits for what in one pair: on the same stream, and for data; ~ marks the pair before.
GRAPH = {
    "attention_f": ("~last compute", "~combine_f"),
    "combine_b": ("~combine_f", "~attention_b"),
    "experts_b": ("attention_f", "combine_b"),
    "dispatch_f": ("combine_b", "attention_f"),
    "experts_w": ("experts_b",),
    "dispatch_b": ("dispatch_f", "experts_b"),
    "experts_f": ("experts_w", "dispatch_f"),
    "combine_f": ("dispatch_b", "experts_f"),
    "attention_b": ("experts_f", "dispatch_b"),
    "attention_w": ("attention_b",),
}


def paired(contention: float = 0.0, host: float = 0.0, **seconds: float) -> np.ndarray:
    """Return the seconds of a pair without and with delayed weight gradients."""
    ops, times = [], []
    for name, (op, module, which) in PARTS.items():
        stream = "ep" if module == EXCHANGE else "compute"
        ops.append(Op(op, module, MEMORY_BOUND, which, {"bytes": 1}, stream))
        times.append(seconds.get(name, 0.0))
    rows = np.array(times)[:, None]
    slowed = np.array([[contention * (op.stream == "ep")] for op in ops])
    estimates = OpEstimates(tuple(ops), rows, 0 * rows, np.zeros(rows.shape, dtype=np.int8), slowed)
    return paired_seconds(estimates, rows, layer_times(estimates, rows, host))[:, 0]


def test_by_hand() -> None:
    # a short exchange hides behind compute, and delays it by its contention
    one = dict.fromkeys(PARTS, 1.0) | {name: 0.25 for name in PARTS if "dispatch" in name or "combine" in name}
    assert paired(**one) == pytest.approx([6.0, 6.0])
    assert paired(contention=0.2, **one) == pytest.approx([6.2, 6.2])
    # nothing but exchange: it runs in order on its stream
    assert paired(dispatch_f=1, dispatch_b=2, combine_f=3, combine_b=4) == pytest.approx([10, 10])
    # the gradients' dispatch (4) waits for the experts' weight gradients (4), or runs beside them
    long = {
        "attention_f": 1,
        "experts_b": 1,
        "experts_w": 4,
        "experts_f": 1,
        "attention_b": 1,
        "dispatch_f": 1,
        "dispatch_b": 4,
        "combine_f": 1,
        "combine_b": 1,
    }
    assert paired(**long) == pytest.approx([11, 8])
    # ten launches of 2 s each take longer than all of it
    assert paired(host=2.0, **long) == pytest.approx([20, 20])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=len(PARTS), max_size=len(PARTS)))
def test_bounds_and_the_graph(times: list[float]) -> None:
    seconds = dict(zip(PARTS, times, strict=True))
    plain, delayed = paired(**seconds)
    sent = sum(value for name, value in seconds.items() if "dispatch" in name or "combine" in name)
    compute = sum(times) - sent
    small = 1e-9 * (1 + sum(times))
    assert max(sent, compute) - small <= delayed <= plain + small <= sent + compute + 2 * small
    assert delayed == pytest.approx(by_graph(seconds), abs=small)
    together = {
        "experts_b": seconds["experts_b"] + seconds["experts_w"],
        "experts_w": 0.0,
        "attention_b": seconds["attention_b"] + seconds["attention_w"],
        "attention_w": 0.0,
    }
    assert plain == pytest.approx(by_graph({**seconds, **together}), abs=small)


def by_graph(seconds: dict[str, float], pairs: int = 24, first: int = 8) -> float:
    """Return the mean time between pairs, where each part starts when all that it waits for has ended."""
    before = dict.fromkeys(PARTS, 0.0)
    ends = []
    for _ in range(pairs):
        now: dict[str, float] = {}
        for name, waits in GRAPH.items():
            start = max(_end(wanted, now, before) for wanted in waits)
            now[name] = start + seconds[name]
        before = now
        ends.append(now["combine_f"])
    return (ends[-1] - ends[first - 1]) / (pairs - first)


def _end(wanted: str, now: dict[str, float], before: dict[str, float]) -> float:
    if wanted == "~last compute":
        return before["attention_w"]
    return before[wanted[1:]] if wanted.startswith("~") else now[wanted]


@pytest.mark.parametrize(("dispatcher", "compute", "moved"), [("alltoall", 9.0, 0.5), ("hybridep", 8.0, 1.5)])
def test_kernels_on_the_exchanges_stream_hide_too(dispatcher: str, compute: float, moved: float) -> None:
    # beside attention (8 and 16) and the experts' gradients (4): a residual addition of 0.5, and where a call of hybrid-EP
    # includes it a permutation of 1. Everything on the exchange's stream hides; its kernels slow compute by half their time
    ops = [
        Op("wo", "attention", MEMORY_BOUND, FORWARD, {"bytes": 1}),
        Op("permute", EXCHANGE, MEMORY_BOUND, FORWARD, {"bytes": 1}),
        Op("residual2", "residual", MEMORY_BOUND, FORWARD, {"bytes": 1}),
        Op("dispatch", EXCHANGE, MEMORY_BOUND, FORWARD, {"bytes": 1}, "ep"),
        Op("combine", EXCHANGE, MEMORY_BOUND, FORWARD, {"bytes": 1}, "ep"),
        Op("experts.w13", EXPERTS, MEMORY_BOUND, INPUT_GRAD, {"bytes": 1}),
        Op("wo", "attention", MEMORY_BOUND, INPUT_GRAD, {"bytes": 1}),
    ]
    rows = np.array([[8.0], [1.0], [0.5], [0.25], [0.25], [4.0], [16.0]])

    def paired_of(chosen: list[int]) -> float:
        some, seconds = tuple(ops[i] for i in chosen), rows[chosen]
        estimates = OpEstimates(some, seconds, 0 * seconds, np.zeros(seconds.shape, dtype=np.int8), 0 * seconds)
        return float(paired_seconds(estimates, seconds, layer_times(estimates, seconds, 0.0), dispatcher)[0, 0])

    assert paired_of([*range(7)]) == pytest.approx(compute + 4 + 16 + MOVED_CONTENTION * moved)
    assert paired_of([0, 2, 6]) == pytest.approx(8 + 0.5 + 16)  # a dense layer has no such stream
