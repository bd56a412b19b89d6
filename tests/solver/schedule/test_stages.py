"""Layers of the stages, by hand, and what a search divides them into."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.schedule.stages import (
    stage_layers,
    stage_layers_by_cost,
    stage_layers_counting_ends,
    stage_layers_last_first,
    stated_layers_in_flight,
)
from solver.search.divisions import Division, divisions
from solver.spec.choices import SCHEDULES
from solver.spec.frameworks import framework_of
from solver.spec.pipeline_layout import layers_of_chunks
from solver.step.stage_kinds import chunk_sizes

MEGATRON = framework_of("megatron-core-0.12").can_run


@pytest.mark.parametrize(
    ("layers", "pp", "ends", "expected"),
    [
        (32, 4, (0, 0, 0, 0), (8, 8, 8)),
        (126, 8, (0, 0, 1, 1), (15, 16, 15)),  # 128 items, 16 a stage
        (63, 8, (0, 0, 0, 1), (8, 8, 7)),  # only the loss counts
        (61, 16, (3, 2, 0, 0), (3, 4, 2)),  # 56 left for 14 stages
        (32, 4, (5, 0, 0, 0), (5, 9, 9)),  # 27 left for three stages
        (32, 4, (0, 2, 0, 0), (10, 10, 2)),
        (13, 2, (0, 6, 0, 0), (7, 7, 6)),
        (13, 2, (6, 0, 0, 0), (6, 7, 7)),
        (13, 2, (0, 0, 0, 1), (7, 7, 6)),
        (126, 1, (0, 0, 1, 1), (126, 126, 126)),
        (22, 4, (0, 0, 0, 0), (5, 6, 5)),  # the remainder goes to middle stages
    ],
)
def test_stages(layers: int, pp: int, ends: tuple[int, ...], expected: tuple[int, ...]) -> None:
    stages = stage_layers(layers, pp, *ends)
    assert (stages.first, stages.middle, stages.last) == expected


@pytest.mark.parametrize("layers", [13, 14, 30, 32, 61, 94, 126])
@pytest.mark.parametrize("pp", [1, 2, 4, 7, 8, 12])
def test_every_division_of_a_search_holds_all_layers_in_whole_chunks(layers: int, pp: int) -> None:
    found = divisions(MEGATRON, layers, pp)
    assert len(found) == len(set(found)) and found
    for vpp, division in found:
        stages = stage_layers(layers, pp, *division)
        embedding, loss = division[2:]
        assert pp == 1 or stages.first + (pp - 2) * stages.middle + stages.last == layers
        assert pp == 1 or (stages.first + embedding) % vpp == (stages.last + loss) % vpp == 0
        assert pp < 3 or stages.middle % vpp == 0


def test_what_does_not_divide_is_searched_with_counted_ends_first_and_stated_ends_else() -> None:
    assert {vpp for vpp, _ in divisions(MEGATRON, 126, 8)} == {1, 2, 4, 8, 16}
    assert {division for _, division in divisions(MEGATRON, 126, 8)} == {Division(0, 0, 1, 1)}
    assert divisions(MEGATRON, 61, 16) == ((1, Division(3, 2)),)
    assert divisions(MEGATRON, 61, 12) == ((1, Division(6, 5)),)  # middle stages of 6 would leave one layer for both ends
    assert divisions(framework_of("megatron-core-0.8").can_run, 61, 16) == ()
    even = ((1, Division()), (2, Division()))
    assert divisions(framework_of("megatron-lm-2023").can_run, 32, 16) == even


def test_stages_of_equal_cost_by_hand() -> None:
    """nanotron: a stage ends with the block that makes it exceed its share. 16 layers and a head that costs four of them: 20.

    2 stages share 10 each: eleven layers exceed it. 4: 5 each; six, five and five layers, the head alone. 8: 2.5 each; the
    third, sixth, eighth, eleventh, ... layer exceeds it, the head is alone and its loss behind it.
    """
    found = stage_layers_by_cost(16, np.array([1, 2, 4, 8]), 4.0)
    assert (found.first.tolist(), found.middle.tolist(), found.last.tolist()) == ([16, 11, 6, 3], [0, 0, 5, 3], [16, 5, 0, 0])
    # middle stages that hold nothing come last
    held = layers_of_chunks(chunk_sizes(16, 8, 1, (3, 3, 0)), 8)
    assert [len(layers) for layers in held] == [3, 3, 2, 2, 2, 2, 2, 0]
    assert [len(layers) for layers in layers_of_chunks(chunk_sizes(8, 6, 1, (3, 3, 0)), 6)] == [3, 3, 2, 0, 0, 0]
    assert np.concatenate(held).tolist() == list(range(16))


@given(st.integers(1, 120), st.integers(1, 32), st.floats(0.01, 40))
def test_stages_of_equal_cost_hold_all_layers(layers: int, pp: int, head: float) -> None:
    found = stage_layers_by_cost(layers, np.array([pp]), head)
    first, middle, last = (int(values[0]) for values in (found.first, found.middle, found.last))
    held = [len(each) for each in layers_of_chunks(chunk_sizes(layers, pp, 1, (first, middle, last)), pp)]
    assert sum(held) == layers and len(held) == pp and min(held) >= 0
    assert held[0] == first and held[-1] == last and max(held[1:-1], default=0) == middle * (pp > 2)


def test_what_is_left_goes_to_the_last_stages() -> None:
    # 32 layers on five stages are 6, 6, 6, 7 and 7; 60 on sixteen four of 3 and twelve of 4; InternEvo's partition_uniform
    found = stage_layers_last_first(32, np.array([1, 2, 3, 5, 16, 31]))
    assert found.first.tolist() == [32, 16, 10, 6, 2, 1]
    assert found.middle.tolist() == [32, 16, 11, 7, 2, 1]
    assert found.last.tolist() == [32, 16, 11, 7, 2, 2]
    many = stage_layers_last_first(60, np.array([16]))
    assert (many.first[0], many.middle[0], many.last[0]) == (3, 4, 4)


@pytest.mark.parametrize(("pp", "expected"), [(10, (3,) * 8 + (4, 4)), (5, (6, 6, 6, 7, 7)), (3, (10, 11, 11)), (2, (16, 16))])
def test_the_fuller_stages_of_internevo_are_the_last_ones(pp: int, expected: tuple[int, ...]) -> None:
    # partition_uniform(32, pp)
    found = stage_layers_last_first(32, np.array([pp]))
    ends = int(found.first[0]), int(found.middle[0]), int(found.last[0])
    assert chunk_sizes(32, pp, 1, ends, fuller_last=found.fuller_last) == expected


def test_embedding_norm_and_head_are_items_of_a_list_whose_remainder_goes_to_the_first_stages() -> None:
    # 32 layers and three more items: 35 of one stage; 18 and 17; 12, 12 and 11; 9, 9, 9 and 8; of seven stages 5 each. The
    # first item is the embedding, the last two are norm and head
    found = stage_layers_counting_ends(32, np.array([1, 2, 3, 4, 7]))
    assert found.first.tolist() == [32, 17, 11, 8, 4]
    assert found.middle.tolist() == [32, 17, 12, 9, 5]
    assert found.last.tolist() == [32, 15, 9, 6, 3]


def test_stated_chunks_are_held_as_the_same_chunks_divided_evenly() -> None:
    # four stages of two chunks of a layer: 2 * 3 + 4 + 1 = 11 passes in flight on the first, two fewer on each further one; of
    # four micro batches all eight
    index = np.arange(4)
    held = [stated_layers_in_flight(SCHEDULES.index("interleaved"), m, 4, (1,) * 8, index).tolist() for m in (16, 4)]
    assert held == [[11, 9, 7, 5], [8, 8, 7, 5]]
