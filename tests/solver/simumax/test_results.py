"""Results under SimuMax's names: sums, definitions by hand, and the model that is counted."""

from __future__ import annotations

from typing import Any

import pytest

from profiler.errors import InputError
from solver.formats.simumax.model import model_of
from solver.simumax import ModelConfig, PerfLLM, Result
from solver.simumax.results import per_token_flops
from solver.spec.model_size import parameters
from solver.step.per_stage import layers_of_stages

RUNS = (
    {"strategy": "tp2_pp1_dp4_mbs1"},
    {"strategy": "tp1_pp2_dp4_mbs1"},
    {"strategy": "tp1_pp2_dp4_mbs1", "pp_size": 4, "recompute_granularity": "full_block", "recompute_layer_num": 3},
    {"strategy": "tp1_pp2_dp4_mbs1", "interleaving_size": 2, "cross_entropy_loss_fusion": True},
    {"zero_state": 3, "tp_size": 1},
    {"model": "mixtral_small", "tp_size": 1, "ep_size": 4, "pp_size": 2, "te_version": "2.11.0"},
    {"model": "deepseek_small", "tp_size": 2, "ep_size": 8},
)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_parts_add_up(estimated: Any, run: dict[str, Any]) -> None:
    perf = estimated(**run)
    cost, memory = perf.analysis_cost(), perf.analysis_mem()
    for name in ("breakdown_result", "breakdown_result_last_stage"):
        if name in cost.data:
            assert sum(cost[name].values()) == pytest.approx(cost["duration_time_per_iter"], rel=1e-9)
            assert all(seconds >= 0 for seconds in cost[name].values())
            assert 0.3 < cost[name]["fwd_compute_time"] / cost[name]["bwd_compute_time"] < 0.7
    pp = perf.strategy.pp_size
    assert set(memory.data) == {"first_stage", "middle_stage", "last_stage"} if pp > 2 else pp == 1 or len(memory.data) == 2
    for stage in memory.data.values() if pp > 1 else [memory.data]:
        cached = stage["cached_micro_batch_num"] * stage["fwd_activation_cache_per_micro_batch"]
        total = stage["model_mem"] + stage["workspaces"] + cached + stage["peak_activation_mem_in_1F1B"]
        assert stage["peak_mem"] == pytest.approx(total, rel=1e-12)
        assert stage["peak_mem"] == max(stage["fwd_peak_allocated_mem"], stage["bwd_peak_allocated_mem"])
        assert stage["peak_activation_mem_in_1F1B"] > 0 < stage["fwd_activation_cache_per_micro_batch"]
        detail = stage["model_mem_detail"]
        assert stage["model_mem"] == pytest.approx(sum(part["all_mem"] for part in detail.values()), rel=1e-12)
        assert all(sum(detail[kind]["detail"].values()) == pytest.approx(detail[kind]["all_mem"]) for kind in ("dense", "moe"))
        assert (detail["moe"]["all_mem"] > 0) == perf.model_config.has_experts
        assert (detail["te_dummy_wgrad"]["all_mem"] > 0) == (perf.strategy.te_version is not None)
        assert stage["peak_mem_with_reserved"] == pytest.approx(stage["peak_mem"] / 0.94, rel=1e-12)


def test_utilisation_by_hand(estimated: Any) -> None:
    """Llama-3 8B: a layer has 4096 * 128 * (32 + 2 * 8) + 4096 * 4096 weights in attention and 3 * 4096 * 14336 in its MLP;
    attention's scores and context are 2 * 2 * 4096 * 4096 FLOPs per token and layer, forward, over the whole square."""
    cost = estimated().analysis_cost()
    linears = 32 * (4096 * 128 * 48 + 4096 * 4096 + 3 * 4096 * 14336) + 128257 * 4096
    square = 32 * 3 * 2 * 2 * 4096 * 4096
    rate = 8 * 4 * 4096 / cost["duration_time_per_iter"] / 8
    assert cost["throughput_per_accelerator"] == pytest.approx(rate, rel=1e-12)
    assert cost["mfu_6nd"] == pytest.approx(6 * linears * rate / 312e12, rel=1e-12)
    assert cost["mfu_6nd_with_attn"] == pytest.approx((6 * linears + square) * rate / 312e12, rel=1e-12)
    assert cost["mfu"] == pytest.approx((6 * linears + 7 / 6 * square / 2) * rate / 312e12, rel=1e-12)
    assert cost["throughput per GPU (TFLOP/s/GPU)"] == pytest.approx(cost["mfu_6nd_with_attn"] * 312, rel=1e-12)
    assert cost["flops_info"]["theory_flops"] == pytest.approx((6 * linears + square) * 8 * 4 * 4096 / 8, rel=1e-12)


def test_states_by_hand(estimated: Any) -> None:
    """16-bit weights, fp32 gradients, 12 bytes of optimizer states over the 4 ranks of ZeRO-1; tensor parallelism halves the
    linears and the vocabulary, padded to 256, and not the norms."""
    detail = estimated().analysis_mem()["model_mem_detail"]["dense"]["detail"]
    norms = (2 * 32 + 1) * 4096
    elements = (32 * (4096 * 128 * 48 + 4096 * 4096 + 3 * 4096 * 14336) + 2 * 128512 * 4096) / 2 + norms
    assert detail == {"weight_bytes": 2 * elements, "grad_bytes": 4 * elements, "state_bytes": 12 * elements / 4}


def test_parameters_of_deepseek_v3_do_not_depend_on_the_pipeline() -> None:
    config = ModelConfig.init_from_config_file("tests/data/simumax/deepseek_small.json")
    whole = model_of(config.changed(layer_num=61, dense_layers=3, expert_num=256))
    assert parameters(whole) / 1e9 == pytest.approx(671, abs=0.5)  # its report, without multi-token prediction
    assert parameters(whole, active=True) / 1e9 == pytest.approx(37.5, abs=0.5)
    assert per_token_flops(whole, 4096)["without_attn"] / 6e9 == pytest.approx(36.6, abs=0.5)  # without the embedding


@pytest.mark.parametrize(("first", "last", "layers"), [(9, 11, [9, 15, 15, 11]), (None, None, [12, 12, 12, 12])])
def test_layers_of_the_stages(configured: Any, first: int | None, last: int | None, layers: list[int]) -> None:
    perf = configured(pp_size=4, tp_size=1, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    perf.model_config.layer_num = sum(layers)
    perf.run_estimate()
    assert layers_of_stages(perf._priced.solutions, 0).tolist() == layers


def test_peaks_by_stage(estimated: Any) -> None:
    perf = estimated(strategy="tp1_pp2_dp4_mbs1", pp_size=4)
    memory = perf.analysis_mem()
    peaks = perf.get_pp_stage_peak_mem(memory, "peak_mem", toG=True)
    assert peaks == {stage: found["peak_mem"] / 2**30 for stage, found in memory.data.items()}
    assert peaks["first_stage"] > peaks["middle_stage"]
    with pytest.raises(InputError, match="peak_mem_key is 'peak'"):
        perf.get_pp_stage_peak_mem(memory, "peak")


def test_reserved_memory_without_a_factor_is_this_programs_own(configured: Any) -> None:
    perf = configured()
    del perf.strategy.stated["mem_factor"]
    perf.run_estimate()
    memory = perf.analysis_mem()
    own = perf._priced.solutions.memory.reserved[0]
    assert memory["peak_mem_with_reserved"] == pytest.approx(own, rel=1e-12)
    assert memory["memory_reserved_ratio"] == pytest.approx(memory["peak_mem"] / own, rel=1e-12)


def test_nothing_is_returned_before_it_is_estimated(configured: Any) -> None:
    with pytest.raises(InputError, match="nothing is configured yet"):
        PerfLLM().run_estimate()
    with pytest.raises(InputError, match="nothing is estimated yet"):
        configured().analysis_mem()
    assert Result({"a": 1})["a"] == 1
