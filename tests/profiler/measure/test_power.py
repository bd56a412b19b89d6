"""GEMMs under sustained load: what is counted of the last seconds, on a clock that is turned by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.measure import power


@pytest.mark.parametrize(("seconds", "counted"), [(1e-3, 1e-3), (0.0262, 0.0262), (0.5, 0.5)])
def test_blocks_of_a_gpu_of_any_speed_are_counted(seconds: float, counted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # blocks of 100 calls of 26.2 ms (42 TFLOP/s): the second ends after 5.2 s, and none begins in the last 1.5 s of 5
    clock = SimpleNamespace(now=100.0)

    def block(*_: Any) -> tuple[Any, float]:
        clock.now += 100 * seconds
        return SimpleNamespace(times=(seconds,) * 100, count=100), 0.0

    monkeypatch.setattr(power, "time_block", block)
    monkeypatch.setattr(power.time, "monotonic", lambda: clock.now)
    session: Any = SimpleNamespace(beat=lambda: None)
    assert power._sustained(lambda _: None, torch.device("cpu"), session) == pytest.approx(counted)
