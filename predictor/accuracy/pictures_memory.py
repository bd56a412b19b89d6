"""The picture of the memory-bound model: each kind's measured kernels, and the launch and bandwidth fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from predictor.accuracy.crossval import formats
from predictor.accuracy.pictures_axes import COLOURS, interval_factor, new_figure, save, subtitle_of
from predictor.accuracy.score import Score
from predictor.estimate import Basis
from predictor.kernels.memory_bound import MemoryBoundModel
from profiler.profile.profile import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST, _COLUMNS = 12, (4, 3)
_TICKS = {2.0**e: label for e, label in zip(range(10, 41, 5), ["1K", "32K", "1M", "32M", "1G", "32G", "1T"], strict=True)}


def draw_memory_bound(fit: MemoryBoundModel, rows: Table, device: str, scores: Sequence[Score], path: Path) -> Path:
    """Write one panel for each kind of ``rows``; returns ``path``.

    Where there are more than twelve kinds, the twelve with the most rows are drawn.
    """
    rows = rows.where(rows["bytes"] > 0)
    kinds, counts = np.unique(rows["kind"], return_counts=True)
    shown = sorted(str(kind) for kind in kinds[np.argsort(-counts, kind="stable")[:_MOST]])
    columns = min(len(shown), min(_COLUMNS, key=lambda across: -len(shown) % across))  # the fewest empty panels
    down = -(-len(shown) // columns)
    left_out = (
        f"; {len(kinds) - len(shown)} kinds of as many or fewer measurements are not shown" if len(kinds) > len(shown) else ""
    )
    formats_said = f" ({formats(rows)})" if formats(rows) else ""
    errors = subtitle_of(scores, "bytes").replace("only): ", "only):\n")  # on one line it would be wider than three panels
    title = f"Memory-bound kernels{formats_said} on {device}\n{errors}"
    width = max(3.2 * columns, 9.5)  # the title and the caption have to fit
    caption = f"dots: measured; line: fit; band: 90% interval{left_out}"
    figure = new_figure(title, caption, (width, 2.6 * down + 1.3))
    panels = figure.subplots(down, columns, sharex=True, sharey=True, squeeze=False)
    for kind, axes in zip(shown, panels.flat, strict=False):
        _panel(axes, fit, kind, rows.where(rows["kind"] == kind))
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    # a panel above an empty one is the lowest of its column
    for axes in panels.flat[max(len(shown) - columns, 0) : len(shown)]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("bytes read and written")
    drawn = rows.where(np.isin(rows["kind"], shown))["bytes"]
    ticks = {at: label for at, label in _TICKS.items() if drawn.min() / 2 <= at <= drawn.max() * 2}
    panels[0, 0].set_xticks(list(ticks), list(ticks.values()))
    panels[0, 0].minorticks_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("seconds")
    return save(figure, path)


def _panel(axes: Axes, fit: MemoryBoundModel, kind: str, rows: Table) -> None:
    low, high = float(rows["bytes"].min()), float(rows["bytes"].max())
    size = np.geomspace(low / 1.5, high * 1.5, 80)
    found = fit.predict(kind, size)
    factor = interval_factor(found)
    axes.fill_between(size, found.seconds / factor, found.seconds * factor, color=COLOURS[0], alpha=0.15, lw=0)
    axes.plot(size, found.seconds, color=COLOURS[0], lw=1.3)
    axes.scatter(rows["bytes"], rows["seconds"], s=10, color=COLOURS[1], lw=0, alpha=0.8, zorder=3)
    axes.set(xscale="log", yscale="log")
    axes.grid(True, which="major", alpha=0.25)
    axes.set_title(panel_title(fit, kind, len(rows)), fontsize=9)


def panel_title(fit: MemoryBoundModel, kind: str, rows: int) -> str:
    """The kind and its fit in figures: "norm\\n3.1 µs + bytes / 1,340 GB/s".

    It states where rows were too few to fit.
    """
    one, two = fit.predict(kind, np.array([1e12, 2e12])).seconds
    launch = max(float(fit.predict(kind, 1.0).seconds - (two - one) / 1e12), 0.0)
    law = f"{_short(launch * 1e6)} µs + bytes / {_short(1e3 / (two - one))} GB/s"
    fitted = fit.predict(kind, 1.0).basis < Basis.ROOFLINE
    name = kind.replace("_", " ")
    return f"{name}\n{law}" if fitted else f"{name}: {rows} measurements, too few to fit\nassumed {law}"


def _short(value: float) -> str:
    """Three digits, without an exponent: "0.637", "28.1", "1,990"."""
    return f"{float(f'{value:.3g}'):,g}"
