"""Axes that a search is told to keep: the same layouts as in the whole search, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import all_layouts, column, make_problem, toy_cost

from profiler.errors import InputError
from solver import load_problem
from solver.formats.config_file import RunConfig
from solver.options.axes import parse_fixed, parse_varied
from solver.options.batch import rounded_batch
from solver.search.divisions import divisions
from solver.search.fixed import fixed_but
from solver.search.pipelines import pipelines
from solver.search.search import search
from solver.search.space import cross, enumerate_splits
from solver.spec.choices import SCHEDULES, V_SHAPED, Recompute, TpMode
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.step.solutions import estimate_layouts

MODEL = ModelSpec(
    name="small",
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=1000,
)


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 2},
        {"tp": 2, "pp": 2, "vpp": 2},
        {"tp_mode": "isp"},
        {"zero": 1, "recompute": "full"},
        {"recompute_layers": 2},
        {"dp": 4, "micro_batch_size": 2, "zero_shard_size": 2},
    ],
)
def test_a_fixed_search_is_the_whole_one_filtered(fixed: dict[str, Any]) -> None:
    problem = make_problem(MODEL, 16, toy_cost(), 512, framework="internevo-2024", p2p_overlap=True)
    layouts = all_layouts(problem, 32)
    keep = np.ones(len(layouts), dtype=bool)
    for name, value in fixed.items():
        own = (
            layouts.splits.mode[layouts.row]
            if name == "tp_mode"
            else (getattr(layouts, name) if hasattr(layouts, name) else column(layouts, name))
        )
        code = TpMode[value.upper()] if name == "tp_mode" else Recompute[value.upper()] if name == "recompute" else value
        keep &= own == int(code)
    found = search(problem, 32, top=5, fixed=fixed)
    times = np.sort(estimate_layouts(problem, layouts.take(np.flatnonzero(keep))).times.seconds)
    assert found.layouts_estimated == keep.sum() > 0
    np.testing.assert_allclose(found.best.times.seconds, times[: len(found.best)], rtol=1e-12)
    for name, value in fixed.items():
        assert {getattr(found.best.layouts.strategy(i, problem.run), name) for i in range(len(found.best))} == {value}


def test_the_text_of_the_option() -> None:
    assert parse_fixed("tp=8, recompute=full,zero=1") == {"tp": 8, "recompute": "full", "zero": 1}
    assert parse_fixed("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=8", "tpp is no axis of a search (did you mean 'tp'?); axes are tp"),
        ("tp", "give each axis once, as in tp=8"),
        ("tp=8,tp=4", "give each axis once"),
        ("tp=0", "tp is 0; it must be a whole number of at least 1"),
        ("tp=two", "tp is 'two'; it must be a whole number"),
        ("schedule=dualpipe", "dualpipev (DualPipe with pp stages is dualpipev with half as many and twice the replicas"),
        ("zero=4", "zero is 4; it must be one of 0, 1, 2, 3"),
        ("recompute=some", "recompute is 'some'; it must be one of none"),
    ],
)
def test_texts_that_fix_nothing(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_fixed(text)
    assert message in str(error.value)


def test_what_no_layout_has_is_named() -> None:
    problem = make_problem(MODEL, 16, toy_cost(), 512)
    with pytest.raises(InputError, match="no layout of this search has tp 3"):
        search(problem, 32, fixed={"tp": 3})
    with pytest.raises(InputError, match="no layout of this search has recompute_layers 7"):
        search(problem, 32, fixed={"recompute_layers": 7})


def test_axes_are_not_constants_and_batches_have_a_unit() -> None:
    with pytest.raises(InputError, match=r"zero is an axis of a search: fix it with search\(..., fixed="):
        load_problem("configs/7B_internlm2.py", 64, zero=1)
    problem = make_problem(MODEL, 16, toy_cost(), 512)
    by_tokens, by_sequences = search(problem, global_batch_tokens=32 * 512), search(problem, global_batch_sequences=32)
    assert by_tokens.best.times.seconds.tolist() == by_sequences.best.times.seconds.tolist()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "either as global_batch_sequences or as global_batch_tokens"),
        ({"global_batch_tokens": 1000}, "global_batch_tokens 1000 is not a whole number of sequences of 512 tokens"),
        ({"global_batch_sequences": 1, "global_batch_tokens": 512}, "either as"),
    ]
    for arguments, message in wrong:
        with pytest.raises(InputError, match=message):
            search(problem, **arguments)


def test_a_search_of_some_axes_keeps_the_others_as_the_layout_has_them() -> None:
    problem = make_problem(MODEL, 16, toy_cost(), 512, framework="internevo-2024")
    layout = problem.layout(tp=2, tp_mode="msp", dp=8, zero=1, recompute="full", recompute_layers=-1)
    settings = ("tp_mode", "recompute", "recompute_layers", "micro_batch_size")
    fixed = fixed_but(("tp", "pp"), {"zero": 0}, layout, stated=settings)
    assert "dp" not in fixed and "num_micro_batches" not in fixed and "zero_shard_size" not in fixed and "tp" not in fixed
    assert fixed["zero"] == 0 and fixed["recompute"] == "full" and fixed["tp_mode"] == "msp" and fixed["vpp"] == 1
    found = search(problem, 32, top=1000, fixed=fixed | {"zero_shard_size": 1}).best
    layouts = [found.layouts.strategy(i, problem.run) for i in range(len(found))]
    assert {(s.tp_mode, s.recompute, s.zero, s.micro_batch_size, s.cp) for s in layouts} == {("msp", "full", 0, 1, 1)}
    assert {s.tp for s in layouts} == {2, 4} and {s.pp for s in layouts} == {1, 2, 4, 8}  # msp: tp 1 is mtp; 128 tokens a rank
    with pytest.raises(InputError, match="tp is both fixed and searched"):
        fixed_but(("tp",), {"tp": 2}, layout, ())
    assert fixed_but(("tp",), {}, layout, ("zero_shard_size",))["zero_shard_size"] == 1
    # of a model's file, which states no layout, sizes are 1 and settings free
    assert fixed_but(("cp",), {"tp": 2}, layout, ()) == {"tp": 2, "wp": 1, "ep": 1, "etp": 1, "pp": 1, "vpp": 1}
    with pytest.raises(InputError, match="has tp 3, whatever else is fixed: tp 3 does not divide the model's heads"):
        search(problem, 32, fixed={"pp": 1, "tp": 3})
    with pytest.raises(InputError, match=r"has tp 4 together with what else is fixed \(pp 8\): tp \* pp is 32, which"):
        search(problem, 32, fixed={"pp": 8, "tp": 4})


@pytest.mark.parametrize(
    ("framework", "fixed", "max_sizes", "message"),
    [
        ("megatron-core", {"tp": 4}, {"tp": 2}, "tp 4 within --max-tp 2; raise the limit or fix less"),
        ("megatron-core", {"vpp": 2}, {"pp": 1, "tp": 8}, "vpp 2 within --max-pp 1; raise the limit or fix less"),
        ("megatron-core", {"dp": 1}, {"pp": 2, "tp": 2, "cp": 1}, "dp 1 within --max-pp 2 and --max-tp 2 and --max-cp 1;"),
        ("megatron-core", {"cp": 4, "pp": 8}, {}, "pp 8 together with what else is fixed (cp 4): cp * pp is 32, which"),
        (
            "megatron-core",
            {"tp": 32},
            {},
            "tp 32, whatever else is fixed: tp 32 does not divide the model's heads and MLP "
            "width, and tp is 32, which does not divide world_size 16",
        ),
        ("megatron-core", {"pp": 9}, {}, "pp 9, whatever else is fixed: pp 9 is more than the model's 8 layers, and pp is 9, "),
        ("megatron-core", {"ep": 2}, {}, "ep 2, whatever else is fixed: ep 2 * etp 1: small has no experts"),
        ("megatron-core", {"etp": 2}, {}, "ep 1 * etp 2: small has no experts"),
        ("megatron-core", {"wp": 2}, {}, "does not offer tp_mode isp"),
        ("megatron-core", {"tp_mode": "isp"}, {}, "does not offer tp_mode isp"),
        ("megatron-core", {"schedule": "zb-h1"}, {}, "does not offer schedule zb-h1"),
        ("megatron-core", {"schedule": "gpipe"}, {}, "does not offer schedule gpipe"),
        ("llm-foundry", {"pp": 4}, {}, "llm-foundry-2024: has no pipeline parallelism, so it does not run 8 layers in 4"),
        ("megatron-core", {"zero": 2}, {}, "has zero 2: megatron-core-0.12 does not offer ZeRO-2"),
        ("megatron-core", {"zero": 3, "pp": 2}, {}, "does not offer ZeRO-3 with a pipeline of 2 stages"),
        ("torchtitan", {"zero": 1}, {}, "does not offer ZeRO-1"),
        ("megatron-core", {"vpp": 2, "pp": 1}, {}, "vpp 2 interleaves pipeline stages, but pp is 1"),
        (
            "megatron-core",
            {"dp": 16, "micro_batch_size": 4},
            {},
            "dp * micro_batch_size is 64, which does not divide the global batch of 32 sequences",
        ),
        ("megatron-core", {"zero_shard_size": 32}, {}, "zero_shard_size is 32, which does not divide the 16 ranks of a"),
        ("megatron-core", {"recompute_layers": 7}, {}, "a search recomputes 0.25, 0.5, 0.75 of a stage's layers, rounded up"),
    ],
)
def test_why_no_layout_has_what_is_fixed(
    framework: str, fixed: dict[str, Any], max_sizes: dict[str, int], message: str
) -> None:
    config = RunConfig("small", MODEL, {}, 512, Path("small.json"))
    problem = load_problem(config, 16, profile="h100_sxm", framework=framework)
    with pytest.raises(InputError) as error:
        search(problem, 32, fixed=fixed, max_sizes=max_sizes)
    assert str(error.value).startswith("no layout of this search has ") and message in str(error.value)
    assert "()" not in str(error.value)


def test_limits_leave_out_what_exceeds_them() -> None:
    problem = make_problem(MODEL, 16, toy_cost(), 512)
    whole, limited = search(problem, 32, top=1), search(problem, 32, top=1000, max_sizes={"pp": 2, "tp": 4})
    layouts = [limited.best.layouts.strategy(i, problem.run) for i in range(len(limited.best))]
    assert max(s.pp for s in layouts) == 2 and max(s.tp for s in layouts) == 4
    assert limited.layouts_estimated < whole.layouts_estimated
    for max_sizes, message in (({"pp": 0}, "pp is 0"), ({"vpp": 2}, "vpp cannot be limited; sizes that can be are tp, cp, pp")):
        with pytest.raises(InputError, match=message):
            search(problem, 32, max_sizes=max_sizes)


@pytest.mark.parametrize(("text", "axes"), [("tp, cp", ("tp", "cp")), ("tp,tp", ("tp",))])
def test_the_text_of_searched_axes(text: str, axes: tuple[str, ...]) -> None:
    assert parse_varied(text) == axes


@pytest.mark.parametrize("text", ["", "experts", "tp;cp"])
def test_texts_that_name_no_axis(text: str) -> None:
    with pytest.raises(InputError, match="give axes, as in tp,cp"):
        parse_varied(text)


@pytest.mark.parametrize(
    ("tokens", "group", "expected"),
    [
        (4_000_000, 96, 960),
        (2**22, 96, 1056),
        (2**22, 128, 1024),
        (100_000, 96, 24),
        (1, 96, 1),
        (2**22, 3072, 1152),
        (2**22, 192, 960),
    ],
)  # 4,000,000 / 4096 = 976.6 -> 10 x 96; 1024 -> 11 x 96 (10.67); 100,000 tokens are fewer than 96 sequences: 24.4 -> 24;
# of 3072 = 3 x 1024 ranks 768 sequences would leave out a quarter, 3 x 384 add an eighth; 1024 -> 5 x 192
def test_rounded_batches(tokens: int, group: int, expected: int) -> None:
    sequences, note = rounded_batch(tokens, 4096, True, group)
    assert sequences == expected and bool(note) == (expected * 4096 != tokens)
    if tokens % 4096:
        with pytest.raises(InputError, match="or --round_batch"):
            rounded_batch(tokens, 4096, False, group)


@pytest.mark.parametrize("mode", [{"tp_mode": "msp"}, {}])
def test_the_reason_is_one_that_every_layout_has(mode: dict[str, Any]) -> None:
    """Without sequence parallelism experts do not run either, but with it they still have too few kv heads."""
    problem = load_problem("configs/models/qwen3_30b_a3b.json", 64, profile="h100_sxm", framework="megatron-core")
    of = r"megatron-core-0.12 does not run tp 8 of 4 kv heads \(Megatron-Core 0.16 does, by gathering q, k and v, which is not"
    with pytest.raises(InputError, match="has tp 8, whatever else is fixed: " + of):
        search(problem, 64, fixed={"tp": 8, **mode})


@pytest.mark.parametrize(
    ("ends", "chunks"),
    [((3, 3), {1, 3}), ((2, 3), set()), ((4, 4), {1, 2}), ((0, 3), {1, 3}), ((7, 0), set()), ((9, 0), {1})],
)
def test_end_stages_that_the_user_states_are_searched_as_stated(ends: tuple[int, int], chunks: set[int]) -> None:
    """12 layers, pp 4: two middle stages share what the ends leave, or three where only one end is stated."""
    problem = make_problem(MODEL.replace(num_hidden_layers=12), 8, toy_cost(), 512, framework="megatron-core")
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    fixed = {"pp": 4, **{name: size for name, size in zip(names, ends, strict=True) if size}}
    if not chunks:
        with pytest.raises(InputError, match="no layout (of this search has|divides .* the stated end stages leave layers)"):
            search(problem, 32, fixed=fixed)
        return
    splits = enumerate_splits(problem, 32, ends).splits
    found = splits.take(splits.pp == 4)
    assert set(found.vpp.tolist()) == chunks
    result = search(problem, 32, fixed=fixed)
    best = result.best.layouts.strategy(0, problem.run)
    assert (best.num_layers_in_first_pipeline_stage, best.num_layers_in_last_pipeline_stage) == ends
    every = estimate_layouts(problem, cross(problem, found))
    fits = every.memory.device <= problem.cluster.memory_bytes
    assert result.best.times.seconds[0] == pytest.approx(every.times.seconds[fits].min(), rel=1e-12)
    for index in range(0, len(every.layouts), 97):
        check_layout(problem.model, problem.cluster, every.layouts.strategy(index, problem.run))


def test_stated_end_stages_are_offered_where_the_framework_runs_them() -> None:
    """Two stages hold all layers, none is left over; frameworks without pipelines have no stages, V-shaped ones equal ones."""
    internevo, ddp = (framework_of(name).can_run for name in ("internevo-2024", "fsdp"))
    assert [vpp for vpp, _ in divisions(internevo, 12, 2, 0, 5, 7)] == [1] and divisions(internevo, 12, 2, 0, 1, 1) == ()
    assert divisions(ddp, 12, 2, 0, 5, 7) == divisions(ddp, 12, 4, 0, 3, 3) == ()
    problem = make_problem(MODEL.replace(num_hidden_layers=12), 8, toy_cost(), 512, framework="primus-2026", p2p_overlap=True)
    found = pipelines(problem, 4, 16, Counter(), (6, 0))
    assert {run.vpp for run in found} == {1, 2} and not {SCHEDULES[run.schedule] for run in found} & set(V_SHAPED)


def test_what_is_fixed_at_one_is_named_where_nothing_fits() -> None:
    problem = load_problem("configs/models/llama3_70b.json", 16, profile="h100_sxm", framework="megatron-core")
    with pytest.raises(InputError, match="use more GPUs or more memory; tp, pp are fixed at 1: leave that free"):
        search(problem, 16, fixed={"tp": 1, "pp": 1})
    with pytest.raises(InputError, match="or more memory$"):
        search(problem.for_world(8), 16, fixed={"tp": 8})


def test_a_framework_that_only_shards_says_so_on_one_gpu() -> None:
    problem = load_problem("qwen3_0_6b", 1, framework="fsdp2")
    said = "fsdp2 has no layout for 1 GPU: it runs ZeRO-2 or ZeRO-3, which shard over two GPUs or more"
    with pytest.raises(InputError, match=f"^{said}$"):
        search(problem, 32)
    pair = load_problem("qwen3_0_6b", 2, framework="fsdp2")
    assert search(pair, 32, 1).best.layouts.strategy(0, pair.run).zero >= 2
