"""The picture of the attention model: the kernel as it was measured, and a training call over the sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from predictor.accuracy.crossval import caveat, formats
from predictor.accuracy.pictures_axes import (
    COLOURS,
    MARKS,
    SIZE,
    few,
    flops_axis,
    interval_factor,
    new_figure,
    rate_unit,
    save,
    subtitle_of,
)
from predictor.accuracy.pictures_scatter import draw_all_rows
from predictor.accuracy.score import Score
from predictor.estimate import Estimate
from predictor.kernels.attn_physics import AttnPhysics
from predictor.kernels.attn_rows import shape_of
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.sources import is_serving, mostly_serving
from profiler.profile.profile import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TOKENS = 16384  # tokens per call of published attention benchmarks
_LEAST_LENGTHS = 4  # fewer lengths of a head layout are too few for a curve
_BLOCK = 128  # kernels work in blocks of this many queries: lengths between cost as much as the next multiple


def draw_attention(fit: FlashAttnModel, rows: Table, table: Table, device: str, scores: Sequence[Score], path: Path) -> Path:
    """Write the picture; returns ``path``. rows: the forward rows of the main kernel; table: all rows of attention."""
    serving = mostly_serving(rows)
    kernel = str(rows["kernel"][0]).replace("_", " ") or "kernel not named"
    title = f"Fused attention ({formats(rows)}, forward; {kernel}) on {device}{few(len(rows), fit.physics == AttnPhysics())}"
    figure = new_figure(title, subtitle_of(scores, "FLOPs", caveat(len(rows), scores)), SIZE)
    if series := head_series(rows):
        _draw_series(figure, fit, series, table, serving)
    else:
        flops, found = shape_of(rows).flops, fit.predict(*shape_of(rows), serving=serving)
        draw_all_rows(figure, "useful FLOPs of one call", flops, rows["seconds"], found, fit.machine.peak)
    return save(figure, path)


def _draw_series(figure: Figure, fit: FlashAttnModel, series: Sequence[Table], table: Table, serving: bool) -> None:
    rate, training = figure.subplots(1, 2)
    unit, scale = rate_unit(fit.machine.peak)
    for i, chosen in enumerate(series):
        batch, heads, kv_heads, dim, v_dim = (
            int(chosen[c][0]) for c in ("batch", "heads", "kv_heads", "head_dim", "v_head_dim")
        )
        seq = _lengths_between(chosen["seq_q"])
        found = fit.predict(batch, seq, seq, heads, kv_heads or heads, dim, v_dim or dim, True, serving=serving)
        flops = _causal_flops(batch, seq, heads, dim, v_dim or dim)
        label = f"{heads} head{'s' * (heads > 1)}, {kv_heads or heads} KV, dim {dim}"
        _rate_curve(rate, flops, flops / scale, found, COLOURS[i], label)
        measured = shape_of(chosen).flops
        points = measured / chosen["seconds"] / scale
        rate.plot(measured, points, ls="", ms=4, mew=0, color=COLOURS[i], marker=MARKS[i])
    batch = int(series[0]["batch"][0])
    rate.set_ylabel(f"achieved {unit}")
    flops_axis(rate, f"useful FLOPs of one call (causal, batch {batch})")
    rate.set_title("as measured: with the copy into a serving cache" if serving else "as measured", fontsize=10)
    _draw_training(training, fit, table, serving)
    for axes in (rate, training):
        axes.set_ylim(bottom=0)
        axes.grid(True, which="major", alpha=0.25)
        axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.2)


def _draw_training(axes: Axes, fit: FlashAttnModel, table: Table, serving: bool) -> None:
    """Draw a training call of 16k tokens, 16 heads of 128, causal, over the sequence length; published kernels as marks."""
    unit, scale = rate_unit(fit.machine.peak)
    seq = _lengths_between(np.array([512, _TOKENS]))
    batch = _TOKENS / seq
    for colour, backward in zip(COLOURS, (False, True), strict=False):
        found = fit.predict(batch, seq, seq, 16, 16, 128, 128, True, backward)
        flops = _causal_flops(batch, seq, 16, 128, 128) * (2.5 if backward else 1.0)
        _rate_curve(axes, seq, flops / scale, found, colour, "backward" if backward else "forward")
    same = (table["causal"] == 1) & (table["head_dim"] == 128) & (table["heads"] == 16)
    same &= (table["pass"] == "forward") & (table["batch"] * table["seq_q"] == _TOKENS)
    other = table.where(same & ~is_serving(table["source"]))
    for mark, kernel in zip(MARKS, np.unique(other["kernel"]), strict=False):
        mine = other.where(other["kernel"] == kernel)
        rate = shape_of(mine).flops / mine["seconds"] / scale
        axes.plot(mine["seq_q"], rate, ls="", marker=mark, mfc="none", color="black", label=f"timed: {kernel}")
    axes.set(xscale="log", xlabel="sequence length (tokens; 16,384 tokens, 16 heads of 128)", ylabel=f"achieved {unit}")
    axes.set_xticks(ticks := [512, 1024, 2048, 4096, 8192, 16384], [f"{t:,}" for t in ticks])
    axes.minorticks_off()
    axes.set_title("training" + (": without the serving cache copy" if serving else ""), fontsize=10)


def head_series(rows: Table) -> list[Table]:
    """Up to five head layouts of the smallest batch with many measured lengths, from few to many heads.

    Empty where no layout was measured at enough lengths for a curve.
    """
    single = rows.where((rows["batch"] == rows["batch"].min()) & (rows["causal"] == 1))
    if not len(single):
        return []
    columns = np.stack([single["heads"], single["kv_heads"], single["head_dim"]])
    layouts, at, counts = np.unique(columns, axis=1, return_inverse=True, return_counts=True)
    often = np.flatnonzero((counts >= min(6, counts.max())) & (layouts[2] == np.median(single["head_dim"])))
    picked = often[np.unique(np.linspace(0, len(often) - 1, len(COLOURS)).astype(int))] if len(often) else []
    series = [single.where(at.ravel() == i) for i in picked]
    return [chosen for chosen in series if len(np.unique(chosen["seq_q"])) >= _LEAST_LENGTHS]


def _lengths_between(measured: np.ndarray) -> np.ndarray:
    """Lengths to draw a curve through: both ends, and multiples of a block between them."""
    blocks = np.round(np.geomspace(measured.min(), measured.max(), 160) / _BLOCK).astype(np.int64) * _BLOCK
    inside = blocks[(blocks > measured.min()) & (blocks < measured.max())]
    return np.unique(np.concatenate([[measured.min()], inside, [measured.max()]]))


def _causal_flops(batch: Any, seq: Any, heads: int, dim: int, v_dim: int) -> np.ndarray:
    return np.asarray(2.0 * batch * heads * seq * (seq + 1) / 2 * (dim + v_dim))


def _rate_curve(axes: Axes, x: np.ndarray, work: np.ndarray, found: Estimate, colour: str, label: str) -> None:
    """work: FLOPs in the unit of the y axis, shape of ``x``."""
    rate, factor = work / found.seconds, interval_factor(found)
    axes.plot(x, rate, color=colour, lw=1.4, label=label)
    axes.fill_between(x, rate / factor, rate * factor, color=colour, alpha=0.15, lw=0)
