"""A report a colleague can read: one HTML file with the answer, pictures, neighbours, assumptions, how sure, the command."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import InputError
from profiler.files import write_text
from profiler.units import GIB
from solver.formats.export import launch_file
from solver.report.decision import MEASUREMENTS, Decision, kept_out, standing
from solver.report.describe import describe
from solver.report.explain import Explanation
from solver.report.other_settings import other_settings
from solver.report.picture_timeline import timeline_figure
from solver.report.pictures import pareto_figure, stages_figure
from solver.report.terminal import network_rate, surely_fitting
from solver.report.timeline import step_timeline
from solver.report.uncertainty import uncertainties
from solver.report.words import PART_NAMES, between, parameter_count, seconds, token_rate
from solver.search.search import DOES_NOT_FIT, SearchResult
from solver.spec.model_size import parameters
from solver.spec.run import Run
from solver.step.memory import AT_RISK, MEMORY_PARTS
from solver.step.solutions import Solutions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #1b1f24; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 1.8em; border-bottom: 1px solid #d0d7de; }
.answer { font-size: 1.25em; font-weight: 600; padding: .6em .8em; border-left: 6px solid; background: #f6f8fa; }
.FITS { border-color: #1a7f37; } .AT { border-color: #bf8700; } .OUT { border-color: #cf222e; }
table { border-collapse: collapse; margin: .6em 0; } th, td { padding: .2em .7em; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #d0d7de; } td { border-bottom: 1px solid #eaeef2; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { display: inline-block; height: .8em; background: #54aeff; } .dim { color: #57606a; }
pre { background: #f6f8fa; padding: .8em; overflow-x: auto; font-size: .85em; } img { max-width: 100%; }
"""
_CHARACTERS = 60_000  #: of a launch command that is shown


def write_report(
    path: Path,
    decision: Decision,
    profile_text: str,
    notes: str,
    command: str,
    result: SearchResult | None = None,
    launched: Solutions | None = None,
    remarks: Sequence[str] = (),
) -> None:
    """Write the report of a decision.

    profile_text, notes: what the profile is, and what a reader must know. command: the one that wrote it. result: the search,
    where there was one. launched: what to launch, where it found the layout: that one or a safer one. remarks: of the search,
    on what would be better.
    """
    rivals, why = decision.rivals, decision.why[0]
    model = rivals.problem.model
    title = f"{model.name} on {rivals.problem.run.world_size} x {rivals.problem.cost.device.name}"
    sections = [
        _answer(rivals, why),
        _sure(result) if result is not None and launched is not None else "",
        *(f"<p>{escape(line)}</p>" for line in remarks),
        _pictures(rivals, result),
        _breakdown(why),
        _memory(rivals),
        _rivals(decision),
        _neighbours(decision),
        _sensitivities(decision),
        _assumptions(rivals, profile_text, notes),
        _launch(rivals if launched is None else launched, rivals),
        _searched(result),
        f"<h2>Made by</h2><pre>{escape(command)}</pre>",
    ]
    write_text(path, _page(title, sections))


def _page(title: str, sections: Sequence[str]) -> str:
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *sections,
        "</body></html>",
        "",
    ]
    return "\n".join(lines)


def _answer(rivals: Solutions, why: Explanation) -> str:
    problem, memory, verdict = rivals.problem, rivals.memory, rivals.verdict(0)
    facts = (
        f"{parameter_count(parameters(problem.model))}, sequences of {problem.run.seq_len:,} tokens, "
        f"{rivals.tokens[0]:,.0f} tokens a step, {problem.run.precision}, {problem.run.framework}"
    )
    return (
        f'<p class="dim">{escape(facts)}</p><p class="answer {verdict.split()[0]}">'
        f"{token_rate(rivals.tgs[0])} tokens per GPU and second: a step takes {seconds(why.seconds)} "
        f"({between(why.interval, why.seconds)} with 90% probability), MFU {rivals.mfu[0]:.1%}."
        f"<br>{memory.device[0] / GIB:.1f} GiB of {problem.cluster.memory_bytes / GIB:.1f} per GPU, at most "
        f"{memory.bound[0] / GIB:.1f}: {verdict}<br>{escape(describe(rivals, 0))}</p>"
    )


def _sure(result: SearchResult) -> str:
    """Return what a layout costs that is sure to fit, where the first of a search may not."""
    return f"<p>{escape(surely_fitting(result))}</p>" if result.best.verdict(0) == AT_RISK else ""


def _pictures(rivals: Solutions, result: SearchResult | None) -> str:
    drawn = [("Time and memory of every pipeline stage", stages_figure(rivals))]
    try:
        step = step_timeline(rivals, 0)
        drawn.append(("One step, pass by pass", timeline_figure(step)))
    except InputError:  # more passes than a picture holds
        pass
    if result is not None:
        drawn.insert(0, ("Speed against memory", pareto_figure(result)))
    return "".join(f"<h2>{title}</h2>{_image(figure, title)}" for title, figure in drawn)


def _image(figure: Figure, title: str) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'


def _breakdown(why: Explanation) -> str:
    rows = []
    for part, value in why.by_part().items():
        if value:
            bar = f'<span class="bar" style="width:{300 * value / why.seconds:.0f}px"></span>'
            rows.append([PART_NAMES[part], seconds(value), f"{value / why.seconds:.1%}", bar])
    lines = sorted(why.lines, key=lambda line: -line.seconds)[:12]
    ops = [
        [
            line.name,
            line.module,
            seconds(line.seconds),
            f"{line.relative_std:.0%}",
            line.basis.name.lower() if line.basis is not None else "",
        ]
        for line in lines
    ]
    shares = ", ".join(f"{share:.0%} {basis}" for basis, share in why.by_basis().items() if share >= 0.005)
    return (
        "<h2>Where the time goes</h2>"
        + _table(["part", "*time", "*share", ""], rows, raw=3)
        + f"<p>Share of the time on numbers that are {escape(shares)}.</p>"
        + _table(["longest ops", "module", "*time", "*uncertainty", "number is"], ops)
    )


def _memory(rivals: Solutions) -> str:
    parts = sorted(zip(MEMORY_PARTS, rivals.memory.parts[:, 0], strict=True), key=lambda item: -item[1])
    rows = [[name.replace("_", " "), f"{size / GIB:.1f}"] for name, size in parts if size >= 0.05 * GIB]
    rows += [
        ["allocated", f"{rivals.memory.allocated[0] / GIB:.1f}"],
        ["reserved", f"{rivals.memory.reserved[0] / GIB:.1f}"],
        ["with CUDA context and NCCL", f"{rivals.memory.device[0] / GIB:.1f}"],
    ]
    return f"<h2>What fills the memory of stage {int(rivals.memory.stage[0]) + 1}, the fullest</h2>" + _table(
        ["", "*GiB"], rows
    )


def _rivals(decision: Decision) -> str:
    rivals = decision.rivals
    if len(rivals) < 2:
        return ""
    times, found = rivals.times.seconds, decision.chances
    rows = [
        [
            seconds(float(times[i])),
            f"{times[i] / times[0] - 1:+.1%}",
            f"{rivals.memory.device[i] / GIB:.1f}",
            f"{found[i]:.0%}",
            describe(rivals, i),
        ]
        for i in range(len(rivals))
    ]
    return "<h2>The best layouts of other sizes</h2>" + _table(["*step", "*beside", "*GiB", "*fastest with", "layout"], rows)


def _neighbours(decision: Decision) -> str:
    around = decision.around
    rows = [
        [
            step.axis,
            step.before,
            step.after,
            f"{around.change(step):+.1%}",
            f"{around.solutions.memory.device[step.index] / GIB:.1f}",
            around.solutions.verdict(step.index),
        ]
        for step in around.steps
    ]
    text = "".join(f"<p>{escape(line)}</p>" for line in (standing(around), *kept_out(around)))
    return "<h2>One step away</h2>" + text + _table(["axis", "from", "to", "*step time", "*GiB", "fits"], rows)


def _sensitivities(decision: Decision) -> str:
    rows = []
    for row in decision.rows:
        turn = ""
        if row.deviations is not None and row.rival is not None:
            off = f"{abs(row.deviations) * row.relative_std:.0%} {'slower' if row.deviations > 0 else 'faster'}"
            turn = f"{off}: {describe(decision.rivals, row.rival)}"
        name, measure = MEASUREMENTS[row.kind]
        rows.append([name, seconds(row.seconds), f"{row.relative_std:.0%}", f"{row.step_change:+.1%}", turn, measure])
    words = [
        "numbers",
        "*time",
        "*uncertainty",
        "*step, one deviation slower",
        "another layout wins if they are",
        "to know better",
    ]
    return "<h2>How sure, and what would tell</h2>" + _table(words, rows)


def _assumptions(rivals: Solutions, profile_text: str, notes: str) -> str:
    problem = rivals.problem
    layout = rivals.layouts.strategy(0, problem.run)
    constants = [
        f"{field.name} {getattr(layout, field.name)}"
        for field in fields(Run)
        if getattr(layout, field.name) != field.default or field.name in ("grad_dtype", "attention")
    ]
    lines = [
        profile_text,
        network_rate(problem),
        *notes.split("\n"),
        f"constants of the run: {', '.join(constants)}",
        *(f"standard deviation of {std:.0%} for {what}" for what, std in uncertainties(problem, layout).items()),
        *(f"if {setting.text}: {seconds(setting.seconds)}" for setting in other_settings(rivals, 0)),
    ]
    return "<h2>Assumed, and left open</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines if line) + "</ul>"


def _launch(launched: Solutions, rivals: Solutions) -> str:
    problem = launched.problem
    run = launched.layouts.strategy(0, problem.run)
    try:
        name, text = launch_file(problem.model, run, problem.cluster.gpus_per_node)
    except InputError as error:
        return f"<h2>To launch it</h2><p>{escape(str(error))}</p>"
    other = run != rivals.layouts.strategy(0, rivals.problem.run)
    memory = f"{launched.memory.device[0] / GIB:.1f} GiB, {launched.verdict(0)}"
    layout = f" for {describe(launched, 0)} ({memory})" if other else ""
    return f"<h2>To launch it</h2><p>{escape(name + layout)}, as --export writes it:</p><pre>{escape(text[:_CHARACTERS])}</pre>"


def _searched(result: SearchResult | None) -> str:
    if result is None:
        return ""
    rows = [[f"{count:,}", reason] for reason, count in result.rejected.most_common() if count and reason != DOES_NOT_FIT]
    return (
        f"<h2>What was searched</h2><p>{result.layouts_estimated:,} layouts in {result.seconds:.2f} s; "
        f"{result.feasible:,} fit, {result.rejected[DOES_NOT_FIT]:,} do not.</p>"
        + _table(["*splits", "left out because"], rows)
    )


def _table(words: Sequence[str], rows: Iterable[Sequence[str]], raw: int = -1) -> str:
    """Return a table; columns whose name begins with * hold numbers. raw: a column whose cells are HTML already."""
    kinds = [' class="n"' if word.startswith("*") else "" for word in words]
    head = "".join(f"<th{kind}>{escape(word.lstrip('*'))}</th>" for word, kind in zip(words, kinds, strict=True))
    body = "".join(f"<tr>{_cells(row, kinds, raw)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cells(row: Sequence[str], kinds: Sequence[str], raw: int) -> str:
    pairs = enumerate(zip(row, kinds, strict=True))
    return "".join(f"<td{kind}>{cell if i == raw else escape(cell)}</td>" for i, (cell, kind) in pairs)
