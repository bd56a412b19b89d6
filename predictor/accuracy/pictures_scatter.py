"""Pictures of a fit whose rows all have different shapes: every row measured and predicted, and their ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from predictor.accuracy.pictures_axes import COLOURS, flops_axis, peak_line, rate_unit
from predictor.estimate import Z90, Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BINS, _ROWS_A_BIN = 20, 15
_RATIO_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


def draw_all_rows(figure: Figure, work: str, flops: np.ndarray, seconds: np.ndarray, found: Estimate, peak: float) -> None:
    """Fill ``figure`` with achieved rates over FLOPs (left), and predicted over measured time (right).

    work: name of the x axis. flops, seconds: of each row; found: predicted for the same rows; shape [rows].
    """
    left, right = figure.subplots(1, 2)
    unit, scale = rate_unit(peak)
    measured, predicted = flops / seconds / scale, flops / found.seconds / scale
    left.vlines(flops, measured, predicted, color="#b0b7bf", lw=0.7, zorder=1)
    size = 16 if len(flops) < 200 else 9
    left.scatter(flops, measured, s=size, color=COLOURS[0], lw=0, alpha=0.75, label="measured")
    left.scatter(flops, predicted, s=size * 1.8, facecolor="none", edgecolor=COLOURS[1], lw=0.7, label="predicted")
    left.set_ylabel(f"achieved {unit}")
    peak_line(left, peak / scale)
    left.set_ylim(0, max(peak, (flops / np.minimum(seconds, found.seconds)).max()) / scale * 1.25)  # the legend lies above
    left.legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    _ratios(right, flops, found.seconds / seconds, found.relative_std, size)
    right.set_ylabel("predicted / measured time")
    right.set_title("the measurements that were fitted", fontsize=10)
    left.set_title("every measured shape; grey: from measured to predicted", fontsize=10)
    for axes in (left, right):
        flops_axis(axes, work)
        axes.grid(True, which="major", alpha=0.25)


def _ratios(axes: Axes, flops: np.ndarray, ratio: np.ndarray, std: np.ndarray, size: float) -> None:
    at, half = band_over(flops, std)
    axes.fill_between(at, 1 / half, half, color=COLOURS[0], alpha=0.15, lw=0, label="90% interval for unseen shapes")
    axes.axhline(1.0, color="grey", lw=1)
    axes.scatter(flops, ratio, s=size, color=COLOURS[0], lw=0, alpha=0.75)
    most = max(float(np.abs(np.log(ratio)).max()), float(np.log(half).max()), 0.05) * 1.25
    axes.set(yscale="log", ylim=(np.exp(-most), np.exp(most)))
    ticks = [t for t in _RATIO_TICKS if abs(np.log(t)) <= most]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False, loc="upper right")


def band_over(flops: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(FLOPs, factor) of the upper bound of the 90% prediction interval over FLOPs.

    Medians over bins of equal numbers of rows.
    """
    order = np.argsort(flops, kind="stable")
    parts = np.array_split(order, int(np.clip(len(order) // _ROWS_A_BIN, 1, _BINS)))
    middle = np.array([np.median(std[part]) for part in parts])
    at = np.array([np.median(flops[part]) for part in parts])
    ends = np.concatenate([[flops[order[0]]], at, [flops[order[-1]]]])
    return ends, np.exp(Z90 * np.concatenate([middle[:1], middle, middle[-1:]]))
