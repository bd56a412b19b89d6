"""Over how many ranks ZeRO shards each group of parameters: by hand."""

from __future__ import annotations

import numpy as np
import pytest
from toy import TINY, estimated, make_problem, toy_cost

from predictor.cost_model import CostModel
from solver.layers.program import EXPERTS, LINEARS, OTHERS
from solver.step.layouts import Layouts
from solver.step.parameter_groups import shard_ranks

MIXTURE = TINY.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)


@pytest.mark.parametrize(
    ("framework", "copies"),
    [
        ("megatron-core", {16: [4, 16], 8: [2, 8], 4: [1, 4]}),
        ("nemo-automodel", {16: [4, 16], 8: [4, 8], 4: [4, 4], 2: [2, 2]}),
    ],
)
def test_hybrid_sharding_cuts_the_experts_copies_too(framework: str, copies: dict[int, list[int]]) -> None:
    # 16 replicas in two instances of the optimizer: the 4 copies of an expert (ep 4) are two and two, in four one each
    problem = make_problem(MIXTURE, 16, toy_cost(), framework=framework)
    layouts = [problem.layout(ep=4, zero=1, zero_shard_size=size) for size in copies]
    ranks = shard_ranks(problem, Layouts.of(layouts).splits)
    assert np.stack([ranks[EXPERTS], ranks[OTHERS]], axis=1).tolist() == list(copies.values())
    assert ranks[LINEARS].tolist() == ranks[OTHERS].tolist()


def test_states_of_experts_that_no_rank_shares_by_hand(h100_model: CostModel) -> None:
    # of 16 replicas 4 hold the same experts; with four instances of the optimizer each of them holds its states whole
    problem = make_problem(MIXTURE, 16, h100_model, framework="megatron-core")
    found = estimated(problem, [problem.layout(ep=4, zero=1, zero_shard_size=size) for size in (16, 4)])
    one, four = found.memory.parts[2]
    experts = 12 * 2 * 2 * 3 * 64 * 32  # two layers, two experts on a rank, three matrices
    assert four == pytest.approx(experts + 4 * (one - experts / 4), rel=1e-9)
