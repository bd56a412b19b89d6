"""Layout strings of stages whose layers do not divide: equal chunks by hand and in general; what a search finds with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.formats.config_file import load_run_config
from solver.search.divisions import Division, divisions
from solver.search.laid_out import even_chunks, layouts_of, search_with_strings
from solver.search.search import search
from solver.search.variants import search_variants
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers

#: 13 layers divide by no number of stages above 1, with embedding and loss as layers only by 7, 3 and 5.
PRIME = ModelSpec(
    name="prime",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=13,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    vocab_size=32000,
)


def test_deepseek_v3s_published_layout_is_found() -> None:
    # 61 layers, the embedding, the loss and one module of multi-token prediction: two of them in each of 32 chunks
    model = load_run_config("configs/models/deepseek_v3.json").model
    assert even_chunks(61, 1, 32) == (1, *[2] * 30, 0)
    assert even_chunks(61, 1, 24) == (1, *[3] * 16, *[2] * 6, 0)
    assert even_chunks(61, 1, 20) is None, "chunks of four would be a fifth empty"
    assert even_chunks(61, 1, 64) is None, "one of 62 chunks between the ends would be empty"
    assert (model.num_hidden_layers, model.num_nextn_predict_layers) == (61, 1)


@given(st.integers(4, 130), st.integers(0, 2), st.integers(2, 64))
def test_chunks_hold_all_layers_nearly_evenly(layers: int, predicted: int, chunks: int) -> None:
    sizes = even_chunks(layers, predicted, chunks)
    if sizes is None:
        return
    assert sum(sizes) == layers and len(sizes) == chunks
    weights = [sizes[0] + 1, *sizes[1:-1], sizes[-1] + 1 + predicted]
    assert max(weights) - min(weights) <= 2 and min(weights) >= 1
    assert min(sizes[1:-1], default=1) >= 1, "Megatron-Core has no empty chunks between the ends"


def test_strings_are_for_stages_that_do_not_interleave_otherwise(h100_model: CostModel) -> None:
    problem = make_problem(PRIME, 8, h100_model, framework="megatron-core")
    assert layouts_of(problem, 1) == {}
    assert {vpp: chunk_layers(text) for vpp, text in layouts_of(problem, 4).items()} == {2: (1, 2, 2, 2, 2, 2, 2, 0)}
    even = make_problem(PRIME.replace(num_hidden_layers=16), 8, h100_model, framework="megatron-core")
    assert layouts_of(even, 4) == {}
    assert layouts_of(make_problem(PRIME, 8, h100_model, framework="megatron-core-0.8"), 4) == {}, "strings came with 0.13"


def test_a_stated_layout_has_one_division() -> None:
    can_run = framework_of("megatron-core").can_run
    assert divisions(can_run, 13, 4, 8) == ((2, Division()),)
    assert divisions(can_run, 13, 3, 8) == divisions(can_run, 13, 1, 8) == ()


def test_interleaving_with_a_string_is_found_and_runs(h100_model: CostModel) -> None:
    problem = make_problem(PRIME, 8, h100_model, framework="megatron-core")
    variants, best = search_with_strings(problem, 64, fixed={"tp": 1, "pp": 4})
    assert {variant.constants["pipeline_layout"] for variant in variants} == {"", "Et|(t*2|)*6L"}
    assert [variant.seconds for variant in variants] == sorted(variant.seconds for variant in variants)
    run = best.best.layouts.strategy(0, best.problem.run)
    assert (run.pp, run.vpp, run.pipeline_layout) == (4, 2, "Et|(t*2|)*6L")
    check_layout(PRIME, best.problem.cluster, run)
    assert best.best.times.seconds[0] < search(problem, 64, fixed={"tp": 1, "pp": 4}).best.times.seconds[0]


def test_strings_are_searched_where_nothing_runs_without(h100_model: CostModel) -> None:
    """The overlapped exchange needs interleaved stages, which 13 layers have in strings alone."""
    model = PRIME.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=4096)
    given = {"framework": "megatron-core", "moe_dispatcher": "deepep", "moe_exchange_overlap": True}
    problem = make_problem(model, 8, h100_model, **given)
    fixed = {"tp": 1, "pp": 4, "ep": 2}
    with pytest.raises(InputError):
        search(problem, 64, fixed=fixed)
    variants, best = search_with_strings(problem, 64, fixed=fixed)
    assert [variant.constants["pipeline_layout"] for variant in variants] == ["Et|(t*2|)*6L"]
    assert best.problem.run.moe_exchange_overlap


def test_each_combination_of_constants_gets_its_strings(h100_model: CostModel) -> None:
    """A search that varies a constant finds for each value what a search of that value alone does."""
    problem = make_problem(PRIME, 8, h100_model, framework="megatron-core")
    fixed = {"tp": 2, "pp": 4}
    found, fastest = search_variants(problem, 64, {"tp_comm_overlap": ()}, fixed=fixed)
    best = {overlap: min(v.seconds for v in found if v.constants["tp_comm_overlap"] == overlap) for overlap in (False, True)}
    for overlap, seconds in best.items():
        alone = search_with_strings(problem.with_run(tp_comm_overlap=overlap), 64, fixed=fixed)[1]
        assert seconds == float(alone.best.times.seconds[0])
    assert float(fastest.best.times.seconds[0]) == min(best.values())
    assert {v.constants["pipeline_layout"] for v in found} == {"", "Et|(t*2|)*6L"}


def test_a_stated_number_of_chunks_is_searched_with_strings(h100_model: CostModel) -> None:
    """13 layers in 4 stages are interleaved by no equal chunks: vpp 2 runs with a string, vpp 16 with none."""
    problem = make_problem(PRIME, 8, h100_model, framework="megatron-core")
    variants, best = search_with_strings(problem, 64, fixed={"tp": 1, "pp": 4, "vpp": 2})
    assert [variant.constants for variant in variants] == [{"pipeline_layout": "Et|(t*2|)*6L"}]
    assert best.best.layouts.strategy(0, best.problem.run).vpp == 2
    free = search_with_strings(problem, 64, fixed={"tp": 1, "pp": 4})[1]
    assert free.best.times.seconds[0] == pytest.approx(best.best.times.seconds[0], rel=1e-12)
    with pytest.raises(InputError, match="no layout of this search has vpp 16"):
        search_with_strings(problem, 64, fixed={"tp": 1, "pp": 4, "vpp": 16})


def test_nothing_more_is_searched_where_no_string_applies(h100_model: CostModel) -> None:
    problem = make_problem(PRIME, 8, h100_model, framework="megatron-core")
    for fixed in ({"tp": 1, "pp": 4, "vpp": 1}, {"pp": 1}):
        variants, best = search_with_strings(problem, 64, fixed=fixed)
        assert variants == [] and not best.problem.run.pipeline_layout
    assert search_with_strings(problem, 64, fixed={"tp": 1}, max_sizes={"pp": 2})[1].best.layouts.splits.pp.max() <= 2


def test_the_most_even_chunks_come_first_and_the_rest_only_where_they_may_win(h100_model: CostModel) -> None:
    """Of 29 layers in 4 stages the string of two chunks of four holds 31 with the ends, one less than the chunks have room."""
    problem = make_problem(PRIME.replace(num_hidden_layers=29), 8, h100_model, framework="megatron-core")
    assert set(layouts_of(problem, 4)) > {2, 4}
    every = {
        vpp: search(problem.with_run(pipeline_layout=text), 64, fixed={"pp": 4, "vpp": vpp, "tp": 1})
        for vpp, text in layouts_of(problem, 4).items()
    }
    fastest = min(float(one.best.times.seconds[0]) for one in every.values())
    found = search_with_strings(problem, 64, fixed={"pp": 4, "tp": 1})[1]
    assert float(found.best.times.seconds[0]) == fastest
