"""Learning from one's own runs: a few factors on kinds of time, and what is left uncertain about them.

A Bayesian update of the uncertainty that predictions have anyway. Before the runs the logarithm of each factor is distributed
around 0: that of the step with what the framework and the laboratory leave open (solver.report.uncertainty), those of the kinds
of time with the uncertainty of their kernels (network and links as of others than those measured). Kernels are normal; the
step, network and links follow Student's t, because another machine may be far off, and consistent runs then outweigh what was
assumed before them. The runs are measured with a noise of LAYOUT_STD, or of their spread where that is more. The largest
posterior is found by Gauss-Newton steps on whole predictions, so that what overlaps is priced as it is; the first derivatives
are over whole standard deviations, for a network that is hidden behind compute shows only when it is slower. Runs far off the
others count less (Huber); what all are off by is the step's. The covariance is that of the last step (Laplace).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor.cost_model import CostModel
from predictor.estimate import Z90
from predictor.learned import FACTOR_OF, FACTORS, STEP, Learned, conditions_of
from predictor.network.collective import UNSEEN_NETWORK_STD
from predictor.network.stated_busbw import STATED_STD
from profiler.errors import InputError, counted
from solver.formats.cases.reading import Case
from solver.report.uncertainty import LAYOUT_STD
from solver.report.validate import CostModels, Prediction, predict_cases, timed
from solver.spec.frameworks import framework_of

_WIDTHS = (1.0, 0.5, 0.1)  #: over which derivatives are taken at each step of Gauss-Newton, in standard deviations before
_ROUNDS = 20  #: of noise, runs far off and weights of the uncertainty before, at each of them
_FAR = 2.0  #: standard deviations from which on a run counts less
_FREEDOM = 4.0  #: degrees of freedom of Student's t before the runs
_OWN = (STEP, "links", "network")  #: what may differ more between machines of the same accelerators
_LEAST_STD, _NOT_IN_ANY = 0.02, 1e-6  #: before the runs; of kinds of time that are in none


@dataclass(frozen=True)
class HeldOut:
    """Errors of runs that were not learned from: median |predicted / measured - 1|, and the share inside the 90% interval.

    spread: the median half width of that interval, as a factor minus 1.
    """

    runs: int
    median_before: float
    median_after: float
    inside_before: float
    inside_after: float
    spread_before: float
    spread_after: float


@dataclass(frozen=True)
class Lesson:
    """What was learned, and what it is worth on runs that are left out in turn (by number of GPUs where there are several)."""

    learned: Learned
    held_out: HeldOut
    skipped: tuple[Prediction, ...]


def learn(
    cases: Sequence[Case], cost_models: CostModels, name: str, progress: Callable[[int, int], None] | None = None
) -> Lesson:
    """Return the factors that explain measured runs. Raises InputError for runs of different machines, and for fewer than two.

    progress(done, total) is called with numbers of passes over the cases.
    """
    before = predict_cases(cases, cost_models)
    used = timed(before)
    if len(used) < 2:
        reasons = sorted({p.skipped for p in before if p.skipped})
        raise InputError(
            f"learning needs at least two runs with a step time that can be predicted; here {counted(len(used), 'run')}"
            f"{': ' + reasons[0] if reasons else ''}"
        )
    runs = [p.case for p in used]
    conditions = _conditions(used)
    prior = _prior(used)
    theta, noise = np.zeros(len(FACTORS)), LAYOUT_STD
    weights, certain, information = np.ones(len(used)), prior**-2, np.diag(prior**-2)
    for step, width in enumerate(_WIDTHS):
        residual, jacobian = _linearised(runs, cost_models, theta, width * prior)
        change, noise, weights, certain, information = _step(residual, jacobian, theta, prior, noise)
        theta = theta + change
        if progress:
            progress(step + 1, len(_WIDTHS) + 1)
    covariance = np.linalg.inv(information)
    system = float(np.median([p.explanation.system_std for p in used if p.explanation]))
    learned = Learned(
        tuple(theta.tolist()),
        tuple(tuple(row) for row in covariance.tolist()),
        noise,
        system,
        len(used),
        tuple(conditions.items()),
        name,
    )
    residual, jacobian = _linearised(runs, cost_models, theta, _WIDTHS[-1] * prior)
    held_out = _held_out(used, residual, jacobian, weights, certain, noise)
    return Lesson(learned, held_out, tuple(p for p in before if p.skipped))


def distinct_runs(cases: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    """Return the cases without those that are another one under a second name, and why each of these counts no more."""
    kept: list[Case] = []
    twins: dict[str, str] = {}
    for case in cases:
        same = next((one for one in kept if replace(case, id=one.id) == one), None)
        if same is None:
            kept.append(case)
        else:
            twins[case.id] = f"the same run as {same.id}"
    return kept, twins


def scaled(cost_models: CostModels, learned: Learned) -> CostModels:
    """Return the same cost models with what was learned."""

    def models(hardware: str, bandwidth: float | None) -> CostModel | None:
        cost = cost_models(hardware, bandwidth)
        return None if cost is None else cost.with_learned(learned)

    return models


def _conditions(used: Sequence[Prediction]) -> dict[str, object]:
    """Return what all runs have in common. Raises InputError where they have not."""
    found = [run_conditions(p) for p in used]
    for key, value in found[0].items():
        other = next(((p, c) for p, c in zip(used, found, strict=True) if c[key] != value), None)
        if other is not None:
            raise InputError(
                f"runs {used[0].case.id} and {other[0].case.id} differ in {key.replace('_', ' ')}: {value} and "
                f"{other[1][key]}; learn from each alone"
            )
    return found[0]


def run_conditions(p: Prediction) -> dict[str, object]:
    assert p.solutions is not None  # a timed prediction
    run, cost = p.solutions.problem.run, p.solutions.problem.cost
    return conditions_of(cost.device.name, framework_of(run.framework).name, run.precision, cost.network.bandwidth)


def _prior(used: Sequence[Prediction]) -> np.ndarray:
    """Return the standard deviations of the logarithms of FACTORS before the runs."""
    stds: dict[str, list[float]] = {name: [] for name in FACTORS}
    for p in used:
        why = p.explanation
        assert why is not None
        stds["step"].append(why.system_std)
        for kind, share in why.kind_shares().items():
            if kind in FACTOR_OF and share > 1e-3:
                lines = [line for line in why.lines if line.kind == kind and line.basis is not None]
                total = sum(line.seconds for line in lines)
                stds[FACTOR_OF[kind]].append(sum(line.seconds * line.relative_std for line in lines) / total)
    prior = {name: max(float(np.median(found)), _LEAST_STD) if found else _NOT_IN_ANY for name, found in stds.items()}
    if stds["network"]:  # whatever logs it was fitted to, the network that is learned from is another one
        prior["network"] = max(prior["network"], UNSEEN_NETWORK_STD)
    if stds["links"]:  # and so are the links of its nodes
        prior["links"] = max(prior["links"], STATED_STD)
    return np.array(list(prior.values()))


def _linearised(
    cases: Sequence[Case], cost_models: CostModels, theta: np.ndarray, widths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (log(predicted / measured) [runs], its derivatives by the logarithms of FACTORS [runs, factors]).

    The derivative by what is hardly in any run (whose width is next to nothing) is 0.
    """
    measured = np.log([float(case.measured["step_s"]) for case in cases])

    def logs(values: np.ndarray) -> np.ndarray:
        found = predict_cases(cases, scaled(cost_models, _trial(values)))
        return np.log([float(p.solutions.times.seconds[p.index]) for p in found if p.solutions is not None])

    at = logs(theta)
    columns = [
        (logs(theta + width * unit) - at) / width if width > _NOT_IN_ANY else np.zeros(len(at))
        for unit, width in zip(np.eye(len(FACTORS)), widths, strict=True)
    ]
    return at - measured, np.stack(columns, axis=1)


def _trial(theta: np.ndarray) -> Learned:
    none = tuple(tuple(row) for row in np.zeros((len(FACTORS),) * 2).tolist())
    return Learned(tuple(theta.tolist()), none, LAYOUT_STD, 0.0)


def _step(
    residual: np.ndarray, jacobian: np.ndarray, theta: np.ndarray, prior: np.ndarray, noise: float
) -> tuple[np.ndarray, float, np.ndarray, np.ndarray, np.ndarray]:
    """Return (change of the factors, noise, weights of the runs, information of the prior, of all) of a step of Gauss-Newton.

    Iteratively reweighted least squares, from ``noise`` on: runs by Huber, the prior of _OWN by Student's t.
    """
    own, change = np.isin(FACTORS, _OWN), np.zeros(len(FACTORS))
    for _ in range(_ROUNDS):
        weights = np.minimum(1.0, _FAR * noise / np.maximum(abs(_apart(residual + jacobian @ change)), 1e-12))
        certain = np.where(own, (_FREEDOM + 1) / (_FREEDOM * prior**2 + (theta + change) ** 2), prior**-2)
        information = (jacobian.T * weights) @ jacobian / noise**2 + np.diag(certain)
        change = -np.linalg.solve(information, (jacobian.T * weights) @ residual / noise**2 + theta * certain)
        noise = _noise(_apart(residual + jacobian @ change), jacobian, information, weights, noise)
    return change, noise, weights, certain, information


def _apart(residual: np.ndarray) -> np.ndarray:
    """Return what runs are off by beside what all are off by."""
    return residual - np.median(residual)


def _noise(residual: np.ndarray, jacobian: np.ndarray, information: np.ndarray, weights: np.ndarray, before: float) -> float:
    """Return the standard deviation of what stays, with the factors that were fitted taken off the number of runs."""
    fitted = float(np.trace(np.linalg.solve(information, (jacobian.T * weights) @ jacobian / before**2)))
    free = max(len(residual) - fitted, 1.0)
    spread = math.sqrt(float((weights * residual**2).sum()) / free)
    return max(LAYOUT_STD, spread)


def _held_out(
    used: Sequence[Prediction],
    residual: np.ndarray,
    jacobian: np.ndarray,
    weights: np.ndarray,
    certain: np.ndarray,
    noise: float,
) -> HeldOut:
    """Return the errors of runs left out in turn, in one Gauss-Newton step from the factors of all. certain: what the prior
    knows of each factor, the inverse of a variance."""
    after, spread = np.zeros(len(used)), np.zeros(len(used))
    for group in _groups(used):
        mine, others = jacobian[group], np.setdiff1d(np.arange(len(used)), group)
        without = np.diag(certain) + (jacobian[others].T * weights[others]) @ jacobian[others] / noise**2
        change = np.linalg.solve(without, (mine.T * weights[group]) @ residual[group] / noise**2)
        after[group] = residual[group] + mine @ change
        spread[group] = np.sqrt(noise**2 + np.einsum("ij,jk,ik->i", mine, np.linalg.inv(without), mine))
    whys = [p.explanation for p in used if p.explanation is not None]
    before = np.log([why.seconds / p.case.measured["step_s"] for why, p in zip(whys, used, strict=True)])
    uncertainties = np.array([why.relative_std for why in whys])
    return HeldOut(
        len(used),
        float(np.median(abs(np.expm1(before)))),
        float(np.median(abs(np.expm1(after)))),
        float((abs(before) <= Z90 * uncertainties).mean()),
        float((abs(after) <= Z90 * spread).mean()),
        float(np.expm1(Z90 * np.median(uncertainties))),
        float(np.expm1(Z90 * np.median(spread))),
    )


def _groups(used: Sequence[Prediction]) -> list[np.ndarray]:
    """Return the indexes of runs that are left out together: those of one number of GPUs, or each alone where all have one."""
    worlds = np.array([p.case.strategy.world_size if p.case.strategy else 0 for p in used])
    different = np.unique(worlds)
    if len(different) == 1:
        return [np.array([i]) for i in range(len(used))]
    return [np.flatnonzero(worlds == world) for world in different]
