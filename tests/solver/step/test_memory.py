"""Peak memory: cases computed by hand, and invariants of every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hybrid import ATTENTION, HYBRID, MAMBA, MLP
from round_trip import model_of
from toy import BEFORE_HOPPER, DEVICE, TINY, changed, column, estimated, make_problem, some_layouts, tiny, toy_cost

from predictor.cost_model import CostModel
from solver.layers.program import LINEARS
from solver.search.space import cross, enumerate_splits
from solver.spec.choices import SCHEDULES
from solver.spec.cluster import cluster_of
from solver.spec.model import ModelSpec
from solver.spec.model_size import layer_parameters, parameters
from solver.step.gather_buffers import gather_buffers
from solver.step.memory import MEMORY_PARTS, Memory
from solver.step.peak_memory import least_memory
from solver.step.per_stage import memory_of_stages
from solver.step.solutions import Solutions, estimate_layouts
from solver.step.states import trained_bytes
from solver.step.workspaces import workspace_bytes

MODEL = ModelSpec(
    name="8B",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
TINY_RUN = {"seq_len": 32, "compile": True}
#: Of a framework whose optimizer needs nothing beside what is held.
PLAIN = TINY_RUN | {"framework": "generic"}
#: Bytes that one micro batch of TINY saves in a layer: 32 tokens; input, two norm outputs and residual 4 * 64, q, k, v 8 * 16,
#: context 64, gate, up and product 3 * 128, two bytes each, and the log-sum-exp of 4 heads in four bytes.
TINY_SAVED = 32 * (2 * (4 * 64 + 8 * 16 + 64 + 3 * 128) + 4 * 4)
TINY_LAYER = 36_864 + 2 * 64
LOGITS = 32 * 256
#: Bytes of gradients alive in a layer's backward pass: that of the residual stream, and in the attention core those of q, k, v
#: and context (12 * 16, two bytes each) and the fp32 sum of the queries' (4 * 16); more than the 2 * 128 of gate and up.
TINY_WORKING = 32 * (64 * 2 + 12 * 16 * 2 + 4 * 16 * 4)

STATIC_PARTS = 4  #: this many of the first parts are allocated once and stay


def parts(solutions: Solutions, index: int = 0) -> dict[str, float]:
    return dict(zip(MEMORY_PARTS, solutions.memory.parts[:, index].tolist(), strict=True))


@pytest.fixture(scope="module")
def sample() -> Solutions:
    """Estimate random layouts of an 8B model on 64 accelerators; memory needs no fitted machine."""
    problem = make_problem(MODEL, 64, toy_cost(), framework="generic")
    return estimate_layouts(problem, some_layouts(problem, 512, 3000, seed=5))


def with_zero(solutions: Solutions, zero: int) -> Solutions:
    return estimate_layouts(solutions.problem, changed(solutions.layouts, zero=zero))


def test_two_stages_by_hand() -> None:
    assert TINY_SAVED == 53_760
    problem = make_problem(TINY, 2, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(dp=1, pp=2, zero=0)])
    # The last stage: one layer, the head of 256 * 64 and its norm; 16-bit weights and gradients, 12 bytes of fp32 states.
    elements = TINY_LAYER + 256 * 64 + 64
    last = {
        "weights": 2 * elements,
        "gradients": 2 * elements,
        "optimizer": 12 * elements,
        "activations": TINY_SAVED,
        "workspaces": 0,
    }
    # The loss: input and output of the final norm, fp32 probabilities, whose buffer becomes their gradient, and 16-bit logits.
    loss = 2 * 32 * 64 * 2 + LOGITS * 4 + LOGITS * 2
    # The first stage: one layer, the embedding table of 256 * 64, one micro batch.
    first = 16 * (TINY_LAYER + 256 * 64) + TINY_SAVED + TINY_WORKING
    assert loss > TINY_WORKING and sum(last.values()) + loss > first
    assert parts(found) == pytest.approx({**last, "backward_buffers": 0, "loss": loss, "gather_buffers": 0})
    assert found.memory.on_last_stage[0]
    assert found.memory.allocated[0] == sum(last.values()) + loss
    assert found.memory.reserved[0] == pytest.approx(found.memory.allocated[0] + 0.35 * (TINY_SAVED + loss))
    assert found.memory.device[0] == found.memory.reserved[0] + 1.5 * 2**30  # CUDA context, cuBLAS, NCCL (docs/model.md)


def test_the_first_stage_peaks_where_activations_outweigh_the_loss() -> None:
    # four stages of one layer each: the first holds up to four micro batches of activations, fewer where there are fewer
    model = TINY.replace(num_hidden_layers=4)
    problem = make_problem(model, 4, toy_cost(), **PLAIN)
    layout = problem.layout(dp=1, pp=4, zero=0)
    found = estimated(problem, [layout.replace(num_micro_batches=m) for m in (1, 2, 3, 4, 8)])
    first = 16 * (TINY_LAYER + 256 * 64) + TINY_SAVED * np.array([1, 2, 3, 4, 4]) + TINY_WORKING
    last = 16 * (TINY_LAYER + 256 * 64 + 64) + TINY_SAVED + 2 * 32 * 64 * 2 + LOGITS * 6
    np.testing.assert_array_equal(found.memory.allocated, np.maximum(first, last))
    assert found.memory.on_last_stage.tolist() == [True, False, False, False, False]


def test_single_layers_are_recomputed_alone_whatever_the_chunks() -> None:
    # 15 layers and the embedding in four chunks: of each layer its input is kept, 4,096 values of two bytes of 139,392 bytes
    problem = make_problem(replace(MODEL, num_hidden_layers=30), 2, toy_cost(), framework="megatron-core")
    ends = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    layout = problem.layout(**ends, dp=1, pp=2, vpp=4, schedule="interleaved", num_micro_batches=8, zero=0)
    kept, whole = (
        memory_of_stages(estimated(problem, [layout.replace(recompute=level)]), 0).parts[MEMORY_PARTS.index("activations"), 0]
        for level in ("full", "none")
    )
    assert kept / whole == pytest.approx(8192 / 139_392, rel=1e-9)


def test_recomputation_by_hand() -> None:
    # one device, two layers: full recomputation saves each layer's input (32 * 64 * 2 bytes) and all of one layer
    problem = make_problem(TINY, 1, toy_cost(), **PLAIN)
    layout = problem.layout(zero=0)
    found = estimated(problem, [layout, layout.replace(recompute="full"), layout.replace(recompute="full", recompute_layers=1)])
    kept = 32 * 64 * 2
    # not at the same time: the memory of the loss is freed before layers are recomputed
    loss, recomputed = 2 * kept + LOGITS * 6, TINY_SAVED - kept + TINY_WORKING
    state = 16 * (2 * TINY_LAYER + 2 * 256 * 64 + 64)
    assert recomputed > loss > TINY_WORKING
    expected = [state + 2 * TINY_SAVED + loss, state + 2 * kept + recomputed, state + TINY_SAVED + kept + recomputed]
    assert found.memory.allocated.tolist() == expected


def test_layers_that_are_recomputed_at_once_share_an_input_by_hand() -> None:
    # the input of the first layer is kept; both layers are there again while the second one's gradients are computed
    problem = make_problem(TINY, 1, toy_cost(), **PLAIN, recompute_group=2)
    found = estimated(problem, [problem.layout(zero=0, recompute="full", recompute_group=2)])
    assert found.memory.allocated[0] == 16 * (2 * TINY_LAYER + 2 * 256 * 64 + 64) + 2 * TINY_SAVED + TINY_WORKING


@pytest.mark.parametrize(("group", "inputs"), [(2, 4), (3, 3), (8, 1), (20, 1)])
def test_groups_of_recomputed_layers_end_with_their_chunk(group: int, inputs: int) -> None:
    # eight layers a chunk, in two stages of two chunks; of the inputs of all layers those of groups are left
    def held(group: int) -> dict[str, float]:
        model = replace(MODEL, vocab_size=1024)  # whose loss needs less than a layer
        problem = make_problem(model, 2, toy_cost(), framework="generic", recompute_group=group)
        layout = {"dp": 1, "pp": 2, "vpp": 2, "schedule": "interleaved", "num_micro_batches": 8, "zero": 0}
        return parts(estimated(problem, [problem.layout(**layout, recompute="full", recompute_group=group)]))

    one, several = held(1), held(group)
    assert several["activations"] == pytest.approx(one["activations"] * inputs / 8)
    # 4,096 tokens: input, two norms and residual, q, k, v, context, gate, up and product, 2 bytes each, log-sum-exp of 32 heads
    layer = 4096 * (2 * (4 * 4096 + 6144 + 4096 + 3 * 14336) + 4 * 32)
    assert several["backward_buffers"] - one["backward_buffers"] == (min(group, 8) - 1) * layer


def test_states_by_zero_stage_by_hand() -> None:
    # as in the ZeRO paper's example of 7.5 billion parameters: 2 + 2 + 12 bytes per parameter, over 8 ranks, optimizer first
    problem = make_problem(TINY, 8, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(zero=z, zero_shard_size=8) for z in range(4)])
    elements = 2 * TINY_LAYER + 2 * 256 * 64 + 64
    state = found.memory.parts[:3] / elements
    np.testing.assert_allclose(state[:, :3].T, [[2, 2, 12], [2, 2, 12 / 8], [2, 2 / 8, 12 / 8]], rtol=1e-12)
    assert state[1:, 3].tolist() == [2 / 8, 12 / 8] and state[0, 3] <= 2 / 8
    # all-gather buffers of ZeRO-3: two layers of 16-bit weights and one layer's gradients
    assert parts(found, 3)["gather_buffers"] == (2 * 2 + 2) * TINY_LAYER
    fp32 = make_problem(TINY, 8, toy_cost(), **PLAIN, grad_dtype="fp32")
    assert estimated(fp32, [fp32.layout(zero=0)]).memory.parts[1, 0] == 4 * elements


def test_weight_parallel_states_by_hand() -> None:
    # ISP over wp 4 of 8 ranks: a quarter of the linears; whole norms, embedding and head; a pool of two blocks' whole weights
    problem = make_problem(TINY, 8, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(tp_mode="isp", wp=4, zero=0)])
    elements = 2 * (36_864 / 4 + 2 * 64) + 2 * 256 * 64 + 64
    assert found.memory.parts[:3, 0].tolist() == [2 * elements, 2 * elements, 12 * elements]
    assert parts(found)["gather_buffers"] == 2 * 36_864 * 2


def test_parts_add_up_and_none_is_negative(sample: Solutions) -> None:
    memory = sample.memory
    np.testing.assert_allclose(memory.parts.sum(axis=0), memory.allocated, rtol=1e-12)
    assert (memory.parts >= 0).all()
    assert (memory.allocated < memory.reserved).all() and (memory.reserved < memory.device).all()


def no_more(less: Memory, more: Memory) -> bool:
    """Whether every layout needs no more on its fullest stage, and there no more is allocated where that is the same stage."""
    same = less.stage == more.stage
    return bool((less.device <= more.device).all() and (less.allocated <= more.allocated)[same].all() and same.mean() > 0.5)


def test_recomputation_saves_memory(sample: Solutions) -> None:
    def held(level: int, layers: int = -1) -> Memory:
        return estimate_layouts(sample.problem, changed(sample.layouts, recompute=level, recompute_layers=layers)).memory

    none, selective, full, some = held(0), held(1), held(2), held(2, 1)
    for less, more in ((full, selective), (selective, none), (full, some), (some, none)):
        assert no_more(less, more)
    assert np.median(full.allocated / none.allocated) < 0.8


def test_zero_stages_save_memory(sample: Solutions) -> None:
    partitioned = estimate_layouts(
        sample.problem, sample.layouts.take(np.flatnonzero(column(sample.layouts, "zero_shard_size") > 1))
    )
    stages = [with_zero(partitioned, zero) for zero in range(4)]
    # with a pipeline ZeRO-2 reduces gradients after the last micro batch only, and until then holds what ZeRO-1 does
    alone = column(partitioned.layouts, "pp") == 1
    zero, one, two = (stage.memory.allocated for stage in stages[:3])
    assert (one < zero).all() and (two < one)[alone].all() and (two == one)[~alone].all() and 0.1 < alone.mean() < 0.9
    state = [solutions.memory.parts[:3].sum(axis=0) for solutions in stages]
    # ZeRO-3 also all-gathers layers into buffers, so it saves memory only where a stage has more layers than these
    same = stages[3].memory.on_last_stage == stages[2].memory.on_last_stage
    assert (state[3] < state[2])[same].all() and same.mean() > 0.9
    assert (stages[3].memory.allocated < stages[2].memory.allocated).mean() > 0.9


def test_sharding_over_more_ranks_holds_less(sample: Solutions) -> None:
    one = estimate_layouts(sample.problem, changed(sample.layouts, zero=1))
    layouts = one.layouts.take(np.flatnonzero(column(one.layouts, "dp") % 4 == 0))
    two, four = (estimate_layouts(sample.problem, changed(layouts, zero_shard_size=k)).memory.allocated for k in (2, 4))
    assert (four < two).all()


def test_fewer_micro_batches_than_stages_hold_less(sample: Solutions) -> None:
    piped = changed(
        sample.layouts.take(np.flatnonzero(column(sample.layouts, "pp") >= 4)), vpp=1, schedule=SCHEDULES.index("1f1b")
    )
    pp = column(piped, "pp")
    held = [estimate_layouts(sample.problem, changed(piped, num_micro_batches=m)).memory for m in (1, 2, pp, 4 * pp)]
    one, two, full, more = held
    assert no_more(one, two) and no_more(two, full) and (full.allocated == more.allocated).all()
    assert (one.allocated < full.allocated).mean() > 0.5


def test_the_longest_stage_holds_most_where_layers_do_not_divide() -> None:
    # 5 layers on 4 stages: 1, 2, 1, 1. The second holds 2 layers and 3 micro batches, the first 1 and 4
    model = TINY.replace(num_hidden_layers=5, vocab_size=128)
    problem = make_problem(model, 4, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(dp=1, pp=4, zero=0, num_micro_batches=8)])
    middle = 16 * 2 * TINY_LAYER + 2 * 3 * TINY_SAVED
    assert found.memory.allocated[0] >= middle


def test_gpipe_holds_all_micro_batches_and_zero_bubble_no_less_than_1f1b() -> None:
    model = TINY.replace(num_hidden_layers=4)

    def activations(schedule: str, m: int) -> float:
        problem = make_problem(model, 4, toy_cost(), **PLAIN)
        found = estimated(problem, [problem.layout(schedule=schedule, dp=1, pp=4, zero=0, num_micro_batches=m)])
        return parts(found)["activations"] / TINY_SAVED

    assert activations("gpipe", 8) == 8 and activations("1f1b", 8) == 4
    assert activations("zb-h1", 8) == activations("zb-1p", 8) == 4 and activations("zb-2p", 9) == 8


def test_interleaving_holds_more() -> None:
    # arXiv 2104.04473: chunks in flight on the first stage: 2 (pp - 1) + (vpp - 1) pp + 1, each with 1 / vpp of its layers
    model = TINY.replace(num_hidden_layers=16)
    problem = make_problem(model, 4, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(dp=1, pp=4, vpp=v, zero=0, num_micro_batches=16) for v in (1, 2, 4)])
    held = found.memory.parts[MEMORY_PARTS.index("activations")] / TINY_SAVED
    assert held.tolist() == [4 * 4, 11 * 2, 19 * 1]


def test_memory_scales_with_micro_batch_and_parameters() -> None:
    problem = make_problem(MODEL, 1, toy_cost(), framework="generic")
    found = estimated(problem, [problem.layout(zero=0, micro_batch_size=b) for b in (1, 2, 4)])
    activations = found.memory.parts[MEMORY_PARTS.index("activations")]
    assert activations.tolist() == [activations[0], 2 * activations[0], 4 * activations[0]]
    # an 8B model trained in 16 bits on one device: 16 bytes per parameter, except for the padding of the vocabulary
    assert found.memory.parts[:3, 0].sum() == pytest.approx(16 * parameters(MODEL), rel=1e-3)


def test_dummy_gradients_of_megatron_by_hand() -> None:
    # 16-bit buffers for each linear of a layer and the vocabulary since Transformer Engine 2.3; before, one for the vocabulary
    # during its backward pass
    names = ("megatron-core 0.12, transformer-engine release_v2.1", "megatron-core 0.14, transformer-engine 2.11.0+c188b5")
    old, new = (make_problem(TINY, 1, toy_cost(), framework=name, grad_dtype="fp32", **TINY_RUN) for name in names)
    before, after = (estimated(problem, [problem.layout(zero=0)]) for problem in (old, new))
    assert parts(after)["gradients"] - parts(before)["gradients"] == 2 * (36_864 + 256 * 64)
    # GEMMs that do not accumulate return real ones: no such buffers, whatever the release
    apart = [
        make_problem(TINY, 1, toy_cost(), framework=name, gradient_accumulation_fusion=False, **TINY_RUN) for name in names
    ]
    assert len({parts(estimated(problem, [problem.layout(zero=0)]))["gradients"] for problem in apart}) == 1
    # fused cross entropy: the 16-bit logits in place, and the dummy of 256 * 64 weights
    fused = make_problem(TINY, 1, toy_cost(), framework=names[0], grad_dtype="fp32", cross_entropy_fusion=True, **TINY_RUN)
    found = estimated(fused, [fused.layout(zero=0)])
    loss = 2 * 32 * 64 * 2 + LOGITS * 2 + 256 * 64 * 2
    held = max(loss, TINY_WORKING)
    assert parts(found)["loss"] + parts(found)["backward_buffers"] == held


def test_the_second_stage_by_hand() -> None:
    # 5 layers on 4 stages: 1, 2, 1, 1. The second holds 2 layers of 3 micro batches; the first 1 of 4, and a table of 128 * 64
    problem = make_problem(TINY.replace(num_hidden_layers=5, vocab_size=128), 4, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(dp=1, pp=4, zero=0, num_micro_batches=8)])
    assert found.memory.allocated[0] == 16 * 2 * TINY_LAYER + 2 * 3 * TINY_SAVED + TINY_WORKING


def test_gpipe_keeps_the_logits_of_all_micro_batches() -> None:
    # the last of two stages: inputs of norm and head (64 values of two bytes) and fp32 probabilities of 32 tokens, four times;
    # the 16-bit logits once. 1F1B holds one micro batch there
    def loss(schedule: str) -> float:
        problem = make_problem(TINY, 2, toy_cost(), **PLAIN)
        found = estimated(problem, [problem.layout(schedule=schedule, dp=1, pp=2, zero=0, num_micro_batches=4)])
        assert bool(found.memory.on_last_stage[0]) == (schedule == "gpipe")
        return parts(found)["loss"]

    assert loss("gpipe") == 4 * (2 * 32 * 64 * 2 + LOGITS * 4) + LOGITS * 2


def test_zero_3_shards_the_only_master_weights() -> None:
    # weights are fp32 already (autocast): whole under ZeRO-1, whose shards hold two moments; under ZeRO-3 the shard of the
    # weights is stored with them, 12 bytes over 8 ranks (Rajbhandari et al. 2020). Gradients are views of DDP's buckets, which
    # stay; those of the only micro batch that FSDP shards are not there at its loss
    problem = make_problem(TINY, 8, toy_cost(), **TINY_RUN, framework="profiler-train", grad_dtype="fp32")
    found = estimated(problem, [problem.layout(zero=z, zero_shard_size=8) for z in (1, 3)])
    elements = 2 * TINY_LAYER + 2 * 256 * 64 + 64
    np.testing.assert_allclose(found.memory.parts[:3].T / elements, [[4, 4, 8 / 8], [0, 0, 12 / 8]], rtol=1e-12)


def test_megatron_fsdp_keeps_what_its_communication_unit_holds() -> None:
    # TINY is smaller than a billion parameters: all of its layers are gathered, embedding and head stay, and whole gradients
    # of all layers wait to be reduced; 2 bytes each
    problem = make_problem(TINY, 8, toy_cost(), **TINY_RUN, framework="megatron-bridge", grad_dtype="bf16")
    splits = estimated(problem, [problem.layout(zero=3, zero_shard_size=8)])
    at_loss, in_layer = gather_buffers(splits.priced)[:, 3, 0]
    layers = TINY.num_hidden_layers * splits.table.layers[0].parameters[0]
    ends = splits.table.embedding.parameters[0] + splits.table.head.parameters[0]
    assert (at_loss, in_layer) == (2 * ends, 2 * (ends + layers) + 2 * layers)


def test_fsdp_keeps_its_root_gathered_and_reduced_gradients_in_fp32() -> None:
    # embedding and head (with its norm) in 16 bits beside the two gathered layers; gradients take the parameters' type, and
    # those of the head wait for the embedding's
    problem = make_problem(TINY, 8, toy_cost(), **TINY_RUN, framework="fsdp")
    found = estimated(problem, [problem.layout(zero=3, zero_shard_size=8, num_micro_batches=2)])
    elements = 2 * TINY_LAYER + 2 * 256 * 64 + 64
    assert found.memory.parts[MEMORY_PARTS.index("gradients"), 0] == 4 * elements / 8
    layers = TINY_LAYER * (2 * 2 + 2)
    assert found.memory.parts[MEMORY_PARTS.index("gather_buffers"), 0] == layers + 2 * (2 * 256 * 64 + 64) + 2 * (256 * 64 + 64)


def test_gathered_weights_and_gradients_of_fsdp2_and_deepspeed_by_hand() -> None:
    def buffers(framework: str) -> np.ndarray:
        problem = make_problem(TINY, 8, toy_cost(), **TINY_RUN, framework=framework, grad_dtype="fp32")
        found = estimated(problem, [problem.layout(zero=3, zero_shard_size=8)])
        return gather_buffers(found.priced)[:, 2:, 0]

    head, ends = 256 * 64 + 64, 2 * 256 * 64 + 64
    # two layers gathered, gradients of one in 16 bits and of the other in the fp32 buffer that is reduced; torchtitan's head is
    # gathered at the loss alone, and ZeRO-2 has the gradients too
    assert buffers("torchtitan-2026-02").tolist() == [[0, 2 * head], [6 * TINY_LAYER, 10 * TINY_LAYER]]
    assert buffers("fsdp2").tolist() == buffers("torchtitan-2026-02").tolist()
    root = 2 * ends
    assert buffers("fsdp2-2025-04").tolist() == [[0, root], [6 * TINY_LAYER + 2 * head, 10 * TINY_LAYER + root + 2 * head]]
    assert buffers("fsdp").tolist() == [[0, 2 * ends], [4 * TINY_LAYER + 2 * head, 8 * TINY_LAYER + 2 * ends + 2 * head]]
    # all of a model of less than a billion parameters
    whole = 2 * (2 * TINY_LAYER + ends)
    assert buffers("megatron-deepspeed").tolist() == [[0, whole], [0, whole]]


def test_two_weight_ranks_hold_a_pool_too() -> None:
    # two blocks of 36,864 16-bit weights, however few ranks share them; none where each rank has its own weights
    problem = make_problem(TINY, 8, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(tp_mode="isp", wp=wp, zero=0) for wp in (1, 2)])
    assert found.memory.parts[MEMORY_PARTS.index("gather_buffers")].tolist() == [0, 2 * 36_864 * 2]


def test_a_tensor_larger_than_what_deepspeed_holds_is_gathered_all_the_same(h100_model: CostModel) -> None:
    # 1e9 parameters at a time, but the head's 128,256 x 16,384 in one piece
    problem = make_problem(model_of("llama3_405b"), 256, h100_model, framework="transformers-deepspeed")
    found = estimated(problem, [problem.layout(zero=3, zero_shard_size=256, dp=256)])
    held = gather_buffers(found.priced)[:, 3, 0]
    assert held.tolist() == [2 * 128_256 * 16_384] * 2


def test_torchtitan_wraps_experts_that_no_other_rank_holds(h100_model: CostModel) -> None:
    def buffers(framework: str, ep: int) -> float:
        problem = make_problem(model_of("qwen3_30b_a3b"), 8, h100_model, framework=framework, grad_dtype="fp32")
        found = estimated(problem, [problem.layout(zero=3, zero_shard_size=8, ep=ep)])
        return float(gather_buffers(found.priced)[1, 3, 0])

    # 128 experts of three matrices of 2048 x 768 a layer: two layers' gathered, gradients of one as made and as reduced
    experts = 128 * 3 * 2048 * 768
    four, eight = (buffers("torchtitan-2026-02", ep) for ep in (4, 8))
    assert four - eight == pytest.approx((2 * 2 + 2 + 4) * (experts / 4 - experts / 8))
    assert buffers("torchtitan-2026-02", 8) - buffers("nemo-automodel", 8) > 10 * experts / 8 * 0.9


def test_torchtitan_s_last_stage_holds_the_logits_until_its_backward_pass_ends(h100_model: CostModel) -> None:
    def found(pp: int) -> tuple[float, float]:
        problem = make_problem(model_of("llama3_8b"), 8, h100_model, 8192, framework="torchtitan", compile=False)
        layout = {"pp": pp, "dp": 8 // pp, "zero": 2, "zero_shard_size": 8 // pp, "num_micro_batches": 8}
        memory = memory_of_stages(estimated(problem, [problem.layout(**layout)]), 0)
        return float(memory.parts[MEMORY_PARTS.index("loss"), -1]), float(memory.parts[:, -1].sum())

    # 12 bytes a logit at the loss, and behind a pipeline the 2 of the stage's output
    logits, (alone, _), (behind, _) = 8192 * 128_256, found(1), found(2)
    assert behind - alone == pytest.approx(2 * logits, rel=0.01)


def test_a_group_of_recomputed_layers_holds_no_more_than_there_are(h100_model: CostModel) -> None:
    # one dense layer of wide MLP and seven of small experts: all eight at once are what no recomputation keeps
    model = MODEL.replace(
        hidden_size=1024,
        intermediate_size=11008,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1024,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=512,
        first_k_dense_replace=1,
    )

    def held(**layout: Any) -> dict[str, float]:
        group = layout.get("recompute_group", 1)
        problem = make_problem(model, 8, h100_model, framework="megatron-core", recompute_group=group)
        return parts(estimated(problem, [problem.layout(dp=8, num_micro_batches=4, micro_batch_size=16, **layout)]))

    plain, group = held(recompute="none"), held(recompute="full", recompute_group=8)
    whole = plain["activations"] + plain["backward_buffers"]
    assert group["activations"] + group["backward_buffers"] == pytest.approx(whole, rel=0.01)


def test_states_of_weight_shards_are_split_over_their_copies() -> None:
    # 8 ranks of 4 weight shards: two ranks hold the same quarter of the linears, which ZeRO-1 splits; the rest over all 8
    problem = make_problem(TINY, 8, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(tp_mode="isp", wp=4, zero=1, zero_shard_size=8)])
    rest = 2 * 2 * 64 + 2 * 256 * 64 + 64
    assert found.memory.parts[2, 0] == 12 * (2 * 36_864 / 4 / 2 + rest / 8)


def test_gaps_of_the_allocator_by_stages() -> None:
    # a tenth of what comes and goes where micro batches free their blocks in reverse order, 35% where stages interleave them
    problem = make_problem(TINY, 2, toy_cost(), **PLAIN)
    found = estimated(problem, [problem.layout(dp=2 // pp, pp=pp, zero=0) for pp in (1, 2)])
    dynamic = found.memory.parts[STATIC_PARTS:].sum(axis=0)
    np.testing.assert_allclose(found.memory.reserved - found.memory.allocated, [0.1, 0.35] * dynamic, rtol=1e-9)
    grown = problem.layout(expandable_segments=True)  # segments that grow leave a tenth at most
    found = estimated(replace(problem, run=grown), [grown.replace(dp=2 // pp, pp=pp, zero=0) for pp in (1, 2)])
    np.testing.assert_allclose(found.memory.reserved - found.memory.allocated, [0.1, 0.1] * dynamic, rtol=1e-9)


@pytest.mark.parametrize(
    ("framework", "grad_dtype", "bytes_each"),
    [
        ("megatron-core", "fp32", 2),
        ("megatron-deepspeed", "bf16", 2),
        ("megatron-deepspeed", "fp32", 4),
    ],
)
def test_no_gap_holds_the_gradient_of_the_embedding(framework: str, grad_dtype: str, bytes_each: int) -> None:
    # each micro batch makes one of the whole table on the first of two stages; DeepSpeed casts it before it adds it to fp32
    problem = make_problem(TINY, 2, toy_cost(), **TINY_RUN, framework=framework, grad_dtype=grad_dtype)
    run = problem.layout(dp=1, pp=2, zero=0, num_micro_batches=2, micro_batch_size=64)  # so much that no step is the peak
    found = estimated(problem, [run])
    stages = memory_of_stages(found, 0)
    gaps = stages.reserved - stages.allocated - 0.35 * stages.parts[STATIC_PARTS:].sum(axis=0)
    assert gaps == pytest.approx([bytes_each * 256 * 64, 0], abs=1e-3)


def test_three_verdicts() -> None:
    # the bound: 3% of what is allocated and 15% of what comes and goes, above the estimate
    problem = make_problem(TINY, 1, toy_cost(), **PLAIN)
    memory = estimated(problem, [problem.layout(zero=0)]).memory
    dynamic = memory.parts[STATIC_PARTS:].sum()
    assert memory.bound[0] - memory.device[0] == pytest.approx(0.15 * dynamic + 0.03 * memory.allocated[0])
    limits = memory.bound[0], memory.device[0], memory.device[0] - 1
    assert [memory.verdict(0, limit) for limit in limits] == ["FITS", "AT RISK", "OUT OF MEMORY"]


def test_nanotron_reserves_what_its_collectives_still_read() -> None:
    # two blocks a layer, each 32 tokens of 64 two-byte values
    problem = make_problem(TINY, 2, toy_cost(), **TINY_RUN, framework="nanotron", grad_dtype="fp32")
    memory = estimated(problem, [problem.layout(dp=1, tp=2, tp_mode="msp", zero=0)]).memory
    gaps = 0.35 * memory.parts[STATIC_PARTS:].sum()
    assert memory.reserved[0] - memory.allocated[0] - gaps == pytest.approx(2 * 2 * 32 * 64 * 2)


@pytest.mark.parametrize(("overlaps", "buckets"), [(False, 1), (True, 2)])
def test_gradients_and_buckets_of_deepspeed(overlaps: bool, buckets: int) -> None:
    # 16-bit gradients and a bucket of 500 million of them, or two, under ZeRO-1 of 8 ranks, and what of them is joined
    run = {**TINY_RUN, "framework": "megatron-deepspeed", "overlap_grad_reduce": overlaps}
    problem = make_problem(TINY, 8, toy_cost(), **run)
    found = estimated(problem, [problem.layout(zero=zero, zero_shard_size=8) for zero in (0, 1)])
    elements = 2 * TINY_LAYER + 2 * 256 * 64 + 64
    bucket = 2 * problem.framework.data_parallel.bucket_elements
    assert found.memory.parts[1].tolist() == [2 * elements + bucket, 2 * 2 * elements + buckets * bucket]
    # with fp32 gradients the 16-bit ones stay
    fp32 = make_problem(TINY, 8, toy_cost(), **run, grad_dtype="fp32")
    held = estimated(fp32, [fp32.layout(zero=1, zero_shard_size=8)]).memory.parts[1, 0]
    assert held - buckets * 2 * bucket == (4 + 4 + 2) * elements


def test_deepspeed_joins_gradients_and_widens_them_in_its_step() -> None:
    # 2 + 4 bytes of what a rank updates, under ZeRO-3 of a billion at a time, under ZeRO-1 less the whole gradients, which are
    # freed before; 4 + 4 of all without ZeRO; nothing where gradients are in fp32
    for zero, ranks, expected in (
        (1, 2, 6 * 1.5e9 - 2 * 3e9),
        (1, 4, 0.0),
        (2, 2, 6 * 1.5e9),
        (3, 2, 6 * 1e9),
        (1, 1, 4 * 3e9),
        (0, 1, 8 * 3e9),
    ):
        problem = make_problem(TINY, ranks, toy_cost(), **TINY_RUN, framework="megatron-deepspeed")
        owned = np.array([3e9 / ranks])
        _, step = trained_bytes(problem, LINEARS, zero, np.array([3e9]), owned, np.array([ranks > 1]), np.array([False]))
        assert step.tolist() == [expected]
    wide = make_problem(TINY, 2, toy_cost(), **TINY_RUN, framework="megatron-deepspeed", grad_dtype="fp32")
    _, step = trained_bytes(wide, LINEARS, 1, np.array([3e9]), np.array([1.5e9]), np.array([True]), np.array([False]))
    assert step.tolist() == [0]


@pytest.mark.parametrize(
    ("settings", "mebibytes"),
    [
        ({}, 2 * 8.125 + 4),  # two threads run torch's GEMMs; Transformer Engine holds one workspace of 4 MiB
        ({"deterministic": True}, 2 * 32 + 4),
        ({"framework": "megatron-core local"}, 2 * 8.125),
        ({"framework": "torchtitan"}, 0.0),  # not modelled
    ],
)
def test_workspaces_of_cublas(settings: dict[str, Any], mebibytes: float) -> None:
    problem = make_problem(TINY, 1, toy_cost(device=BEFORE_HOPPER), **TINY_RUN, **{"framework": "megatron-core", **settings})
    assert workspace_bytes(problem) == mebibytes * 2**20


def test_workspaces_grow_with_hopper_and_experts() -> None:
    hopper = toy_cost(device=replace(DEVICE, peak_flops={"bf16": 1e15, "fp8": 2e15}))
    experts = TINY.replace(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    dense, grouped = (workspace_bytes(make_problem(model, 4, hopper, framework="megatron-core")) for model in (TINY, experts))
    assert dense == 3 * 32 * 2**20 and grouped == (2 + 5) * 32 * 2**20  # experts' GEMMs run on four more streams


def test_experts_that_nothing_shards_are_not_gathered_and_keep_their_own_gradients(h100_model: CostModel) -> None:
    # an expert of 3 * 128 * 64 on each of 4 ranks, beside attention, router and norms, whose whole gradients are fp32 until the
    # last micro batch; those of experts are in the parameters' 16 bits. Sharded in pairs, they are gathered with the rest
    experts = TINY.replace(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    run = {**TINY_RUN, "framework": "nemo-automodel", "grad_dtype": "fp32"}
    alone, pairs = (
        estimated(problem, [problem.layout(ep=ep, zero=3, zero_shard_size=4, num_micro_batches=2)])
        for problem in [make_problem(experts, 4, h100_model, **run)]
        for ep in (4, 2)
    )
    dense, expert = 4 * 64 * 64 - 2 * 64 * 32 + 4 * 64 + 2 * 64, 3 * 128 * 64
    ends = 2 * 256 * 64 + 64
    assert parts(alone)["gradients"] == 4 * (2 * dense + ends) + 2 * 2 * expert
    assert parts(pairs)["gradients"] == 4 * (2 * dense + ends) + 4 * 2 * 2 * expert
    in_layer = [gather_buffers(found.priced)[1, 3, 0] for found in (alone, pairs)]
    assert in_layer == [(2 * 2 + 2 + 4) * dense, (2 * 2 + 2 + 4) * (dense + 2 * expert)]


def test_buffers_of_hybrid_ep_by_hand(h100_model: CostModel) -> None:
    """Of 4 ranks in a domain: their 4 * 32 tokens of 64 values and 4 fp32 probabilities; over domains of 2 twice, 2 each."""
    experts = TINY.replace(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    run = {"world_size": 8, "dp": 8, "ep": 4, **TINY_RUN, "framework": "megatron-bridge-26"}

    def outside(node: int, moe_dispatcher: str = "hybridep", **axes: Any) -> float:
        cluster = replace(cluster_of(DEVICE), gpus_per_node=node, nvlink_domain=node)
        how = {"framework": "megatron-bridge-26", "moe_dispatcher": moe_dispatcher}
        problem = make_problem(experts, 8, h100_model, 32, cluster, **how)
        found = estimated(problem, [problem.layout(**{**run, **how, **axes})]).memory
        return float(found.device[0] - found.reserved[0])

    none = outside(8, moe_dispatcher="alltoall")
    assert outside(8) - none == 4 * 32 * (2 * 64 + 4 * 4)
    assert outside(2) - none == 2 * 4 * 32 * (2 * 64 + 4 * 2)
    assert outside(8, ep=1) == none


@pytest.mark.parametrize(
    ("framework", "group"),
    [
        ("megatron-core", 1),
        ("megatron-core", 3),
        ("torchtitan", 1),
        ("generic", 1),
        ("internevo-2024", 1),
        ("megatron-lm-zero-bubble", 1),
    ],
)
def test_no_layout_goes_below_the_bound_that_prunes_a_search(framework: str, group: int, h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 64, h100_model, framework=framework, recompute_group=group)
    layouts = some_layouts(problem, 512, 1500, seed=3)
    found = estimate_layouts(problem, layouts)
    least = least_memory(found.priced, layouts)
    assert (least <= found.memory.device * (1 + 1e-12)).all()
    assert np.median(least / found.memory.device) > 0.5, "a bound that prunes something"


@pytest.mark.parametrize("framework", ["fsdp", "fsdp2", "torchtitan", "nemo-automodel"])
def test_the_bound_holds_where_gradients_come_as_activations_go(framework: str) -> None:
    problem = make_problem(MODEL, 64, toy_cost(), framework=framework)
    layouts = cross(problem, enumerate_splits(problem, 64).splits)
    layouts = layouts.take(np.flatnonzero(layouts.splits.num_micro_batches[layouts.row] == 1))
    found = estimate_layouts(problem, layouts)
    assert len(layouts) >= 20
    assert (least_memory(found.priced, layouts) <= found.memory.device * (1 + 1e-12)).all()


@pytest.mark.parametrize(("schedule", "waiting"), [("1f1b", 0), ("zb-h1", 3), ("zb-1p", 3), ("zb-2p", 5)])
def test_weight_gradients_of_the_head_wait_with_their_operands(schedule: str, waiting: int) -> None:
    """Of 6 micro batches and 4 stages: input and logits' gradient of all but the one at work, as far as the schedule allows."""

    def last_stage(vocabulary: int, micro_batches: int) -> float:
        model = replace(TINY, vocab_size=vocabulary, num_hidden_layers=4)
        problem = make_problem(model, 4, toy_cost(), **TINY_RUN, framework="zero-bubble")
        layout = problem.layout(pp=4, dp=1, micro_batch_size=1, num_micro_batches=micro_batches, schedule=schedule)
        found = memory_of_stages(estimated(problem, [layout]), 0)
        return float(found.allocated[-1])

    grown = [last_stage(4096, m) - last_stage(2048, m) for m in (6, 1)]
    assert grown[0] - grown[1] == pytest.approx(waiting * 32 * 2048 * 2)


def test_at_the_loss_no_layer_is_gathered_and_the_first_micro_batch_has_no_gradients() -> None:
    """FSDP's peak at the loss, by hand for a vocabulary of 4,096 on 2 ranks, each with half of the parameters."""
    model = TINY.replace(vocab_size=4096)
    one, two = (
        tiny("torchtitan-2026-02", 2, model, {"grad_dtype": "fp32"}, zero=3, zero_shard_size=2, dp=2, num_micro_batches=m)
        for m in (1, 2)
    )
    parts = [dict(zip(MEMORY_PARTS, found.memory.parts[:, 0].tolist(), strict=True)) for found in (one, two)]
    layers, ends = 2 * (36864 + 2 * 64), 2 * 4096 * 64 + 64
    assert [part["gradients"] for part in parts] == [0.0, (layers + ends) / 2 * 4]
    head = 2 * (4096 * 64 + 64)  # bytes of the head, which stays gathered from its forward to its backward pass
    assert [part["gather_buffers"] for part in parts] == [head, head]
    assert [part["backward_buffers"] for part in parts] == [0.0, 0.0] and parts[0]["loss"] == parts[1]["loss"] > 0


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-1p", "zb-2p"])
def test_no_weight_gradient_of_the_head_waits_beside_the_only_micro_batch(schedule: str) -> None:
    def loss(name: str) -> float:
        problem = make_problem(TINY, 2, toy_cost(), **TINY_RUN, framework="zero-bubble")
        found = estimated(problem, [problem.layout(pp=2, dp=1, zero=0, num_micro_batches=1, schedule=name)])
        return float(memory_of_stages(found, 0).parts[MEMORY_PARTS.index("loss"), -1])

    assert loss(schedule) == loss("1f1b") > 0


def test_a_middle_stage_has_whole_chunks_where_the_loss_counts_as_a_layer() -> None:
    # 15 layers and the loss in 4 stages of 2 chunks: the second stage has 2 layers in each, of 2 * 2 + 4 + 1 = 9 passes in
    # flight
    model = TINY.replace(num_hidden_layers=15)
    problem = make_problem(model, 4, toy_cost(), **PLAIN)
    layout = problem.layout(dp=1, pp=4, vpp=2, zero=0, num_micro_batches=16, account_for_loss_in_pipeline_split=True)
    held = memory_of_stages(estimated(problem, [layout]), 0).parts[MEMORY_PARTS.index("activations")]
    assert held[1] == 9 * 2 * TINY_SAVED


def test_one_tensor_rank_gathers_nothing_and_whole_activations_need_no_buffer() -> None:
    # nanotron: two buffers of 32 tokens of 64 two-byte values under a sequence split over two ranks, and gaps where it reads
    # them
    problem = make_problem(TINY, 2, toy_cost(), **TINY_RUN, framework="nanotron", grad_dtype="fp32")
    layouts = [{"tp": 2, "tp_mode": "msp"}, {"tp": 2, "tp_mode": "mtp"}, {"dp": 2}]
    found = estimated(problem, [problem.layout(**{"dp": 1, "zero": 0, **layout}) for layout in layouts])
    workspaces = found.memory.parts[MEMORY_PARTS.index("workspaces")]
    assert (workspaces - workspaces[2]).tolist() == [2 * 32 * 64 * 2, 0, 0]
    gaps = found.memory.reserved - found.memory.allocated - 0.35 * found.memory.parts[STATIC_PARTS:].sum(axis=0)
    assert gaps[2] == pytest.approx(0, abs=1e-3)


def test_experts_are_updated_after_all_else_whose_wide_copies_are_gone_by_then() -> None:
    # Adam with 16-bit moments makes fp32 copies of both for its step: 8 bytes of what it updates, here of the expert of a rank
    model = TINY.replace(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=512)
    problem = make_problem(model, 2, toy_cost(), **TINY_RUN, framework="megatron-core", optimizer_states="bf16")
    found = estimated(problem, [problem.layout(dp=2, ep=2, zero=0)])
    experts = 2 * 3 * 64 * 512
    others = float(found.terms.once.parameters[0]) - experts
    assert experts > others
    # of 16-bit moments 4 bytes, and 2 of the fp32 weights that the 16-bit ones lack
    assert parts(found)["optimizer"] == pytest.approx(6 * (experts + others) + 8 * experts)


@pytest.mark.parametrize("seq", [32, 256])
def test_gradients_of_the_only_micro_batch_come_as_its_activations_go(seq: int) -> None:
    """At the loss of one of two micro batches there are gradients of the other; the only one has none there. When the backward
    pass of its first layer begins there are that layer's activations and the gradients of all but it and the embedding; if
    these are more than the layer's activations, all gradients at the end are the peak."""
    problem = make_problem(
        replace(TINY, num_hidden_layers=4),
        1,
        toy_cost(),
        seq_len=seq,
        compile=True,
        grad_dtype="fp32",
        framework="profiler-train",
    )
    found = estimated(problem, [problem.layout(zero=0, num_micro_batches=m) for m in (1, 2)])
    one, two = (dict(zip(MEMORY_PARTS, column, strict=True)) for column in found.memory.parts.T)
    gradients = 4 * (4 * TINY_LAYER + 2 * 256 * 64 + 64)
    assert two["gradients"] == gradients and two["loss"] > 0
    if gradients < two["activations"]:  # the loss is the peak of both
        assert one == {**two, "gradients": 0.0}
    else:
        assert one == {**two, "activations": 0.0, "backward_buffers": 0.0, "loss": 0.0}
    assert found.memory.allocated[0] == sum(one.values())


def test_dummy_gradients_are_of_the_layers_that_a_stage_has() -> None:
    # two stages of two layers: Mamba-2 and an MLP on the first, Mamba-2 and attention on the last; 16-bit, of each shape once
    problem = make_problem(HYBRID, 2, toy_cost(), 256, grad_dtype="fp32", framework="megatron-core")
    layout = problem.layout(dp=1, pp=2, zero=0)
    mamba, attention, mlp = (layer_parameters(HYBRID, kind) for kind in (MAMBA, ATTENTION, MLP))
    first, last = memory_of_stages(estimated(problem, [layout]), 0).parts[MEMORY_PARTS.index("gradients")]
    table, norms = 256 * 64, 64
    linears = {
        "mamba": 64 * (64 + 64 + 2 * 2 * 8 + 4) + 64 * 64,
        "attention": 64 * (4 + 2 * 2) * 16 + 64 * 64,
        "mlp": 3 * 64 * 128,
    }
    assert first == 4 * (mamba + mlp + table) + 2 * (linears["mamba"] + linears["mlp"])
    assert last == 4 * (mamba + attention + table + norms) + 2 * (linears["mamba"] + linears["attention"] + table)


def test_quantised_weights_of_multi_token_prediction_are_on_the_last_stage() -> None:
    # fp8 and transposed copies of the layer, and of the projection of 2 * 64 * 64, one byte each beside what bf16 holds
    model = TINY.replace(num_nextn_predict_layers=1, hidden_size=64)
    found = {}
    for precision in ("bf16", "fp8"):
        problem = make_problem(model, 2, toy_cost(), 128, framework="megatron-core", precision=precision)
        solutions = estimated(problem, [problem.layout(dp=1, pp=2, zero=0)])
        found[precision] = memory_of_stages(solutions, 0).parts[MEMORY_PARTS.index("weights")]
    more = found["fp8"] - found["bf16"]
    assert more.tolist() == [2 * 36_864, 2 * (2 * 36_864 + 2 * 64 * 64)]


def test_deepspeed_frees_16_bit_gradients_of_zero_1_and_2() -> None:
    # of the first micro batch there are none at its loss; with more micro batches they are there from the second on
    def gradients(zero: int, grad_dtype: str, micro_batches: int) -> float:
        run = {"framework": "transformers-deepspeed", "precision": "fp16", "grad_dtype": grad_dtype}
        problem = make_problem(TINY, 8, toy_cost(), 256, **run)
        layout = {"zero": zero, "zero_shard_size": 8, "micro_batch_size": 64, "num_micro_batches": micro_batches}
        return parts(estimated(problem, [problem.layout(**layout)]))["gradients"]

    assert gradients(1, "fp16", 1) == 0 < gradients(1, "fp16", 2)
    assert gradients(2, "fp16", 1) == 0 < gradients(2, "fp16", 2)


def test_llm_foundry_holds_reduced_gradients_in_fp32() -> None:
    found = {}
    for framework in ("llm-foundry", "fsdp"):
        problem = make_problem(TINY, 8, toy_cost(), 32, framework=framework)
        found[framework] = parts(estimated(problem, [problem.layout(zero=3, zero_shard_size=8, num_micro_batches=2)]))[
            "gradients"
        ]
    assert found["llm-foundry"] == found["fsdp"] > 0


@pytest.mark.parametrize(("framework", "logits"), [("llm-foundry-2023", 1), ("fsdp", 0)])
def test_composers_trainer_holds_the_logits_through_the_backward_pass(framework: str, logits: int) -> None:
    # layers so much wider than the vocabulary that the peak is in a layer's backward pass, not at the loss
    model = TINY.replace(intermediate_size=65_536, vocab_size=128)
    found = tiny(framework, model=model, zero=0, recompute="full", num_micro_batches=2)
    parts = dict(zip(MEMORY_PARTS, found.memory.parts[:, 0].tolist(), strict=True))
    assert parts["backward_buffers"] > 0
    assert parts["loss"] == logits * 32 * 128 * 2  # tokens, logits of each, in 16 bits
