"""Layout strings of pipelines: read by hand, round trip, and the same answer as an even division that they only spell out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import estimated, make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.schedule.kinds import BACKWARD, FORWARD
from solver.schedule.op_orders import stage_order
from solver.schedule.stages import stated_layers_in_flight
from solver.search.search import search
from solver.spec.choices import SCHEDULES
from solver.spec.feasibility import check_layout
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers, layout_text, predicted_layers, predicts_apart, with_predicted
from solver.spec.strategy import Strategy
from solver.step.per_stage import chunks_of, layers_of_stages, memory_of_stages

LLAMA = ModelSpec(
    name="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32000,
)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et*2|(tt|)*5t|tmL", (2, 2, 2, 2, 2, 2, 1, 1)),
        ("E|t*3|(t|tt|)*2L", (0, 3, 1, 2, 1, 2, 0)),
        ("Ett,|ttL", (2, 2)),
        ("Et*15|((t|)*2tt|)*2mL", (15, 1, 1, 2, 1, 1, 2, 0)),
        ("Et*3|(tt|)*29m|L", (3, *[2] * 29, 0, 0)),  # DeepSeek-V3 on 16 stages, as NVIDIA runs it
    ],
)
def test_layouts_by_hand(text: str, layers: tuple[int, ...]) -> None:
    assert chunk_layers(text) == layers


def test_prediction_in_a_chunk_of_its_own_is_said_to_be_left_out() -> None:
    for text, apart in (("Et*3|(tt|)*29m|L", True), ("Et*3|(tt|)*30mL", False), ("Et|tL", False), ("", False)):
        assert predicts_apart(text) == apart
        run = Strategy(world_size=8, seq_len=64, pp=4, vpp=1, dp=2, pipeline_layout=text)
        assert any("multi-token" in line for line in run.unmodelled) == apart


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(0, 2))
def test_a_layout_reads_as_it_was_written(chunks: list[int], predicts: int) -> None:
    assert chunk_layers(layout_text(chunks, predicts)) == tuple(chunks)


@pytest.mark.parametrize(
    "text",
    ["", "t|tL", "Et*4L", "Et|t|t", "EtL|t", "Et|x|tL", "Et|tE|tL", "((((", "Et|tmL|L", "Et|tm|t|L", "Et|m|tmL", "E(t*9)*9)"],
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="pipeline_layout"):
        chunk_layers(text)


@pytest.mark.parametrize(("pp", "vpp", "text"), [(4, 1, "Et*4|t*4|t*4|t*4L"), (4, 2, "Ett|(tt|)*6ttL")])
def test_layers_dealt_evenly_are_the_even_division(h100_model: CostModel, pp: int, vpp: int, text: str) -> None:
    base = {"pp": pp, "vpp": vpp, "dp": 2, "zero": 1, "zero_shard_size": 2, "num_micro_batches": 8}
    plain, stated = (
        make_problem(LLAMA, 8, h100_model, framework="megatron-core", **({"pipeline_layout": given_} if given_ else {}))
        for given_ in ("", text)
    )
    one, other = (estimated(problem, [problem.layout(**base)]) for problem in (plain, stated))
    check_layout(LLAMA, stated.cluster, stated.layout(**base))
    assert one.times.seconds[0] == pytest.approx(other.times.seconds[0], rel=1e-12)
    np.testing.assert_allclose(memory_of_stages(one, 0).parts, memory_of_stages(other, 0).parts, rtol=1e-12)
    assert chunk_layers(layout_text(chunks_of(one, 0))) == chunks_of(other, 0) == chunk_layers(text)


def test_a_light_last_stage_makes_the_step_faster(h100_model: CostModel) -> None:
    base = {"pp": 4, "dp": 2, "zero": 1, "zero_shard_size": 2, "num_micro_batches": 16}
    seconds = {}
    for text in ("Et*4|t*4|t*4|t*4L", "Et*4|t*5|t*4|t*3L", "Et*7|t*3|t*3|t*3L"):
        problem = make_problem(LLAMA.replace(vocab_size=128000), 8, h100_model, framework="megatron-core", pipeline_layout=text)
        found = estimated(problem, [problem.layout(**base)])
        assert layers_of_stages(found, 0).tolist() == list(chunk_layers(text))
        seconds[text] = found.times.seconds[0]
    even, light, heavy = seconds.values()
    assert light < 0.95 * min(even, heavy), "the head is worth a layer and more"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline_layout": "Et*4|t*4|t*4|t*3L"}, "assigns 15 layers to 4 chunks, but there are 16 layers"),
        ({"pipeline_layout": "Et*8|t*8L"}, "pp 4"),
        ({"framework": "deepspeed"}, "does not offer pipeline_layout"),
        ({"account_for_loss_in_pipeline_split": True}, "pipeline_layout says what every stage holds"),
    ],
)
def test_layouts_that_do_not_belong_are_refused(h100_model: CostModel, changes: dict[str, object], sentence: str) -> None:
    problem = make_problem(LLAMA, 8, h100_model, framework="megatron-core")
    run = problem.layout(pp=4, dp=2, num_micro_batches=8, pipeline_layout="Et*4|t*4|t*4|t*4L")
    with pytest.raises(InputError, match=sentence):
        check_layout(LLAMA, problem.cluster, run.replace(**changes))


@pytest.mark.parametrize(
    ("framework", "layout", "sentence"),
    [
        ("fsdp", "Et*8|t*8L", "fsdp.* does not offer pipeline_layout"),
        ("megatron-core", "Et*7|t*8L", "pipeline_layout holds 15 layers; .* has 16"),
    ],
)
def test_a_search_refuses_a_layout_of_another_model(framework: str, layout: str, sentence: str, h100_model: CostModel) -> None:
    with pytest.raises(InputError, match=sentence):
        search(make_problem(LLAMA, 8, h100_model, framework=framework, pipeline_layout=layout), 64)


@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(1, 6))
def test_layers_in_flight_are_counted(chunks: list[int], groups: int) -> None:
    pp, m = 2, 2 * groups
    for stage in range(pp):
        order = stage_order("interleaved", stage, pp, m, 2)
        held = most = 0
        for kind, chunk, _ in order.tolist():
            held += chunks[chunk * pp + stage] * ((kind == FORWARD) - (kind == BACKWARD))
            most = max(most, held)
        columns = (np.array([value]) for value in (SCHEDULES.index("interleaved"), m, pp))
        assert stated_layers_in_flight(*columns, chunks, np.array([stage]))[0] == most


@pytest.mark.parametrize(
    ("text", "held", "written"),
    [("Et*3|t*4L", 0, "Et*3|t*4mmL"), ("Et*3|t*4m*2L", 2, "Et*3|t*4m*2L"), ("Et|(tt|)*3m|L", 1, "Et|(tt|)*3m|L")],
)
def test_multi_token_prediction_is_written_beside_the_loss_unless_it_is_stated(text: str, held: int, written: str) -> None:
    assert predicted_layers(text) == held
    assert with_predicted(text, 2) == written
