"""What is there between passes: messages of a pipeline that stay, and the copies that an optimizer's step makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import TINY, estimated, make_problem, part, tiny, toy_cost

from predictor.cost_model import CostModel
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.model_size import parameters
from solver.spec.precision import element_bytes
from solver.spec.strategy import Strategy
from solver.step.gradient_buffers import bucket_bytes
from solver.step.layouts import Layouts
from solver.step.memory import MEMORY_PARTS
from solver.step.parameter_groups import fullest_in_order
from solver.step.per_stage import memory_of_stages
from solver.step.solutions import Solutions

MODEL = TINY.replace(num_hidden_layers=4)
OPTIMIZER, ACTIVATIONS = MEMORY_PARTS.index("optimizer"), MEMORY_PARTS.index("activations")
MESSAGE = 32 * 64 * 2  #: 32 tokens of 64 values in 16 bits


def of_stages(framework: str, **layout: Any) -> list[float]:
    found = tiny(framework, 4, MODEL, dp=1, pp=4, zero=0, recompute="full", **layout)
    return [float(bytes_) for bytes_ in memory_of_stages(found, 0).parts[ACTIVATIONS]]


def test_messages_of_all_micro_batches_stay_in_torch_pipelines() -> None:
    # six micro batches; of stages 0 to 3, 4, 3, 2 and 1 are in flight, whose inputs are those of their only layer
    kept = [4 * MESSAGE, 3 * MESSAGE, 2 * MESSAGE, 1 * MESSAGE]
    assert of_stages("megatron-core", num_micro_batches=6) == kept
    # received: six activations, of which those in flight are these inputs; six gradients; sent: outputs of those in flight
    more = [(6 + 4) * MESSAGE, (6 - 3 + 6 + 3) * MESSAGE, (6 - 2 + 6 + 2) * MESSAGE, (6 - 1) * MESSAGE]
    found = of_stages("torchtitan-2025-06", num_micro_batches=6)
    assert found == [held + extra for held, extra in zip(kept, more, strict=True)]


@pytest.mark.parametrize(
    ("constants", "weight", "states", "sharded", "step"),
    [
        ({}, 2, 12, 12, 0),
        ({"optimizer_states": "remainder"}, 2, 2 + 8, 12, 0),  # moments in fp32 need no copies for the step
        ({"optimizer_states": "bf16"}, 2, 2 + 4, 8, 8),  # of the fp32 weights the 16 bits that the others lack
        ({"optimizer_states": "8bit"}, 2, 2 + 2, 6, 8),
        ({"optimizer_states": "bf16", "precision": "mxfp8"}, 2, 4 + 4, 8, 8),
        ({"optimizer_states": "bf16", "precision": "fp8", "fp8_recipe": "delayed"}, 2, 2 + 4, 8, 8),
        ({"optimizer_states": "bf16", "precision": "fp8", "fp8_recipe": "tensorwise"}, 2, 4 + 4, 8, 8),
        ({"framework": "nemo-automodel", "optimizer_states": "bf16"}, 2, 4, 6, 0),  # parameters and moments in 16 bits
        ({"framework": "nemo-automodel"}, 2, 12, 12, 0),
    ],
)
def test_bytes_of_states(constants: dict[str, Any], weight: int, states: int, sharded: int, step: int) -> None:
    run = Strategy(world_size=1, seq_len=32, **{"framework": "megatron-core", "precision": "bf16", **constants})
    sizes = element_bytes(run, framework_of(run.framework))
    assert (sizes.weight, sizes.states, sizes.sharded, sizes.step) == (weight, states, sharded, step)


def test_narrow_moments_are_widened_for_the_step() -> None:
    def updated(states: str, **layout: Any) -> Solutions:
        given = {"dp": 2, "zero": 1, "zero_shard_size": 2, "recompute": "full", **layout}
        return tiny("megatron-core", 2, MODEL, {"optimizer_states": states}, **given)

    wide, narrow = updated("fp32"), updated("bf16")
    owned = parameters(MODEL) / 2
    passing = float(narrow.memory.parts[MEMORY_PARTS.index("workspaces") + 1 :, 0].sum())
    assert passing == 0.0  # no activations while the optimizer runs, which is the peak here
    assert narrow.memory.parts[OPTIMIZER, 0] == pytest.approx(owned * (2 + 4 + 8))
    assert wide.memory.parts[OPTIMIZER, 0] == pytest.approx(owned * 12)
    large = {"recompute": "none", "micro_batch_size": 64}
    assert updated("bf16", **large).memory.parts[OPTIMIZER, 0] == pytest.approx(owned * (2 + 4))
    assert updated("bf16", **large).memory.parts[ACTIVATIONS, 0] == updated("fp32", **large).memory.parts[ACTIVATIONS, 0]


@pytest.mark.parametrize(("framework", "peak"), [("internevo-2023", 24), ("internevo-2024", 18)])
def test_internevo_joins_and_casts_gradients_for_its_step(framework: str, peak: int) -> None:
    # hybrid_zero_optim.py: whole 16-bit weights; of what a rank updates the states (12 bytes), and flat gradients of 2 and 4
    # bytes, or the cast ones and two temporaries of an AdamW that is not fused; whole gradients before, which are less than a
    # bucket, flattened when the activations have gone
    elements = parameters(MODEL)
    held = 2 + 2 + 12
    for shard, at_step in ((1, max(2 + peak, held)), (8, 0)):
        found = tiny(framework, 8, MODEL, dp=8, zero=1, zero_shard_size=shard, recompute="full")
        states = float(found.memory.parts[:3, 0].sum())
        if at_step:
            assert states == pytest.approx(at_step * elements, rel=1e-9)
        else:
            assert states < held * elements


@pytest.mark.parametrize(
    ("vocabulary", "layout", "linears", "others"),
    [
        (256, {"zero_shard_size": 8}, 147_456 / 8, (2 * 16_384 + 576) / 8),  # a table has less than an equal share
        (4096, {"zero_shard_size": 8}, 147_456 / 8, 262_144 - 147_456 / 8),  # more: its rank updates nothing else
        (256, {"zero_shard_size": 4, "tp_mode": "isp", "wp": 2}, 147_456 / 8, 16_384),  # apart: a table and a share of the rest
        (256, {"zero_shard_size": 1, "tp_mode": "isp", "wp": 2}, 147_456 / 2, 16_384),
        (256, {"zero": 0, "tp_mode": "isp", "wp": 2}, 147_456 / 2, 16_384),  # zero1 size 1, which is the same
    ],
)
def test_internevo_deals_whole_tensors(vocabulary: int, layout: dict[str, Any], linears: float, others: float) -> None:
    # 4 layers of 36,864 in linears, 9 norms of 64, two tables of 64 x the vocabulary
    model = MODEL.replace(vocab_size=vocabulary)
    values = {"dp": 8, "zero": 1, "recompute": "none", "micro_batch_size": 64, **layout}
    found = tiny("internevo-2024", 8, model, {"overlap_param_gather": False}, **values)
    assert found.memory.parts[OPTIMIZER, 0] == pytest.approx(12 * (linears + others), rel=1e-9)


def test_internevo_fills_ranks_in_order_where_parameters_are_gathered_beside_the_forward_pass() -> None:
    # tables of 4,096 x 64, layers of norm 64, q, k and v 8,192, output 4,096, norm 64, gate and up 8,192 each, down 8,192, of
    # which four are 147,968; with the last norm 672,320 in all, 84,040 for each of 8 ranks: the first table goes to the second
    # rank, which does not count it, and takes the first layer and the second one's attention
    model = MODEL.replace(vocab_size=4096)
    found = tiny(
        "internevo-2024",
        8,
        model,
        {"overlap_param_gather": True},
        dp=8,
        zero=1,
        zero_shard_size=8,
        recompute="none",
        micro_batch_size=64,
    )
    splits = found.layouts.splits
    layer = (64, 8192, 4096, 64, 8192, 8192, 8192)
    second = 4096 * 64 + sum(layer) * 2 + sum(layer[:0])
    assert sum(layer) == 36_992 and 2 * sum(layer) + 64 + 8192 < 1.01 * 672_320 // 8 < 2 * sum(layer) + 64 + 8192 + 4096
    held = second + 64 + 8192
    assert fullest_in_order(found.problem, splits, np.array([8])).tolist() == [held]
    assert found.memory.parts[OPTIMIZER, 0] == pytest.approx(12 * held, rel=1e-9)


#: InternEvo, doc/en/train_performance.md (v0.2.1dev20231121; A800, whole layers recomputed, 4 micro batches of 2,048 tokens):
#: layers, GPUs, tp, pp and GB. Nothing here is fitted to them.
PUBLISHED = [
    ("7b", 4, 4, 1, 61),
    ("7b", 4, 1, 4, 69),
    ("7b", 5, 1, 5, 62),
    ("7b", 6, 1, 6, 56),
    ("7b", 3, 1, 3, 75),
    ("20b", 16, 1, 16, 52),
]


@pytest.mark.parametrize(("size", "gpus", "tp", "pp", "published"), PUBLISHED)
def test_memory_that_internevo_published(
    size: str, gpus: int, tp: int, pp: int, published: float, a100_model: CostModel
) -> None:
    wide = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 60, "num_attention_heads": 40}
    plain = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes = wide if size == "20b" else plain
    model = ModelSpec(name=size, vocab_size=103_168, head_dim=128, num_key_value_heads=sizes["num_attention_heads"], **sizes)
    problem = make_problem(model, gpus, a100_model, 2048, framework="internevo-2023", precision="bf16")
    run = problem.layout(tp=tp, pp=pp, dp=1, zero=1, num_micro_batches=4, recompute="full")
    assert estimated(problem, [run]).memory.device[0] == pytest.approx(published * 1e9, rel=0.15)


def test_zero_1_of_one_rank_is_zero_0_under_isp() -> None:
    isp = {"dp": 8, "tp_mode": "isp", "wp": 2, "zero_shard_size": 1}
    plain, one = (tiny("internevo-2024", 8, MODEL, zero=zero, **isp) for zero in (0, 1))
    assert plain.times.seconds[0] == pytest.approx(one.times.seconds[0], rel=1e-12)
    assert part(plain, "parameter_gather")[0] > 0  # of the tables, by the two ranks that update them
    assert part(tiny("internevo-2024", 8, MODEL, dp=8, zero=0), "parameter_gather")[0] == 0


@pytest.mark.parametrize(("elements", "buckets"), [(2**29, 0), (2**29 + 2, 1), (3 * 2**28, 1.5), (2**31, 2)])
def test_buckets_of_internevo(elements: int, buckets: float) -> None:
    # of 512 Mi elements in 16 bits, at most two and no more than there are gradients; none while all fit one, or under FSDP
    problem = make_problem(MODEL, 8, toy_cost(), 32, framework="internevo-2024")
    splits = Layouts.of([problem.layout()]).splits
    found = bucket_bytes(problem, np.array([float(elements)]), splits)
    assert found[:3, 0] == pytest.approx(np.full(3, buckets * 2**29 * 2), rel=1e-8)
    assert found[3, 0] == 0.0
