"""Time one piece of work until its median is known, by device events on CUDA and by the wall clock on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

ENOUGH_REPEATS = 5  #: the fewest times that say anything about a spread
MOST_REPEATS = 400
_TICK = 1e-9  # seconds: a rank that has nothing to do may see no time pass
CONFIDENT = 0.02  #: relative half width of the median's 95% interval at which timing stops
_BLOCK_SECONDS = 0.02  # duration of a block of calls between two checks of the uncertainty
_LEAST_LEAD, _MOST_LEAD = 1e-3, 50e-3  # seconds that a GPU waits while the host queues a block, so that launches are not timed
_LEAD_SHARE = 1.5  # of the time that the host took for as many calls before
_CYCLES_PER_SECOND = 2e9  # of a GPU's clock at its fastest: at a slower one it waits longer

Work = Callable[[int], None]  #: the i-th call works on the i-th set of operands (modulo their number)


@dataclass(frozen=True)
class Measurement:
    """Times of one piece of work in seconds, in the order taken."""

    times: tuple[float, ...]

    @cached_property
    def median(self) -> float:
        return float(np.median(self.times))

    @property
    def spread(self) -> float:
        """Half of the range over the median."""
        return (max(self.times) - min(self.times)) / 2 / max(self.median, _TICK)

    @property
    def count(self) -> int:
        return len(self.times)

    @property
    def uncertainty(self) -> float:
        """Half width of the median's 95% confidence interval over the median.

        The interval lies between order statistics n/2 -+ 0.98 sqrt(n) (normal approximation of the binomial; Conover, Practical
        Nonparametric Statistics, section 3.2). Infinite for fewer than five times.
        """
        n = self.count
        if n < ENOUGH_REPEATS:
            return math.inf
        ordered = np.sort(self.times)
        low = max(math.floor(n / 2 - 0.98 * math.sqrt(n)), 0)
        high = min(math.ceil(n / 2 + 0.98 * math.sqrt(n)), n - 1)
        return float(ordered[high] - ordered[low]) / 2 / max(self.median, _TICK)

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(self.times + other.times)

    def __mul__(self, factor: float) -> Measurement:
        return Measurement(tuple(t * factor for t in self.times))


def time_block(work: Work, first: int, calls: int, device: torch.device, launch: float = 0.0) -> tuple[Measurement, float]:
    """Time ``calls`` calls one by one, starting with operand set ``first``.

    launch: seconds that the host takes to launch a call, as far as known; what it took now is returned too (0 on a CPU).
    """
    if device.type == "cuda":
        return _time_on_device(work, first, calls, launch)
    times = []
    for i in range(first, first + calls):
        start = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - start)
    return Measurement(tuple(times)), 0.0


def _time_on_device(work: Work, first: int, calls: int, launch: float) -> tuple[Measurement, float]:
    """Time every call by events, queued behind a sleep as long as the host needs, so that the device never waits for it."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    hold_device(calls * launch)
    start = time.perf_counter()
    for i in range(calls):
        events[2 * i].record()
        work(first + i)
        events[2 * i + 1].record()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    pairs = zip(events[::2], events[1::2], strict=True)
    return Measurement(tuple(a.elapsed_time(b) * 1e-3 for a, b in pairs)), queued / calls


def hold_device(queueing: float) -> None:
    """Let the current stream wait while the host queues work, for which it takes about ``queueing`` seconds."""
    seconds = min(max(_LEAD_SHARE * queueing, _LEAST_LEAD), _MOST_LEAD)
    torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


def measure(work: Work, device: torch.device, seconds: float, agree: Callable[[float], float] = float) -> Measurement:
    """Time ``work`` until its median is known to CONFIDENT or about ``seconds`` have passed.

    agree: returns the largest value over all ranks that time the same work together. Every decision uses it, so that all ranks
    make the same number of calls. The returned times are this rank's own. The first two calls are not counted: they choose
    algorithms, compile, connect ranks and fault pages in, which on a GPU may take longer than all others.
    """
    each, launch = _slowest(time_block(work, 0, 1, device), agree)
    if each < seconds or device.type == "cuda":
        each, launch = _slowest(time_block(work, 1, 1, device), agree)
    calls = int(np.clip(_BLOCK_SECONDS / each, 1, 50))
    least = 3 if each < seconds else 2  # two for a call that takes longer than its share of the budget
    most = int(np.clip(seconds / each, least, MOST_REPEATS))
    start, found = time.perf_counter(), Measurement(())
    while found.count < most:
        more, took = time_block(work, 2 + found.count, min(calls, most - found.count), device, launch)
        found, launch = found + more, agree(took)
        late = time.perf_counter() - start > seconds
        if agree(1.0 if found.uncertainty > CONFIDENT and not (late and found.count >= least) else 0.0) == 0.0:
            break
    return found


def _slowest(timed: tuple[Measurement, float], agree: Callable[[float], float]) -> tuple[float, float]:
    """Return the seconds of a call and of its launch on the slowest rank."""
    return max(agree(timed[0].median), 1e-7), agree(timed[1])
