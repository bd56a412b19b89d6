"""What only a GPU does when it measures: compiled kernels and their backward passes, a queue that the host fills, errors.

No GPU is needed: kernels are compiled without code generation, and the clocks of host and device are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from profiler.measure import kernels, memory_bound, timing, try_kernel
from profiler.measure.arena import Arena
from profiler.measure.timing import Measurement, measure
from profiler.profile.item import Item
from profiler.profile.plan import KINDS

KERNEL = 20e-6  #: seconds of one call on the simulated device
CPU = torch.device("cpu")


@pytest.fixture
def compiled_without_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch.compile trace forward and backward passes as for a GPU, but generate no code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    memory_bound._compiled.cache_clear()
    yield
    memory_bound._compiled.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_runs_again_and_again(kind: str, compiled_without_code: None) -> None:
    # backward passes run through one graph many times; PyTorch gives the buffers of a compiled one away unless told not to
    arena = Arena(CPU, 2**16)
    for size in (2**16, 3 * 2**16):
        work = kernels.workload(Item.of("memory_bound", {"kind": kind, "bytes": size, "dtype": "fp32"}), arena)
        for i in range(3):
            work(i)


class Simulated:
    """Clocks of a host and of a device that works off a queue: each call keeps the host for ``launch`` seconds."""

    def __init__(self, launch: float) -> None:
        self.launch, self.host, self.free = launch, 0.0, 0.0

    def queue(self, seconds: float) -> float:
        """Queue work on the device; return when it is done."""
        self.free = max(self.free, self.host) + seconds
        return self.free

    def work(self, _: int) -> None:
        self.host += self.launch
        self.queue(KERNEL)

    def synchronize(self, *_: Any) -> None:
        self.host = max(self.host, self.free)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Simulated]:
    def make(launch: float) -> Simulated:
        clocks = Simulated(launch)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clocks.queue(0.0)

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", clocks.synchronize)
        monkeypatch.setattr(
            torch.cuda, "_sleep", lambda cycles: clocks.queue(cycles / timing._CYCLES_PER_SECOND), raising=False
        )
        monkeypatch.setattr(timing.time, "perf_counter", lambda: clocks.host)
        return clocks

    return make


@pytest.mark.parametrize("launch", [5e-6, 100e-6, 500e-6])
def test_a_slow_host_is_not_timed(launch: float, simulated: Callable[[float], Simulated]) -> None:
    # 50 calls of 20 us after a wait of 1 ms: a host that needs 100 us for each would be seen from the 13th call on
    found = measure(simulated(launch).work, torch.device("cuda"), 0.05)
    assert found.count >= 50 and found.times == pytest.approx([KERNEL] * found.count, rel=1e-6)


def test_the_first_calls_of_a_gpu_do_not_count(simulated: Callable[[float], Simulated]) -> None:
    clocks = simulated(10e-6)

    def compiles(i: int) -> None:  # longer than all the time there is, in the first call only
        clocks.host += 30.0 * (i == 0)
        clocks.work(i)

    found = measure(compiles, torch.device("cuda"), 0.05)
    assert found.count >= 50 and found.median == pytest.approx(KERNEL)


def test_a_rank_without_work_sees_no_time_pass(simulated: Callable[[float], Simulated]) -> None:
    simulated(0.0)
    idle = measure(lambda _: None, torch.device("cuda"), 0.05)
    assert idle.median == idle.spread == idle.uncertainty == 0


def outcome(error: Exception, device: torch.device = CPU) -> Measurement | str | None:
    def make() -> timing.Work:
        raise error

    return try_kernel.try_kernel(make, Arena(device, 2**16), 0.1)


def test_a_kernel_that_fails_on_a_working_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert outcome(RuntimeError("Failed to find C compiler\nPlease set CC"), gpu) == "Failed to find C compiler"
    assert outcome(AssertionError(), gpu) == "AssertionError"
    assert len(str(outcome(TypeError("x" * 10_000), gpu))) <= try_kernel._MOST_SAID


def test_an_error_that_a_gpu_does_not_survive_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    with pytest.raises(RuntimeError, match="launch failed"):
        outcome(RuntimeError("CUDA error: launch failed"), torch.device("cuda"))


def test_on_a_cpu_only_a_missing_kernel_is_no_error() -> None:
    assert outcome(NotImplementedError("no such kernel")) == "no such kernel"
    assert outcome(RuntimeError("No available kernel. Aborting execution.")) == "No available kernel. Aborting execution."
    with pytest.raises(RuntimeError, match="shapes differ"):
        outcome(RuntimeError("shapes differ"))
