"""A SIMAI_workload on a measured profile: each term by hand, and both columns add up to their step."""

from __future__ import annotations

import numpy as np
import pytest
from simai_files import MACHINE, small, text_of

from predictor.cost_model import CostModel
from solver.api import configured_strategy, estimate, load_problem
from solver.formats.config_file import CONFIGS, load_run_config
from solver.simai.analytical import Overlaps, analytical_step
from solver.simai.collective_time import Sizes
from solver.simai.export_text import text_workload
from solver.simai.price import Prices, Term, chunks_of, collective_prices, prices
from solver.simai.pricing import true_parameters
from solver.simai.stage_work import stage_work
from solver.simai.step_work import step_work
from solver.simai.workload_text import Collective, Group, parse_workload_text
from solver.spec.cluster import placement

GIB = 1 << 30
NODE = 8


def term(found: Prices, name: str) -> Term:
    (only,) = [one for one in found.terms if one.name == name]
    return only


def us(cost: CostModel, op: str, size: int, ranks: int, stride: int) -> float:
    place = placement(np.array([ranks]), np.array([stride]), NODE)
    return float(cost.network.collective(op, np.array([float(size)]), *place).seconds[0]) * 1e6


@pytest.mark.parametrize(
    "name",
    [
        "gpt7b_tp2_pp1_ws4096_gbs8192_seq4096",
        "gpt175b_tp8_pp8_ws128_gbs32_seq2048_sp_aiobExample",
        "mixtral8x7b_tp2_ep8_ws128_gbs128_seq2048_sp_aiobExample",
        "gpt13b_tp4_pp1_ws4_gbs2_seq4096_sp",
    ],
)
def test_the_left_column_is_the_step_of_simai_analytical(name: str, h100_model: CostModel) -> None:
    workload = parse_workload_text(text_of(name), name)
    gpus = workload.header.value("all_gpus:")
    found = prices(workload, MACHINE, h100_model, NODE, gpus, overlaps=Overlaps(dp=0.5))
    assert found.simai == pytest.approx(analytical_step(workload, MACHINE, overlaps=Overlaps(dp=0.5)).total, rel=1e-9)
    assert 0 < found.ours == pytest.approx(sum(one.ours for one in found.terms))
    assert term(found, "compute").simai == term(found, "compute").ours


def test_groups_are_placed_as_simai_names_them(h100_model: CostModel) -> None:
    rows = (
        f"a -1 3000 ALLREDUCE {GIB} 0 ALLTOALL_EP {GIB} 0 REDUCESCATTER {GIB} 100",
        f"b -1 0 NONE 0 0 NONE 0 0 ALLGATHER_DP_EP {GIB} 100",
    )
    found = prices(small(*rows, ep=4, gpus=32), MACHINE, h100_model, NODE, 32)
    assert term(found, "compute").ours == 3
    assert term(found, "tensor-parallel messages").ours == pytest.approx(us(h100_model, "all_reduce", GIB, 2, 1))
    assert term(found, "expert-parallel exchange").ours == pytest.approx(us(h100_model, "all2all", GIB, 4, 2))
    assert term(found, "data-parallel messages").ours == pytest.approx(us(h100_model, "reduce_scatter", GIB, 16, 2))
    assert term(found, "expert copies' messages").ours == pytest.approx(us(h100_model, "all_gather", GIB, 4, 8))


def test_overlap_hides_the_same_share_in_both_columns(h100_model: CostModel) -> None:
    row = f"a -1 0 ALLREDUCE {GIB} 0 NONE 0 0 REDUCESCATTER {GIB} 100"
    whole, part = (prices(small(row), MACHINE, h100_model, NODE, 16, overlaps=o) for o in (None, Overlaps(dp=0.75, tp=0.5)))
    for name, share in (("tensor-parallel messages", 0.5), ("data-parallel messages", 0.25)):
        assert term(part, name).ours == pytest.approx(share * term(whole, name).ours)
        assert term(part, name).simai == pytest.approx(share * term(whole, name).simai, rel=1e-6)


def test_rows_that_should_not_be_there_or_are_of_another_group(h100_model: CostModel) -> None:
    rows = (
        f"grad_norm -1 0 ALLGATHER {GIB} 0 NONE 0 0 NONE 0 100",
        f"layernorm -1 0 NONE 0 0 ALLREDUCE {GIB} 0 NONE 0 100",
        f"embedding_norm -1 0 ALLREDUCE {GIB} 0 NONE 0 0 NONE 0 100",
    )
    found = prices(small(*rows), MACHINE, h100_model, NODE, 16)
    assert term(found, "all-gather in grad_norm").ours == pytest.approx(us(h100_model, "all_gather", GIB, 8, 2))
    for name in ("all-reduce in layernorm", "all-reduce in embedding_norm"):
        assert term(found, name).ours == 0 < term(found, name).simai


@pytest.mark.parametrize(
    ("name", "forward", "back", "mirror"),
    [
        ("attention_layer", "ALLREDUCE", "NONE 0", "all_reduce"),
        ("mlp_column", "ALLGATHER", f"REDUCESCATTER {0}", "reduce_scatter"),
        ("mlp_row", "REDUCESCATTER", "NONE 0", "all_gather"),
        ("attention_row", "REDUCESCATTER", f"ALLGATHER {GIB}", ""),
        ("mlp_moelayer", "ALLGATHER", "NONE 0", ""),
    ],
)
def test_backward_messages_that_the_file_lacks(name: str, forward: str, back: str, mirror: str, h100_model: CostModel) -> None:
    found = prices(small(f"{name} -1 0 {forward} {GIB} 0 {back} 0 NONE 0 100"), MACHINE, h100_model, NODE, 16)
    lost = [one for one in found.terms if one.name == "backward messages that are lost"]
    assert [one.ours for one in lost] == ([pytest.approx(us(h100_model, mirror, GIB, 2, 1))] if mirror else [])


def test_bubble_and_sends(h100_model: CostModel) -> None:
    rows = ("grad_norm -1 9000 NONE 0 0 NONE 0 0 NONE 0 100", f"x -1 5000 ALLREDUCE {GIB} 1000 NONE 0 2000 ALLREDUCE {GIB} 100")
    workload = small(*rows, pp=4, vpp=3, ga=5, gpus=32, rest=f"pp_comm: {GIB}")
    found = prices(workload, MACHINE, h100_model, NODE, 32)
    micro_batch = 8.0 + us(h100_model, "all_reduce", GIB, 2, 1)  # not the gradients, nor what runs once
    assert found.vpp == 3 and term(found, "pipeline bubble").ours == pytest.approx(3 / 15 * micro_batch)
    assert term(found, "sends between stages").ours == pytest.approx(30 * us(h100_model, "p2p", GIB, 2, 8))
    assert term(prices(workload, MACHINE, h100_model, NODE, 32, vpp=1), "pipeline bubble").ours == pytest.approx(
        3 / 5 * micro_batch
    )


def test_aicb_writes_layers_where_chunks_belong() -> None:
    assert chunks_of(parse_workload_text(text_of("gpt175b_tp8_pp8_ws128_gbs32_seq2048_sp"), "x")) == 1
    assert chunks_of(parse_workload_text(text_of("deepseek16b_tp1_ep16_ws2048_gbs4096_seq4096_sp_aiobExample"), "x")) == 1
    assert chunks_of(small("attention_layer -1 0 NONE 0 0 NONE 0 0 NONE 0 100", vpp=2)) == 2


def test_the_models_own_parameters_change_the_data_parallel_messages(h100_model: CostModel) -> None:
    row = f"grad_norm -1 0 ALLGATHER {2 * GIB} 0 NONE 0 0 REDUCESCATTER {4 * GIB} 100"
    found = prices(small(row), MACHINE, h100_model, NODE, 16, true_parameters=(GIB / 2, 0.0))  # half of those stated
    change = us(h100_model, "reduce_scatter", 2 * GIB, 8, 2) - us(h100_model, "reduce_scatter", 4 * GIB, 8, 2)
    change += us(h100_model, "all_gather", GIB, 8, 2) - us(h100_model, "all_gather", 2 * GIB, 8, 2)
    assert term(found, "parameters of the model").ours == pytest.approx(change) and change < 0
    buckets = prices(small(row, row), MACHINE, h100_model, NODE, 16, true_parameters=(GIB / 2, 0.0))
    assert "parameters of the model" not in {one.name for one in buckets.terms}


def test_an_exported_layout_is_priced_as_it_was(h100_model: CostModel) -> None:
    config = load_run_config(CONFIGS / "simai" / "mixtral8x7b_tp2_ep8_sp.json")
    problem = load_problem(config, 128, profile="h100_sxm")
    solutions = estimate(problem, [configured_strategy(problem, config)])
    run = solutions.layouts.strategy(0, problem.run)
    stage, step = stage_work(solutions, 0), step_work(solutions, 0)
    found = prices(text_workload(run, stage, step), MACHINE, problem.cost, 8, 128)
    layers = [piece for work in stage.works for piece in (*work.forward, *work.backward) if piece.is_message]
    messages = [*layers * run.num_micro_batches, *step.reduced, *step.gathered]
    expected = dict.fromkeys(("tp", "ep", "dp", "ep_dp"), 0.0)
    for piece in messages:
        if piece.size >= 1 << 20:
            expected[piece.group] += piece.ns / 1e3
    names = ("tensor-parallel messages", "expert-parallel exchange", "data-parallel messages", "expert copies' messages")
    inside, exchange, copies, expert_copies = (term(found, name).ours for name in names)
    assert inside == pytest.approx(expected["tp"], rel=1e-3) and exchange == pytest.approx(expected["ep"], rel=1e-3)
    assert copies == pytest.approx(expected["dp"], rel=1e-2) and expert_copies == pytest.approx(expected["ep_dp"], rel=1e-2)
    assert not [one for one in found.terms if one.name == "backward messages that are lost"]


def test_parameters_of_a_rank() -> None:
    dense = load_run_config(CONFIGS / "simai" / "gpt7b_tp2.json").model
    others, experts = true_parameters(dense, Sizes(2, 1, 1, 4096))
    norms = (36 * 2 + 1) * 2 * 4096
    layers = 36 * (4 * 4096**2 + 3 * 4096 * 10880)
    assert experts == 0 and others == (layers + 50257 * 4096 + 4096 * 4096 + norms) / 2
    mixture = load_run_config(CONFIGS / "simai" / "mixtral8x7b_tp2_ep8_sp.json").model
    assert true_parameters(mixture, Sizes(2, 8, 1, 128))[1] == 32 * 8 * 3 * 4096 * 14336 / 16


def test_one_rank_and_empty_messages_take_no_time(h100_model: CostModel) -> None:
    seconds = collective_prices(h100_model, Sizes(1, 1, 1, 1), NODE)
    assert seconds(Collective.ALL_REDUCE, Group.TP, GIB) == seconds(Collective.ALL_REDUCE, Group.NONE, GIB) == 0
    assert collective_prices(h100_model, Sizes(2, 1, 1, 2), NODE)(Collective.ALL_REDUCE, Group.TP, 0) == 0
