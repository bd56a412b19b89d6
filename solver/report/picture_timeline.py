"""Picture of one step, pass by pass: a row for each pipeline stage; of a long step its beginning and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solver.report import words
from solver.report.pictures import canvas
from solver.report.timeline import WORDS, StepTimeline
from solver.report.words import PART_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_COLOURS = {"F": "tab:blue", "B": "tab:orange", "W": "tab:green", "BW": "tab:red"}
_GREYS = {
    "parameter_gather": "0.6",
    "gradient_accumulation": "0.5",
    "gradient_sync": "0.45",
    "optimizer": "0.3",
    "stragglers": "0.75",
}
_AFTER = 0.2  #: of a stretch of a long step, what comes after its passes
_LETTERS = 20.0  #: of a pass's number, in an inch
_MOST_PASSES = 80  #: of a stage, that a picture shows and labels with their micro batch


def timeline_figure(step: StepTimeline) -> Figure:
    """Draw one step pass by pass; a black bar under the passes on the critical path.

    Of a step with more passes than can be told apart, as long a stretch of its beginning, and of the end of its passes, as
    holds so many.
    """
    share = _MOST_PASSES / 2 * len(step.line.in_flight) / len(step.line.end)
    whole = share >= 0.5
    figure, drawn = canvas(1 if whole else 2)
    panels = [drawn] if whole else list(drawn)
    letters = _LETTERS * figure.get_figwidth() / len(panels)
    width = share * step.end
    last = step.first_pass + step.line.makespan + _AFTER * width
    windows = [(0.0, step.end)] if whole else [(0.0, width), (min(last, step.end) - width, min(last, step.end))]
    for axes, window in zip(panels, windows, strict=True):
        _draw(axes, step, window, letters)
    panels[0].set_ylabel("pipeline stage")
    figure.legend(handles=_legend(step), fontsize=7, loc="outside lower center", ncols=4, frameon=False)
    further = "" if step.waits else "; a stage begins the next one as it ends"
    shown = "" if whole else f"; its first {share:.1%}, and as much where its passes end"
    simulated, predicted = words.seconds(step.seconds), words.seconds(step.predicted)
    taken = simulated if simulated == predicted else f"{simulated} as simulated here ({predicted} predicted)"
    title = f"{step.title}\none step, {taken}{further}{shown}; black bars: the critical path"
    figure.suptitle(title, fontsize=9)
    return figure


def _draw(axes: Axes, step: StepTimeline, window: tuple[float, float], letters: float) -> None:
    """Draw what of a step lies in a window (from, to) [s], as wide as so many letters. A pass that is narrower than its number
    has none."""
    line, begin = step.line, step.first_pass
    start, length = begin + line.start, line.end - line.start
    visible = (start < window[1]) & (start + length > window[0])
    for stage in range(len(line.in_flight)):
        bars = [(line.kind == kind, (stage - 0.4, 0.8), colour, 0.3) for kind, colour in _COLOURS.items()]
        for drawn, place, colour, edge in (*bars, (step.critical, (stage + 0.36, 0.1), "black", 0.0)):
            chosen = np.flatnonzero(drawn & visible & (line.stage == stage))
            spans = list(zip(start[chosen], length[chosen], strict=True))
            axes.broken_barh(spans, place, facecolor=colour, edgecolor="white", lw=edge)
    room = letters / (window[1] - window[0])
    for i in np.flatnonzero(visible & (length * room > np.char.str_len(line.micro_batch.astype(str)))):
        axes.text(
            start[i] + length[i] / 2,
            line.stage[i],
            str(line.micro_batch[i]),
            ha="center",
            va="center",
            fontsize=5,
            color="white",
            clip_on=True,
        )
    stages = len(line.in_flight)
    for name, seconds, at in _around(step, begin):
        axes.broken_barh([(at, seconds)], (-0.4, stages - 0.2), facecolor=_GREYS[name])
    axes.set_xlim(*window)
    axes.set_ylim(stages - 0.4, -0.6)
    axes.set_yticks(range(stages), [str(stage + 1) for stage in range(stages)])
    axes.set_xlabel("time [s]")


def _legend(step: StepTimeline) -> list[Patch]:
    from matplotlib.patches import Patch

    present = [kind for kind in _COLOURS if kind in set(step.line.kind.tolist())]
    passes = [Patch(color=_COLOURS[kind], label=WORDS[kind]) for kind in present]
    return [*passes, *(Patch(color=_GREYS[name], label=PART_NAMES[name]) for name, _ in (*step.before, *step.after))]


def _around(step: StepTimeline, begin: float) -> list[tuple[str, float, float]]:
    """Return (part, seconds, start) of what comes before and after the passes."""
    found, clock = [], 0.0
    for name, seconds in step.before:
        found.append((name, seconds, clock))
        clock += seconds
    clock = begin + step.line.makespan
    for name, seconds in step.after:
        found.append((name, seconds, clock))
        clock += seconds
    return found
