"""Shared parts of the pictures of the models: figure, caption of held-out errors, units, colours, saving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from predictor.accuracy.score import Score
from predictor.estimate import Z90, Estimate
from profiler.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b3c5d", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93")
MARKS = ("o", "s", "^", "D", "v")
SIZE = (12.5, 5.4)  #: inches of a figure of two panels


def new_figure(title: str, caption: str, size: tuple[float, float]) -> Figure:
    """An empty figure of ``size`` inches with a title above and a grey caption below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(caption, fontsize=9, color="#444444")
    return figure


def subtitle_of(scores: Sequence[Score], alone: str, caveat: str = "") -> str:
    """The held-out mean errors in words, by regime.

    alone: what the naive prediction uses, "FLOPs" or "bytes". caveat: a clause on what the errors cannot show, on a line of
    its own.
    """
    if not scores:
        return "held-out errors: none, too few measurements to spare some"
    regimes = dict.fromkeys(s.regime for s in scores)
    parts = [
        f"{regime}: " + ", ".join(f"{s.split} {s.mape:.1%} ({s.naive_mape:.1%})" for s in scores if s.regime == regime)
        for regime in regimes
    ]
    lines = [
        f"mean error on held-out measurements (in brackets: by {alone} only): {parts[0]}",
        *parts[1:],
        *([caveat] if caveat else []),
    ]
    return "\n".join(lines)


def few(rows: int, assumed: bool) -> str:
    """What a title adds where the constants of a fit are ``assumed``, not fitted; "" where they are fitted."""
    return f"\nonly {rows} measurements, too few to fit: usual constants, scaled to these" if assumed else ""


def rate_unit(peak: float) -> tuple[str, float]:
    """Name and FLOP/s of the unit in which rates up to ``peak`` are legible."""
    return ("TFLOP/s", 1e12) if peak >= 1e12 else ("GFLOP/s", 1e9)


def interval_factor(estimate: Estimate) -> np.ndarray:
    """Bounds of the 90% prediction interval of time: seconds divided and multiplied by this."""
    return np.exp(Z90 * estimate.relative_std)


def flops_axis(axes: Axes, label: str) -> None:
    """Set a logarithmic x axis with a label at whole powers of ten, of which at least two are in view."""
    from matplotlib.ticker import NullFormatter

    axes.set(xscale="log", xlabel=label)
    low, high = np.log10(axes.get_xlim())
    if np.floor(high) - np.ceil(low) < 1:
        axes.set_xlim(10 ** np.floor(low), 10 ** np.ceil(high))
    axes.xaxis.set_minor_formatter(NullFormatter())


def peak_line(axes: Axes, peak: float) -> None:
    """Draw a dashed line at the peak of the device (in the unit of the axis), with room above it."""
    axes.axhline(peak, color="grey", lw=1, ls="--")
    across = axes.get_yaxis_transform()
    axes.text(0.01, peak, "peak of the device", color="grey", ha="left", va="bottom", fontsize=9, transform=across)
    axes.set_ylim(0, 1.1 * max(float(np.max(line.get_ydata())) for line in axes.lines))


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` as JPEG, atomically; raises InputError where it cannot be written."""
    with replacing(path) as file:
        figure.savefig(file, format="jpg", dpi=130)
    return path
