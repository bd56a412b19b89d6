"""Picture of a sweep: tokens per GPU and second against GPUs, a panel for each model and sequence, a line for each machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12
_PANEL = ("model", "seq_len", "global_batch_size")
_SCALED = ("model", "seq_len")
_LINE = ("machine", "framework")

Row = Mapping[str, Any]


def check_panels(panels: int) -> None:
    """Raise InputError for more panels than a picture holds."""
    if panels > MOST_PANELS:
        raise InputError(f"--plot would have {panels} panels, one for each model, sequence and batch; it holds {MOST_PANELS}")


def sweep_figure(rows: Sequence[Row]) -> Figure:
    """Draw the best rate of every problem with its 90% interval. Raises InputError for more than MOST_PANELS panels."""
    from matplotlib.figure import Figure

    panels = _panels([row for row in rows if row["tgs"] is not None])
    check_panels(len(panels))
    if not panels:
        raise InputError("no problem of this sweep has a layout that fits; there is nothing to draw")
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(max(5.2 * across, 8), 4.3 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    lines = list(_grouped(rows, _LINE))
    for axes, (named, found) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, named, found, lines)
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    handles, labels = _legend(grid)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), fontsize=8, frameon=False)
    figure.suptitle("Best layout of each problem; bars: 90% prediction interval", fontsize=11)
    return figure


def _panels(found: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows of each panel: a model, a sequence, and a batch, or one batch for each number of GPUs."""
    panels: dict[tuple[Any, ...], list[Row]] = {}
    for named, rows in _grouped(found, _SCALED).items():
        batches = _grouped(rows, ("world_size", "global_batch_size"))
        scales = len(batches) == len(_grouped(rows, ("world_size",)))
        panels |= {(*named, "own"): rows} if scales else _grouped(rows, _PANEL)
    return panels


def _panel(axes: Axes, named: tuple[Any, ...], found: Sequence[Row], lines: Sequence[tuple[Any, ...]]) -> None:
    top, worlds = 0.0, sorted({row["world_size"] for row in found})
    for key, group in _grouped(found, _LINE).items():
        ordered = sorted(group, key=lambda row: row["world_size"])
        rates = [row["tgs"] for row in ordered]
        below = [row["tgs"] * (1 - row["step_s"] / row["interval_high_s"]) for row in ordered]
        above = [row["tgs"] * (row["step_s"] / row["interval_low_s"] - 1) for row in ordered]
        at = [row["world_size"] for row in ordered]
        axes.errorbar(
            at,
            rates,
            yerr=(below, above),
            fmt="o-",
            ms=4,
            capsize=2,
            lw=1.2,
            color=f"C{lines.index(key) % 10}",
            label=f"{key[0]}, {key[1]}",
        )
        top = max(top, *(rate + more for rate, more in zip(rates, above, strict=True)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("TGS [tokens per GPU per second]")
    (model, length, _), batches = named, sorted({row["global_batch_size"] for row in found})
    tokens = " to ".join(f"{batch:,}" for batch in dict.fromkeys((batches[0], batches[-1])))
    axes.set_title(f"{Path(str(model)).stem}, sequences of {length:,}, {tokens} tokens a step", fontsize=9)
    axes.grid(alpha=0.3)


def _legend(grid: Any) -> tuple[list[Any], list[str]]:
    """Return one handle for each line of any panel."""
    found: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found
