"""Write docs/learning.md: what learning from the first half of a collection of runs is worth on the rest.

The first half of each collection, in the order of its source, plays the user's own runs; the rest is predicted without and with
what was learned from them. ``--cases FILE`` adds the runs of a collection that is not shipped (nanotron's).
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from predictor.learned import FACTORS
from predictor.network.collective import UNSEEN_NETWORK_STD
from predictor.network.stated_busbw import STATED_STD
from profiler.files import write_text
from profiler.profile.profiles import known_profiles
from solver.commands.validate import CostModels
from solver.formats.cases.reading import Case, read_cases
from solver.learning import learn, scaled
from solver.options.terminal_run import progress_bar
from solver.report.scores import Score, time_scores
from solver.report.uncertainty import LAYOUT_STD
from solver.report.validate import Prediction, predict_cases, timed

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "configs/cases/published.jsonl"
OUTPUT = ROOT / "docs/learning.md"
_HEAD = """# Learning from your own runs

    foretrain import job.log --runs runs.jsonl              # Megatron's logs state what they run; others need --config
    foretrain learn runs.jsonl --output mine.json           # from two runs on; ten or more tell much
    foretrain search --world_size 512 --learned mine.json   # later predictions use it and say so

A trace of torch.profiler (`.json`, `.json.gz`; `foretrain import trace.json.gz --config FILE`) is read step by step: what its
kernels do is told by their names (GEMM, attention, memory-bound kernels, optimizer, NCCL's collectives, DeepEP and Hybrid-EP),
and the median step is printed beside the predicted one: compute by kind, communication that no compute hides, by op, and the
time in which nothing runs. Both add up to their step. A trace is of one rank; with a pipeline the prediction is of the slowest
stage. Kernels whose names say nothing count as memory-bound, and the five that took longest are listed.

What is learned are seven factors, on the whole step and on six kinds of time (`predictor/learned.py`), as a Bayesian
update of the uncertainty that predictions have anyway (`solver/learning.py`): the prior of the step is what the framework and
the laboratory leave open, that of a kind the uncertainty of its kernels, that of the network {network:.0%}, as of a network
without measurements, that of the links in a node {links:.0%}. The step, network and links may be far off (Student's t):
two runs that agree on half as long again teach it. Runs are taken to scatter by {scatter:.1%}, or by their spread where
that is more; those far off the others count less. The interval of a later prediction is that of the posterior for its own
mix of times, plus the scatter. A file of factors holds for its device, framework, precision and network only; elsewhere
it is refused.

## What it is worth

The first half of a collection plays your runs, the rest is predicted (`make learning`). Nothing is fitted on what is reported.

| runs | learned from | predicted | median error | 90th percentile | in 90% interval | half width of the interval |
|---|--:|--:|--:|--:|--:|--:|
"""
_TAIL = """
What a file of factors is worth on runs that are left out in turn, by number of GPUs, is printed by `foretrain learn`, which
also says so where nothing was learned that holds for others. If the runs learned from scatter more than the later ones,
intervals become too wide (AA); if less, too narrow (LF).

The factors that were learned:

"""


def halves(cases: Sequence[Case], cost_models: CostModels, chosen: Callable[[Case], bool]) -> tuple[list[Case], list[Case]]:
    """Return the first and the second half of the chosen runs that can be predicted, in their order."""
    used = [p.case for p in timed(predict_cases([case for case in cases if case.strategy and chosen(case)], cost_models))]
    return used[: len(used) // 2], used[len(used) // 2 :]


def spread(predictions: Sequence[Prediction]) -> float:
    """Return the median half width of the 90% interval, as a factor minus 1."""
    whys = [p.explanation for p in timed(predictions) if p.explanation is not None]
    return float(np.median([why.interval[1] / why.seconds for why in whys])) - 1


def rows(name: str, first: Sequence[Case], rest: Sequence[Case], cost_models: CostModels) -> tuple[list[str], str]:
    """Return two rows of the table, without and with what was learned, and a line of the factors."""
    lesson = learn(first, cost_models, name)
    found = []
    for words, models in (("", cost_models), ("with what was learned", scaled(cost_models, lesson.learned))):
        predictions = predict_cases(rest, models)
        score: Score = time_scores(predictions)["all"]
        found.append(
            f"| {words or name} | {'' if words else len(first)} | {'' if words else score.n} | {score.median:.1%} | "
            f"{score.p90:.1%} | {score.coverage:.0%} | {spread(predictions):.0%} |"
        )
    stds = np.sqrt(np.diag(np.array(lesson.learned.covariance)))
    named = ", ".join(
        f"{factor.replace('_', '-')} {math.exp(value):.2f} ± {std:.2f}"
        for factor, value, std in zip(FACTORS, lesson.learned.log_factors, stds, strict=True)
    )
    return found, textwrap.fill(f"- {name}: {named}; scatter {lesson.learned.noise:.1%}", 150, subsequent_indent="  ")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", type=Path, help="a file with nanotron's runs (ids NT-...)")
    args = p.parse_args()
    cost_models = CostModels(known_profiles())
    published = read_cases(PUBLISHED)

    def is_13b(case: Case) -> bool:
        return case.source == "AA" and case.model is not None and case.model.hidden_size == 5120

    def is_foundry(case: Case) -> bool:
        bf16 = case.strategy is not None and case.strategy.precision == "bf16"
        return case.source == "LF" and case.hardware == "h100_sxm" and bf16

    sets = [
        ("AA, 13B on A100, all layouts", *halves(published, cost_models, is_13b)),
        ("LF, llm-foundry on H100, all sizes", *halves(published, cost_models, is_foundry)),
    ]
    if args.cases:
        theirs = read_cases(args.cases)
        small = halves(theirs, cost_models, lambda c: c.source == "NT" and c.strategy.world_size <= 32)  # type: ignore[union-attr]
        large = halves(theirs, cost_models, lambda c: c.source == "NT" and c.strategy.world_size > 32)  # type: ignore[union-attr]
        sets += [("nanotron on 8 to 32 H100", *small), ("the same runs, for 64 to 512 H100", small[0], [*large[0], *large[1]])]
    table, factors = [], []
    with progress_bar("learning") as report:
        for number, (name, first, rest) in enumerate(sets, 1):
            found, line = rows(name, first, rest, cost_models)
            table += found
            factors += [line] if line.split(": ", 1)[1] not in "\n".join(factors) else []
            report(number, len(sets))
    write_text(
        OUTPUT,
        _HEAD.format(scatter=LAYOUT_STD, network=UNSEEN_NETWORK_STD, links=STATED_STD)
        + "\n".join(table)
        + "\n"
        + _TAIL
        + "\n".join(factors)
        + "\n",
    )
    print(f"wrote {OUTPUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
