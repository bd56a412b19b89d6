"""Muon: the products of its iterations, its bytes and its messages by hand; what it does not run with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import FLOP, TINY, all_layouts, make_problem, part, toy_cost

from profiler.errors import InputError
from solver.report.explain import explain
from solver.search.search import search
from solver.spec.feasibility import check_layout
from solver.step.layouts import Layouts
from solver.step.memory import MEMORY_PARTS
from solver.step.muon import muon_ops, query_key_value
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

#: Of one layer of TINY: (rows, columns) of q, k and v together, attention's output, gate and up together, down.
MATRICES = ((128, 64), (64, 64), (256, 64), (64, 128))


def products(rows: int, columns: int) -> float:
    """FLOPs of five iterations: X X', its square, and that times X."""
    small, large = min(rows, columns), max(rows, columns)
    return 5 * 2 * (small * small * large + small**3 + small * small * large)


#: Queries, keys and values (64, 32 and 32 rows) are orthogonalised apart.
APART = ((64, 64), (32, 64), (32, 64), *MATRICES[1:])
ONE_LAYER = sum(products(*sizes) for sizes in APART)


def problem(world: int = 1, **constants: Any) -> Problem:
    alone = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    values = {"framework": "megatron-core", "optimizer": "muon", "cuda_graphs": True, **alone, **constants}
    return make_problem(TINY, world, toy_cost(), 512, **values)


def estimated(world: int = 1, layout: dict[str, Any] | None = None, **constants: Any) -> Solutions:
    one = problem(world, **constants)
    return estimate_layouts(one, Layouts.of([one.layout(**(layout or {}))]))


def held(found: Solutions) -> float:
    return float(found.memory.parts[MEMORY_PARTS.index("optimizer"), 0])


def test_the_products_of_two_layers_by_hand() -> None:
    muon, adam = estimated(), estimated(optimizer="adam")
    matrices = 2 * sum(rows * columns for rows, columns in MATRICES)
    moved = float(part(muon, "optimizer")[0]) - float(part(adam, "optimizer")[0])
    adam_bytes = adam.problem.framework.data_parallel.optimizer_bytes_per_parameter
    assert moved == pytest.approx(2 * ONE_LAYER * FLOP + matrices * (78 - adam_bytes) * 1e-12, rel=1e-9)
    assert held(adam) - held(muon) == pytest.approx(4 * matrices)  # one momentum instead of two moments


def test_tensor_ranks_work_on_their_part() -> None:
    whole, halves = estimated(2), estimated(2, {"tp": 2, "dp": 1})
    parts = ((64, 64), (64, 32), (128, 64), (64, 64))
    apart = ((32, 64), (16, 64), (16, 64), *parts[1:])
    iterations = 2 * sum(products(*sizes) for sizes in apart) * FLOP
    matrices = sum(rows * columns for rows, columns in parts) * 2
    other = estimated(2, {"tp": 2, "dp": 1}, optimizer="adam")
    adam_bytes = other.problem.framework.data_parallel.optimizer_bytes_per_parameter
    moved = float(part(halves, "optimizer")[0] - part(other, "optimizer")[0])
    assert moved == pytest.approx(iterations + matrices * (78 - adam_bytes) * 1e-12, rel=1e-9)
    assert part(halves, "optimizer")[0] < part(whole, "optimizer")[0]


@pytest.mark.parametrize(("ranks", "fullest"), [(4, ((64, 64), (256, 64))), (8, ((256, 64),))])
def test_matrices_are_dealt_to_ranks(ranks: int, fullest: tuple[tuple[int, int], ...]) -> None:
    # 8 matrices (two layers) by size: 2 of 4,096 elements, 4 of 8,192, 2 of 16,384. Dealt to and fro, the first of 4 ranks gets
    # one of the first and one of the last; of 8 ranks each gets one
    alone, assigned = (estimated(ranks, {"zero": zero, "zero_shard_size": ranks if zero else 1}) for zero in (0, 1))
    both = [estimated(ranks, {"zero": z, "zero_shard_size": ranks if z else 1}, optimizer="adam") for z in (0, 1)]
    adam_bytes = both[0].problem.framework.data_parallel.optimizer_bytes_per_parameter
    matrices = 2 * sum(rows * columns for rows, columns in MATRICES)
    dealt = sum(products(*sizes) for sizes in fullest)
    for muon, adam, iterations, share in ((alone, both[0], 2 * ONE_LAYER, 1), (assigned, both[1], dealt, 1 / ranks)):
        moved = float(part(muon, "optimizer")[0] - part(adam, "optimizer")[0])
        assert moved == pytest.approx(iterations * FLOP + matrices * share * (78 - adam_bytes) * 1e-12, rel=1e-6)
    # the first of 4 ranks also holds no more than the others: 4,096 + 16,384 as 2 * 8,192 and more
    elements, even = (4096 + 16384, 2 * 16384 / 2), matrices / ranks
    most = elements[0] if ranks == 4 else elements[1]
    assert held(assigned) - held(both[1]) == pytest.approx(8 * most - 12 * even)
    # gradients are all-reduced whole, and nothing hides the gather of what was updated
    assert part(assigned, "gradient_sync")[0] == pytest.approx(part(both[0], "gradient_sync")[0], rel=1e-9)
    after = estimated(ranks, {"zero": 1, "zero_shard_size": ranks}, optimizer="adam", overlap_param_gather=False)
    assert part(assigned, "parameter_gather")[0] == pytest.approx(part(after, "parameter_gather")[0], rel=1e-9)


def test_more_ranks_than_matrices_leave_the_largest_one() -> None:
    sixteen, adam = (estimated(16, {"zero": 1, "zero_shard_size": 16}, optimizer=name) for name in ("muon", "adam"))
    moved = float(part(sixteen, "optimizer")[0] - part(adam, "optimizer")[0])
    assert moved > products(256, 64) * FLOP  # and its bytes
    largest, even = 256 * 64, 2 * sum(rows * columns for rows, columns in MATRICES) / 16
    assert held(sixteen) - held(adam) == pytest.approx(8 * largest - 12 * even)


@pytest.mark.parametrize("zero", [0, 1])
def test_the_step_is_explained(zero: int) -> None:
    found = estimated(4, {"zero": zero, "zero_shard_size": 4 if zero else 1})
    explained = explain(found, 0)
    assert sum(line.seconds for line in explained.lines) == pytest.approx(float(found.times.seconds[0]), rel=1e-9)


def test_a_search_offers_what_runs() -> None:
    one = problem(8, cuda_graphs=False)
    layouts = all_layouts(one, 16)
    assert set(layouts.zero.tolist()) == {0, 1}
    found = estimate_layouts(one, layouts)
    fits = found.memory.device <= one.cluster.memory_bytes
    assert search(one, 16).best.times.seconds[0] == pytest.approx(np.min(found.times.seconds[fits]), rel=1e-12)


@pytest.mark.parametrize(
    ("constants", "reason"),
    [
        ({"precision": "fp16"}, "does not run in fp16"),
        ({"overlap_grad_reduce": True}, "does not reduce Muon's gradients beside compute: turn overlap_grad_reduce off"),
        ({"optimizer_states": "bf16"}, "keeps its momentum in fp32"),
        ({"framework": "fsdp", "zero": 3, "zero_shard_size": 8}, "does not offer optimizer muon"),
        ({"zero": 1, "zero_shard_size": 4}, "assigns matrices to all 8 replicas, not to 4"),
        ({"framework": "generic", "tp_mode": "isp", "wp": 8, "zero": 0}, "weights that tp_mode isp shards"),
        ({"zero": 2, "zero_shard_size": 8, "framework": "generic"}, "ZeRO-0 to 1, not ZeRO-2"),
    ],
)
def test_refused(constants: dict[str, Any], reason: str) -> None:
    one = problem(8)
    with pytest.raises(InputError, match=reason):
        check_layout(TINY, one.cluster, one.layout(**constants))


def test_the_fullest_stage_decides() -> None:
    # two stages of one layer each; the step is that of one of them
    found = estimated(2, {"pp": 2, "dp": 1})
    adam = estimated(2, {"pp": 2, "dp": 1}, optimizer="adam")
    matrices = sum(rows * columns for rows, columns in MATRICES)
    adam_bytes = adam.problem.framework.data_parallel.optimizer_bytes_per_parameter
    moved = float(part(found, "optimizer")[0] - part(adam, "optimizer")[0])
    assert moved == pytest.approx(ONE_LAYER * FLOP + matrices * (78 - adam_bytes) * 1e-12, rel=1e-9)


@pytest.mark.parametrize("gate", [False, True])
def test_queries_keys_and_values_are_orthogonalised_apart(gate: bool) -> None:
    """Llama-3 70B: 64 heads of queries (and as many of their gate), 8 of keys, 8 of values, of 128 rows each, with tp 4."""
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    rows = np.array([(64 * (1 + gate) + 16) * 128 // 4])
    (queries, one), (others, two) = query_key_value(TINY.replace(**heads, attention_gate=gate), rows)
    assert (int(queries[0]), one, int(others[0]), two) == (64 * (1 + gate) * 128 // 4, 1, 8 * 128 // 4, 2)


def test_the_layer_of_multi_token_prediction_has_the_same_matrices() -> None:
    # beside the two layers a third, and the projection of both halves (64 of 2 x 64)
    def flops(predicted: int) -> float:
        model = TINY.replace(num_nextn_predict_layers=predicted)
        one = make_problem(
            model,
            1,
            toy_cost(),
            512,
            framework="megatron-core",
            optimizer="muon",
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        )
        found = estimate_layouts(one, Layouts.of([one.layout()]))
        ops = muon_ops(found.priced)
        return sum(
            float((2.0 * op.dims["m"] * op.dims["n"] * op.dims["k"] * op.count)[0])
            for op in ops
            if op.name == "optimizer.whole"
        )

    assert flops(0) == pytest.approx(2 * ONE_LAYER) and flops(1) - flops(0) == pytest.approx(ONE_LAYER + products(64, 128))
