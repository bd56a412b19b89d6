"""Collectives of the backward pass where a schedule computes weight gradients apart, and where all-reduces are waited for."""

from __future__ import annotations

import numpy as np
import pytest
from toy import DEVICE, TINY, estimated, layer_keys, make_problem, toy_cost, toy_layout

from solver.layers.decoder import layer_program
from solver.spec.cluster import cluster_of

BACKWARD = {"mtp": {"all_reduce"}, "msp": {"reduce_scatter", "regather"}}


def exposed(framework: str, mode: str, split: int) -> dict[str, float]:
    """Return the share of each collective beside a GEMM of the backward pass that stays exposed, by what it does."""
    found = layer_program(
        layer_keys(mode, tp=2, split=split), TINY, toy_layout(2, 512, framework=framework), cluster_of(DEVICE)
    )
    return {
        op.name.rpartition(".")[2]: float(np.broadcast_to(op.exposed_share, 1)[0])
        for op in found.ops
        if op.stream == "tp" and op.phase != "forward" and op.overlaps_with and np.any(op.count)
    }


@pytest.mark.parametrize("mode", ["mtp", "msp"])
def test_a_split_backward_pass_waits_for_its_collectives(mode: str) -> None:
    beside, split = (exposed("megatron-lm-zero-bubble", mode, which) for which in (0, 1))
    assert beside == dict.fromkeys(BACKWARD[mode], 0.0) and split == dict.fromkeys(BACKWARD[mode], 1.0)


def test_nanotron_waits_for_all_reduces_only() -> None:
    assert exposed("nanotron", "mtp", 0) == {"all_reduce": 1.0}
    assert exposed("nanotron", "msp", 0) == {"reduce_scatter": 0.0, "regather": 0.0}


def test_steps_end_together_but_where_what_was_done_is_corrected_later() -> None:
    def seconds(precision: str) -> float:
        one = make_problem(
            TINY.replace(num_hidden_layers=8), 4, toy_cost(), 512, framework="megatron-lm-zero-bubble", precision=precision
        )
        layout = {"pp": 4, "dp": 1, "schedule": "zb-2p", "num_micro_batches": 12, "zero": 0}
        return float(estimated(one, [one.layout(**layout)]).times.seconds[0])

    assert seconds("bf16") > seconds("fp16")
