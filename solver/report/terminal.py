"""Terminal reports of a search and of one layout: the result first, then the best layouts, the breakdown, and the counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from predictor.cost_model import CostModel
from profiler.units import GBIT, GIB
from solver.report.breakdown import breakdown
from solver.report.decision import kept_out, standing
from solver.report.describe import describe, describe_strategy
from solver.report.explain import TIE_THRESHOLD, explain, tied
from solver.report.health import WORSE, Finding
from solver.report.words import between, parameter_count, rounded, seconds, token_rate
from solver.search.balance import Balanced
from solver.search.best_layout import BestLayout, Variant, surest
from solver.search.neighbours import neighbours
from solver.search.search import DOES_NOT_FIT, SearchResult
from solver.spec.model_size import parameters
from solver.step.memory import AT_RISK, FITS
from solver.step.problem import Problem
from solver.step.solutions import Solutions

#: Combinations of constants that are listed.
_VARIANTS = 12
#: Faster layouts one step away that do not fit, of which this many are named.
_STEPS = 2
_LEGEND = Text(
    "TGS: tokens per GPU per second; GiB: peak memory per GPU; zero1/16: ZeRO-1, states sharded over 16 ranks; "
    f"8 x 1: 8 micro batches of 1 sequence; tie ~: within {TIE_THRESHOLD:.0%} of the first row, which is within the "
    "error of predicted differences. More in docs/glossary.md",
    style="dim",
)
#: Why GEMMs and attention take longer in a training run, by where a device's kernels are from.
_CLOCKS = {"measured": "sustained-clock derating", "derived": "power and clocks"}


def show_search(
    console: Console,
    result: SearchResult,
    profile: str,
    notes: str = "",
    variants: Sequence[Variant] = (),
    remarks: Sequence[str] = (),
) -> None:
    """Print the whole report of a search. notes: lines about kernels timed for it. variants: searches with other constants.
    remarks: on what would be better."""
    console.print(heading(result.best, profile, notes))
    console.print(verdict_text(result.best))
    if result.best.verdict(0) == AT_RISK:
        console.print(Text(surely_fitting(result, variants), style="bold yellow"))
    for line in remarks:
        console.print(line, style="bold", markup=False)
    if variants:
        console.print(_variants_table(variants))
    sizes = [(result.best_of_sizes, i) for i in range(len(result.best_of_sizes))]
    console.print(solutions_table("Best layout of each tp x cp x pp", sizes, ties=True))
    console.print(solutions_table("Fastest layouts", [(result.best, i) for i in range(len(result.best))]))
    modes = [(found, 0) for found in result.best_of_mode.values()]
    console.print(solutions_table("Best of each tensor-parallel mode", modes))
    console.print(_LEGEND)
    console.print(breakdown(result.best, 0))
    around = neighbours(result.problem, result.best.layouts.strategy(0, result.problem.run))
    console.print(Text("\n".join([standing(around), *kept_out(around)[:_STEPS]])))
    console.print(_search_counts(result, [one.best for one in variants if one.best]))


def surely_fitting(result: SearchResult, variants: Sequence[Variant] = ()) -> str:
    """Return what the fastest layout found that is sure to fit costs, in words; variants: searches with other constants."""
    found = [sure for sure in (surest(result), *(variant.sure for variant in variants)) if sure]
    if not found:
        return "None of the layouts kept is sure to fit."
    sure = min(found, key=lambda one: one.seconds)
    memory = f"{sure.memory / GIB:.1f} GiB, at most {sure.bound / GIB:.1f}"
    change = sure.seconds / float(result.best.times.seconds[0]) - 1
    return f"Sure to fit, {change:+.1%} step time: {describe_strategy(sure.layout)}; {memory}"


LEAST_CHANGE = 5e-4  #: share of the step from which a change by assigning layers to stages is reported


def balance_text(balance: Balanced) -> Text:
    """Return what assigning single layers to the stages brings."""
    memory = f"{balance.solutions.memory.device[0] / GIB:.1f} GiB"
    change = balance.seconds / balance.before - 1
    if change > -LEAST_CHANGE:
        return Text("Layers assigned to the stages one by one make the step no shorter.", style="bold")
    by_stage = balance.solutions.problem.run.recompute_stage_layers
    other = (
        f"{seconds(balance.uniform)} ({balance.seconds / balance.uniform - 1:+.1%})"
        if balance.uniform < np.inf
        else "none fits"
    )
    return Text(
        f"Layers assigned to the stages one by one, {balance.text}: {seconds(balance.seconds)} ({change:+.1%}), {memory}\n"
        + f"Recomputed on the stages: {by_stage}; with the same number on every stage: {other}\n" * bool(by_stage)
        + describe(balance.solutions, 0),
        style="bold",
    )


def _variants_table(variants: Sequence[Variant]) -> Table:
    """Return the best layout of each combination of constants that was searched too."""
    table = Table(title="Also searched; the tables below are of the first", title_justify="left")
    for name in variants[0].constants:
        table.add_column(name, justify="right")
    for name in ("TGS", "step", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    distinct = {
        (variant.seconds, variant.reason, describe_strategy(variant.best.layout) if variant.best else ""): variant
        for variant in reversed(variants)
    }
    shown = sorted(distinct.values(), key=lambda variant: variant.seconds)
    for variant in shown[:_VARIANTS]:
        best = variant.best
        constants = [_constant(name, value, best) for name, value in variant.constants.items()]
        if best is None:
            table.add_row(*constants, "", "", "", Text(f"none: {variant.reason}"))
            continue
        table.add_row(
            *constants, token_rate(best.tgs), seconds(best.seconds), f"{best.memory / GIB:.1f}", describe_strategy(best.layout)
        )
    more = len(variants) - min(len(shown), _VARIANTS)
    table.caption = f"{more} combinations that find the same layouts or slower ones are in --json" if more else ""
    return table


def _constant(name: str, value: Any, best: BestLayout | None) -> str:
    """Return a constant of a search in words; nothing for what its best layout does not depend on."""
    idle = name == "recompute_modules" and best is not None and best.layout.recompute != "selective"
    return "" if idle else str(value)


def show_single(console: Console, solutions: Solutions, profile: str, notes: str = "", remark: str = "") -> None:
    """Print the report of one explicit layout. notes: as for a search. remark: on whether its framework runs it."""
    console.print(heading(solutions, profile, notes))
    console.print(verdict_text(solutions))
    if remark:
        console.print(remark, style="bold", markup=False)
    console.print(solutions_table("The config's layout", [(solutions, 0)]))
    console.print(_LEGEND)
    console.print(breakdown(solutions, 0))


def heading(solutions: Solutions, profile: str, notes: str) -> Text:
    p = solutions.problem
    lines = [
        f"{p.model.name}: {parameter_count(parameters(p.model))}, {p.run.seq_len} tokens per sequence, "
        f"{solutions.tokens[0]:,.0f} tokens per step, {p.run.precision}, framework {p.run.framework}"
        f"{f', adapters of rank {p.run.lora_rank} trained' if p.run.lora_rank else ''}",
        f"{p.run.world_size} x {p.cost.device.name}, {p.cluster.gpus_per_node} per node, {_domain(p)}{network_rate(p)}, "
        f"{p.cluster.memory_bytes / GIB:.1f} GiB per GPU",
        f"{profile}; {_derated(p.cost)}",
        *([notes] if notes else []),
    ]
    return Text("\n".join(lines))


def _derated(cost: CostModel) -> str:
    if cost.kernels.deratings.power_slowdown > 1:
        factor = f"GEMM and attention times x {cost.kernels.deratings.power_slowdown:.2f}"
        return f"power limit: {factor} where nothing else runs, less beside other work"
    gemms, attention = cost.kernels.deratings.linear, cost.kernels.deratings.attention
    alike = f"{gemms:.2f}" == f"{attention:.2f}"
    factors = f"GEMM and attention times x {gemms:.2f}" if alike else f"GEMM times x {gemms:.2f}, attention x {attention:.2f}"
    itself = (
        f" (on the measured device itself GEMM times x {cost.kernels.deratings.measured_on:.2f})"
        if cost.kernels.deratings.measured_on > gemms
        else ""
    )
    return f"{_CLOCKS[cost.origin]}: {factors}{itself}"


def _domain(problem: Problem) -> str:
    """Return how many GPUs the fastest links join, where they are more than a node, and of how many that are there."""
    here, whole = problem.cluster.gpus_per_domain, problem.cost.device.nvlink_domain
    some = f" of each {whole}" if here < min(whole, problem.run.world_size) else ""
    return f"fast links over {here}{some}, " if here > problem.cluster.gpus_per_node else ""


def network_rate(problem: Problem) -> str:
    """Return the bandwidth between nodes, and whether nobody stated that of a network in use, which widens the interval."""
    cluster = problem.cluster
    assumed = cluster.usual_network and problem.run.world_size > cluster.gpus_per_domain
    rate = f"{rounded(cluster.network_bandwidth / GBIT)} Gbit/s per GPU between nodes"
    return rate + " assumed (--cluster states yours)" * assumed


def verdict_text(solutions: Solutions) -> Text:
    why = explain(solutions, 0)
    verdict, interval = solutions.verdict(0), between(why.interval, why.seconds)
    text = (
        f"\n{token_rate(solutions.tgs[0])} tokens/GPU/s: "
        f"a step takes {seconds(why.seconds)} (90% prediction interval {interval})\n"
        f"MFU {solutions.mfu[0]:.1%}, {rounded(solutions.flops_per_second[0] / 1e12)} TFLOP/s per GPU "
        f"(with non-causal attention FLOPs {solutions.mfu_whole_square[0]:.1%}), "
        f"{solutions.memory.device[0] / GIB:.1f} GiB per GPU, at most {solutions.memory.bound[0] / GIB:.1f}: {verdict}"
    )
    return Text(text, style={FITS: "bold", AT_RISK: "bold yellow"}.get(verdict, "bold red"))


def solutions_table(title: str, rows: Iterable[tuple[Solutions, int]], ties: bool = False) -> Table:
    """Return a table of layouts with their estimates, one row per layout. ties: mark those as good as the first."""
    table = Table(title=title, title_justify="left")
    for name in ("TGS", "step", "90% interval", "MFU", "GiB", *(["tie"] if ties else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    for solutions, index in rows:
        why = explain(solutions, index)
        table.add_row(
            token_rate(solutions.tgs[index]),
            seconds(why.seconds),
            between(why.interval, why.seconds, "-"),
            f"{solutions.mfu[index]:.1%}",
            f"{solutions.memory.device[index] / GIB:.1f}",
            *(["~" if tied(solutions, index) else ""] if ties else []),
            describe(solutions, index),
        )
    return table


def show_health(console: Console, findings: Sequence[Finding]) -> None:
    """Print what was measured of a job beside its prediction."""
    console.print("\nMeasured beside predicted", style="bold")
    for finding in findings:
        console.print(Text(f"{finding.verdict:>12}: {finding.text}", style="bold red" if finding.verdict == WORSE else ""))


def _search_counts(result: SearchResult, all_searches: Sequence[BestLayout]) -> Group:
    """Return how many layouts were searched, and in how many searches, and why others were left out."""
    rejected = {reason: n for reason, n in result.rejected.most_common() if n}
    too_large = rejected.pop(DOES_NOT_FIT, 0)
    table = Table("splits", "not enumerated because", title="Splits of ranks or batch that were left out", title_justify="left")
    table.columns[0].justify = "right"
    for reason, n in rejected.items():
        table.add_row(f"{n:,}", reason)
    searched = Text(
        f"searched {result.layouts_estimated:,} layouts in {result.seconds:.2f} s ({result.layouts_per_second:,.0f}/s): "
        f"{result.feasible:,} fit, {too_large:,} do not fit in memory"
    )
    if len(all_searches) > 1:
        layouts, elapsed = (
            sum(getattr(best, name) for best in all_searches) for name in ("layouts_estimated", "search_seconds")
        )
        searched.append(f"; all {len(all_searches)} searches: {layouts:,} layouts in {elapsed:.2f} s")
    return Group(searched, table) if rejected else Group(searched)
