"""Time and memory of every stage: the slowest and the fullest one are those of the estimate."""

from __future__ import annotations

import numpy as np
import pytest
from toy import estimated, make_problem, some_layouts, toy_cost

from solver.spec.model import ModelSpec
from solver.step.memory import MEMORY_PARTS
from solver.step.per_stage import layers_of_stages, memory_of_stages, slowest_stage, time_of_stages
from solver.step.solutions import estimate_layouts
from solver.step.time import TIME_PARTS

MODEL = ModelSpec(
    name="small",
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=14,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=1000,
)


@pytest.mark.parametrize(
    ("framework", "layers"), [("megatron-core", 14), ("internevo-2024", 13), ("aleph alpha", 14), ("torchtitan", 14)]
)
def test_the_slowest_and_the_fullest_stage_are_those_of_the_estimate(framework: str, layers: int) -> None:
    problem = make_problem(MODEL.replace(num_hidden_layers=layers), 16, toy_cost(), 512, framework=framework)
    found = estimate_layouts(problem, some_layouts(problem, 32, 150, seed=3))
    seen = set()
    for index in range(len(found)):
        pp = int(found.layouts.splits.pp[found.layouts.row[index]])
        counts, times, memory = layers_of_stages(found, index), time_of_stages(found, index), memory_of_stages(found, index)
        assert len(counts) == times.shape[1] == memory.parts.shape[1] == pp and counts.sum() == layers
        np.testing.assert_allclose(times.sum(axis=0), found.times.seconds[index], rtol=1e-12)
        slowest = int(np.argmin(times[TIME_PARTS.index("bubble")]))
        np.testing.assert_allclose(times[:, slowest], found.times.parts[:, index], rtol=1e-9, atol=1e-15)
        assert (times[TIME_PARTS.index("bubble")] >= -1e-12 * found.times.seconds[index]).all()
        np.testing.assert_allclose(memory.parts.sum(axis=0), memory.allocated, rtol=1e-12)
        fullest = int(np.argmax(memory.device))
        assert memory.device[fullest] == pytest.approx(found.memory.device[index], rel=1e-12)
        assert memory.allocated[fullest] == pytest.approx(found.memory.allocated[index], rel=1e-12)
        assert memory.bound.max() == pytest.approx(found.memory.bound[index], rel=1e-12)
        seen.add(pp)
    assert {1, 2, 4} <= seen


def test_two_stages_by_hand() -> None:
    # four layers on two stages: the first holds the embedding and min(2, m) micro batches, the last the head and one
    problem = make_problem(MODEL.replace(num_hidden_layers=4), 2, toy_cost(), 512, framework="megatron-core")
    found = estimate_layouts(problem, some_layouts(problem, 8, 10**6, seed=0))
    splits, row = found.layouts.splits, found.layouts.row
    index = int(
        np.flatnonzero(
            (splits.pp == 2)[row]
            & (splits.vpp == 1)[row]
            & (splits.micro_batch_size == 1)[row]
            & (found.layouts.recompute == 0)
        )[0]
    )
    held = memory_of_stages(found, index).parts[MEMORY_PARTS.index("activations")]
    assert held[0] == 2 * held[1] > 0
    table, key = found.table, int(found.terms.key[row[index]])
    layer = float((table.layer.times.forward + table.layer.times.backward)[0, key])
    head = float((table.head.times.forward + table.head.times.backward)[0, key])
    embedding = float((table.embedding.times.forward + table.embedding.times.backward)[0, key])
    compute = time_of_stages(found, index)[TIME_PARTS.index("compute")]
    np.testing.assert_allclose(compute, [8 * (2 * layer + embedding), 8 * (2 * layer + head)], rtol=1e-12)


def test_with_many_micro_batches_no_stage_has_less_than_no_bubble() -> None:
    """Each end of the pipeline has one neighbour, so that the last stage, with a large head, waits for half of the messages."""
    model = MODEL.replace(vocab_size=60_000, num_hidden_layers=16)
    problem = make_problem(model, 8, toy_cost(), 512, framework="megatron-core")
    found = estimated(problem, [problem.layout(pp=8, dp=1, num_micro_batches=512)])
    times = time_of_stages(found, 0)
    np.testing.assert_allclose(times.sum(axis=0), found.times.seconds[0], rtol=1e-12)
    assert slowest_stage(found, 0) == 7 and (times[TIME_PARTS.index("bubble")] >= 0).all()
    sent = times[TIME_PARTS.index("pp_transfer")]
    assert sent[7] == pytest.approx(sent[3] / 2) == found.times.parts[TIME_PARTS.index("pp_transfer"), 0] > 0


def test_a_middle_stage_is_the_fullest_where_messages_stay() -> None:
    """Under torchtitan a stage keeps the activations that it received for all micro batches; the first one receives none."""
    problem = make_problem(MODEL.replace(num_hidden_layers=16), 8, toy_cost(), 512, framework="torchtitan")
    found = estimated(problem, [problem.layout(pp=8, dp=1, num_micro_batches=64, recompute="full")])
    device = memory_of_stages(found, 0).device
    assert device.argmax() == 1 == found.memory.stage[0] and found.memory.device[0] == pytest.approx(device[1], rel=1e-12)
    assert device[1] > device[0]
