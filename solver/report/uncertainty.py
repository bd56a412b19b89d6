"""What no single kernel explains of a step's time: how far off a prediction may be although its kernels are known.

Standard deviations of log(step time), judged from the published runs (docs/accuracy.md), each for what is not known in a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from predictor.kernels.flash_generations import FLASH_SPEEDUP
from solver.spec.frameworks import names_another
from solver.spec.frameworks.megatron import GENERIC
from solver.spec.strategy import Strategy
from solver.step.problem import Problem
from solver.step.solutions import Solutions

#: Standard deviation of log(predicted / measured) among runs that differ in their layout only: the median over the families of
#: three or more such runs in the published cases (tests/benchmarks/test_published_runs.py derives it again).
LAYOUT_STD = 0.031
#: How much slower than the best a run is set up: log(slowdown) by which a setting is e times less likely.
SLOWER = 0.1
# Two laboratories measuring one GPU differ by 3-9 percent, one run across releases of a framework by 3-8 percent. The value of
# a framework (Framework.uncertainty) stands for both; these come on top.
#: The host's wait for counted tokens, and routing as it was. The mean errors of the published runs with experts, by collection
#: and device, have a root mean square of 6.4%; more, because the runs of some collections differ by more than that.
EXPERTS = 0.10
LONG_SEQUENCE = 0.15  #: which attention kernel ran counts most, and kernels are extrapolated
LONG_FROM = 16_384  #: tokens
#: Tensor-parallel collectives between nodes, whose latency is not understood: as the law has them, and where runs of the
#: framework showed it.
SPREAD_TENSOR_GROUP, SPREAD_AS_SHOWN = 0.35, 0.15
BLOCKING = 0.10  #: launches that wait for each other
LAUNCH_STD = 0.5  #: of the time for which the device waits for launches (judged)
STRAGGLER_STD = 0.5  #: of the time that a step waits for its slowest rank (judged)
DETERMINISTIC = 0.10  #: attention's backward pass loses between nothing and 38%, other kernels are not priced


def spread_std(problem: Problem, layout: Strategy) -> float:
    """Return the standard deviation of log(step time) of a tensor group that spans nodes; 0 where it does not."""
    spread = layout.tp_mode != "isp" and layout.tp > problem.cluster.gpus_per_domain
    shown = problem.framework.tensor_parallel.ring_step_delay > 0
    return (SPREAD_AS_SHOWN if shown else SPREAD_TENSOR_GROUP) * spread


def spread_of(solutions: Solutions, index: int) -> float:
    """Return spread_std of one of the layouts."""
    return spread_std(solutions.problem, solutions.layouts.strategy(index, solutions.problem.run))


def difference_std(one: float, other: float) -> float:
    """Return the standard deviation of the log ratio of two layouts' times, of one run on one machine, from their spread_std:
    LAYOUT_STD each, and what only one of them errs by."""
    return math.sqrt(2 * LAYOUT_STD**2 + abs(one**2 - other**2))


def errors_of(solutions: Solutions, index: int, kinds: Mapping[str, float]) -> dict[str, float]:
    """Return the standard deviations of log(step time) that layouts of one run may differ by, each for its cause.

    kinds: by the kind of ops whose errors make it (Explanation.kind_uncertainties).
    """
    return {**kinds, "a tensor group that spans nodes": spread_of(solutions, index)}


def own_stds(errors: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return the standard deviations of log(step time) of what each layout errs by and not all others do too, [layouts].

    errors: of each layout, as errors_of returns them: of each cause the smallest is common.
    """
    causes = sorted({cause for one in errors for cause in one})
    squares = np.array([[one.get(cause, 0.0) ** 2 for cause in causes] for one in errors])
    return np.hypot(LAYOUT_STD, np.sqrt((squares - squares.min(axis=0)).sum(axis=1)))


def uncertainties(problem: Problem, layout: Strategy) -> Mapping[str, float]:
    """Return the standard deviations by what they are of; independent of each other."""
    alike = GENERIC.uncertainty if names_another(layout.framework) else 0.0
    found = {
        f"what {problem.framework.name} does": max(problem.framework.uncertainty, alike),
        "experts": EXPERTS * problem.model.is_mixture_of_experts,
        f"sequences above {LONG_FROM:,} tokens": LONG_SEQUENCE * (layout.seq_len > LONG_FROM),
        "a tensor group that spans nodes": spread_std(problem, layout),
        "blocking launches": BLOCKING * layout.launch_blocking,
        "deterministic kernels": DETERMINISTIC * layout.deterministic,
    }
    return {name: std for name, std in found.items() if std}


def attention_std(problem: Problem, layout: Strategy, share: float) -> float:
    """Return the standard deviation of log(step time) of not knowing which generation of FlashAttention ran, where runs that
    state none may have had an older one (Kernels.flash_unstated). share: of the step that attention's kernels take.
    """
    kernels, device = problem.framework.kernels, problem.cost.device
    if not kernels.flash_unstated or layout.flash_generation or layout.attention != "flash":
        return 0.0
    slower = math.prod(FLASH_SPEEDUP.get(v, 1.0) for v in range(kernels.flash_unstated, device.flash_version))
    return unstated_std(np.array([math.log1p(share * (slower - 1))]))


def network_std(solutions: Solutions, index: int) -> float:
    """Return the standard deviation of log(step time) of not knowing the network between nodes, where nobody stated it."""
    return unstated_std(np.log(solutions.on_slower_networks[:, index] / solutions.times.seconds[index]))


def unstated_std(off: np.ndarray) -> float:
    """Return the standard deviation of log(step time) about the likeliest one, of not knowing a setting.

    off: log of the times that other settings would have over that one. Another setting is exp(-abs(off) / SLOWER) times
    as likely, since runs are tuned.
    """
    likely = np.exp(-abs(off) / SLOWER)
    return math.sqrt(float((likely * off**2).sum() / (1 + likely.sum())))


def system_std(problem: Problem, layout: Strategy) -> float:
    """Return the standard deviation of log(step time) beside that of the kernels."""
    return math.hypot(*uncertainties(problem, layout).values())


def normal_cdf(x: np.ndarray | float) -> np.ndarray:
    """Return the distribution function of the standard normal; without scipy, which a prediction does not need."""
    erf = np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))
    return (1 + erf) / 2
