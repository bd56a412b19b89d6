"""Helpers of the attention timing tests: this machine's CPU as a profile's device, and layouts of the tiny model on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy

from profiler.measure import hardware, try_kernel
from profiler.measure.timing import Measurement
from profiler.profile.profile import Device, Profile, Table
from profiler.units import GIB
from solver.search.space import enumerate_splits
from solver.step.problem import Problem
from solver.step.timed_attention import attention_calls, with_timed_attention

BATCH = 4


def cpu_device(name: str | None = None) -> Device:
    """Return this machine's CPU, one thread per rank, as a device; it is called ``name`` if that is given."""
    here = re.sub(r"\(\d+ of", "(1 of", hardware._cpu_name())
    return Device(name or here, {"fp32": 5e10, "bf16": 5e10}, 4 * GIB, 1e10, 1, 2, 5e9, 5e9, "shared memory and sockets")


def cpu_profile(device: Device) -> Profile:
    columns = {
        "batch": [1, 1],
        "seq_q": [48, 96],
        "seq_kv": [48, 96],
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "v_head_dim": 16,
        "causal": 1,
        "pass": "forward",
        "kernel": "torch_flash",
        "dtype": "fp32",
        "seconds": [1e-4, 2e-4],
        "spread": 0.1,
        "repeats": 5,
        "source": "measured, torch 0.0",
    }
    table = Table.from_columns("flash_attn", columns)
    return Profile("this machine", device, {"flash_attn": table}, {"sustained_scale": 1.0}, "made for a test")


def problem_on(device: Device, **changes: Any) -> Problem:
    """Return the problem of the tiny model on eight devices, with ring attention where cp > 1."""
    return toy.make_problem(toy.TINY, 8, toy.toy_cost(device=device, **changes), seq_len=256, cp_comm="ring")


def counted_timings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the timer; return a list that gets the device type of each timed kernel. A timing makes two real calls."""
    calls: list[str] = []

    def measure(work: Callable[[int], None], device: torch.device, seconds: float) -> Measurement:
        work(0)
        work(1)
        calls.append(device.type)
        return Measurement((1e-3 * len(calls), 1.2e-3 * len(calls)))

    monkeypatch.setattr(try_kernel, "measure", measure)
    return calls


def prepare(problem: Problem, profile: Profile, folder: Path, **options: Any) -> tuple[Problem, str]:
    return with_timed_attention(problem, profile, lambda: enumerate_splits(problem, BATCH).splits, folder, **options)


def calls_of(problem: Problem) -> dict[str, np.ndarray]:
    return attention_calls(problem, enumerate_splits(problem, BATCH).splits).columns


def counts(report: str) -> tuple[int, int, int]:
    """Read the reported sentence: (shapes with a measured time, those timed in this run, shapes estimated by the fit)."""
    found = re.match(r"attention: (\d+) shapes? timed on this machine \((\d+) of them now\), (\d+) by the fit", report)
    assert found, report
    return int(found[1]), int(found[2]), int(found[3])
