"""Defects of the InternLM Simulator must not come back: a test for each numbered defect that a predictor can have.

The numbers are those of a list of its defects: 1-18 wrong results, 19-24 robustness.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from references import flops
from toy import (
    TINY,
    all_layouts,
    column,
    estimated,
    layer_keys,
    layer_linear_parameters,
    make_problem,
    part,
    toy_cost,
    toy_layout,
)

from predictor.cost_model import CostModel
from predictor.estimate import Basis
from profiler.errors import InputError
from profiler.profile.profile import Table
from profiler.profile.profiles import PROF_DATA, shipped_profiles
from profiler.profile.store import read_profile
from solver.api import configured_strategy, load_problem
from solver.formats.config_file import load_run_config
from solver.layers.decoder import layer_program
from solver.layers.program import FLASH_ATTN, LINEAR
from solver.search.search import search
from solver.spec.choices import TpMode
from solver.spec.cluster import Cluster, placement
from solver.spec.model import ModelSpec
from solver.step.memory import MEMORY_PARTS

ROOT = Path(__file__).resolve().parents[2]
INTERNLM2 = ModelSpec(
    name="7B",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=92544,
)
MIB, GIB = 2.0**20, 2.0**30


def dims(mode: str, tp: int, kind: str, model: ModelSpec = INTERNLM2, **constants: object) -> dict[str, dict[str, float]]:
    """Return the dims of the ops of a kind in one layer, by op label."""
    cluster = Cluster("x", 8, 5e10, 80e9)
    ops = layer_program(layer_keys(mode, tp), model, toy_layout(1, 4096, **constants), cluster).ops
    return {op.label: {k: float(np.ravel(v)[0]) for k, v in op.dims.items()} for op in ops if op.kind == kind}


def test_01_the_best_is_not_the_worst(h100_model: CostModel) -> None:
    problem = make_problem(INTERNLM2, 8, h100_model)
    result = search(problem, 64, top=20)
    assert (np.diff(result.best.tgs) <= 0).all()
    for mode, found in result.best_of_mode.items():
        mine = [s for s in range(len(result.best)) if result.best.layouts.strategy(s, problem.run).tp_mode == mode]
        assert all(found.tgs[0] >= result.best.tgs[i] for i in mine)
    # the old tool recommended 2e-10 tokens per second for this model on 8 GPUs; a good layout of 8 H100s has 8 to 13 thousand
    assert 8_000 < result.best.tgs[0] < 13_000


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_02_weight_groups_cost_without_tensor_parallelism(h100_model: CostModel, tp: int) -> None:
    problem = make_problem(INTERNLM2, 64, h100_model)
    layout = problem.layout(dp=64 // tp, tp=tp, tp_mode="isp", zero=0, num_micro_batches=4)
    found = estimated(problem, [layout.replace(wp=wp) for wp in (1, 8, 64)])
    exposed = part(found, "wp_exposed")
    assert exposed[0] == 0 and 0 < exposed[1] < exposed[2]


def test_02_sharding_over_all_ranks_is_not_sharding_over_eight(h100_model: CostModel) -> None:
    problem = make_problem(INTERNLM2, 64, h100_model)
    found = estimated(problem, [problem.layout(zero=1, zero_shard_size=z) for z in (8, 64)])
    assert found.times.seconds[0] != found.times.seconds[1]
    assert found.memory.allocated[0] > found.memory.allocated[1]


def test_03_bandwidths_are_those_of_the_machine(h100_model: CostModel, a100_model: CostModel) -> None:
    layout = toy_layout(64, dp=64, zero=1, zero_shard_size=64)
    steps = {
        (name, gbit): estimated(make_problem(INTERNLM2, 64, cost.with_network(gbit * 1e9 / 8)), [layout]).times.seconds[0]
        for name, cost in (("h100", h100_model), ("a100", a100_model))
        for gbit in (25, 400)
    }
    assert steps["h100", 25] > 1.2 * steps["h100", 400] and steps["a100", 25] > 1.05 * steps["a100", 400]
    inside = [float(cost.network.collective("all_reduce", 256 * MIB, 8, 1).seconds) for cost in (h100_model, a100_model)]
    assert inside[0] < 0.8 * inside[1], "NVLink 4 is 1.5 times as fast as NVLink 3"


def test_04_every_collective_has_its_own_curve_and_the_node_is_measured(h100_model: CostModel) -> None:
    times = {
        op: float(h100_model.network.collective(op, 256 * MIB, 8, 1).seconds) for op in ("all_reduce", "all_gather", "all2all")
    }
    assert len(set(times.values())) == 3 and times["all_reduce"] > 1.3 * times["all_gather"]
    rows = read_profile(PROF_DATA / "h100_sxm.pt").table("all_reduce")
    assert ((rows["intra"] == 8) & (rows["inter"] == 1)).any(), "the most used group is measured"


@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp", "isp"])
def test_05_attention_scales_with_its_heads(h100_model: CostModel, mode: str) -> None:
    for tp in (1, 2, 4, 8):
        core = dims(mode, tp, FLASH_ATTN)["attention.forward"]
        assert (core["heads"], core["kv_heads"], core["head_dim"]) == (32 / tp, 8 / tp, 128)
    whole, split = (float(h100_model.kernels.flash_attn(1, 4096, 4096, 32 // tp, 8 // tp, 128, 128).seconds) for tp in (1, 8))
    assert 4 < whole / split < 10


def test_06_grouped_queries_are_cheaper() -> None:
    grouped, full = INTERNLM2, INTERNLM2.replace(num_key_value_heads=32)
    n = [dims("msp", 1, LINEAR, model)["wqkv.forward"]["n"] for model in (grouped, full)]
    assert n == [48 * 128, 96 * 128], "the projection of q, k and v is half as wide"
    assert layer_linear_parameters(full) / layer_linear_parameters(grouped) == pytest.approx(1.115, abs=1e-3)
    sent = [sum(d["bytes"] for d in dims("isp", 4, "all2all", model).values()) for model in (grouped, full)]
    assert sent[1] / sent[0] == 128 / 80, "q, k, v and context: 1.6 times"
    many = toy_layout(8, micro_batch_size=8)  # so that activations and not the optimizer's step are the peak
    estimates = [estimated(make_problem(model, 8, toy_cost()), [many]) for model in (grouped, full)]
    activations = [s.memory.parts[MEMORY_PARTS.index("activations"), 0] for s in estimates]
    assert activations[0] < activations[1] and estimates[0].times.seconds[0] < estimates[1].times.seconds[0]


def test_07_embedding_head_loss_norms_and_optimizer_take_time(h100_model: CostModel) -> None:
    from solver.report.explain import explain

    problem = make_problem(INTERNLM2, 8, h100_model)
    why = explain(estimated(problem, [problem.layout(zero=1, zero_shard_size=8)]), 0)
    spent = why.by_module()
    assert all(spent[module] > 0 for module in ("embedding", "head", "loss", "norm", "residual", "mlp", "attention"))
    # the head has 92,544 * 4,096 of the 6.98e9 + 0.38e9 weights in GEMMs: 5.2% of them
    gemm_seconds = sum(line.seconds for line in why.lines if line.kind == "linear")
    assert spent["head"] / gemm_seconds == pytest.approx(0.052, rel=0.15)
    names = {line.name for line in why.lines}
    assert {"rope.forward", "activation.forward", "cross_entropy.forward", "lookup.forward"} <= names
    assert why.by_part()["optimizer"] > 0


def test_08_gradient_synchronisation_is_not_free_at_scale(h100_model: CostModel) -> None:
    def tgs(world: int, shard: int) -> tuple[float, float]:
        problem = make_problem(INTERNLM2, world, h100_model)
        found = estimated(problem, [problem.layout(zero=1, zero_shard_size=shard, num_micro_batches=2)])
        return float(found.tgs[0]), float(part(found, "gradient_sync")[0])

    small, sharded, whole = tgs(8, 8), tgs(1024, 8), tgs(1024, 1024)
    assert sharded[1] > small[1] > 0
    assert sharded[0] < 0.995 * small[0], "throughput per GPU falls a little from 8 to 1,024 GPUs"
    assert whole[0] < 0.8 * small[0], "it falls much more with shards broadcast over all ranks (measured: 44%)"


@pytest.mark.parametrize(
    ("mode", "all_gathers", "reduce_scatters", "all_reduces"),
    [("mtp", 0, 0, 5), ("msp", 3 + 2, 2 + 3, 0), ("fsp", 3 + 5, 2 + 3, 0)],
)
def test_09_counts_of_collectives(mode: str, all_gathers: int, reduce_scatters: int, all_reduces: int) -> None:
    # forward and backward of one layer over the tensor group; the old tool had 2 + 2 all-gathers under MSP and 4 + 2 under FSP
    cluster = Cluster("x", 8, 5e10, 80e9)
    layer = layer_program(layer_keys(mode, 4), INTERNLM2, toy_layout(1, 4096, framework="internevo"), cluster)
    counts = [
        sum(float(np.ravel(op.count)[0]) for op in layer.ops if op.kind == kind and op.stream == "tp")
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert counts == [all_gathers, reduce_scatters, all_reduces]


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_10_all_to_all_between_nodes_sends_what_leaves_the_node(h100_model: CostModel, nodes: int) -> None:
    ranks = 8 * nodes
    leaves = GIB * (ranks - 8) / ranks / h100_model.network.bandwidth
    seconds = float(h100_model.network.collective("all2all", GIB, 8, nodes).seconds)
    assert 1.0 < seconds / leaves < 1.31, "the old formula had 1.94 times at 16 ranks and 1.32 at 32"


def test_11_activations_follow_the_width_and_peak_on_the_right_stage() -> None:
    many = toy_layout(1, micro_batch_size=16)  # so that activations and not the optimizer's step are the peak

    def activations(model: ModelSpec) -> float:
        return float(estimated(make_problem(model, 1, toy_cost()), [many]).memory.parts[MEMORY_PARTS.index("activations"), 0])

    wider = activations(INTERNLM2.replace(intermediate_size=2 * 14336)) - activations(INTERNLM2)
    assert wider == 16 * 32 * 4096 * 3 * 14336 * 2, "gate, up and their product, two bytes each"
    problem = make_problem(INTERNLM2, 4, toy_cost())
    found = estimated(problem, [toy_layout(4, dp=1, pp=4, zero=0, num_micro_batches=8)])
    loss = found.memory.parts[MEMORY_PARTS.index("loss"), 0]
    assert not found.memory.on_last_stage[0] and loss == 0, "the logits are not on the first stage"
    assert found.memory.device[0] > 1.03 * found.memory.allocated[0] + 1.5 * 2**30, "allocator and runtime are counted"


def test_12_large_micro_batches_are_estimated_not_clamped(h100_model: CostModel) -> None:
    problem = make_problem(INTERNLM2, 8, h100_model)
    sizes = [1, 4, 16, 64, 256, 1024]
    found = estimated(problem, [problem.layout(zero=1, zero_shard_size=8, micro_batch_size=b) for b in sizes])
    assert np.isfinite(found.times.seconds).all() and (np.diff(found.times.seconds) > 0).all()
    # far outside the measured range a token takes the same time as at its edge: neither infinite nor zero
    assert found.tgs[1:].max() / found.tgs[1:].min() < 1.1
    far = h100_model.kernels.linear(4_194_304, 4096, 4096)
    near = h100_model.kernels.linear(131_072, 4096, 4096)
    assert float(far.seconds / near.seconds) == pytest.approx(32, rel=0.1) and int(far.basis) == Basis.EXTRAPOLATED
    assert float(far.relative_std) > float(near.relative_std)
    message = h100_model.network.collective("all_reduce", [GIB, 64 * GIB], 8, 2)
    assert message.seconds[1] / message.seconds[0] == pytest.approx(64, rel=0.1)


def test_13_shape_matters_not_flops_alone(h100_model: CostModel) -> None:
    # all 2^37 FLOPs
    shapes = np.array([[4096, 4096, 4096], [128, 4096 * 32, 4096], [65536, 1024, 1024], [16, 65536, 65536]])
    seconds = h100_model.kernels.linear(*shapes.T).seconds
    assert seconds.max() / seconds.min() > 1.5
    backward = h100_model.kernels.linear(8192, 4096, [14336] * 3, layout=[0, 1, 2]).seconds
    assert len(set(backward.tolist())) == 3, "forward and both gradients are different GEMMs"
    squarish, thin = dims("msp", 1, LINEAR)["w1.forward"], dims("msp", 8, LINEAR)["w1.forward"]
    assert thin["n"] == squarish["n"] / 8 and thin["k"] == squarish["k"], "the sharded shape is estimated, time is not divided"


def test_14_flops_do_not_depend_on_the_type() -> None:
    cluster = Cluster("x", 8, 5e10, 80e9)
    counted = {
        precision: flops(layer_program(layer_keys("msp", 2), INTERNLM2, toy_layout(1, 4096, precision=precision), cluster))[0]
        for precision in ("bf16", "fp16", "fp8")
    }
    assert len(set(counted.values())) == 1


def test_15_latency_counts_and_passes_overlap_separately(h100_model: CostModel) -> None:
    small, none = (float(h100_model.network.collective("all_gather", size, 8, 4).seconds) for size in (1024, 1))
    assert small > 1e-6 and small == pytest.approx(none, rel=0.5), "a small message costs its latency"
    problem = make_problem(INTERNLM2, 64, h100_model)
    found = estimated(problem, [problem.layout(tp_mode="isp", wp=64, zero=0)])
    key, times = found.terms.key[0], found.table.layer.times
    assert times.forward[3, key] > 0 and times.backward[3, key] > 0, "all-gathers of forward overlap with forward only"
    exposed = toy_layout(64, overlap_weight_gather=False, tp_mode="isp", wp=64, zero=0)
    without = estimated(make_problem(INTERNLM2, 64, h100_model, overlap_weight_gather=False), [exposed])
    assert part(without, "wp_exposed")[0] > part(found, "wp_exposed")[0]


@pytest.mark.parametrize(
    ("size", "stride", "node", "intra", "inter"),
    [
        (8, 1, 8, 8, 1),
        (16, 1, 8, 8, 2),
        (2, 8, 8, 1, 2),
        (4, 4, 8, 2, 2),
        (8, 2, 16, 8, 1),
        (64, 2, 8, 4, 16),
        (1, 64, 8, 1, 1),
        (12, 1, 4, 4, 3),
        (16, 16, 4, 1, 16),
    ],
)
def test_16_placement_of_groups_by_stride(size: int, stride: int, node: int, intra: int, inter: int) -> None:
    found = placement(size, stride, node)
    assert (int(found.intra), int(found.inter)) == (intra, inter)


def test_16_the_node_size_is_not_a_constant(h100_model: CostModel) -> None:
    layout = toy_layout(16, dp=1, tp=16, tp_mode="msp")
    kv = INTERNLM2.replace(num_key_value_heads=16)
    small, large = (
        estimated(make_problem(kv, 16, h100_model, cluster=Cluster("x", node, 5e10, 80e9)), [layout]) for node in (8, 16)
    )
    assert part(small, "tp_exposed")[0] > 1.3 * part(large, "tp_exposed")[0]


def test_17_the_space_is_complete() -> None:
    model = INTERNLM2.replace(num_hidden_layers=12, num_attention_heads=48, num_key_value_heads=4, intermediate_size=13824)
    layouts = all_layouts(make_problem(model, 48, toy_cost(), seq_len=6144, p2p_overlap=True), 96)
    modes, tp, wp, pp = (column(layouts, name) for name in ("mode", "tp", "wp", "pp"))
    assert (column(layouts, "num_micro_batches") < pp).any(), "fewer micro batches than stages"
    assert {3, 6, 12} <= set(pp) and {12, 24} <= set(tp) and {12, 24, 48} <= set(wp)
    assert tp.max() > 4, "more tensor ranks than key-value heads"
    assert set(modes) == {int(mode) for mode in TpMode} and (column(layouts, "vpp") > 1).any()
    assert (column(layouts, "cp") > 1).any() and (layouts.recompute_layers > 0).any() and set(layouts.zero) >= {0, 1, 3}


@pytest.mark.parametrize("name", shipped_profiles())
def test_18_no_invented_times_in_the_data(name: str) -> None:
    for op, table in read_profile(PROF_DATA / f"{name}.pt").tables.items():
        assert table["seconds"].min() > 1e-7 and table["seconds"].max() < 10, op
    with pytest.raises(InputError, match="positive and finite"):
        Table.from_columns("linear", {"m": [1], "seconds": [np.inf]})


def test_19_nothing_in_a_config_runs(tmp_path: Path) -> None:
    text = (ROOT / "configs" / "7B_internlm2.py").read_text()
    trace = tmp_path / "ran"
    opened = f"open({str(trace)!r}, 'w')\n"
    for line in (f"import os\nos.system('touch {trace}')\n", opened, f"X = {opened}"):
        path = tmp_path / "hostile.py"
        path.write_text(text + "\n" + line)
        try:
            load_run_config(path)
        except InputError as error:
            assert "\n" not in str(error)
        assert not trace.exists()


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp", "isp"])
def test_20_a_single_layout_of_every_shipped_config_and_mode(
    h100_model: CostModel, config: Path, mode: str, tmp_path: Path
) -> None:
    text, tensors = re.subn(r'mode="\w+"', f'mode="{mode}"', config.read_text())
    assert tensors == 1
    if mode != "isp":
        text = re.sub(r"weight=dict\(size=\d+", "weight=dict(size=1", text)
    changed = tmp_path / config.name
    changed.write_text(text)
    run = load_run_config(changed)
    problem = load_problem(run, 128, profile="h100_sxm")
    found = estimated(problem, [configured_strategy(problem, run)])
    assert 100 < found.tgs[0] < 20_000
    assert list(tmp_path.iterdir()) == [changed], "nothing is written that was not requested"


def test_21_impossible_values_are_refused() -> None:
    with pytest.raises(InputError, match="world_size"):
        toy_layout(8, tp=3)
    with pytest.raises(InputError, match="it must be one of"):
        toy_layout(8, tp_mode="nonsense")
    with pytest.raises(InputError, match="positive"):
        INTERNLM2.replace(hidden_size=0)


def test_22_no_state_is_kept_between_problems(h100_model: CostModel) -> None:
    environment, first_model = dict(os.environ), copy.deepcopy(TINY)
    problem = make_problem(INTERNLM2, 8, h100_model)
    first = search(problem, 16, top=3)
    search(make_problem(INTERNLM2.replace(num_hidden_layers=8), 16, h100_model, framework="megatron-lm"), 64)
    estimated(make_problem(TINY, 1, toy_cost()), [toy_layout(1)])
    with pytest.raises(InputError):
        search(make_problem(INTERNLM2, 8, h100_model, cluster=Cluster("x", 8, 5e10, 1e9)), 16)
    repeated = search(problem, 16, top=3)
    assert repeated.best.times.seconds.tolist() == first.best.times.seconds.tolist()
    assert dict(os.environ) == environment and first_model == TINY


def test_23_estimating_needs_neither_torch_nor_any_fitting_library() -> None:
    # without packages, whose own files are empty
    code = "import sys; import solver; print(*(name for name, one in sys.modules.items() if not hasattr(one, '__path__')))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = run.stdout.split()
    assert not {"torch", "sklearn", "scipy", "pandas", "matplotlib", "rich"} & {name.split(".")[0] for name in modules}
    # modules, not seconds: 400 load in 0.2 s on an idle core, and a busy one must not fail the test
    assert len(modules) < 600


def test_24_the_report_is_short(h100_model: CostModel) -> None:
    command = [sys.executable, "simulation_train_formulaic.py", "--run_all_solu", "--world_size", "1024"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(printed) < 20_000 and len(printed.splitlines()) < 100
