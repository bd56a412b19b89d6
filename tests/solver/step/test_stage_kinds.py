"""What stages hold where layers are of several kinds: by hand, and against counting every layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.schedule.stages import StageLayers, stage_layers
from solver.spec.pipeline_layout import layers_of_chunks
from solver.step.stage_kinds import StageKinds, chunk_sizes, stage_kinds


def layers_by_stage(
    layers: int, pp: int, vpp: int, counts: tuple[int, int, int], embedding: int = 0, loss: int = 0, v_shaped: bool = False
) -> list[np.ndarray]:
    """Return the numbers of the layers of every stage, of given sizes of stages."""
    return layers_of_chunks(chunk_sizes(layers, pp, vpp, counts, embedding, loss, v_shaped=v_shaped), pp, v_shaped)


def kinds_of(order: list[int], pp: int, vpp: int = 1, ends: tuple[int, int] = (0, 0), every: bool = False) -> StageKinds:
    """Return what the stages of one split hold; order: kind of every layer."""
    layers = stage_layers(len(order), np.array([pp]), 0, 0, *ends)
    columns = tuple(np.array([value]) for value in (pp, vpp, *ends, 0))
    return stage_kinds(np.array(order), max(order) + 1, StageLayers(layers.first, layers.middle, layers.last), columns, every)


def test_three_dense_layers_before_experts_by_hand() -> None:
    # 16 layers over 4 stages: the first three are dense, so the first stage has one layer with experts
    found = kinds_of([0] * 3 + [1] * 13, 4)
    assert found.index[:, 0].tolist() == [0, 3, 1], "of equal middle stages the earliest stands for all"
    assert found.counts[:, :, 0].tolist() == [[3, 1], [0, 4], [0, 4]]
    assert found.totals.tolist() == [3, 13]
    stages, of_all = found.recomputed(np.array([2, 4]), np.array([0, 0]))
    # two layers a stage: two dense ones on the first, two with experts on each other stage
    assert stages[0].T.tolist() == [[2, 0], [3, 1]] and stages[1].T.tolist() == [[0, 2], [0, 4]]
    assert of_all.T.tolist() == [[2, 6], [3, 13]]


def test_interleaved_chunks_by_hand() -> None:
    # 8 layers, 2 stages of 2 chunks: the first stage has layers 0, 1 and 4, 5
    assert [stage.tolist() for stage in layers_by_stage(8, 2, 2, (4, 4, 4))] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # embedding and loss take a place each in the first and the last of 4 chunks: 6 layers, chunks of 1, 2, 2, 1
    assert [stage.tolist() for stage in layers_by_stage(6, 2, 2, (3, 3, 3), 1, 1)] == [[0, 3, 4], [1, 2, 5]]


def test_chunks_of_a_v_by_hand() -> None:
    # 8 layers, 2 stages: the first has the first and the last part, layers 0, 1 and 6, 7
    assert [stage.tolist() for stage in layers_by_stage(8, 2, 2, (4, 4, 4), v_shaped=True)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    # embedding and loss take a place each, both of the first stage: 6 layers, which hold 2 and 4
    assert [s.tolist() for s in layers_by_stage(6, 2, 2, (2, 4, 4), 1, 1, True)] == [[0, 5], [1, 2, 3, 4]]


def test_alternating_layers_over_odd_stages_by_hand() -> None:
    # 9 layers over 3 stages, kinds 0 1 0 | 1 0 1 | 0 1 0
    found = kinds_of([0, 1] * 4 + [0], 3)
    assert found.counts[:, :, 0].tolist() == [[2, 1], [2, 1], [1, 2]]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 8), st.integers(1, 3), st.integers(0, 24))
def test_every_layer_is_on_one_stage(order: list[int], pp: int, vpp: int, limit: int) -> None:
    layers = len(order)
    if pp > layers or (vpp > 1 and (pp == 1 or layers % (pp * vpp))):
        return
    found = kinds_of(order, pp, vpp, every=True)
    assert found.counts[:, :, 0].sum(axis=0).tolist() == np.bincount(order, minlength=max(order) + 1).tolist()
    held = np.concatenate(layers_by_stage(layers, pp, vpp, tuple(int(n[0]) for n in _sizes(layers, pp))))  # type: ignore[arg-type]
    assert sorted(held.tolist()) == list(range(layers))
    stages, of_all = found.recomputed(np.array([min(limit, layers)]), np.array([0]))
    np.testing.assert_array_equal(stages.sum(axis=0), of_all)
    np.testing.assert_array_equal(stages[:, :, 0].sum(axis=1), np.minimum(limit, found.layers[:, 0]))
    few = kinds_of(order, pp, vpp)
    for counts in found.counts[:, :, 0]:  # no stage exceeds all that are looked at
        assert (few.counts[:, :, 0] >= counts).all(axis=1).any()


def _sizes(layers: int, pp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found = stage_layers(layers, np.array([pp]))
    return found.first, found.middle, found.last


@pytest.mark.parametrize("pp", [1, 2])
def test_stages_without_middle_ones_repeat_the_first(pp: int) -> None:
    columns = tuple(np.array(values) for values in ([pp, 4], [1, 1], [0, 0], [0, 0], [0, 0]))
    layers = stage_layers(8, columns[0])
    found = stage_kinds(np.array([0, 0, 1, 1, 1, 1, 1, 1]), 2, layers, columns)  # the first stage of 4 has none of kind 1
    assert found.index[:, 0].tolist() == [0, pp - 1, 0] and found.index[:, 1].tolist() == [0, 3, 1]
    assert found.has_head[:, 0].tolist() == [float(pp == 1), 1.0, float(pp == 1)]


def test_a_middle_stage_that_holds_no_more_than_the_first_is_left_out() -> None:
    """It has neither embedding nor head and fewer micro batches in flight: never the slowest, never the fullest."""
    columns = tuple(np.array([value]) for value in (4, 1, 0, 0, 0))
    layers = stage_layers(8, columns[0])
    assert stage_kinds(np.zeros(8, dtype=np.int64), 1, layers, columns).index[:, 0].tolist() == [0, 3]
    assert stage_kinds(np.zeros(8, dtype=np.int64), 1, layers, columns, True).index[:, 0].tolist() == [0, 1, 2, 3]
