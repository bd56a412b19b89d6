"""Pictures of the kernel models: measurements, the fit, and its uncertainty.

Shapes measured at many sizes are drawn as curves; where every shape was measured once (a low-discrepancy grid), all rows are
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from predictor.accuracy.crossval import (
    caveat,
    flash_attn_scores,
    formats,
    linear_family,
    linear_rows,
    linear_scores,
    memory_bound_scores,
)
from predictor.accuracy.pictures_attention import draw_attention
from predictor.accuracy.pictures_axes import (
    COLOURS,
    MARKS,
    SIZE,
    few,
    flops_axis,
    interval_factor,
    new_figure,
    peak_line,
    rate_unit,
    save,
    subtitle_of,
)
from predictor.accuracy.pictures_memory import draw_memory_bound
from predictor.accuracy.pictures_scatter import draw_all_rows
from predictor.accuracy.score import Score
from predictor.kernels.attn_rows import main_rows
from predictor.kernels.gemm_physics import GemmPhysics
from predictor.kernels.linear import LinearModel
from profiler.profile.profile import Profile, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_SIZES = 6  # fewer m of a weight shape are too few for a curve
_WORK = "FLOPs of one GEMM (2 m n k)"


def draw(profile: Profile, fits: Mapping[str, Any], out_dir: Path, scores: Sequence[Score] | None = None) -> list[Path]:
    """Write linear.jpg, flash_attn.jpg and memory_bound.jpg to ``out_dir``; a model without measurements has no picture.

    fits: holds the fitted ``linears``, ``attention`` and ``kernels``. scores: held-out errors to show; computed here if not
    given. Raises OSError or InputError where ``out_dir`` cannot be written to.
    """
    out_dir.mkdir(parents=True, exist_ok=True)

    def known(op: str) -> list[Score]:
        tests = {"linear": linear_scores, "flash_attn": flash_attn_scores, "memory_bound": memory_bound_scores}
        return tests[op](profile) if scores is None else [s for s in scores if s.op == op]

    written, device = [], profile.device.name
    if len(rows := linear_rows(profile)):
        written.append(_draw_linear(profile, fits["linears"], rows, known("linear"), out_dir / "linear.jpg"))
    attention = profile.table("flash_attn")
    if len(rows := main_rows(attention)):
        path = out_dir / "flash_attn.jpg"
        written.append(draw_attention(fits["attention"], rows, attention, device, known("flash_attn"), path))
    kernels = profile.table("memory_bound")
    if len(rows := kernels.where(kernels["bytes"] > 0)):
        path = out_dir / "memory_bound.jpg"
        written.append(draw_memory_bound(fits["memory"], rows, device, known("memory_bound"), path))
    return written


def _draw_linear(profile: Profile, fit: LinearModel, rows: Table, scores: Sequence[Score], path: Path) -> Path:
    family = linear_family(profile)
    part = fit.parts[family]
    title = f"Matrix multiplication ({formats(rows)}, forward) on {profile.device.name}"
    title += few(len(rows), part.physics == GemmPhysics())
    figure = new_figure(title, subtitle_of(scores, "FLOPs", caveat(len(rows), scores)), SIZE)
    if weights := weight_shapes(rows):
        _draw_weights(figure, fit, rows, weights, family)
    else:
        flops = 2.0 * rows["m"] * rows["n"] * rows["k"]
        found = fit.predict(rows["m"], rows["n"], rows["k"], dtype=family)
        draw_all_rows(figure, _WORK, flops, rows["seconds"], found, part.machine.peak)
    return save(figure, path)


def _draw_weights(figure: Figure, fit: LinearModel, rows: Table, weights: Sequence[tuple[int, int]], family: str) -> None:
    """Rate (left) and time (right) of a few weight shapes over the FLOPs of m rows."""
    rate, time = figure.subplots(1, 2)
    peak = fit.parts[family].machine.peak
    unit, scale = rate_unit(peak)
    for i, (n, k) in enumerate(weights):
        chosen = rows.where((rows["n"] == n) & (rows["k"] == k))
        m = _sizes_between(chosen["m"])
        found, per_row = fit.predict(m, n, k, dtype=family), 2.0 * n * k
        flops, measured = per_row * m, per_row * chosen["m"]
        factor, colour = interval_factor(found), COLOURS[i]
        for axes, fitted, points in (
            (rate, flops / found.seconds / scale, measured / chosen["seconds"] / scale),
            (time, found.seconds * 1e6, chosen["seconds"] * 1e6),
        ):
            axes.plot(flops, fitted, color=colour, lw=1.4, label=f"n {n}, k {k}")
            axes.fill_between(flops, fitted / factor, fitted * factor, color=colour, alpha=0.15, lw=0)
            axes.plot(measured, points, ls="", ms=4, mew=0, color=colour, marker=MARKS[i])
    _label(rate, time, unit, peak / scale)


def _label(rate: Axes, time: Axes, unit: str, peak: float) -> None:
    peak_line(rate, peak)
    rate.set_ylabel(f"achieved {unit}")
    legend = "dots: measured; line: fit; band: 90% interval"
    rate.legend(fontsize=8, frameon=False, title=legend, title_fontsize=8, loc="lower right", alignment="left")
    time.set(yscale="log", ylabel="time (microseconds)")
    for axes in (rate, time):
        flops_axis(axes, _WORK)
        axes.grid(True, which="major", alpha=0.25)


def weight_shapes(rows: Table) -> list[tuple[int, int]]:
    """Up to five weight shapes (n, k) with many measured m, from small to large.

    Empty where each has too few for a curve.
    """
    shapes = np.unique(np.stack([rows["n"], rows["k"], rows["m"]]), axis=1)
    pairs, counts = np.unique(shapes[:2], axis=1, return_counts=True)
    often = pairs[:, counts >= max(min(12, counts.max()), _LEAST_SIZES)]
    if not often.size:
        return []
    shaped = often[:, np.abs(np.log(often[0] / often[1])) < 1.5]  # near square: neither thin nor flat
    often = shaped if shaped.shape[1] >= len(COLOURS) else often
    order = np.argsort(often[0].astype(float) * often[1], kind="stable")
    spread = np.unique((np.linspace(0.1, 0.95, len(COLOURS)) * (len(order) - 1)).astype(int))
    picked = order[spread] if len(order) > len(COLOURS) else order
    return [(int(often[0, i]), int(often[1, i])) for i in picked]


def _sizes_between(measured: np.ndarray) -> np.ndarray:
    """Numbers of rows to draw a curve through: multiples of 64 between the measured ones."""
    sizes = np.geomspace(measured.min(), measured.max(), 160)
    return np.unique(np.maximum(np.round(sizes / 64), 1).astype(np.int64) * 64)
