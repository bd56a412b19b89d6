"""Constants that a search varies on demand: every combination once, the best of all, refusals, the command line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from toy import make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver.commands.command_line import main
from solver.formats.config_file import load_run_config
from solver.options.axes import parse_constant_axes
from solver.search.search import search
from solver.search.variants import search_variants, variants_of
from solver.spec.cluster import cluster_of
from solver.step.problem import Problem

DENSE = load_run_config("configs/models/llama3_8b.json").model
EXPERTS = load_run_config("configs/models/qwen3_30b_a3b.json").model


def problem_of(cost: CostModel, experts: bool = False, **constants: object) -> Problem:
    return make_problem(EXPERTS if experts else DENSE, 16, cost, 8192, framework="megatron-core", precision="bf16", **constants)


def test_every_combination_comes_once(h100_model: CostModel) -> None:
    found = variants_of(problem_of(h100_model), {"cp_comm": (), "recompute_modules": ()})
    assert len(found) == 3 * 3 and found[0] == {"cp_comm": "ring", "recompute_modules": "core_attn"}
    assert len({tuple(one.values()) for one in found}) == len(found)
    modules = [one["recompute_modules"] for one in variants_of(problem_of(h100_model, experts=True), {"recompute_modules": ()})]
    assert "layernorm+moe_act" in modules and not [name for name in modules if "moe_act+moe" in name or "mlp" in name]


def test_the_best_is_the_best_of_all_searches(h100_model: CostModel) -> None:
    problem = problem_of(h100_model)
    found, fastest = search_variants(problem, 128, {"cp_comm": (), "tp_comm_overlap": ()}, fixed={"cp": 2})
    assert len(found) == 6
    seconds = [variant.seconds for variant in found]
    assert float(fastest.best.times.seconds[0]) == seconds[0]
    assert seconds == sorted(seconds)
    for variant in found:
        alone = search(problem.with_run(**variant.constants), 128, fixed={"cp": 2})
        assert variant.seconds == float(alone.best.times.seconds[0])
    assert len({variant.seconds for variant in found}) > 2, "both axes change the step"


def test_memory_does_not_grow_with_the_combinations(h100_model: CostModel) -> None:
    """What is kept of a search with its tables is megabytes; a variant without them is a few plain figures."""
    found, _ = search_variants(problem_of(h100_model, experts=True), 128, {"moe_dispatcher": ()}, fixed={"ep": 8, "pp": 1})
    assert len(found) > 1 and all(len(pickle.dumps(variant)) < 10_000 for variant in found)


def test_other_modules_are_searched_only_where_something_is_recomputed(h100_model: CostModel) -> None:
    found, _ = search_variants(problem_of(h100_model, experts=True), 128, {"recompute_modules": ()}, fixed={"ep": 8, "pp": 1})
    for variant in found:
        assert variant.best
        stated = variant.constants["recompute_modules"]
        assert variant.best.fixed.get("recompute") == (None if stated == "core_attn" else "selective")
    none, _ = search_variants(problem_of(h100_model), 128, {"recompute_modules": ()}, fixed={"recompute": "none"})
    assert len(none) == 1


def test_the_host_is_offered_where_the_cluster_describes_one(h100_model: CostModel) -> None:
    host = cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": 50, "host_memory_gb_s": 40, "memory_gib": 62})
    problem = make_problem(DENSE, 8, h100_model, 8192, host, framework="megatron-core", precision="bf16")
    found, _ = search_variants(problem, 64, {"optimizer_offload_fraction": ()})
    fits = [variant.constants["optimizer_offload_fraction"] for variant in found if variant.best]
    assert len(found) == 5 and fits[-1] == 1.0, "the more the host updates, the slower"
    with pytest.raises(InputError, match="offload_layers varies nothing: .* where the cluster describes no host"):
        search_variants(problem_of(h100_model), 64, {"offload_layers": ()})


def test_modules_on_the_host_are_searched(h100_model: CostModel) -> None:
    host = cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": 50, "memory_gib": 30})
    given = {"framework": "megatron-core", "precision": "bf16"}
    found, _ = search_variants(make_problem(DENSE, 8, h100_model, 8192, host, **given), 64, {"offload_modules": ()})
    names = {variant.constants["offload_modules"] for variant in found}
    # without experts and latent attention no norm, and attn_proj with core_attn alone
    assert names == {"", "qkv_linear", "core_attn", "core_attn+attn_proj", "qkv_linear+core_attn+attn_proj"}
    assert all(v.best is None or v.best.memory <= 30 * 2**30 for v in found)
    assert found[0].best and found[0].constants["offload_modules"], "with 30 GiB the fastest keeps activations on the host"


@pytest.mark.parametrize(
    ("names", "sentence"),
    [("moe_dispatcher", "llama3_8b has no experts"), ("tp", "tp is not varied on demand"), ("", "it names no axis")],
)
def test_what_varies_nothing_is_refused(h100_model: CostModel, names: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        search_variants(problem_of(h100_model), 64, parse_constant_axes(names))


def test_graphs_of_whole_layers_do_not_hold_experts_whose_rows_the_host_reads(h100_model: CostModel) -> None:
    model = load_run_config("configs/models/qwen3_30b_a3b.json").model
    problem = make_problem(model, 64, h100_model, 4096, framework="megatron-core")
    found, _ = search_variants(problem, 512, {"cuda_graphs": ()}, fixed={"tp": 1, "pp": 1, "ep": 8})
    (best, without), (graphs, reason) = [(one.best, one.reason) for one in found]
    assert best is not None and not best.layout.cuda_graphs and not without
    assert graphs is None and "cuda_graphs of whole layers leaves out that no CUDA graph holds dropless experts" in reason


def test_a_run_that_is_none_is_refused_whatever_else_is_tried(h100_model: CostModel) -> None:
    run = make_problem(DENSE, 8, h100_model, 8192, framework="megatron-core", recompute_modules="layernorm")
    with pytest.raises(InputError, match="has no layernorm to recompute"):
        search_variants(run, 64, {"recompute_modules": ()})


def test_nothing_that_fits_is_an_error(h100_model: CostModel) -> None:
    small = cluster_of(DEVICES["h100_sxm"], {"memory_gib": 3})
    with pytest.raises(InputError, match="fits on 8 GPUs: the smallest needs"):
        search_variants(make_problem(DENSE, 8, h100_model, 8192, small, framework="megatron-core"), 64, {"cp_comm": ()})


def test_the_command_line_lists_what_it_searched_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = "--run_all_solu --model_size llama3_8b --world_size 16 --seq_len 8192 --framework megatron-core --fix cp=2,tp=2"
    assert main([*words.split(), "--also", "cp_comm", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    content = json.loads(out.read_text())
    assert "Also searched" in shown and len(content["also"]) == 3
    assert content["also"][0]["step_s"] == content["best"][0]["step_s"]
    assert content["also"][0]["layout"]["cp_comm"] == content["best"][0]["layout"]["cp_comm"] == content["run"]["cp_comm"]
    assert main(["--model_size", "llama3_8b", "--world_size", "16", "--also", "cp_comm"]) == 2
    assert "--also belongs to a search" in capsys.readouterr().err


def test_graphs_moments_and_attention_in_fp8_vary_where_the_framework_has_them(h100_model: CostModel) -> None:
    problem = problem_of(h100_model)
    assert [one["cuda_graphs"] for one in variants_of(problem, {"cuda_graphs": ()})] == [False, True]
    assert [one["optimizer_states"] for one in variants_of(problem, {"optimizer_states": ()})] == [
        "fp32",
        "remainder",
        "bf16",
        "8bit",
    ]
    with pytest.raises(InputError, match="--also fp8_attention varies nothing"):  # of a 16-bit run
        variants_of(problem, {"fp8_attention": ()})
    quantised = problem.with_run(framework="megatron-bridge-26", precision="fp8")
    assert [one["fp8_attention"] for one in variants_of(quantised, {"fp8_attention": ()})] == [False, True]
    narrower = quantised.with_run(fp8_recipe="tensorwise")  # beside which master weights stay whole
    assert [one["optimizer_states"] for one in variants_of(narrower, {"optimizer_states": ()})] == ["fp32", "bf16", "8bit"]
    found, _ = search_variants(problem, 128, {"optimizer_states": ()}, fixed={"tp": 2, "pp": 1, "recompute": "none"})
    memory = {variant.constants["optimizer_states"]: variant.best.memory for variant in found if variant.best}
    assert memory["8bit"] <= memory["bf16"] <= memory["remainder"] <= memory["fp32"]


def test_the_shares_of_the_layers_that_are_tried_on_the_host(h100_model: CostModel) -> None:
    # of 32 layers a quarter, a half, three quarters, and all but the last, whose backward pass comes next
    cluster = cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": 50, "host_memory_gb_s": 100})
    problem = make_problem(DENSE, 16, h100_model, 8192, cluster, framework="megatron-core", precision="bf16")
    assert [one["offload_layers"] for one in variants_of(problem, {"offload_layers": ()})] == [0, 8, 16, 24, 31]


def test_an_axis_may_be_of_some_values(h100_model: CostModel) -> None:
    problem = problem_of(h100_model, experts=True)
    axes = parse_constant_axes("recompute_modules=moe_act/moe_act+core_attn, cp_comm")
    assert axes == {"recompute_modules": ("moe_act", "moe_act+core_attn"), "cp_comm": ()}
    found = {one["recompute_modules"] for one in variants_of(problem, axes)}
    assert found == {"core_attn", "moe_act", "core_attn+moe_act"}
    with pytest.raises(InputError, match=r"--also recompute_modules='moe_acts': .* runs core_attn, .*, values apart by /"):
        variants_of(problem, {"recompute_modules": ("moe_acts",)})


def test_a_value_that_the_run_has_is_named(h100_model: CostModel) -> None:
    with pytest.raises(InputError, match=r"--also cp_comm=ring varies nothing: it is what the run has"):
        variants_of(problem_of(h100_model), {"cp_comm": ("ring",)})
