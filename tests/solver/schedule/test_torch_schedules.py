"""Pipelines beside PyTorch's own: its schedules start where torchtitan's rules say so, and run in the orders given here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class
from toy import TINY, make_problem, toy_cost

from solver.formats.rule import Arguments, broken
from solver.formats.torchtitan.rules import RULES
from solver.schedule.kinds import BACKWARD, FORWARD, WEIGHT, WHOLE
from solver.schedule.op_orders import stage_order
from solver.search.space import enumerate_splits
from solver.spec.choices import SCHEDULES
from solver.spec.frameworks import known_framework

#: Schedule -> stages that a rank holds.
CHUNKS = {"1F1B": (1,), "GPipe": (1,), "Interleaved1F1B": (2, 3), "ZBVZeroBubble": (2,)}

#: Enough layers for a stage on every rank.
DEEP = replace(TINY, num_hidden_layers=8)


def stage(index: int, stages: int, ranks: int, rank: int) -> Any:
    """Return what a schedule looks at of a stage before it runs."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=ranks,
        group_rank=rank,
        has_backward=True,
        submod=None,
        group=None,
        is_first=index == 0,
        is_last=index == stages - 1,
        device="cpu",
    )


def starts(schedule: str, ranks: int, chunks: int, micro_batches: int) -> bool:
    """Whether PyTorch makes the schedule on every rank."""
    made = get_schedule_class(schedule)
    for rank in range(ranks):
        v_shaped = schedule.startswith("ZBV")
        held = [rank, 2 * ranks - 1 - rank] if v_shaped else [rank + ranks * chunk for chunk in range(chunks)]
        stages = [stage(index, ranks * chunks, ranks, rank) for index in held]
        try:
            made(stages[0] if chunks == 1 else stages, micro_batches, loss_fn=lambda *_: None)
        except ValueError:
            return False
    return True


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_schedule_starts_where_the_rules_allow_it(schedule: str, ranks: int) -> None:
    found = []
    for chunks in CHUNKS[schedule]:
        for micro_batches in range(1, 3 * ranks + 2):
            arguments = Arguments(
                {
                    "parallelism.pipeline_parallel_degree": ranks,
                    "parallelism.pipeline_parallel_schedule": schedule,
                    "parallelism.module_fqns_per_model_part": [["layers.0"]] * (ranks * chunks),
                    "training.local_batch_size": micro_batches,
                }
            )
            found.append(starts(schedule, ranks, chunks, micro_batches))
            refused = broken(RULES, arguments)
            assert bool(refused) is not found[-1], (chunks, micro_batches, refused)
    assert any(found)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_search_offers_what_starts(ranks: int) -> None:
    unfilled = known_framework("torchtitan").can_run.unfilled_stages
    least = next(n for n in range(1, 2 * ranks) if starts("1F1B", ranks, 1, n))
    assert unfilled is not None and least == ranks - unfilled
    for sequences in (least - 1, least):  # of which a replica over all ranks has as many micro batches at most
        space = enumerate_splits(make_problem(DEEP, ranks, toy_cost(), framework="torchtitan-2026-02"), sequences)
        plain = (space.splits.pp == ranks) & (space.splits.schedule == SCHEDULES.index("1f1b"))
        assert plain.any() == (sequences == least)
        assert space.rejected["fewer micro batches than 1F1B takes under torchtitan-2026-02"] > 0


@pytest.mark.parametrize(("theirs", "ours"), [("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipev")])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_v_shaped_orders_are_those_of_pytorch(theirs: str, ours: str, ranks: int) -> None:
    kinds = {"FORWARD": FORWARD, "BACKWARD_INPUT": BACKWARD, "BACKWARD_WEIGHT": WEIGHT, "FULL_BACKWARD": WHOLE}
    ends = [stage(index, 2 * ranks, ranks, 0) for index in (0, 2 * ranks - 1)]
    for micro_batches in range(2 * ranks, 5 * ranks):
        made = get_schedule_class(theirs)(ends, micro_batches, loss_fn=lambda *_: None)
        for rank in range(ranks):
            actions = [action for action in made.pipeline_order[rank] if action is not None]
            passes = [one for action in actions for one in action.sub_actions or (action,)]
            order = [(kinds[one.computation_type.name], one.stage_index != rank, one.microbatch_index) for one in passes]
            assert stage_order(ours, rank, ranks, micro_batches, 2).tolist() == [[*map(int, one)] for one in order]
