"""A traced step beside the predicted one, part by part: compute by kind, communication that nothing hides, idle time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from solver.formats.logs.profiler_trace import ATTENTION, COMPUTE, GEMM, MEMORY, OPTIMIZER, Trace
from solver.layers.program import CHUNK_SCAN, FLASH_ATTN, GROUPED_LINEAR, LINEAR, STATE_SPACE
from solver.report.explain import Explanation

COMMUNICATION, IDLE = "communication that nothing hides", "idle"
PARTS = (*COMPUTE, COMMUNICATION, IDLE)
#: Parts of a predicted step in which the device has nothing to do.
_IDLE = ("bubble", "stragglers", "offload_exposed")
_LARGEST = 5  #: kernels that are named


@dataclass(frozen=True)
class Traced:
    """Seconds of the median step. parts: by PARTS; they add up to the step. overlapped: seconds in which kernels of compute
    run beside each other, which are counted once. exposed: of the communication that nothing hides, by op. largest: names of
    the kernels that took longest, with what they do and their seconds in a step."""

    step: float
    parts: Mapping[str, float]
    overlapped: float
    exposed: Mapping[str, float]
    largest: tuple[tuple[str, str, float], ...]


def traced(trace: Trace) -> Traced:
    """Return the step of a trace whose length is the median (of an even number the longer of the two)."""
    chosen = int(np.argsort(trace.steps, kind="stable")[len(trace.steps) // 2])
    here = trace.step == chosen
    first, last = trace.windows[chosen]
    start, end, kind = trace.start[here], np.minimum(trace.end[here], last), trace.kind[here]
    computes = np.isin(kind, COMPUTE)
    compute = _union(start[computes], end[computes])
    parts = {name: float((end - start)[kind == name].sum()) for name in COMPUTE}
    overlapped = sum(parts.values()) - _length(compute)
    busy = _union(start, end)
    parts = {name: value * (1 - overlapped / max(sum(parts.values()), 1e-30)) for name, value in parts.items()}
    parts |= {COMMUNICATION: _length(busy) - _length(compute), IDLE: float(last - first) - _length(busy)}
    exposed, so_far = {}, compute
    for op in sorted(set(kind[~computes]), key=lambda name: -float((end - start)[kind == name].sum())):
        wider = _union(*np.concatenate([so_far, np.stack([start[kind == op], end[kind == op]], axis=1)]).T)
        exposed[str(op)], so_far = _length(wider) - _length(so_far), wider
    return Traced(float(last - first), parts, overlapped, exposed, _largest(trace, here))


def predicted_parts(explanation: Explanation) -> dict[str, float]:
    """Return the seconds of a predicted step by PARTS."""
    found = dict.fromkeys(PARTS, 0.0)
    for line in explanation.lines:
        found[_part(line.part, line.kind)] += line.seconds
    return found


def trace_lines(found: Traced, explanation: Explanation) -> list[str]:
    """Return in words which part of the gap each part is, the largest first, and the kernels that took longest."""
    ours, gap = predicted_parts(explanation), found.step - explanation.seconds
    lines = []
    differences = sorted(((found.parts[name] - ours[name], name) for name in PARTS), key=lambda row: -abs(row[0]))
    for difference, name in differences:
        if abs(difference) < 0.01 * found.step:
            continue
        share = f": {difference / gap:.0%} of the gap" if gap > 0.02 * found.step and difference > 0 else ""
        lines.append(f"{name}: {_ms(abs(difference))} {'more' if difference > 0 else 'less'} than predicted{share}")
    waited = [f"{op} {_ms(seconds)}" for op, seconds in found.exposed.items() if seconds > 0.005 * found.step]
    if waited:
        lines.append(f"communication that nothing hides is {', '.join(waited)}")
    lines += [f"{_ms(seconds)} {kind}: {name[:90]}" for name, kind, seconds in found.largest]
    return lines


def _part(part: str, kind: str) -> str:
    if part in _IDLE or kind == "host":
        return IDLE
    if part not in ("compute", "recompute", "gradient_accumulation", "optimizer"):
        return COMMUNICATION
    if part == "optimizer":
        return OPTIMIZER
    if kind in (FLASH_ATTN, CHUNK_SCAN, STATE_SPACE):
        return ATTENTION
    return GEMM if kind in (LINEAR, GROUPED_LINEAR) else MEMORY


def _largest(trace: Trace, here: np.ndarray) -> tuple[tuple[str, str, float], ...]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for i in np.flatnonzero(here):
        seconds[trace.names[i], str(trace.kind[i])] += float(trace.end[i] - trace.start[i])
    ordered = sorted(seconds.items(), key=lambda row: -row[1])[:_LARGEST]
    return tuple((name, kind, value) for (name, kind), value in ordered)


def _union(start: Iterable[float], end: Iterable[float]) -> np.ndarray:
    """Return the union of intervals as disjoint ones in order, [n, 2]."""
    first, last = np.asarray(start, dtype=float), np.asarray(end, dtype=float)
    if not len(first):
        return np.empty((0, 2))
    order = np.argsort(first, kind="stable")
    first, reached = first[order], np.maximum.accumulate(last[order])
    new = np.concatenate([[True], first[1:] > reached[:-1]])
    ends = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(first) - 1]])
    return np.stack([first[new], reached[ends]], axis=1)


def _length(union: np.ndarray) -> float:
    return float((union[:, 1] - union[:, 0]).sum())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
