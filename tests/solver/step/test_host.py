"""Host time per launch: a framework's own, the machine's as measured, or the assumed one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy import DEVICE, TINY, layer_keys, make_problem, some_layouts, toy_cost, toy_layout

from predictor.cost_model import CostModel
from predictor.derived import derived_cost_model
from predictor.fitted import _plain_layer_launch
from predictor.host_costs import HostCosts
from profiler.profile.profile import Table
from profiler.profile.profiles import find_profile
from solver.layers.decoder import layer_program
from solver.spec.cluster import cluster_of
from solver.spec.framework import ASSUMED_LAUNCH
from solver.spec.frameworks import framework_of
from solver.step.host import PLAIN_LAUNCHES, launch_seconds
from solver.step.op_estimates import estimate_ops, layer_times
from solver.step.solutions import estimate_layouts


def measured(seconds: float) -> CostModel:
    return replace(toy_cost(), host=HostCosts(plain_layer_launch=seconds))


def test_the_ops_of_the_timed_layer_are_counted() -> None:
    program = layer_program(layer_keys("mtp"), TINY, toy_layout(1, 16, framework="pytorch-ddp"), cluster_of(DEVICE))
    estimates = estimate_ops(program.ops, 1, toy_cost())
    assert layer_times(estimates, estimates.exposed(False), host_op_seconds=1.0).host.sum() == PLAIN_LAUNCHES


def test_what_the_machine_takes_replaces_what_is_assumed_of_plain_layers_only() -> None:
    names = ("pytorch-ddp", "fsdp", "torchtitan", "megatron-core", "megatron-lm", "nanotron", "nemo-automodel")
    seconds = {name: launch_seconds(framework_of(name), measured(PLAIN_LAUNCHES * 9e-6)) for name in names}
    assert [seconds[name] for name in ("pytorch-ddp", "fsdp", "torchtitan")] == pytest.approx([9e-6] * 3)
    assert seconds["megatron-core"] == seconds["nemo-automodel"] == ASSUMED_LAUNCH
    assert seconds["megatron-lm"] == 107e-6 and seconds["nanotron"] == 115e-6
    assert launch_seconds(framework_of("fsdp"), toy_cost()) == ASSUMED_LAUNCH


def test_a_slower_host_never_makes_a_step_faster_and_bounds_small_ones() -> None:
    steps = []
    for seconds in (1e-9, 1e-4, 1e-2):
        problem = make_problem(TINY, 4, measured(seconds), seq_len=32, framework="fsdp")
        steps.append(estimate_layouts(problem, some_layouts(problem, 32, 20, seed=1)).times.seconds)
    assert (np.diff(steps, axis=0) >= 0).all()
    assert (steps[2] >= TINY.num_hidden_layers * 29 / PLAIN_LAUNCHES * 1e-2).all()  # FSDP's q, k and v are one linear


def test_both_passes_are_needed_and_another_machine_has_another_host(h100_model: CostModel) -> None:
    both = Table.from_columns("host", {"pass": ["forward", "backward", "forward"], "seconds": [2e-4, 5e-4, 4e-4]})
    assert _plain_layer_launch(both) == pytest.approx(8e-4)
    assert _plain_layer_launch(both.where(both["pass"] == "forward")) == 0.0
    h20 = find_profile("h20")[0]
    assert h20.derivation is not None
    own = replace(h100_model, host=HostCosts(plain_layer_launch=8e-4))
    assert derived_cost_model(own, h20.device, h20.derivation, own).host.plain_layer_launch == 0.0
