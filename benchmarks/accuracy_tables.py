"""Tables of docs/accuracy.md: predictions in, Markdown out. Errors are predicted / measured - 1."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from profiler.profile.devices import DATASHEETS
from profiler.units import GIB
from solver.formats.cases.reading import Case
from solver.report.scores import Score, confusion, constant_mfu_scores, memory_scores, regret, time_scores, worst
from solver.report.validate import Prediction, timed
from solver.report.words import seconds
from solver.spec.strategy import Strategy

NOT_EXPLAINED = "not explained"
MEAN = "mean of groups"
#: Cases with the same description whose times differ by more than this factor cannot both be predicted.
TWINS_DIFFER = 1.1
_BOUNDS = {"micro_batch_size": (1, 2, 4, 8, 16), "world_size": (8, 64, 256), "seq_len": (1024, 2048, 4096, 8192)}


@dataclass(frozen=True)
class Note:
    """Why cases are off. cases: a shell pattern of their ids (* ? [12])."""

    cases: str
    reason: str


@dataclass(frozen=True)
class Peer:
    """Accuracy that another tool reports for itself; ``group`` names those of our cases that are most like its own."""

    tool: str
    cases: str
    time: str
    memory: str
    group: str
    origin: str


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """A Markdown table; the columns ``text`` are aligned left, the others (numbers) right."""
    rule = ["---" if column in text else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


#: Columns of the table of step times.
_TIME_HEAD = (
    "group",
    "runs",
    "n",
    "constant-MFU baseline: median",
    "median",
    "90th percentile",
    "mean (signed)",
    "in 90% interval",
    "its half width",
    "skill",
    "regret: mean",
    "worst",
    "families",
)


def time_table(predictions: Sequence[Prediction], groups: Mapping[str, str]) -> str:
    """Step-time errors per group, those of the constant-MFU baseline per hardware, and the regret of trusting the order."""
    return table(_TIME_HEAD, time_rows(predictions, groups), text=(0, 1))


def time_rows(predictions: Sequence[Prediction], groups: Mapping[str, str]) -> list[Sequence[str]]:
    """Return the rows of time_table."""
    nulls, regrets = constant_mfu_scores(predictions), regret(predictions)
    rows: list[Sequence[str]] = []
    scores = time_scores(predictions)
    for name, s in scores.items():
        null, cost = nulls[name].median, regrets.get(name)
        chosen = [f"{cost.mean:.1%}", f"{cost.worst:.1%}", f"{cost.families}"] if cost else ["", "", ""]
        rows.append(
            [
                name,
                groups.get(name, ""),
                f"{s.n}",
                f"{null:.1%}",
                f"{s.median:.1%}",
                f"{s.p90:.1%}",
                f"{s.bias:+.1%}",
                f"{s.coverage:.0%}",
                f"{s.half_width:.0%}",
                f"{1 - s.median / null:.2f}" if null else "",
                *chosen,
            ]
        )
    if scores:
        mean, null = mean_of_groups(scores), mean_of_groups(nulls).median
        rows.append(
            [
                MEAN,
                "every group counts the same",
                f"{mean.n}",
                f"{null:.1%}",
                f"{mean.median:.1%}",
                f"{mean.p90:.1%}",
                f"{mean.bias:+.1%}",
                f"{mean.coverage:.0%}",
                f"{mean.half_width:.0%}",
                f"{1 - mean.median / null:.2f}",
                "",
                "",
                "",
            ]
        )
    return rows


def device_table(predictions: Sequence[Prediction]) -> str:
    """Step-time errors by device, dense models and mixtures of experts apart; whether the device itself was measured."""
    members: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for p in timed(predictions):
        experts = p.case.model is not None and p.case.model.is_mixture_of_experts
        members[p.case.hardware, "experts" if experts else "dense"].append(p)
    rows = []
    for (hardware, kind), found in sorted(members.items()):
        s = time_scores(found)["all"]
        sheet = DATASHEETS.get(hardware)
        origin = f"derived from {sheet.derived_from}" if sheet and sheet.derived_from else "measured"
        rows.append(
            [hardware, origin, kind, f"{s.n}", f"{s.median:.1%}", f"{s.p90:.1%}", f"{s.bias:+.1%}", f"{s.coverage:.0%}"]
        )
    head = ["device", "kernels", "models", "n", "median", "90th percentile", "mean (signed)", "in 90% interval"]
    return table(head, rows, text=(0, 1, 2))


def mean_of_groups(scores: Mapping[str, Score]) -> Score:
    """Return the mean over groups of each figure; n: the number of groups."""
    groups = [score for name, score in scores.items() if name != "all"]
    median, p90, bias, coverage, half = (
        float(np.mean([getattr(s, key) for s in groups])) for key in ("median", "p90", "bias", "coverage", "half_width")
    )
    return Score(len(groups), median, p90, bias, coverage, half)


def memory_table(predictions: Sequence[Prediction], groups: Mapping[str, str]) -> str:
    """Peak-memory errors per group.

    distinct: number of different readings, where sources state the same one for runs of any number of micro batches.
    """
    readings: dict[str, set[float]] = defaultdict(set)
    for p in weighed(predictions):
        readings[p.case.source].add(float(p.case.measured["peak_memory_gib"]))
    rows, scores = [], memory_scores(predictions)
    for name, s in scores.items():
        distinct = sum(map(len, readings.values())) if name == "all" else len(readings[name])
        rows.append([name, groups.get(name, ""), f"{s.n}", f"{distinct}", f"{s.median:.1%}", f"{s.p90:.1%}", f"{s.bias:+.1%}"])
    if scores:
        s = mean_of_groups(scores)
        rows.append([MEAN, "every group counts the same", f"{s.n}", "", f"{s.median:.1%}", f"{s.p90:.1%}", f"{s.bias:+.1%}"])
    return table(["group", "runs", "n", "distinct", "median", "90th percentile", "mean (signed)"], rows, text=(0, 1))


def fits_table(predictions: Sequence[Prediction]) -> str:
    """Fits or does not fit: the four counts, the share classified correctly and both kinds of error.

    Empty without runs of both outcomes.
    """
    n = confusion(predictions)
    fit, out = (n[f"{real}, predicted fit"] + n[f"{real}, predicted OOM"] for real in ("fit", "OOM"))
    if not fit or not out:
        return ""
    right = _right(n)
    stated = [p for p in predictions if not p.alternatives]
    left_open = fit + out - sum(confusion(stated).values())
    rows = [
        ["fitted", f"{n['fit, predicted fit']}", f"{n['fit, predicted OOM']}"],
        ["OOM", f"{n['OOM, predicted fit']}", f"{n['OOM, predicted OOM']}"],
    ]
    counts = table(["run", "predicted: fits", "predicted: does not fit"], rows)
    return counts + (
        f"\nClassified correctly: {right:.1%}. "
        f"False alarms (fitted, predicted not to): {n['fit, predicted OOM'] / fit:.1%} of {fit} runs.\n"
        f"Missed (OOM, predicted to fit): {n['OOM, predicted fit'] / out:.1%} of {out} runs.\n"
        f"{left_open} of the runs that fitted leave recomputation, ZeRO stage or chunks of stages open and are predicted with\n"
        f"a choice that fits where there is one, which tells little: {_right(confusion(stated)):.1%} without them.\n"
    )


def _right(counts: Mapping[str, int]) -> float:
    """Return the share classified correctly."""
    return (counts["fit, predicted fit"] + counts["OOM, predicted OOM"]) / sum(counts.values())


def peer_table(predictions: Sequence[Prediction], peers: Sequence[Peer]) -> str:
    """Mean |error| of other tools as they state it, next to ours on the most similar group."""
    head = [
        "tool",
        "its cases",
        "step time",
        "memory",
        "our group",
        "n",
        "our step time",
        "our memory",
        "origin of its figures",
    ]
    rows = []
    for peer in peers:
        ours = [p for p in predictions if p.case.source == peer.group]
        time, memory = [abs(step_error(p)) for p in timed(ours)], [abs(memory_error(p)) for p in weighed(ours)]
        mean = [f"{np.mean(errors):.1%}" if errors else "" for errors in (time, memory)]
        rows.append([peer.tool, peer.cases, peer.time, peer.memory, peer.group, f"{len(time)}", *mean, peer.origin])
    return table(head, rows, text=(0, 1, 4, 8))


def step_error(p: Prediction) -> float:
    return p.seconds / float(p.case.measured["step_s"]) - 1


def memory_error(p: Prediction) -> float:
    return p.memory_bytes / (float(p.case.measured["peak_memory_gib"]) * GIB) - 1


def weighed(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The predicted cases whose peak memory was measured."""
    return [p for p in predictions if not p.skipped and "peak_memory_gib" in p.case.measured]


def factor_table(predictions: Sequence[Prediction]) -> str:
    """Signed error of the step time by properties of the run.

    With and without the largest group, which determines the medians.
    """
    members = timed(predictions)
    sizes: dict[str, int] = defaultdict(int)
    for p in members:
        sizes[p.case.source] += 1
    largest = max(sizes, key=lambda name: sizes[name], default="")
    rows = []
    for factor, level_of in _FACTORS.items():
        levels: dict[str, list[Prediction]] = defaultdict(list)
        for p in sorted((p for p in members if p.case.strategy), key=lambda p: level_of(p.case.strategy)[0]):
            levels[level_of(p.case.strategy)[1]].append(p)
        for level, found in levels.items():
            rest = [step_error(p) for p in found if p.case.source != largest]
            errors = [step_error(p) for p in found]
            rows.append(
                [
                    factor,
                    level,
                    f"{len(errors)}",
                    f"{np.median(errors):+.1%}",
                    f"{np.median(np.abs(errors)):.1%}",
                    f"{len(rest)}",
                    f"{np.median(rest):+.1%}" if rest else "",
                ]
            )
    head = ["factor", "value", "n", "median (signed)", "median (absolute)", f"n without {largest}", f"signed without {largest}"]
    return table(head, rows, text=(0, 1))


def _binned(key: str) -> Callable[[Strategy], tuple[int, str]]:
    bounds = _BOUNDS[key]
    names = [f"up to {bounds[0]:,}" if bounds[0] > 1 else "1"]
    names += [f"{b:,}" if a + 1 == b else f"{a + 1:,} to {b:,}" for a, b in zip(bounds, bounds[1:], strict=False)]
    names.append(f"over {bounds[-1]:,}")

    def level(run: Strategy) -> tuple[int, str]:
        place = sum(getattr(run, key) > bound for bound in bounds)
        return place, names[place]

    return level


def _exact(key: str) -> Callable[[Strategy], tuple[int, str]]:
    return lambda run: (int(getattr(run, key)), f"{getattr(run, key)}")


_RECOMPUTE = ("none", "selective", "full")
_FACTORS: Mapping[str, Callable[..., tuple[int, str]]] = {
    "tp": _exact("tp"),
    "pp": _exact("pp"),
    "micro batch": _binned("micro_batch_size"),
    "recompute": lambda run: (_RECOMPUTE.index(run.recompute), run.recompute),
    "GPUs": _binned("world_size"),
    "sequence": _binned("seq_len"),
}


def worst_table(predictions: Sequence[Prediction], notes: Sequence[Note], count: int = 10) -> str:
    """The cases with the largest errors, each with a reason that can be checked, or none."""
    like = twins(predictions)
    rows = [
        [
            p.case.id,
            layout_of(p.case),
            seconds(p.seconds),
            seconds(p.case.measured["step_s"]),
            f"{step_error(p) + 1:.2f}",
            reason_of(p, notes, like),
        ]
        for p in worst(predictions, count)
    ]
    return table(["case", "run", "predicted", "measured", "factor", "reason"], rows, text=(0, 1, 5))


def layout_of(case: Case) -> str:
    """Model, GPUs, and the parts of the layout that are not 1."""
    s = case.strategy
    if s is None or case.model is None:
        return ""
    sizes = " ".join(f"{key}{getattr(s, key)}" for key in ("tp", "cp", "pp", "vpp") if getattr(s, key) > 1)
    batch = f"{s.num_micro_batches} x {s.micro_batch_size} x {s.seq_len}"
    return ", ".join(filter(None, (case.model.name, f"{s.world_size} GPUs", sizes, batch, f"recompute {s.recompute}")))


def twins(predictions: Sequence[Prediction]) -> list[list[Prediction]]:
    """Timed cases of equal source, hardware, cluster, model and layout: sets of two and more, fastest first."""
    alike: dict[str, list[Prediction]] = defaultdict(list)
    for p in timed(predictions):
        key = (p.case.source, p.case.hardware, json.dumps(dict(p.case.cluster), sort_keys=True), p.case.model, p.case.strategy)
        alike[repr(key)].append(p)
    sets = [sorted(found, key=lambda p: float(p.case.measured["step_s"])) for found in alike.values()]
    return [found for found in sets if len(found) > 1]


def reason_of(p: Prediction, notes: Sequence[Note], like: Sequence[Sequence[Prediction]]) -> str:
    """The reason of the first note whose pattern matches the case.

    Else a run with the same description that took a different time; else not explained.
    """
    for note in notes:
        if fnmatchcase(p.case.id, note.cases):
            return note.reason
    for found in like:
        if any(member is p for member in found):
            others = [member for member in found if member is not p]
            other = max(others, key=lambda member: abs(np.log(_measured(member) / _measured(p))))
            if abs(np.log(_measured(other) / _measured(p))) > np.log(TWINS_DIFFER):
                return f"{other.case.id}, described alike, took {seconds(_measured(other))}"
    return NOT_EXPLAINED


def _measured(p: Prediction) -> float:
    return float(p.case.measured["step_s"])


def twin_table(predictions: Sequence[Prediction]) -> str:
    """How much measured runs with the same description in the file differ.

    No prediction from these descriptions can reproduce this difference.
    """
    spreads: dict[str, list[float]] = defaultdict(list)
    for found in twins(predictions):
        spreads[found[0].case.source].append(_measured(found[-1]) / _measured(found[0]) - 1)
    rows = [[name, f"{len(s)}", f"{np.median(s):.1%}", f"{max(s):.1%}"] for name, s in sorted(spreads.items())]
    return table(["group", "sets of runs alike", "slowest over fastest: median", "largest"], rows)


def skipped_list(predictions: Sequence[Prediction]) -> str:
    """Cases that were not predicted, by reason and name."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for p in predictions:
        if p.skipped:
            reasons[p.skipped].append(p.case.id)
    return "".join(f"* {len(ids)}: {reason}: {', '.join(ids)}\n" for reason, ids in reasons.items()) or "* none\n"
