"""A measured job beside its prediction: what differs from the prediction, and what would explain it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from predictor.estimate import Z90
from predictor.network.collective_points import sent_share
from predictor.network.stated_busbw import PROBE_BYTES, StatedLinks
from profiler.errors import InputError
from profiler.units import GB, GIB, MIB
from solver.formats.logs.step_log import LEAST, WARM_UP, Collectives, Observation
from solver.report.explain import Explanation, explain
from solver.report.other_settings import OtherSetting, other_settings
from solver.report.words import PART_NAMES, between, seconds
from solver.spec.cluster import check_bus_bandwidths, placement
from solver.step.collective_checks import as_late_as_checks
from solver.step.layouts import Layouts
from solver.step.memory import OUT_OF_MEMORY
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

AS_PREDICTED, WORSE, BETTER, NOTE = "as predicted", "worse", "better", "note"
#: Collectives are compared by their rate from LARGE bytes on, by their latency up to SMALL.
LARGE, SMALL = 16 * MIB, 64 * 1024
#: Measured beside the memory of a GPU: of a figure that is in another unit.
_MORE_THAN_ALL = 1.1
#: Differences within these are never findings: laboratories differ by as much.
_LEAST_OFF, _LEAST_MEMORY = math.log(1.25), 0.10
#: The slowest of twenty steps over the median, and the second half of a log over the first: more is a finding.
_UNEVEN, _DRIFT = 1.10, 1.03
_STALLS = 0.01  #: by which single slow steps raise the mean over the median, if they matter
_FIRST = "they wait for compilation, data and communicators"
_MOST_FACTOR = 20.0  #: a part that must be slower than this does not explain a step
_FARTHEST = 200.0  #: a factor that no fault of a machine explains; milliseconds taken for seconds are a thousand
_COUNTED_APART = 2.0  #: two counts of the FLOPs of one step differ by less


@dataclass(frozen=True)
class Finding:
    """One sentence, and whether it is AS_PREDICTED, WORSE (slower, larger), BETTER, or a NOTE on another one."""

    verdict: str
    text: str


def health(solutions: Solutions, index: int, observed: Observation) -> list[Finding]:
    """Return what fits and what does not, of a job that ran layout ``index``.

    Raises InputError for a step that cannot be of this job, or is in another unit than seconds.
    """
    found = [*_networks(solutions, observed), *(_collective(solutions, measured) for measured in observed.collectives)]
    why = explain(solutions, index)
    if len(observed.steps):
        step = float(np.median(observed.steps))
        if not why.seconds / _FARTHEST < step < why.seconds * _FARTHEST:
            raise InputError(
                f"a step of {step:g} s, where {why.seconds:.3g} s are predicted, is not in seconds, or of another job"
            )
        found += [*_step(solutions, index, why, observed), *_evenness(observed.steps)]
        if observed.warm_up:
            found.append(Finding(NOTE, f"its first steps count too, since it shows no {WARM_UP + LEAST} of them: {_FIRST}"))
    if observed.peak_memory:
        found.append(_memory(solutions, index, observed.peak_memory, observed.memory_kind))
    found += _ran_all_the_same(solutions, index, observed)
    found += [*_checks(solutions.problem, observed), *_on_measured_links(solutions, index, observed)]
    return found


def _checks(problem: Problem, observed: Observation) -> Iterator[Finding]:
    """Yield that all-reduces are late both in a node and over all ranks, as checked ones are."""
    inside, everywhere = observed.busbw_in_node, observed.busbw
    if problem.checks_collectives or not (inside and everywhere):
        return
    if as_late_as_checks(problem.cost.network, problem.run.world_size, problem.cluster.gpus_per_domain, inside, everywhere):
        yield Finding(NOTE, "all-reduces are late in a node too, as with TORCH_DISTRIBUTED_DEBUG=DETAIL: see whether it is set")


def _counted_apart(printed: float | None, ours: float) -> Iterator[Finding]:
    """Yield that a log's own FLOP/s are of another model or number of GPUs. Trainers count attention's whole square, and
    recomputation or not, which is up to 1.7 times as much."""
    if printed and not 1 / _COUNTED_APART < printed / ours < _COUNTED_APART:
        yield Finding(
            NOTE,
            f"the log prints {printed / 1e12:,.0f} TFLOP/s per GPU, where this model and layout have {ours / 1e12:,.0f} at "
            "that step: it may be the log of another job",
        )


def as_measured(problem: Problem, observed: Observation) -> Problem:
    """Return the problem on links that reach the measured all-reduces; as it is where none was measured, or where torch checks
    them, which makes them late on any links.

    Raises InputError for rates that the device's links do not carry.
    """
    measured = {"all_reduce_busbw_gb_s": observed.busbw, "all_reduce_busbw_in_node_gb_s": observed.busbw_in_node}
    check_bus_bandwidths({key: rate / GB for key, rate in measured.items() if rate}, problem.cost.device)
    if problem.checks_collectives:
        return problem
    ranks, node = problem.run.world_size, problem.cluster.gpus_per_domain
    # an all-reduce over all ranks passed the leaf switches
    network = problem.cost.network.with_leaf_switches(None) if observed.busbw else problem.cost.network
    network = network.with_stated_busbw(ranks, node, observed.busbw, observed.busbw_in_node)
    return replace(problem, cost=replace(problem.cost, network=network))


def _on_measured_links(solutions: Solutions, index: int, observed: Observation) -> Iterator[Finding]:
    """Yield the step on the links as they were measured, and whether the measured step agrees."""
    if not (observed.busbw or observed.busbw_in_node):
        return
    problem = as_measured(solutions.problem, observed)
    if problem.checks_collectives:
        return
    layouts = Layouts.of([solutions.layouts.strategy(index, problem.run)])
    there = explain(estimate_layouts(problem, layouts), 0)
    text = f"on links as fast as measured a step is predicted to take {seconds(there.seconds)}"
    low, high = there.interval
    if len(observed.steps):
        taken = float(np.median(observed.steps))
        agrees = (
            "whose uncertainty covers the measured one"
            if low <= taken <= high
            else (
                "more than the measured one: the links were slower when they were measured than while the job ran"
                if taken < low
                else "less than the measured one: something else is slow too"
            )
        )
        text += f", {agrees}"
    yield Finding(NOTE, text)


def _step(solutions: Solutions, index: int, why: Explanation, observed: Observation) -> Iterator[Finding]:
    """Yield what a measured step says. Raises InputError where the GPUs would exceed their peak."""
    measured = float(np.median(observed.steps))
    utilization = float(solutions.mfu[index]) * why.seconds / measured
    if utilization > 1:
        raise InputError(
            f"a step of {seconds(measured)} would take {utilization:.0%} of the GPUs' peak FLOP/s: its batch, its GPUs or its "
            "seconds are not those of this layout"
        )
    low, high = why.interval
    text = (
        f"a step takes {seconds(measured)}; predicted {seconds(why.seconds)}, 90% interval {between(why.interval, why.seconds)}"
    )
    verdict = WORSE if measured > high else BETTER if measured < low else AS_PREDICTED
    yield Finding(verdict, text)
    yield from _counted_apart(observed.flops, float(solutions.flops_per_second[index]) * why.seconds / measured)
    if verdict == AS_PREDICTED:
        return
    width = high / why.seconds
    for setting in other_settings(solutions, index):
        if measured / width <= setting.seconds <= measured * width and _memory_allows(solutions, index, observed, setting):
            yield Finding(NOTE, f"the measured step would match if {setting.text}: {seconds(setting.seconds)}")
    if verdict == WORSE:
        yield from _parts(why, measured - why.seconds)


def _memory_allows(solutions: Solutions, index: int, observed: Observation, setting: OtherSetting) -> bool:
    """Whether the measured peak of memory allows for another setting, whose peak is no farther from it than that without."""
    peak, kind = observed.peak_memory, observed.memory_kind
    if not peak:
        return True
    without, there = float(getattr(solutions.memory, kind)[index]), setting.memory[kind]
    return abs(there / peak - 1) <= max(abs(without / peak - 1), _LEAST_MEMORY)


def _parts(why: Explanation, excess: float) -> Iterator[Finding]:
    """Yield which parts of the step alone could take ``excess`` seconds longer, the likeliest (the least factor) first."""
    factors = {part: 1 + excess / taken for part, taken in why.by_part().items() if taken > 0}
    for part, factor in sorted(factors.items(), key=lambda item: item[1]):
        if factor <= _MOST_FACTOR:
            yield Finding(NOTE, f"{PART_NAMES[part]} alone would explain it at {factor:.2g} times its predicted time")


def _evenness(steps: np.ndarray) -> Iterator[Finding]:
    if len(steps) < 20:
        return
    median, slow = float(np.median(steps)), float(np.quantile(steps, 0.95))
    first, second = (float(np.median(half)) for half in np.array_split(steps, 2))
    slower, mean = steps[steps > _UNEVEN * median], float(np.mean(steps)) / median - 1
    if slow > _UNEVEN * median and mean >= _STALLS:  # else a drift, below
        text = (
            f"{len(slower)} of {len(steps)} steps take {float(np.median(slower)) / median:.2g} times the median, and the mean "
            f"is {mean:.0%} above it: data, checkpoints, or a rank that stalls"
        )
        yield Finding(WORSE, text)
    if second > _DRIFT * first:
        text = f"the second half of the log is {second / first - 1:.0%} slower than the first: clocks, memory or a sick node"
        yield Finding(WORSE, text)


def _memory(solutions: Solutions, index: int, measured: float, kind: str) -> Finding:
    predicted = float(getattr(solutions.memory, kind)[index])
    whole = solutions.problem.cluster.memory_bytes
    if measured > _MORE_THAN_ALL * whole:
        raise InputError(f"a peak of {measured / GIB:,.1f} GiB was measured, but a GPU has {whole / GIB:.1f}: give it in GiB")
    off = measured / predicted - 1
    text = f"peak memory ({kind}) is {measured / GIB:.1f} GiB; predicted {predicted / GIB:.1f}"
    return Finding(AS_PREDICTED if abs(off) <= _LEAST_MEMORY else WORSE if off > 0 else BETTER, text)


def _ran_all_the_same(solutions: Solutions, index: int, observed: Observation) -> Iterator[Finding]:
    """Yield that a job whose steps were measured is predicted not to fit."""
    memory, limit = solutions.memory, solutions.problem.cluster.memory_bytes
    if len(observed.steps) and solutions.verdict(index) == OUT_OF_MEMORY:
        text = (
            f"it ran, but is predicted to need {memory.device[index] / GIB:.1f} GiB of a GPU's {limit / GIB:.1f} with what the "
            "allocator reserves: either it ran with other settings, or the prediction is too high"
        )
        yield Finding(NOTE, text)


def _networks(solutions: Solutions, observed: Observation) -> Iterator[Finding]:
    """Yield the stated bus bandwidths beside what this hardware does, on the nominal network."""
    problem = solutions.problem
    node, world = problem.cluster.gpus_per_domain, problem.run.world_size
    for busbw, ranks in ((observed.busbw_in_node, min(node, world)), (observed.busbw, world)):
        if busbw and ranks > 1:
            place = placement(ranks, 1, node)
            share = float(sent_share("all_reduce", ranks))
            sizes = np.array([PROBE_BYTES], dtype=float)
            yield _collective(
                solutions, Collectives("all_reduce", int(place.intra), int(place.inter), sizes, sizes * share / busbw)
            )


def _collective(solutions: Solutions, measured: Collectives) -> Finding:
    """Compare by rate where large messages were measured, else by time."""
    problem = solutions.problem
    large = measured.size >= LARGE if (measured.size >= LARGE).any() else measured.size <= max(SMALL, measured.size.min())
    size, taken = measured.size[large], measured.seconds[large]
    bandwidth = problem.cluster.network_bandwidth
    nominal = replace(problem.cost.network, bandwidth=bandwidth, stated=StatedLinks(), rank_skew=0.0)
    estimate = nominal.collective(measured.op, size, measured.intra, measured.inter)
    ratio = taken / estimate.seconds
    off, allowed = float(np.log(np.median(ratio))), max(Z90 * float(np.median(estimate.relative_std)), _LEAST_OFF)
    where = f"{measured.intra} GPUs of a node" if measured.inter == 1 else f"{measured.inter} nodes of {measured.intra} GPUs"
    name = measured.op.replace("_", "-").replace("all2all", "all-to-all")
    at = int(np.argmax(size))
    share = float(sent_share(measured.op, measured.intra * measured.inter))
    if size[at] >= LARGE:
        was, does = (share * size[at] / t / GB for t in (taken[at], estimate.seconds[at]))
        figures = f"reaches {was:.3g} GB/s of bus bandwidth; {does:.3g} are predicted"
    else:
        figures = f"takes {seconds(taken[at])}; {seconds(float(estimate.seconds[at]))} are predicted"
    verdict = WORSE if off > allowed else BETTER if off < -allowed else AS_PREDICTED
    times = f", {_times(math.exp(abs(off)))} {'slower' if off > 0 else 'faster'}" if verdict != AS_PREDICTED else ""
    return Finding(verdict, f"{name} over {where} {figures}{times}")


def _times(factor: float) -> str:
    return f"{factor:.2g} times" if factor < 10 else f"{factor:.0f} times"
