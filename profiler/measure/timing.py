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
CONFIDENT = 0.02  #: relative half width of the median's 95% interval at which timing stops
_BLOCK_SECONDS = 0.02  # duration of a block of calls between two checks of the uncertainty
_QUEUE_LEAD_CYCLES = 2_000_000  # about 1 ms: the GPU waits while the host queues a block, so launches are not timed

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
        return (max(self.times) - min(self.times)) / 2 / self.median

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
        return float(ordered[high] - ordered[low]) / 2 / self.median

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(self.times + other.times)

    def __mul__(self, factor: float) -> Measurement:
        return Measurement(tuple(t * factor for t in self.times))


def time_block(work: Work, first: int, calls: int, device: torch.device) -> Measurement:
    """Time ``calls`` calls one by one, starting with operand set ``first``."""
    if device.type == "cuda":
        return _time_on_device(work, first, calls)
    times = []
    for i in range(first, first + calls):
        start = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - start)
    return Measurement(tuple(times))


def _time_on_device(work: Work, first: int, calls: int) -> Measurement:
    """Time every call by events, queued behind a short sleep so that the device never waits for the host."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(_QUEUE_LEAD_CYCLES)  # type: ignore[no-untyped-call]
    for i in range(calls):
        events[2 * i].record()
        work(first + i)
        events[2 * i + 1].record()
    torch.cuda.synchronize()
    pairs = zip(events[::2], events[1::2], strict=True)
    return Measurement(tuple(a.elapsed_time(b) * 1e-3 for a, b in pairs))


def measure(work: Work, device: torch.device, seconds: float, agree: Callable[[float], float] = float) -> Measurement:
    """Time ``work`` until its median is known to CONFIDENT or about ``seconds`` have passed.

    agree: returns the largest value over all ranks that time the same work together. Every decision uses it, so that all ranks
    make the same number of calls. The returned times are this rank's own. The first two calls are not counted: they choose
    algorithms, compile and fault pages in.
    """
    each = agree(time_block(work, 0, 1, device).median)
    if each < seconds:
        each = max(agree(time_block(work, 1, 1, device).median), 1e-7)
    calls = int(np.clip(_BLOCK_SECONDS / each, 1, 50))
    least = 3 if each < seconds else 2  # two for a call that takes longer than its share of the budget
    most = int(np.clip(seconds / each, least, MOST_REPEATS))
    start, found = time.perf_counter(), Measurement(())
    while found.count < most:
        found += time_block(work, 2 + found.count, min(calls, most - found.count), device)
        late = time.perf_counter() - start > seconds
        if agree(1.0 if found.uncertainty > CONFIDENT and not (late and found.count >= least) else 0.0) == 0.0:
            break
    return found
