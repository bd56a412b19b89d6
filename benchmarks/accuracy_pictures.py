"""Scatter plots of docs/accuracy.md: predicted over measured, one panel per group, one colour per device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiler.files import replacing
from solver.report.validate import Prediction

#: Colours that most colour-blind readers can tell apart (Okabe and Ito).
COLOURS = {
    "a100_sxm_80gb": "#0072B2",
    "a100_sxm_40gb": "#56B4E9",
    "a100_pcie_80gb": "#009E73",
    "h100_sxm": "#D55E00",
    "h200_sxm": "#E69F00",
    "b200_sxm": "#CC79A7",
    "gb200": "#882255",
    "gb300": "#332288",
    "b300": "#AA4499",
    "gh200_96gb": "#999933",
    "h100_96gb_500w": "#F0C000",
}
_OTHER = "#000000"
BAND = 0.1
_TICKS = ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
_MOST_TICKS = 6

Pair = Callable[[Prediction], tuple[float, float]]


def draw_scatter(predictions: Sequence[Prediction], pair: Pair, unit: str, path: Path) -> None:
    """Draw one panel per group, four in a row, with equal logarithmic axes.

    pair: returns measured and predicted of one case in ``unit``.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted({p.case.source for p in predictions})
    width = min(4, len(names) + 1)
    height = -(-(len(names) + 1) // width)  # one place more than groups, for the legend
    figure, axes = plt.subplots(height, width, figsize=(3.3 * width, 3.3 * height), layout="constrained", squeeze=False)
    for name, panel in zip(names, axes.flat, strict=False):
        _panel(panel, name, [p for p in predictions if p.case.source == name], pair)
    for panel in axes.flat[len(names) :]:
        panel.axis("off")
    _legend(axes.flat[len(names)], sorted({p.case.hardware for p in predictions}))
    figure.supxlabel(f"measured {unit}")
    figure.supylabel(f"predicted {unit}")
    with replacing(path) as file:
        figure.savefig(file, format="jpeg", dpi=100, pil_kwargs={"quality": 85})
    plt.close(figure)


def _panel(panel: Any, name: str, members: Sequence[Prediction], pair: Pair) -> None:
    measured, predicted = np.array([pair(p) for p in members]).T
    low = min(measured.min(), predicted.min()) / 1.25
    high = max(measured.max(), predicted.max()) * 1.25
    line = np.array([low, high])
    panel.fill_between(line, line * (1 - BAND), line * (1 + BAND), color="0.85", lw=0, zorder=0)
    panel.plot(line, line, color="0.4", lw=0.8, zorder=1)
    colours = [COLOURS.get(p.case.hardware, _OTHER) for p in members]
    panel.scatter(measured, predicted, s=14, c=colours, alpha=0.6, linewidths=0, zorder=2)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(low, high)
    panel.set_ylim(low, high)
    panel.set_aspect("equal")
    for axis in (panel.xaxis, panel.yaxis):
        _ticks(axis, low, high)
    error = np.median(abs(predicted / measured - 1))
    panel.set_title(f"{name}: n = {len(members)}, median error {error:.1%}", fontsize=10)


def _ticks(axis: Any, low: float, high: float) -> None:
    """Set ticks with plain numbers: 1, 2, 5 of each decade where they are few enough, else 1 and 3, else the decades.

    A narrow panel gets finer ticks.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    choices = [[d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high] for digits in _TICKS]
    places = next((places for places in choices if len(places) <= _MOST_TICKS), choices[-1])
    if len(places) < 3:
        places = [float(x) for x in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= x <= high]
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_tick_params(labelsize=8)


def _legend(panel: Any, hardware: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Any] = [Line2D([], [], ls="", marker="o", color=COLOURS.get(name, _OTHER), label=name) for name in hardware]
    marks += [
        Line2D([], [], color="0.4", lw=0.8, label="predicted = measured"),
        Patch(color="0.85", label=f"within {BAND:.0%}"),
    ]
    panel.legend(handles=marks, loc="center", fontsize=9, frameon=False)
