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
from solver.search.laid_out import even_chunks, layouts_of, search_laid_out, search_with_strings
from solver.search.search import SearchResult, search
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers

#: 13 layers divide by no number of stages above 1, with embedding and loss as layers only by 7, 3 and 5.
PRIME = ModelSpec(
    name="prime", hidden_size=2048, intermediate_size=8192, num_hidden_layers=13, num_attention_heads=16,
    num_key_value_heads=16, head_dim=128, vocab_size=32000,
)  # fmt: skip


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


@pytest.fixture(scope="module")
def searched(h100_model: CostModel) -> SearchResult:
    return search(make_problem(PRIME, 8, h100_model, framework="megatron-core"), 64, fixed={"tp": 1, "pp": 4})


def test_interleaving_with_a_string_is_found_and_runs(searched: SearchResult) -> None:
    variants, best = search_laid_out(searched)
    assert {variant.constants["pipeline_layout"] for variant in variants} == {"", "Et|(t*2|)*6L"}
    assert [variant.seconds for variant in variants] == sorted(variant.seconds for variant in variants)
    run = best.best.layouts.strategy(0, best.problem.run)
    assert (run.pp, run.vpp, run.pipeline_layout) == (4, 2, "Et|(t*2|)*6L")
    check_layout(PRIME, best.problem.cluster, run)
    assert best.best.times.seconds[0] < searched.best.times.seconds[0]


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


def test_nothing_more_is_searched_where_no_string_applies(searched: SearchResult, h100_model: CostModel) -> None:
    problem = make_problem(PRIME, 8, h100_model, framework="megatron-core")
    flat = search(problem, 64, fixed={"tp": 1, "pp": 4, "vpp": 1})
    assert search_laid_out(flat) == ([], flat)
    single = search(problem, 64, fixed={"pp": 1})
    assert search_laid_out(single) == ([], single)
