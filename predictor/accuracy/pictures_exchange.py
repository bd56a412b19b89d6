"""The picture of the laws of dispatch and combine: measured rates and the fitted ones, by tokens per rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from predictor.accuracy.pictures_axes import COLOURS, MARKS, SIZE, interval_factor, new_figure, save
from predictor.accuracy.score import Score
from predictor.network.exchange_law import SHAPE
from predictor.network.expert_exchange import OPS, ExpertExchangeModel, fitted_rows
from profiler.profile.profile import Profile, Table
from profiler.units import GB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DISPATCHER = "deepep"
_SERIES = len(COLOURS)
_POINTS = 160
_LEAST_SIZES = 6  # fewer numbers of tokens are too few for a curve
_LEGEND = "dots: measured; line: fit; band: 90% interval"


def draw_exchange(profile: Profile, fit: ExpertExchangeModel, scores: Sequence[Score], path: Path) -> Path | None:
    """Write one panel for dispatch and one for combine; None where no curve was measured."""
    tables = {op: fitted_rows(profile.table("expert_exchange"), _DISPATCHER, op) for op in OPS}
    shapes = {op: _spread(_series(rows)) for op, rows in tables.items()}
    if not any(shapes.values()):
        return None
    title = f"Dispatch and combine of experts over ranks (DeepEP) on {profile.device.name}"
    figure = new_figure(title, "\n".join(_said(op, scores) for op in OPS), SIZE)
    panels = figure.subplots(1, 2)
    for axes, op in zip(panels, OPS, strict=True):
        for i, shape in enumerate(shapes[op]):
            _curve(axes, fit, op, tables[op], shape, profile.device.network_bandwidth, i)
        axes.set(xscale="log", xlabel="tokens per rank", ylabel=f"{op}: own rows moved, GB/s", ylim=(0, None))
        axes.legend(fontsize=8, frameon=False, title=_LEGEND, title_fontsize=8, loc="upper left", alignment="left")
        axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
        axes.grid(True, which="major", alpha=0.25)
    return save(figure, path)


def _said(op: str, scores: Sequence[Score]) -> str:
    """The held-out errors of an op, of exchanges as large as training's."""
    own = [s for s in scores if s.op == f"{_DISPATCHER} {op}" and "tokens" in s.regime]
    if not own:
        return f"{op}: no held-out errors, too few measurements to spare some"
    parts = (f"{s.split} {s.mape:.1%} ({s.naive_mape:.1%})" for s in own)
    return f"{op}, error from 1,024 tokens (by bytes only): " + ", ".join(parts)


def _series(rows: Table) -> list[tuple[int, ...]]:
    """(row bytes, top k, experts, intra, inter) measured at enough numbers of tokens, the most nodes last."""
    if not len(rows):
        return []
    found, counts = np.unique(np.stack([rows[name] for name in SHAPE[1:]], axis=1), axis=0, return_counts=True)
    often = found[counts >= _LEAST_SIZES]
    return sorted((tuple(int(v) for v in shape) for shape in often), key=lambda s: (s[4], s[0], s[1], s[2]))


def _spread(series: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those between nodes, and of those in one node some from the smallest to the largest row."""
    far = [s for s in series if s[4] > 1][: _SERIES - 1]
    near = [s for s in series if s[4] == 1]
    if not near:
        return far
    at = np.unique(np.linspace(0, len(near) - 1, _SERIES - len(far)).astype(int))
    return [near[i] for i in at] + far


def _curve(
    axes: Axes, fit: ExpertExchangeModel, op: str, rows: Table, shape: tuple[int, ...], bandwidth: float, i: int
) -> None:
    row, top_k, experts, intra, inter = shape
    mask = np.all([rows[name] == value for name, value in zip(SHAPE[1:], shape, strict=True)], axis=0)
    points = rows.where(mask)
    tokens = np.geomspace(points["tokens"].min(), points["tokens"].max(), _POINTS)
    found = fit.predict(op, tokens, row, top_k, experts, intra, inter, bandwidth, _DISPATCHER)
    rate, factor = tokens * row / found.seconds / GB, interval_factor(found)
    nodes = f"{inter} x {intra}" if inter > 1 else f"{intra}"
    axes.plot(tokens, rate, color=COLOURS[i], lw=1.4, label=f"{row:,} B rows, top {top_k} of {experts}, {nodes} ranks")
    axes.fill_between(tokens, rate / factor, rate * factor, color=COLOURS[i], alpha=0.12, lw=0)
    measured = points["tokens"] * row / points["seconds"] / GB
    axes.plot(points["tokens"], measured, ls="", ms=4, mew=0, color=COLOURS[i], marker=MARKS[i])
