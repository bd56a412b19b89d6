"""The CSV file that SimAI-Analytical writes: two summary lines, a header, and a line for each row of the workload."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from profiler.files import write_text
from profiler.units import GIB
from solver.simai.analytical import PARTS, PassTime, RowTime, StepTime
from solver.simai.workload_text import Collective

_SUMMARY = (
    "File name, Expose DP comm, Expose DP_EP comm, Expose TP comm, Expose_EP_comm, Expose_PP_comm, bubble time, total comp, "
    "total exposed comm, Total time"
)
_RUN = "Analytical_test"
_HEADER = (
    f"layer_name,{_RUN},fwd compute,wg compute,ig compute,fwd exposed comm,wg exposed comm,ig exposed comm,fwd total comm,"
    "algbw,busbw,wg total comm,algbw,busbw,ig total comm,algbw,busbw"
)


def analytical_csv(step: StepTime, prefix: str) -> str:
    """Return the text of the file. prefix: of the file's name, which its first cell repeats."""
    values = [step.parts[name] for name in PARTS] + [step.exposed]
    cells = [f"{_fixed(value, 0)} ({_fixed(value / step.total * 100 if step.total else math.nan, 2)}%)" for value in values]
    summary = ", ".join([prefix, *cells, _fixed(step.total, 0)])
    distinct = {id(row): row for row in step.rows}  # rows repeat for every layer of every micro batch
    lines = {number: ",".join(_line(row)) for number, row in distinct.items()}
    return "\n".join([_SUMMARY, summary, _HEADER, *(lines[id(row)] for row in step.rows), ""])


def _line(row: RowTime) -> Iterator[str]:
    order = (row.forward, row.weight_grad, row.input_grad)
    yield from (row.name, _RUN)
    yield from (_fixed(part.compute / 1000.0, 0) for part in order)
    yield from (_fixed(part.exposed / 1000.0, 0) for part in order)
    for part in order:
        algorithm, bus = bandwidths(part)
        yield from (_fixed(part.comm / 1000.0, 0), _fixed(algorithm, 2), _fixed(bus, 2))


def bandwidths(part: PassTime) -> tuple[float, float]:
    """Return (algorithm, bus) bandwidth [GiB/s] of one pass in 32-bit floats, as the original computes them.

    Infinite or not a number where the collective takes no time.
    """
    with np.errstate(all="ignore"):
        seconds = np.float64(part.comm / 1000.0)
        algorithm = np.float32(np.float64(part.size) / seconds * 1000000 / GIB)
        ranks = np.float64(part.ranks)
        collective = part.part.collective
        if collective is Collective.NONE:
            return float(algorithm), 0.0
        factor = np.float32(2 if collective is Collective.ALL_REDUCE else 1)
        return float(algorithm), float(np.float32(algorithm * factor * np.float32(part.ranks - 1) / ranks))


def _fixed(value: float, digits: int) -> str:
    """Return a number as the original prints it: what is not one as ``-nan``, the sign that x86 gives it."""
    return "-nan" if math.isnan(value) else f"{value:.{digits}f}"


def write_analytical_csv(path: Path, step: StepTime, prefix: str) -> None:
    """Write the file, atomically."""
    write_text(path, analytical_csv(step, prefix))
