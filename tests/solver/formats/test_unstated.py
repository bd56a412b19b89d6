"""What a measured run that does not state its recomputation, ZeRO stage or chunks of stages may have had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import DEVICE, toy_cost

from solver.formats.cases.reading import Case, case_of
from solver.report.validate import Prediction, predict_cases

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}
RUN = {
    "world_size": 8,
    "seq_len": 2048,
    "tp": 2,
    "pp": 2,
    "cp": 1,
    "dp": 2,
    "zero": 1,
    "vpp": 1,
    "micro_batch_size": 4,
    "num_micro_batches": 4,
    "framework": "megatron-core",
    "recompute": "none",
}


def read(*unstated: str, **stated: Any) -> Case:
    run = {key: value for key, value in {**RUN, **stated}.items() if key not in unstated}
    return case_of({"id": "x-1", "hardware": "toy", "model": MODEL, "run": run, "measured": {"step_s": 1.0}})


def choices(case: Case, key: str) -> list[Any]:
    return [getattr(layout, key) for layout in case.alternatives]


def predicted(case: Case, memory_gib: float) -> Prediction:
    device = replace(DEVICE, memory_bytes=memory_gib * 2.0**30)
    return predict_cases([case], lambda *_: toy_cost(device=device))[0]


def test_a_run_that_states_them_has_no_alternatives() -> None:
    assert len(read().alternatives) <= 1


def test_what_is_not_stated_is_open() -> None:
    # fused attention: selective drops nothing; of the four layers of a stage one, two, three or all
    found = read("recompute").alternatives
    assert [(s.recompute, s.recompute_layers) for s in found] == [("none", -1), ("full", -1), *(("full", n) for n in (1, 2, 3))]
    assert choices(read("recompute", attention="unfused"), "recompute") == ["none", "selective", *["full"] * 4]
    assert choices(read("vpp"), "vpp") == [1, 2, 4]  # stages of four layers
    assert [layout.schedule for layout in read("vpp").alternatives] == ["1f1b", "interleaved", "interleaved"]
    assert choices(read("vpp", num_micro_batches=3), "vpp") == [1]  # which interleaving cannot run
    assert choices(read("zero"), "zero") == [0, 1] and choices(read("zero", tp=4, dp=1), "zero") == [0]
    assert len(read("recompute", "vpp", "zero").alternatives) == 5 * 3 * 2


def test_the_default_stands_where_it_fits() -> None:
    found = predicted(read("recompute"), 80.0)
    assert found.solutions is not None and found.solutions.layouts.recompute[found.index] == 0
    assert [other.setting for other in found.alternatives][:2] == ["recompute full", "recompute full, recompute_layers 1"]


def test_recomputation_where_the_default_does_not_fit() -> None:
    case = read("recompute")
    devices = [float(estimate.memory.device[0]) / 2**30 for estimate in [predicted(case, 80.0).solutions] if estimate]
    found = predicted(case, devices[0] * 0.9)
    assert found.solutions is not None and found.solutions.layouts.recompute[found.index] == 2
    assert found.fits and 0 < found.solutions.layouts.recompute_layers[found.index] < 4  # no more layers than must be


def test_another_zero_stage_comes_before_recomputation() -> None:
    case = read("recompute", "zero", dp=4, pp=1)
    solutions = predicted(case, 80.0).solutions
    assert solutions is not None
    device = {
        (int(r), int(z)): float(b)
        for r, z, b in zip(solutions.layouts.recompute, solutions.layouts.zero, solutions.memory.device, strict=True)
    }
    assert device[0, 1] < device[0, 0]
    found = predicted(case, (device[0, 1] + 1) / 2**30)
    assert found.solutions is not None
    assert (found.solutions.layouts.recompute[found.index], found.solutions.layouts.zero[found.index]) == (0, 1)


def test_what_may_have_been_widens_the_interval() -> None:
    # a choice takes d = log(slower / taken) longer: its weight is w = exp(-d / 0.1), the variance sum(w d^2) / (1 + sum(w))
    stated, unstated = predicted(read(), 80.0), predicted(read("recompute"), 80.0)
    assert stated.explanation is not None and unstated.explanation is not None
    assert unstated.seconds == stated.seconds
    d = np.log([other.seconds / unstated.seconds for other in unstated.alternatives])
    w = np.exp(-d / 0.1)
    added = unstated.explanation.system_std**2 - stated.explanation.system_std**2
    assert added == pytest.approx((w * d**2).sum() / (1 + w.sum()), rel=1e-9) and added > 0


def test_a_slower_setting_that_cannot_have_fitted_adds_no_uncertainty() -> None:
    full = predicted(read(recompute="full"), 80.0)
    assert full.solutions is not None and full.explanation is not None
    found = predicted(read("recompute"), float(full.solutions.memory.device[0]) * 1.001 / 2**30)
    assert not found.alternatives[0].fits and found.explanation is not None
    assert found.explanation.system_std == pytest.approx(full.explanation.system_std)


def test_optimizer_states_of_a_run_that_does_not_say_so_are_shared_by_all_ranks_that_hold_copies() -> None:
    # 16 ranks of tp 2 and cp 2: 4 data-parallel ones by the 2 that share a sequence
    model = {
        "name": "m",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    }
    run = {"framework": "megatron-core", "world_size": 16, "tp": 2, "cp": 2, "pp": 1, "zero": 1, "seq_len": 4096}
    found = case_of({"id": "x-1", "hardware": "h100_sxm", "model": model, "measured": {}, "run": run})
    assert found.strategy is not None and (found.strategy.dp, found.strategy.zero_shard_size) == (4, 8)
