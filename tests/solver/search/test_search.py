"""The search against brute force: the space is complete and without duplicates, and the reported best is the best."""

from __future__ import annotations

import sys
from collections import Counter
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references import op_flops
from toy import TINY, all_layouts, column, make_problem, toy_cost

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver import estimate
from solver.layers.decoder import layer_program
from solver.layers.program import FLASH_ATTN
from solver.search.divisions import divisors
from solver.search.kept import pareto
from solver.search.pipelines import pipelines
from solver.search.search import DOES_NOT_FIT, SearchResult, search
from solver.search.space import enumerate_splits
from solver.spec.choices import Recompute, TpMode
from solver.spec.cluster import Cluster
from solver.spec.model import ModelSpec
from solver.step.layouts import Layouts
from solver.step.memory import MEMORY_PARTS
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

MODEL = ModelSpec(
    name="1B",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=32000,
)
_SPLIT_COLUMNS = ("mode", "tp", "wp", "cp", "pp", "vpp", "dp", "zero_shard_size", "micro_batch_size", "num_micro_batches")


def cluster(memory_gib: float, gpus_per_node: int = 8) -> Cluster:
    return Cluster("toy", gpus_per_node, 5e10, memory_gib * 2**30)


def table(layouts: Layouts) -> np.ndarray:
    """Return all columns of all layouts, [layouts, columns]."""
    small = (layouts.zero, layouts.recompute, layouts.recompute_layers)
    return np.stack([*(column(layouts, name) for name in _SPLIT_COLUMNS), *small], axis=1)


def brute_force(problem: Problem, batch: int) -> tuple[Solutions, np.ndarray]:
    """Estimate every layout in one call; return the solutions and which of them fit in memory."""
    found = estimate_layouts(problem, all_layouts(problem, batch))
    return found, found.memory.device <= problem.cluster.memory_bytes


@pytest.fixture(scope="module")
def problem(h100_model: CostModel) -> Problem:
    return make_problem(MODEL, 16, h100_model, cluster=cluster(14.0))


@pytest.fixture(scope="module")
def result(problem: Problem) -> SearchResult:
    return search(problem, 64, top=7)


@pytest.fixture(scope="module")
def everything(problem: Problem) -> tuple[Solutions, np.ndarray]:
    return brute_force(problem, 64)


# the space


@pytest.mark.parametrize(("world", "batch"), [(1, 4), (2, 6), (8, 32), (16, 96), (64, 128)])
def test_sizes_multiply_to_the_world_and_layouts_are_unique(world: int, batch: int) -> None:
    problem = make_problem(MODEL, world, toy_cost())
    layouts = all_layouts(problem, batch)
    c = {name: column(layouts, name) for name in _SPLIT_COLUMNS}
    assert (c["tp"] * c["cp"] * c["dp"] * c["pp"] == world).all()
    assert (c["dp"] * c["micro_batch_size"] * c["num_micro_batches"] == batch).all()
    rows = table(layouts)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert (MODEL.num_attention_heads % c["tp"] == 0).all() and (c["pp"] <= MODEL.num_hidden_layers).all()
    isp = c["mode"] == TpMode.ISP
    assert (c["wp"][~isp] == 1).all() and (c["tp"] * c["cp"] * c["dp"] % c["wp"] == 0).all()
    replicas = np.where(isp, c["tp"] * c["cp"] * c["dp"] // c["wp"], c["cp"] * c["dp"])
    assert (replicas % c["zero_shard_size"] == 0).all()
    assert ((layouts.zero == 0) == (c["zero_shard_size"] == 1))[layouts.zero < 3].all()
    interleaved = c["vpp"] > 1
    assert (c["num_micro_batches"][interleaved] % c["pp"][interleaved] == 0).all()
    assert (MODEL.num_hidden_layers % (c["pp"] * c["vpp"])[interleaved] == 0).all()


def test_every_layout_is_a_strategy_with_the_same_estimate() -> None:
    problem = make_problem(MODEL, 8, toy_cost())
    layouts = all_layouts(problem, 8)
    chosen = layouts.take(np.arange(0, len(layouts), 23))
    strategies = [chosen.strategy(i, problem.run) for i in range(len(chosen))]
    rebuilt = Layouts.of(strategies)
    np.testing.assert_array_equal(table(rebuilt), table(chosen))
    first, second = estimate_layouts(problem, chosen), estimate_layouts(problem, rebuilt)
    np.testing.assert_allclose(first.times.seconds, second.times.seconds, rtol=1e-12)


def test_the_space_has_every_mode_and_axis() -> None:
    # small enough to count by hand: 2 ranks, 1 sequence of 512 tokens: dp 2 does not divide the batch; tp, cp or pp is 2
    problem = make_problem(MODEL.replace(num_hidden_layers=2), 2, toy_cost(), seq_len=512)
    splits = enumerate_splits(problem, 1).splits
    rows = Counter(
        zip(*(getattr(splits, n).tolist() for n in ("mode", "tp", "cp", "pp", "wp", "zero_shard_size")), strict=True)
    )
    expected = [
        (0, 1, 1, 2, 1, 1),  # two stages of one layer each
        (3, 1, 2, 1, 1, 1),
        (3, 1, 2, 1, 1, 2),
        (3, 1, 2, 1, 2, 1),  # context, which is ISP's: parameters split by wp or whole
        (0, 2, 1, 1, 1, 1),
        (1, 2, 1, 1, 1, 1),
        (2, 2, 1, 1, 1, 1),  # tensor modes have nothing to shard
        (3, 2, 1, 1, 1, 1),
        (3, 2, 1, 1, 1, 2),
        (3, 2, 1, 1, 2, 1),  # ISP replicates parameters over the tensor group
    ]
    assert rows == Counter(expected)


def test_sizes_that_are_no_powers_of_two_are_searched() -> None:
    model = MODEL.replace(num_attention_heads=24, num_key_value_heads=6, num_hidden_layers=12, intermediate_size=8064)
    problem = make_problem(model, 48, toy_cost(), seq_len=4608)
    layouts = all_layouts(problem, 96)
    assert set(column(layouts, "tp")) == {1, 2, 3, 6, 12, 24}
    assert {3, 6, 12} <= set(column(layouts, "pp")) and {3, 12, 24} <= set(column(layouts, "wp"))


def test_fewer_micro_batches_than_stages_are_searched() -> None:
    layouts = all_layouts(make_problem(MODEL, 8, toy_cost()), 8)
    assert (column(layouts, "num_micro_batches") < column(layouts, "pp")).any()


@given(st.integers(1, 10**6))
def test_divisors(n: int) -> None:
    found = divisors(n)
    assert (n % found == 0).all() and (np.diff(found) > 0).all() and found[0] == 1 and found[-1] == n
    assert len(found) == sum(1 + (d * d != n) for d in range(1, int(n**0.5) + 1) if n % d == 0)


@pytest.mark.parametrize("how", ["ring", "a2a", "allgather"])
@pytest.mark.parametrize("heads", [(32, 8), (24, 8), (12, 2)])
def test_no_layout_of_the_space_loses_or_repeats_attention(how: str, heads: tuple[int, int]) -> None:
    # all ranks of a stage together do one layer's attention: 7 * 2 * 64 FLOPs for each head and pair (where keys are
    # all-gathered, half a pair per query, on the diagonal, is not counted)
    model = MODEL.replace(num_attention_heads=heads[0], num_key_value_heads=heads[1], intermediate_size=6144)
    problem = make_problem(model, 16, toy_cost(), cp_comm=how)
    splits = enumerate_splits(problem, 16).splits
    keys, _ = splits.layer_keys()
    layer = layer_program(keys, model, problem.run, problem.cluster)
    attention = sum(op_flops(op) * op.count for op in layer.ops if op.kind == FLASH_ATTN) * keys.tp * keys.cp
    pairs = 4096 * 4097 / 2 * keys.micro_batch_size
    np.testing.assert_allclose(attention / (7 * 2 * 64 * heads[0] * pairs), 1, atol=3e-4)


# what the search finds


def test_best_is_the_argmin_of_all_layouts(result: SearchResult, everything: tuple[Solutions, np.ndarray]) -> None:
    found, fits = everything
    assert 0 < fits.sum() < len(found), "some layouts fit and some do not, so that the limit is tested"
    seconds = np.sort(found.times.seconds[fits])
    np.testing.assert_allclose(result.best.times.seconds, seconds[:7], rtol=1e-12)
    assert result.best.times.seconds[0] == pytest.approx(found.times.seconds[fits].min(), rel=1e-12)
    assert (found.times.seconds[fits] >= result.best.times.seconds[0] * (1 - 1e-12)).all()
    assert (result.best.memory.device <= result.problem.cluster.memory_bytes).all()
    best = np.flatnonzero(fits)[found.times.seconds[fits].argmin()]
    if np.count_nonzero(found.times.seconds[fits] == found.times.seconds[best]) == 1:
        assert table(result.best.layouts)[0].tolist() == table(found.layouts)[best].tolist()
    assert result.best.tgs[0] == result.best.tgs.max()


def test_counts_are_those_of_all_layouts(result: SearchResult, everything: tuple[Solutions, np.ndarray]) -> None:
    found, fits = everything
    assert (result.layouts_estimated, result.feasible) == (len(found), fits.sum())
    assert result.rejected[DOES_NOT_FIT] == (~fits).sum()
    assert result.layouts_per_second == pytest.approx(result.layouts_estimated / result.seconds)


def test_best_of_each_mode(result: SearchResult, everything: tuple[Solutions, np.ndarray]) -> None:
    found, fits = everything
    assert set(result.best_of_mode) == {"mtp", "msp", "fsp", "isp"}
    for name, best in result.best_of_mode.items():
        mine = fits & (column(found.layouts, "mode") == TpMode[name.upper()])
        assert best.layouts.strategy(0, found.problem.run).tp_mode == name
        assert best.times.seconds[0] == pytest.approx(found.times.seconds[mine].min(), rel=1e-12)
        assert best.times.seconds[0] < np.median(found.times.seconds[mine])


def test_pareto_optimal_layouts_are_those_of_all_layouts(
    result: SearchResult, everything: tuple[Solutions, np.ndarray]
) -> None:
    found, fits = everything
    seconds, memory = found.times.seconds[fits], found.memory.device[fits]
    optimal = result.pareto
    assert (np.diff(optimal.times.seconds) > 0).all() and (np.diff(optimal.memory.device) < 0).all()
    for t, m in zip(optimal.times.seconds, optimal.memory.device, strict=True):  # no layout is better than these
        assert not ((seconds < t * (1 - 1e-12)) & (memory <= m)).any()
        assert not ((seconds <= t * (1 - 1e-12)) & (memory < m)).any()
    for t, m in zip(seconds, memory, strict=True):  # and one of these matches or beats every layout
        assert ((optimal.times.seconds <= t * (1 + 1e-12)) & (optimal.memory.device <= m * (1 + 1e-12))).any()


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_pareto_by_brute_force(points: list[tuple[int, int]]) -> None:
    seconds, memory = (np.array([p[i] for p in points], dtype=float) for i in (0, 1))
    expected = sorted({p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)})
    index = pareto(seconds, memory)
    assert [(seconds[i], memory[i]) for i in index] == expected


@pytest.mark.parametrize("chunk", [1, 37, 10**6])
def test_the_chunk_size_does_not_matter(
    problem: Problem, result: SearchResult, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    small = make_problem(MODEL, 4, problem.cost, cluster=cluster(20.0)) if chunk == 1 else problem
    reference = search(small, 8, top=7) if chunk == 1 else result
    monkeypatch.setattr(sys.modules[SearchResult.__module__], "CHUNK_SPLITS", chunk)
    other = search(small, 8 if chunk == 1 else 64, top=7)
    np.testing.assert_allclose(other.best.times.seconds, reference.best.times.seconds, rtol=1e-12)
    np.testing.assert_allclose(other.best.memory.device, reference.best.memory.device, rtol=1e-12)
    np.testing.assert_allclose(other.pareto.memory.device, reference.pareto.memory.device, rtol=1e-12)
    for mode, found in reference.best_of_mode.items():
        assert other.best_of_mode[mode].times.seconds[0] == pytest.approx(found.times.seconds[0], rel=1e-12)
    assert (other.layouts_estimated, other.feasible, other.rejected) == (
        reference.layouts_estimated,
        reference.feasible,
        reference.rejected,
    )


def test_processes_that_share_the_work_find_the_same(problem: Problem, result: SearchResult) -> None:
    seen: list[tuple[int, int]] = []
    shared = search(problem, 64, 7, lambda *at: seen.append(at), jobs=3)
    assert (shared.layouts_estimated, shared.feasible, shared.rejected) == (
        result.layouts_estimated,
        result.feasible,
        result.rejected,
    )
    for name in ("best", "best_of_sizes", "pareto"):
        mine, theirs = getattr(shared, name), getattr(result, name)
        np.testing.assert_array_equal(mine.times.seconds, theirs.times.seconds)
        np.testing.assert_array_equal(mine.memory.device, theirs.memory.device)
    assert shared.best_of_mode.keys() == result.best_of_mode.keys()
    assert len(seen) == 3 and seen[-1][0] == seen[-1][1]


def test_an_error_in_a_process_reaches_the_caller(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(sys.modules["solver.search.search"], "peak_memory", broken)
    with pytest.raises(ValueError, match="a defect"):
        search(problem, 64, 7, jobs=2)


def test_progress_reaches_the_end(problem: Problem) -> None:
    seen: list[tuple[int, int]] = []
    search(problem, 64, progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1] == len(enumerate_splits(problem, 64).splits)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_less_memory_is_never_faster(problem: Problem, result: SearchResult) -> None:
    tight = search(make_problem(MODEL, 16, problem.cost, cluster=cluster(7.0)), 64)
    assert tight.feasible < result.feasible and tight.best.times.seconds[0] >= result.best.times.seconds[0]
    assert (tight.best.memory.device <= 7 * 2**30).all() and (tight.pareto.memory.device <= 7 * 2**30).all()


def test_a_larger_top_starts_with_the_same_layouts(problem: Problem, result: SearchResult) -> None:
    one, many = search(problem, 64, top=1), search(problem, 64, top=50)
    assert len(one.best) == 1 and len(many.best) == 50
    np.testing.assert_allclose(many.best.times.seconds[:7], result.best.times.seconds, rtol=1e-12)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kv=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2]),
    d=st.sampled_from([16, 64]),
    layers=st.integers(1, 6),
    gated=st.booleans(),
    tied=st.booleans(),
    world=st.sampled_from([1, 2, 4, 8, 16]),
    sequences=st.sampled_from([4, 6, 16]),
    framework=st.sampled_from(["internevo", "megatron-lm"]),
    memory=st.sampled_from([1.7, 2.0, 80.0]),
)
def test_small_random_models(
    kv: int, group: int, d: int, layers: int, gated: bool, tied: bool, world: int, sequences: int, framework: str, memory: float
) -> None:
    model = ModelSpec(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=kv * group,
        num_key_value_heads=kv,
        head_dim=d,
        vocab_size=500,
        gated_mlp=gated,
        tie_word_embeddings=tied,
    )
    problem = make_problem(model, world, toy_cost(), seq_len=1024, cluster=cluster(memory), framework=framework)
    try:
        found, fits = brute_force(problem, sequences)
    except InputError as error:
        assert "no layout divides" in str(error)
        return
    rows = table(found.layouts)
    assert len(np.unique(rows, axis=0)) == len(rows)
    np.testing.assert_allclose(found.times.parts.sum(axis=0), found.times.seconds, rtol=1e-9)
    if not fits.any():
        with pytest.raises(InputError, match="fits on"):
            search(problem, sequences)
        return
    result = search(problem, sequences, top=3)
    np.testing.assert_allclose(result.best.times.seconds, np.sort(found.times.seconds[fits])[:3], rtol=1e-12)
    assert (result.layouts_estimated, result.feasible) == (len(found), fits.sum())
    for name, best in result.best_of_mode.items():
        mine = fits & (column(found.layouts, "mode") == TpMode[name.upper()])
        assert best.times.seconds[0] == pytest.approx(found.times.seconds[mine].min(), rel=1e-12)


# what cannot be searched


@pytest.mark.parametrize(
    ("world", "batch", "message"),
    [
        (0, 8, "world_size"),
        (-1, 8, "world_size"),
        (12, 12, "nodes"),
        (10**9, 8, "world_size"),
        (2**20 + 8, 8, "world_size"),
        (8, 0, "global_batch_sequences"),
        (8, -4, "global_batch_sequences"),
    ],
)
def test_invalid_world_sizes_and_batches(world: int, batch: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        search(make_problem(MODEL, world, toy_cost()), batch)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_batch_that_no_layout_divides_names_the_reasons() -> None:
    # 7 GPUs per node, 7 in all: heads, sequences and batch are not divisible by 7
    problem = make_problem(MODEL.replace(num_hidden_layers=4), 7, toy_cost(), cluster=cluster(80, gpus_per_node=7))
    with pytest.raises(InputError) as caught:
        search(problem, 8)
    sentence = str(caught.value)
    assert "no layout divides 7 GPUs" in sentence and "\n" not in sentence
    for reason in ("heads", "global batch", "stages than layers"):
        assert reason in sentence


def test_a_model_that_fits_nowhere_states_how_much_it_needs() -> None:
    problem = make_problem(MODEL, 8, toy_cost(), cluster=cluster(1.0))
    with pytest.raises(InputError) as caught:
        search(problem, 32)
    found, _ = brute_force(problem, 32)
    assert f"{found.memory.device.min() / 2**30:.3g} GiB of 1 GiB" in str(caught.value)
    assert f"{len(found):,}" in str(caught.value)


def test_a_large_world_is_quick(h100_model: CostModel) -> None:
    begin = process_time()  # of this process alone, however busy the machine is
    result = search(make_problem(MODEL, 128, h100_model), 1024)
    assert result.layouts_estimated > 80_000
    assert result.layouts_estimated / (process_time() - begin) > 50_000  # a fifth of the rate on one core of the build machine


def test_schedules_are_an_axis_where_the_framework_has_several() -> None:
    model = TINY.replace(num_hidden_layers=8)
    alone = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    zb = make_problem(model, 8, toy_cost(), 512, framework="megatron-lm-zero-bubble", **alone)
    found = search(zb, 32, top=500, fixed={"pp": 4, "vpp": 1, "tp": 1, "micro_batch_size": 1}).best
    layouts = [found.layouts.strategy(i, zb.run) for i in range(len(found))]
    assert {s.schedule for s in layouts} == {"1f1b", "zb-h1", "zb-1p", "zb-2p"}
    assert layouts[0].schedule == "zb-2p" and found.times.seconds[0] < found.times.seconds[-1]
    beside = make_problem(model, 8, toy_cost(), 512, framework="megatron-lm-zero-bubble")
    whole = search(beside, 32, top=500).best
    assert {whole.layouts.strategy(i, beside.run).schedule for i in range(len(whole))} == {"1f1b", "interleaved"}
    core = make_problem(model, 8, toy_cost(), 512, framework="megatron-core")
    kept = search(core, 32, top=500).best
    assert {kept.layouts.strategy(i, core.run).schedule for i in range(len(kept))} == {"1f1b", "interleaved"}
    only = search(zb, 32, top=500, fixed={"schedule": "zb-h1"}).best
    assert {only.layouts.strategy(i, zb.run).schedule for i in range(len(only))} == {"zb-h1"}


def test_an_explicit_layout_runs_the_schedule_that_it_states() -> None:
    problem = make_problem(TINY.replace(num_hidden_layers=8), 8, toy_cost(), 512, framework="generic")
    layout = problem.layout(pp=4, dp=2, num_micro_batches=8, zero=0)
    found = estimate(problem, [layout.replace(schedule=name) for name in ("1f1b", "gpipe", "zb-h1", "zb-2p")])
    one, gpipe, h1, two = found.times.seconds
    assert two < h1 < one == gpipe  # GPipe takes as long as 1F1B and holds all eight micro batches instead of four
    memory = found.memory.parts[MEMORY_PARTS.index("activations")]
    assert memory[1] == 2 * memory[0]
    with pytest.raises(InputError, match="interleaves 1F1B, and schedule gpipe has one chunk a stage"):
        estimate(problem, [layout.replace(schedule="gpipe", vpp=2)])
    core = make_problem(TINY.replace(num_hidden_layers=8), 8, toy_cost(), 512, framework="megatron-core")
    with pytest.raises(InputError, match="megatron-core-0.12 does not offer schedule gpipe"):
        estimate(core, [core.layout(pp=4, dp=2, num_micro_batches=8, zero=0, schedule="gpipe")])


def test_a_share_of_a_stage_is_recomputed_in_each_of_its_chunks() -> None:
    # 16 layers in 4 stages: of 4 layers a quarter, a half and three quarters in one chunk; in each of two chunks of 2 layers
    # one; in chunks of one layer each nothing between none and all
    problem = make_problem(TINY.replace(num_hidden_layers=16), 4, toy_cost(), framework="megatron-core")
    layouts = all_layouts(problem, 16)
    found: dict[int, set[int]] = {}
    for pp, vpp, level, layers in zip(
        column(layouts, "pp").tolist(),
        column(layouts, "vpp").tolist(),
        layouts.recompute.tolist(),
        layouts.recompute_layers.tolist(),
        strict=True,
    ):
        if pp == 4 and level == Recompute.FULL:
            found.setdefault(vpp, set()).add(layers)
    assert found == {1: {1, 2, 3, -1}, 2: {2, -1}, 4: {-1}}


@pytest.mark.parametrize(
    ("framework", "constants", "reason"),
    [
        ("torchtitan", {"micro_batch_group": 6}, "micro_batch_group needs interleaved stages"),
        ("torchtitan", {"pipeline_layout": "Et|t|t|tL"}, "interleaving needs micro batches in multiples of pp"),
        ("internevo", {"pipeline_layout": "Et|t|t|tL"}, "internevo-2023 interleaves stages only with p2p_overlap"),
    ],
)
def test_why_a_pipeline_has_no_runs_is_the_rule_that_none_obeys(framework: str, constants: dict[str, Any], reason: str) -> None:
    model = TINY.replace(num_hidden_layers=4 if "pipeline_layout" in constants else 2)
    problem = make_problem(model, 2, toy_cost(), framework=framework, **constants)
    rejected: Counter[str] = Counter()
    assert not pipelines(problem, 2, 7, rejected) and list(rejected) == [reason]
