"""Pictures of the communication models: measured points, fitted curve and 90% band, as time and as bus bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from predictor.estimate import Z90, Basis
from predictor.network.collective import CollectiveModel
from predictor.network.collective_points import OPS, preferred, sent_share
from profiler.files import replacing
from profiler.profile.profile import Profile, Table
from profiler.units import GB, GBIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREDICTED_NODES = (2, 8, 64)  # drawn without points where the profile has none
_SIZES = 2.0 ** np.arange(10.0, 34.01, 0.125)  # 1 KiB to 16 GiB
_TICKS = {2.0**e: label for e, label in zip(range(10, 35, 4), ["1K", "16K", "256K", "4M", "64M", "1G", "16G"], strict=True)}
_OTHER_NETWORK = 2.0  # measured over fitted time; beyond this it is another network, not an error of the fit
_FITTED, _OTHER, _CURVE = "#d1495b", "#9aa5b1", "#1f4e79"
_TITLES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all2all": "all-to-all",
    "broadcast": "broadcast",
    "p2p": "point to point",
}

#: (bytes, seconds) -> what an axis shows
Conversion = Callable[[np.ndarray, np.ndarray], np.ndarray]


def draw(profile: Profile, fit: CollectiveModel, out_dir: Path) -> list[Path]:
    """Write ``comm/{op}_intra_{ranks}_inter_{nodes}.jpg`` for every measured group and some predicted ones.

    Returns the paths in the order written. All pictures reuse one figure: making one takes longer than drawing in it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder = Path(out_dir) / "comm"
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    paths = []
    for op, intra, inter in _groups(profile):
        figure.clear()
        _draw_group(figure, profile, fit, op, intra, inter)
        path = folder / f"{op}_intra_{intra}_inter_{inter}.jpg"
        with replacing(path) as file:
            figure.savefig(file, format="jpg", dpi=90, pil_kwargs={"quality": 88})
        paths.append(path)
    return paths


def _groups(profile: Profile) -> list[tuple[str, int, int]]:
    groups = []
    for op in OPS:
        table = profile.table(op)
        measured = {(int(k), int(n)) for k, n in zip(table["intra"], table["inter"], strict=True) if k * n > 1}
        full = 1 if op == "p2p" else profile.device.gpus_per_node
        extra = {(full, nodes) for nodes in PREDICTED_NODES}
        inside = {(2 if op == "p2p" else full, 1)} if profile.device.gpus_per_node > 1 else set()
        groups += [(op, k, n) for k, n in sorted(measured | extra | inside)]
    return groups


def _draw_group(figure: Figure, profile: Profile, fit: CollectiveModel, op: str, intra: int, inter: int) -> None:
    table = profile.table(op)
    rows = table.where((table["intra"] == intra) & (table["inter"] == inter) & (table["bytes"] > 0))
    estimate = fit.predict(op, _SIZES, intra, inter)
    share = float(sent_share(op, intra * inter))
    left, right = figure.subplots(1, 2)
    band = np.exp(Z90 * estimate.relative_std)
    conversions: tuple[tuple[Axes, Conversion], ...] = (
        (left, lambda _, seconds: seconds * 1e6),
        (right, lambda size, seconds: share * size / seconds / GB),
    )
    for axes, convert in conversions:
        value = convert(_SIZES, estimate.seconds)
        axes.fill_between(_SIZES, value / band, value * band, color=_CURVE, alpha=0.15, lw=0, label="90% interval")
        _curve(axes, value, estimate.basis, len(rows))
        if len(rows):
            _points(axes, rows, convert, _origin(fit, op, preferred(rows)))
        _bytes_axis(axes)
    left.set(yscale="log", ylabel="time (microseconds)")
    right.set(ylabel="bus bandwidth (GB/s)", ylim=(0, None))
    left.legend(loc="upper left", fontsize=8, frameon=False)
    ranks = f"{intra} rank{'s' * (intra > 1)}"
    group = f"{ranks} in one node" if inter == 1 else f"{inter} nodes x {ranks}"
    network = "" if inter == 1 else f", {fit.network_bandwidth / GBIT:.0f} Gbit/s per rank between nodes"
    figure.suptitle(f"{_TITLES[op]}, {group}{network} - {profile.device.name}", fontsize=11)


def _curve(axes: Axes, value: np.ndarray, basis: np.ndarray, rows: int) -> None:
    """Draw the fit over _SIZES, solid inside its measurements, dashed beyond them."""
    if not rows:
        words = {Basis.ROOFLINE: "nominal rate and usual efficiency", Basis.EXTRAPOLATED: "extrapolated"}
        label = f"prediction, nothing measured ({words.get(Basis(int(np.median(basis))), 'network fit')})"
        axes.plot(_SIZES, value, color=_CURVE, lw=1.6, label=label)
        return
    beyond = basis >= Basis.EXTRAPOLATED
    joined = np.convolve(beyond, [1, 1, 1], mode="same") > 0  # one point more, so that the dashes meet the line
    assumed = (basis == Basis.ROOFLINE).any()
    dashed = "usual efficiency: too few measurements to fit" if assumed else "fit, extrapolated"
    for shown, style, label in ((~beyond, "-", "fit"), (joined & beyond.any(), "--", dashed)):
        if shown.any():
            axes.plot(_SIZES, np.where(shown, value, np.nan), color=_CURVE, lw=1.6, ls=style, label=label)


def _points(axes: Axes, rows: Table, convert: Conversion, origin: str) -> None:
    """Draw the measurements that the fit uses on top, other types and releases below."""
    fitted = preferred(rows)
    for table, color, size, label in ((rows, _OTHER, 10, "other measurements"), (fitted, _FITTED, 16, origin)):
        if table is fitted or len(rows) > len(fitted):
            size_bytes = table["bytes"].astype(np.float64)
            axes.scatter(size_bytes, convert(size_bytes, table["seconds"]), s=size, color=color, lw=0, label=label, zorder=3)


def _origin(fit: CollectiveModel, op: str, rows: Table) -> str:
    """Where the points come from; a profile may hold measurements of a network far slower than that of its fit."""
    envs = [str(e) for e in np.unique(rows["env"]) if e]
    words = f"{', '.join(np.unique(rows['dtype']))}; {', '.join(envs[-3:]) or 'this machine'}"
    expected = fit.predict(op, rows["bytes"], rows["intra"], rows["inter"]).seconds
    slower = np.median(rows["seconds"] / expected) > _OTHER_NETWORK
    network = "on a slower network\nthan the fit is for " if slower else ""
    return f"measured {network}({words})"


def _bytes_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xlim(_SIZES[0] / 1.5, _SIZES[-1] * 1.5)
    axes.set_xticks(list(_TICKS), list(_TICKS.values()))
    axes.minorticks_off()
    axes.set_xlabel("message (bytes, whole buffer)")
    axes.grid(alpha=0.25)
