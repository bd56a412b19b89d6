"""The picture of a plan: money against days, a line for each machine, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from solver.report.plan import Training, efficient

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_APART = (34.0, 12.0)  #: pixels of a label of 7 points, across and upright


def plan_figure(found: Sequence[Training], title: str, days: float | None = None, budget: float | None = None) -> Figure:
    """Plot what each training costs against its days (90% interval), with its GPUs, the deadline and the budget."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes, labels = figure.subplots(), list[tuple[float, float, str, Any]]()
    for machine in dict.fromkeys(one.machine for one in found):
        own = [one for one in found if one.machine == machine]
        middle = [one.days[1] for one in own]
        errors = [[one.days[1] - one.days[0] for one in own], [one.days[2] - one.days[1] for one in own]]
        label = (machine.name or "best layout") + (f", {machine.price:g} an hour" if machine.price is not None else "")
        (line, *_) = axes.errorbar(middle, [o.cost for o in own], xerr=errors, marker="o", ms=4, lw=1, capsize=2, label=label)
        labels += [(one.days[1], one.cost, f"{one.world_size:,}", line.get_color()) for one in own]
    front = efficient(found)
    axes.plot(
        [o.days[1] for o in front],
        [o.cost for o in front],
        "o",
        ms=10,
        mfc="none",
        mec="black",
        label="none is both faster and cheaper",
    )
    if days is not None:
        axes.axvline(days, color="tab:red", ls="--", label=f"{days:g} days")
    if budget is not None:
        axes.axhline(budget, color="tab:red", ls=":", label=f"budget of {budget:,.0f}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(0, 1.08 * max(one.cost for one in found))
    axes.set_xlabel("days (90% interval); numbers: GPUs")
    axes.set_ylabel("GPU-hours" if found[0].money is None else "money")
    axes.set_title(fill(title, 95), fontsize=11)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    _label(axes, labels)
    return figure


def _label(axes: Axes, labels: Sequence[tuple[float, float, str, Any]]) -> None:
    """Write (x, y, text, colour) above points, but for those that would lie on one that is written already."""
    written: list[tuple[float, float]] = []
    for x, y, text, colour in labels:
        right, up = axes.transData.transform((x, y))
        if all(abs(right - other) > _APART[0] or abs(up - height) > _APART[1] for other, height in written):
            axes.annotate(text, (x, y), xytext=(0, 6), textcoords="offset points", fontsize=7, ha="center", color=colour)
            written.append((right, up))
