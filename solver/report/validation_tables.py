"""Terminal report of a validation: errors per group, the worst cases, and what was skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from solver.report.scores import Regret, Score
from solver.report.validate import Prediction
from solver.report.words import seconds

_VALIDATION_LEGEND = Text(
    "error: predicted / measured - 1; mean (signed) below 0: predicted too fast; regret: measured time of the layout ranked "
    "first over the measured best, minus 1, in families of runs that differ in layout only. More in docs/glossary.md",
    style="dim",
)


def show_validation(
    console: Console,
    predictions: Sequence[Prediction],
    times: Mapping[str, Score],
    memory: Mapping[str, Score],
    fits: Mapping[str, int],
    regrets: Mapping[str, Regret],
    worst: Sequence[Prediction],
) -> None:
    """Print tables of errors per group, the worst cases by name, and what was skipped."""
    console.print(_scores("Step time: predicted / measured - 1", times, coverage=True))
    if memory:
        console.print(_scores("Peak memory: predicted / measured - 1", memory, coverage=False))
    console.print(_VALIDATION_LEGEND)
    if any(fits.values()):
        right = fits["fit, predicted fit"] + fits["OOM, predicted OOM"]
        listed = "; ".join(f"{n} {name}" for name, n in fits.items())
        console.print(Text(f"fits or not: {right / sum(fits.values()):.1%} classified correctly ({listed})"))
    for source, r in regrets.items():
        console.print(Text(f"regret {source}: mean {r.mean:.1%}, worst {r.worst:.1%} over {r.families} families"))
    table = Table(title="Worst cases", title_justify="left")
    for name in ("case", "predicted", "measured", "factor"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for p in worst:
        measured = p.case.measured["step_s"]
        table.add_row(p.case.id, seconds(p.seconds), seconds(measured), f"{p.seconds / measured:.2f}")
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for p in predictions:
        if p.skipped:
            reasons.setdefault(p.skipped, []).append(p.case.id)
    for reason, ids in reasons.items():
        console.print(Text(f"skipped {len(ids)}: {reason}: {', '.join(ids[:12])}{' ...' if len(ids) > 12 else ''}"))
    console.print(Text(f"{len(predictions)} cases, {sum(not p.skipped for p in predictions)} predicted"))


def _scores(title: str, scores: Mapping[str, Score], coverage: bool) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("group")
    of_interval = ["in 90% interval", "its half width"] if coverage else []
    names = ["n", "median |error|", "90th percentile", "mean (signed)", *of_interval]
    for name in names:
        table.add_column(name, justify="right")
    for group, s in scores.items():
        row = [f"{s.n}", f"{s.median:.1%}", f"{s.p90:.1%}", f"{s.bias:+.1%}"]
        row += [f"{s.coverage:.0%}", f"{s.half_width:.0%}"] if coverage else []
        table.add_row(group, *row, end_section=group == list(scores)[-2:][0])
    return table
