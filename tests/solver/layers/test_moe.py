"""Mixtures of experts: a layer by hand, what one expert costs, and the exchange of tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from references import flops
from toy import DEVICE, TINY, estimated, layer_keys, make_problem, toy_layout

from predictor.cost_model import CostModel
from predictor.network.exchange_law import Exchange
from profiler.errors import InputError
from profiler.profile.routing import expected_groups, expected_places
from solver.formats.config_file import find_model, load_run_config
from solver.layers.decoder import layer_program
from solver.layers.program import FORWARD, GROUPED_LINEAR, LINEAR, ONE_KERNEL, LayerProgram
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_framework
from solver.spec.frameworks import framework_of
from solver.spec.layer_kinds import LayerKind
from solver.spec.model import ModelSpec
from solver.spec.model_size import layer_parameters
from solver.spec.rules.runs import check_run

#: 8 experts of width 32, of which a token goes to 2; SEQ tokens, hidden size 64.
SEQ, HIDDEN, WIDTH, EXPERTS, TOP = 256, 64, 32, 8, 2
MOE = TINY.replace(num_experts=EXPERTS, num_experts_per_tok=TOP, moe_intermediate_size=WIDTH)
KIND = LayerKind(experts=True)


def program(model: ModelSpec = MOE, mode: str = "mtp", kind: LayerKind = KIND, **given: Any) -> LayerProgram:
    sizes = {name: given.pop(name) for name in ("tp", "ep", "etp", "micro_batch_size") if name in given}
    return layer_program(layer_keys(mode, **sizes), model, toy_layout(64, SEQ, **given), cluster_of(DEVICE), kind)


def op(layer: LayerProgram, label: str) -> dict[str, float]:
    """Return the dims of one op with its count."""
    (found,) = [o for o in layer.ops if o.label == label and np.ravel(o.count)[0] > 0]
    return {name: float(np.ravel(value)[0]) for name, value in found.dims.items()} | {"count": float(np.ravel(found.count)[0])}


def saved(layer: LayerProgram, name: str) -> float:
    return float(np.ravel(next(tensor.bytes for tensor in layer.saved if tensor.name == name))[0])


def test_a_layer_of_eight_experts_over_four_ranks_by_hand() -> None:
    # a rank sends 256 * 2 rows and receives as many, 256 of each of its 2 experts
    layer = program(ep=4)
    up = op(layer, "experts.w13.forward")
    assert (up["groups"], up["tokens_per_group"], up["n"], up["k"]) == (2, SEQ * TOP / 2, 2 * WIDTH, HIDDEN)
    down = op(layer, "experts.w2.weight_grad")
    assert (down["groups"], down["n"], down["k"]) == (2, HIDDEN, WIDTH)
    for label in ("dispatch.forward", "combine.forward", "dispatch.input_grad", "combine.input_grad"):
        assert op(layer, label)["bytes"] == SEQ * TOP * HIDDEN * 2
    # permuted: each token read, its two rows written; sorted: all rows read and written
    assert op(layer, "permute.forward")["bytes"] == (SEQ + SEQ * TOP) * HIDDEN * 2
    assert op(layer, "sort.forward")["bytes"] == 2 * SEQ * TOP * HIDDEN * 2
    assert op(program(ep=1), "sort.forward") == op(layer, "sort.forward"), "sorted all the same where nothing was sent"
    assert not any(o.name == "sort" and np.any(o.count) for o in program(ep=EXPERTS).ops), "one expert needs no order"
    assert saved(layer, "expert_input") == SEQ * TOP * HIDDEN * 2
    assert saved(layer, "expert_act_input") == SEQ * TOP * 2 * WIDTH * 2
    assert layer.weight_elements("experts")[0] == 2 * 3 * HIDDEN * WIDTH
    router = 6.0 * SEQ * HIDDEN * EXPERTS
    dense = flops(program(TINY.replace(intermediate_size=TOP * WIDTH), kind=LayerKind()))[0]
    assert flops(layer)[0] == pytest.approx(dense + router, rel=1e-12)


def test_experts_split_over_two_ranks_by_hand() -> None:
    # etp 2: each rank works on the rows of both, with half of each expert; tp 2 halves the tokens of a rank
    layer = program(mode="msp", tp=2, ep=2, etp=2)
    up = op(layer, "experts.w13.forward")
    assert (up["groups"], up["tokens_per_group"], up["n"]) == (4, SEQ / 2 * TOP * 2 / 4, WIDTH)
    assert op(layer, "dispatch.etp.forward")["bytes"] == SEQ / 2 * TOP * 2 * HIDDEN * 2
    assert layer.weight_elements("experts")[0] == 4 * 3 * HIDDEN * WIDTH / 2


def test_experts_of_torchtitan_by_hand() -> None:
    """Gate and up are GEMMs of their own, the tensor group gathers the input; by op, what was sent is kept."""
    given = {"framework": "torchtitan-2026-02", "fused_norm": True, "moe_permute_fusion": False}
    layer, other = program(mode="msp", tp=2, ep=4, **given), program(mode="msp", tp=2, ep=4)
    for name in ("w13", "w3"):
        up = op(layer, f"experts.{name}.forward")
        assert (up["groups"], up["tokens_per_group"], up["n"], up["k"]) == (2, SEQ / 2 * TOP / 2, WIDTH, HIDDEN)
    assert op(layer, "experts.gradients.input_grad")["bytes"] == 3 * SEQ / 2 * TOP * HIDDEN * 2
    # the router works on all tokens of the group, three products of the other half too
    routed = 3 * 2 * SEQ / 2 * EXPERTS * HIDDEN
    assert flops(layer)[0] == pytest.approx(flops(other)[0] + routed, rel=1e-12)
    sent = {o.label: float(np.ravel(o.dims["bytes"])[0]) for o in layer.ops if o.module == "experts" and o.stream == "tp"}
    assert sent == {
        f"experts.{what}.{phase}": SEQ * HIDDEN * 2
        for what in ("all_gather", "reduce_scatter")
        for phase in ("forward", "input_grad")
    }
    again = {o.label for o in layer.ops if Recompute.SELECTIVE in o.recomputed_by}
    assert {"router.forward", "experts.w13.forward", "experts.w2.forward", "permute.forward"} <= again
    assert not {"dispatch.forward", "combine.forward", "dispatch.counts.forward"} & again
    # rows to zeros for the whole tensor group's tokens, in fp32, weighed and added: 12 bytes a value, backward 14
    whole = SEQ * TOP * HIDDEN
    assert op(layer, "weigh.forward")["bytes"] == 12 * whole and op(layer, "weigh.input_grad")["bytes"] == 14 * whole
    assert saved(layer, "expert_output") == 4 * whole
    # sorted with a row of zeros joined on, 4 reads and writes each way; back 2 and 5; no probabilities are sent
    assert op(layer, "sort.forward")["bytes"] == op(layer, "sort.input_grad")["bytes"] == 4 * whole / 2 * 2
    assert (op(layer, "unsort.forward")["bytes"], op(layer, "unsort.input_grad")["bytes"]) == (2 * whole, 5 * whole)
    assert not any("probabilities" in o.name for o in layer.ops) and any("probabilities" in o.name for o in other.ops)
    kept, none = (program(ep=ep, **given) for ep in (4, 1))
    assert saved(kept, "products") - saved(none, "products") == 2 * SEQ * TOP * HIDDEN * 2


def test_gathered_tokens_have_a_buffer_that_stays() -> None:
    # Megatron-Core's all-gather dispatcher: the tokens of all four ranks in 16 bits, over the tensor group's too
    for sizes, tokens in (({"ep": 4}, 4 * SEQ), ({"ep": 2, "mode": "msp", "tp": 2, "etp": 2}, 4 * SEQ / 2), ({"ep": 1}, 0)):
        layer = program(framework="megatron-core", moe_dispatcher="allgather", **sizes)
        assert float(np.ravel(layer.buffer_bytes)[0]) == tokens * HIDDEN * 2
    assert not np.any(program(framework="megatron-core", ep=4, moe_dispatcher="alltoall").buffer_bytes)


def test_torchtitan_divides_experts_within_what_it_shards() -> None:
    run = toy_layout(64, SEQ, framework="torchtitan-2026-02", zero=3, zero_shard_size=16, ep=8)
    normed = MOE.replace(qk_norm="head")
    check_framework(normed, run)
    for changes, sentence in (
        ({"ep": 8, "zero_shard_size": 4}, "copies of the experts do not divide alike"),
        ({"etp": 2}, "does not run ep 8 and etp 2 with tp 1, as described here"),
        ({"tp": 2, "tp_mode": "msp", "dp": 32, "ep": 1}, "does not run ep 1 and etp 1 with tp 2, as described here"),
        ({"zero": 0, "zero_shard_size": 1}, "does not run ZeRO-0 with tp 1, cp 1, pp 1 and ep 8"),
        ({"pp": 2, "dp": 32, "zero": 2}, "has no pipelines of models with norms of q and k"),
        ({"moe_dispatcher": "hybridep"}, "does not offer moe_dispatcher hybridep"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_framework(normed, run.replace(**changes))


def test_a_capacity_factor_pads_every_expert() -> None:
    # 256 * 2 * 1.3 / 8 = 83.2 rows an expert, so 84
    layer = program(ep=4, moe_capacity_factor=1.3)
    assert op(layer, "experts.w13.forward")["tokens_per_group"] == 84 * EXPERTS / 2
    assert op(layer, "dispatch.forward")["bytes"] == 84 * EXPERTS * HIDDEN * 2
    # of equal rows the order by expert is a transposition: all are copied once each way
    for name in ("sort.forward", "sort.input_grad", "unsort.forward", "unsort.input_grad"):
        assert op(layer, name)["bytes"] == 2 * 84 * EXPERTS * HIDDEN * 2
    kinds = {o.variant for o in layer.ops if o.name in ("sort", "unsort")}
    assert kinds == {"copy"} and {o.variant for o in program(ep=4).ops if o.name == "sort"} == {"permute", "permute_grad"}
    with pytest.raises(InputError, match="moe_imbalance 2 changes nothing beside moe_capacity_factor 1.3"):
        program(ep=4, moe_capacity_factor=1.3, moe_imbalance=2.0)


def test_one_expert_is_the_dense_layer() -> None:
    model = TINY.replace(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=TINY.intermediate_size)
    dense, one = program(TINY, kind=LayerKind(), framework="megatron-core"), program(model, framework="megatron-core")
    gemms = [o for o in one.ops if o.kind == GROUPED_LINEAR and np.any(o.count)]
    assert not gemms, "a single expert is a plain GEMM"
    mlp = sorted(tuple(float(np.ravel(v)[0]) for v in o.dims.values()) for o in dense.ops if o.kind == LINEAR)
    expert = [o for o in one.ops if o.kind == LINEAR and np.any(o.count) and o.name != "router"]
    assert sorted(tuple(float(np.ravel(v)[0]) for v in o.dims.values()) for o in expert) == mlp
    assert flops(one)[0] - flops(dense)[0] == 6 * SEQ * HIDDEN
    assert one.weight_elements()[0] - dense.weight_elements()[0] == HIDDEN


def test_hybrid_ep_gathers_who_goes_where_by_hand() -> None:
    # a byte for each of the 4 * 256 tokens of the group and 8 experts, gathered and read once in the forward pass
    layer = program(ep=4, moe_dispatcher="hybridep")
    assert op(layer, "dispatch.routing.forward")["bytes"] == op(layer, "dispatch.scan.forward")["bytes"] == 4 * SEQ * EXPERTS
    assert not any(o.name in ("dispatch.routing", "dispatch.scan") and o.phase != FORWARD for o in layer.ops)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_nothing_is_sent_within_one_rank(dispatcher: str) -> None:
    for ep, sends in ((1, False), (4, True)):
        layer = program(ep=ep, moe_dispatcher=dispatcher)
        assert any(np.any(o.count) for o in layer.ops if o.stream == "ep") == sends


@pytest.mark.parametrize(
    ("dispatcher", "arriving"),
    [
        ("alltoall", 1.0),
        ("allgather", 4.0),
        ("deepep", 4 * 13 / 28),
        ("hybridep", 4 * 13 / 28),
    ],
)
def test_rows_are_made_of_what_arrives(dispatcher: str, arriving: float) -> None:
    # a token goes to a rank with 2 of 8 experts unless both of its experts are among the other 6: 1 - 15 / 28
    layer = program(ep=4, moe_dispatcher=dispatcher)
    for name in ("permute.forward", "unpermute.forward", "permute.input_grad"):
        assert op(layer, name)["bytes"] == pytest.approx((arriving + TOP) * SEQ * HIDDEN * 2, rel=1e-6)


def test_imbalance_costs_time_and_memory() -> None:
    even, balanced, uneven = (program(ep=4, **k) for k in ({}, {"moe_imbalance": 1.0}, {"moe_imbalance": 1.5}))
    assert flops(balanced)[0] == flops(even)[0] and saved(balanced, "expert_input") == saved(even, "expert_input")
    assert op(uneven, "experts.w2.forward")["tokens_per_group"] == 1.5 * op(even, "experts.w2.forward")["tokens_per_group"]
    assert op(uneven, "dispatch.forward")["bytes"] == 1.5 * op(even, "dispatch.forward")["bytes"]
    assert saved(uneven, "expert_act_output") == 1.5 * saved(even, "expert_act_output")
    # ranks that hold all experts have no hottest one
    assert flops(program(ep=1, moe_imbalance=1.5))[0] == flops(program(ep=1))[0]


@pytest.mark.parametrize(
    ("dispatcher", "size", "grows"),
    [
        ("alltoall", "bytes", 1.5),
        ("deepep", "tokens", 1.5),
        ("hybridep", "tokens", 1.5),
        ("allgather", "bytes", 1.0),
    ],
)
def test_the_exchange_waits_for_the_rank_that_gets_most(dispatcher: str, size: str, grows: float) -> None:
    even, uneven = (program(ep=4, moe_dispatcher=dispatcher, moe_imbalance=load) for load in (1.0, 1.5))
    for name in ("dispatch.forward", "combine.forward", "dispatch.input_grad", "combine.input_grad"):
        assert op(uneven, name)[size] == grows * op(even, name)[size]


@pytest.mark.parametrize(("ep", "etp", "tp"), [(1, 1, 1), (4, 1, 1), (2, 2, 2), (8, 1, 2)])
def test_all_ranks_together_hold_every_parameter_once(ep: int, etp: int, tp: int) -> None:
    model = MOE.replace(shared_expert_intermediate_size=48, shared_expert_gate=True, router_bias=True, mlp_bias=False)
    layer = program(model, "msp" if tp > 1 else "mtp", tp=tp, ep=ep, etp=etp)
    experts = layer.weight_elements("experts")[0] * ep * etp
    linears = layer.weight_elements("linears")[0] * tp
    assert experts + linears + layer.weight_elements("others")[0] == layer_parameters(model, KIND)


def test_shared_experts_run_beside_the_exchange_where_asked() -> None:
    model = MOE.replace(shared_expert_intermediate_size=48)
    for overlap in (False, True):
        layer = program(model, ep=4, moe_shared_expert_overlap=overlap)
        under = {o.label: o.overlaps_with for o in layer.ops if o.stream == "ep" and o.name in ("dispatch", "combine")}
        assert all(bool(labels) == overlap for labels in under.values())
        assert {label for labels in under.values() for label in labels} <= {o.label for o in layer.ops}
    apart = program(model, ep=4, moe_shared_expert_overlap=True, framework="internevo")  # gate and up are two GEMMs
    (under,) = (o.overlaps_with for o in apart.ops if o.label == "dispatch.forward")
    assert under == ("shared.w1.forward", "shared.w3.forward", "shared.w2.forward")


def test_experts_that_stay_home_are_the_same_whatever_the_dispatcher(h100_model: CostModel) -> None:
    model = load_run_config("configs/models/gpt_oss_20b.json").model

    def seconds(dispatcher: str, ep: int) -> float:
        one = make_problem(model, 8, h100_model, framework="megatron-bridge-26", moe_dispatcher=dispatcher)
        return float(estimated(one, [one.layout(ep=ep)]).times.seconds[0])

    assert seconds("alltoall", 1) == seconds("deepep", 1) == seconds("hybridep", 1)
    assert seconds("alltoall", 2) != seconds("deepep", 2)


def test_biases_of_shared_experts_are_counted() -> None:
    model = MOE.replace(shared_expert_intermediate_size=48, mlp_bias=True)
    assert layer_parameters(model, KIND) - layer_parameters(model.replace(mlp_bias=False), KIND) == (
        EXPERTS * (2 * WIDTH + HIDDEN) + 2 * 48 + HIDDEN
    )
    assert layer_parameters(model, KIND) == program(model).weight_elements()[0]


def test_a_router_limited_to_groups_limits_ranks_and_nodes() -> None:
    # 4 groups of 8 experts, of which a token uses 2: on 4 ranks it goes to two; on 2, with two groups each, to both unless they
    # are one rank's (two of six pairs); on 8 ranks a group is on two, of which its experts are on one or both
    model = MOE.replace(num_experts=32, router_groups=4, router_topk_groups=2)
    for ep, ranks in ((4, 2.0), (2, 2 * (1 - 1 / 6)), (8, expected_groups(4, 16, TOP))):
        layer = program(model, ep=ep, moe_dispatcher="deepep")
        sent = op(layer, "dispatch.forward")
        assert (sent["groups"], sent["chosen"]) == (4, 2)
        assert op(layer, "permute.forward")["bytes"] == pytest.approx((ranks + TOP) * SEQ * HIDDEN * 2, rel=1e-9)
    split = op(program(model, ep=4, etp=2, moe_dispatcher="deepep"), "combine.forward")
    assert (split["groups"], split["chosen"]) == (8, 4)
    assert op(program(MOE, ep=4, moe_dispatcher="deepep"), "dispatch.forward")["groups"] == 0


def test_places_of_a_limited_router_by_hand_and_as_simulated() -> None:
    # DeepSeek-V3's router, simulated over 10^5 tokens: 8 groups of 32 experts, the 4 with the best two experts, 8 experts
    simulated = {8: 3.95, 16: 5.73, 32: 6.86}
    for ranks, reached in simulated.items():
        assert expected_places(ranks, 256, 8, 8, 4) == pytest.approx(reached, rel=0.08)
    assert expected_places(2, 256, 8, 8, 4) == pytest.approx(2 * (1 - 1 / 70)) and expected_places(8, 256, 8, 8, 4) == 4
    assert expected_places(16, 256, 8, 8, 8) == expected_places(16, 256, 8) == expected_groups(16, 256, 8)


def memory_bytes(layer: LayerProgram, label: str) -> float:
    """Bytes of all runs of one memory-bound op."""
    return op(layer, label)["bytes"] * op(layer, label)["count"]


def test_biases_and_clamps_of_megatron_by_hand() -> None:
    """GPT-OSS under Megatron-Core: clamps of gate and up projection, and biases of the output, are kernels of their own."""
    model = MOE.replace(mlp_bias=True, clamped_gate=True)
    layer = program(model, ep=4, framework="megatron-core")
    rows = SEQ * TOP  # of the two experts of a rank together
    assert memory_bytes(layer, "experts.activation.clamp.forward") == rows * WIDTH * 2 * 4  # views: two kernels, and five
    assert memory_bytes(layer, "experts.activation.clamp.input_grad") == rows * WIDTH * 5 * 4
    assert {o.variant for o in layer.ops if o.name == "experts.activation.clamp"} == {"strided"}
    assert memory_bytes(layer, "experts.activation.join.forward") == rows * WIDTH * 8
    assert memory_bytes(layer, "experts.activation.join.input_grad") == rows * WIDTH * 11
    assert memory_bytes(layer, "experts.bias.forward") == rows * HIDDEN * 4  # of one kernel; the chain moves 12
    assert op(layer, "experts.bias.input_grad")["count"] == 2
    (forward,) = [o for o in layer.ops if o.label == "experts.bias.forward"]
    assert np.ravel(forward.launches)[0] == 2 * 2 and forward.variant == "expert_bias_half_eager"
    wide = program(model, ep=4, framework="megatron-core", moe_dispatcher="deepep")  # whose probabilities are in fp32
    assert {o.variant for o in wide.ops if o.label == "experts.bias.forward"} == {"expert_bias_eager"}
    plain = program(ep=4, framework="megatron-core")
    names = {o.name for o in layer.ops} - {o.name for o in plain.ops}
    assert names == {"experts.activation.clamp", "experts.activation.join", "experts.bias"}
    assert saved(layer, "expert_clamped") == saved(layer, "expert_act_input") == rows * 2 * WIDTH * 2
    again = program(model, ep=4, framework="megatron-core", recompute="selective", recompute_modules="moe_act")
    dropped = next(tensor for tensor in again.saved if tensor.name == "expert_clamped").dropped_by
    assert Recompute.SELECTIVE in dropped
    assert {o.name for o in again.ops if Recompute.SELECTIVE in o.recomputed_by} == {
        "experts.activation",
        "experts.activation.clamp",
        "experts.activation.join",
    }


def test_a_framework_that_compiles_adds_biases_in_one_kernel() -> None:
    model = MOE.replace(mlp_bias=True, clamped_gate=True)
    assert {o.name for o in program(model, framework="torchtitan").ops} == {o.name for o in program(framework="torchtitan").ops}


def test_what_is_sent_beside_the_rows_by_hand() -> None:
    """Over 4 ranks: the numbers of rows of 8 experts from each, 8 bytes; a probability of 2 bytes of every row."""
    layer = program(ep=4, framework="megatron-core")
    assert op(layer, "dispatch.counts.forward")["bytes"] == 4 * 8 * 8
    rows = SEQ * TOP
    found = [op(layer, f"dispatch.probabilities.{phase}")["bytes"] for phase in ("forward", "input_grad")]
    assert found == [rows * 2, rows * 2] and not [o for o in layer.ops if o.label == "dispatch.counts.input_grad"]
    assert not [o for o in program(ep=4, moe_capacity_factor=1.0).ops if o.name == "dispatch.counts"]  # all have as many
    assert not [o for o in program(ep=4, moe_dispatcher="deepep").ops if o.name.startswith("dispatch.")]


#: Bytes of the collectives of one layer by op and pass, without those of attention, as Megatron-Core 0.16.1 itself sends them
#: (its GPTModel on a fake process group of 8 ranks): 2,048 tokens of width 1,024, 8 experts, 2 of each token, in 16 bits.
SENT = {
    ("alltoall", 1, 4, 1): {
        ("all2all", True): [8192, 8388608, 8388608],
        ("all_gather", True): [256],
        ("all2all", False): [8192, 8388608, 8388608],
    },
    ("alltoall", 2, 2, 2): {
        ("all2all", True): [4096, 4194304, 4194304],
        ("all_gather", True): [256, 8192, 8388608],
        ("reduce_scatter", True): [8388608],
        ("all2all", False): [4096, 4194304, 4194304],
        ("all_gather", False): [8388608],
        ("reduce_scatter", False): [8192, 8388608],
    },
    ("allgather", 1, 4, 1): {
        ("all_gather", True): [65536, 131072, 16777216],
        ("reduce_scatter", True): [16777216],
        ("all_gather", False): [16777216],
        ("reduce_scatter", False): [131072, 16777216],
    },
    ("allgather", 2, 4, 1): {
        ("all_gather", True): [32768, 65536, 8388608],
        ("reduce_scatter", True): [8388608],
        ("all_gather", False): [8388608],
        ("reduce_scatter", False): [65536, 8388608],
    },
}


@pytest.mark.parametrize("case", SENT)
def test_experts_send_what_megatron_core_sends(case: tuple[str, int, int, int]) -> None:
    dispatcher, tp, ep, etp = case
    model = MOE.replace(
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
    )
    run = toy_layout(64, 2048, moe_dispatcher=dispatcher, framework="megatron-core")
    layer = layer_program(layer_keys("msp", tp=tp, ep=ep, etp=etp), model, run, cluster_of(DEVICE), KIND)
    found: dict[tuple[str, bool], list[int]] = {}
    for one in layer.ops:
        if one.module == "expert_exchange" and one.stream == "ep" and np.all(np.asarray(one.count) > 0):
            found.setdefault((one.kind, one.phase == FORWARD), []).append(int(np.ravel(one.dims["bytes"])[0]))
    assert {kind: sorted(sizes) for kind, sizes in found.items()} == SENT[case]


def waiting(layer: LayerProgram) -> set[str]:
    """Labels of the ops for which the host waits."""
    return {o.label for o in layer.ops if np.any(np.asarray(o.after_host_sync) & (np.asarray(o.count) > 0))}


def test_where_the_host_waits() -> None:
    assert waiting(program(ep=4)) == {"dispatch.forward"}
    assert waiting(program(ep=2, etp=4, tp=4)) == {"dispatch.forward"}
    assert waiting(program()) == waiting(program(ep=4, moe_dispatcher="deepep")) == {"experts.w13.forward"}
    assert waiting(program(ep=4, moe_capacity_factor=1.0)) == set()
    clamped = program(MOE.replace(clamped_gate=True), ep=4, framework="megatron-core")
    assert waiting(clamped) == {"dispatch.forward", "experts.activation.forward"}


def test_a_fused_router_is_few_kernels() -> None:
    for fused, counts in ((False, [12, 6]), (True, [3, 1])):
        layer = program(moe_router_fusion=fused)
        assert [op(layer, f"routing.{phase}")["count"] for phase in ("forward", "input_grad")] == counts


def test_biases_of_experts_have_gradients_and_hooks() -> None:
    """Two of them for each of two experts' weights, and as many for their biases."""
    for model, launches in ((MOE, 4), (MOE.replace(mlp_bias=True), 8)):
        layer = program(model, ep=4, framework="megatron-core")
        found = [np.ravel(o.launches)[0] for o in layer.ops if o.label in ("experts.w13.weight_grad", "experts.w2.weight_grad")]
        assert found == [launches, launches]


def test_experts_one_after_the_other_are_launched_one_by_one() -> None:
    together, apart = program(ep=2), program(ep=2, moe_grouped_gemm=False)
    assert op(apart, "experts.w13.forward") == op(together, "experts.w13.forward")

    def launches(layer: LayerProgram) -> float:
        return float(sum(np.ravel(o.launches * o.count)[0] for o in layer.ops if o.name == "experts.w13"))

    assert launches(apart) == 3 * EXPERTS / 2 > launches(together) == 3, "three passes of four experts"


@pytest.mark.parametrize("name", ["mixtral_8x7b", "qwen3_30b_a3b"])
def test_experts_one_after_the_other_are_never_faster(name: str, h100_model: CostModel) -> None:
    model = load_run_config(find_model(name)).model

    def seconds(grouped: bool) -> float:
        problem = make_problem(model, 16, h100_model, 4096, framework="megatron-core", moe_grouped_gemm=grouped)
        return float(estimated(problem, [problem.layout(ep=4, dp=16, micro_batch_size=1)]).times.seconds[0])

    assert seconds(False) >= seconds(True)


def test_yarn_is_a_chain_of_kernels_under_megatron() -> None:
    def variants(model: ModelSpec, framework: str) -> set[str]:
        return {o.variant for o in program(model, framework=framework).ops if o.name == "rope"}

    scaled = MOE.replace(scaled_rope=True)
    assert variants(MOE, "megatron-core") == variants(scaled, "generic") == {"rope"}
    assert variants(scaled, "megatron-core") == {"rope_eager", "rope_eager_grad"}


def test_fused_experts_leave_only_what_stands_around_the_gemms() -> None:
    model = MOE.replace(mlp_bias=True, clamped_gate=True)
    given = {"ep": 4, "framework": "megatron-bridge-26.06", "precision": "mxfp8"}
    apart, fused = program(model, **given), program(model, moe_fused_experts=True, **given)
    gone = [o.label for o in apart.ops if o.label not in {other.label for other in fused.ops}]
    assert sorted(gone) == [
        "experts.activation.clamp.forward",
        "experts.activation.clamp.input_grad",
        "experts.activation.forward",
        "experts.activation.input_grad",
        "experts.activation.join.forward",
        "experts.activation.join.input_grad",
        "experts.bias.forward",
        "experts.bias.input_grad",
        "experts.pad.forward",
        "experts.pad.input_grad",
        "experts.unpad.forward",
        "experts.unpad.input_grad",
        "experts.w13.output_cast.input_grad",
        "experts.w2.input_cast.forward",
    ]
    assert flops(fused)[0] == flops(apart)[0]


@pytest.mark.parametrize(
    ("framework", "given", "message"),
    [
        ("megatron-bridge-26", {"precision": "mxfp8"}, "megatron-bridge-26 does not offer moe_fused_experts"),
        ("megatron-bridge-26.06", {"precision": "bf16"}, "precision mxfp8"),
        ("megatron-bridge-26.06", {"precision": "mxfp8", "moe_grouped_gemm": False}, "moe_grouped_gemm"),
        ("megatron-bridge-26.06", {"precision": "mxfp8", "tp": 2, "dp": 4, "etp": 2, "tp_mode": "msp"}, "etp 1, not 2"),
        (
            "megatron-bridge-26.06",
            {"precision": "mxfp8", "recompute": "selective", "recompute_modules": "moe_act"},
            "leaves no moe_act to recompute",
        ),
    ],
)
def test_fused_experts_are_refused_where_they_do_not_run(framework: str, given: dict[str, Any], message: str) -> None:
    run = toy_layout(8, SEQ, framework=framework, moe_fused_experts=True, **given)
    with pytest.raises(InputError, match=message):
        check_framework(MOE, run)


@pytest.mark.parametrize(
    ("given", "each"),
    [
        ({"precision": "mxfp8"}, 2),
        ({"precision": "fp8", "fp8_recipe": "tensorwise"}, 2),
        ({"precision": "fp8"}, 1),
        ({"precision": "mxfp8", "moe_fused_experts": True}, 1),
        ({"precision": "mxfp8", "framework": "generic"}, 1),
    ],
)
def test_the_host_launches_the_casts_of_each_expert(given: dict[str, Any], each: int) -> None:
    """Two local experts: Transformer Engine quantises the rows of each by itself, but for delayed scaling and fused experts."""
    layer = program(ep=4, **{"framework": "megatron-core", **given})
    casts = [o for o in layer.ops if o.name.startswith("experts.") and o.name.endswith("_cast")]
    assert len(casts) >= 2 and {float(np.ravel(o.launches)[0]) for o in casts} == {each}
    # the transposed copy comes from the same kernel
    assert all(np.all(o.launches == 0) for o in layer.ops if o.name.startswith("experts.") and o.name.endswith("_transpose"))


def test_rows_of_quantised_experts_are_copied_to_be_padded() -> None:
    """Megatron-Core copies all rows before the first GEMM and after the last, each way: read and written in 16 bits."""
    given: dict[str, Any] = {"framework": "megatron-core", "precision": "fp8"}
    layer = program(ep=4, **given)
    for label in ("experts.pad.forward", "experts.pad.input_grad", "experts.unpad.forward", "experts.unpad.input_grad"):
        assert op(layer, label)["bytes"] == SEQ * TOP * HIDDEN * 2 * 2
    for other in (
        {"precision": "bf16"},
        {"moe_capacity_factor": 1.0},
        {"moe_dispatcher": "hybridep"},
        {"framework": "generic"},
    ):
        assert not any("pad" in o.name and np.any(o.count) for o in program(ep=4, **{**given, **other}).ops)


def test_router_dispatch_shared_experts_and_their_gate_read_one_norm() -> None:
    # the gradient of each reader but the first is added: two reads and a write of 256 tokens of 64 values in two bytes
    def added(**model: Any) -> float:
        return op(program(MOE.replace(**model)), "norm2.gradients.input_grad")["bytes"] / (3 * SEQ * HIDDEN * 2)

    shared = {"shared_expert_intermediate_size": 64}
    assert [added(), added(**shared), added(**shared, shared_expert_gate=True)] == [1, 2, 3]


def test_consecutive_experts_are_on_as_few_ranks_as_hold_them() -> None:
    # token i goes to experts 2i and 2i + 1 of 8: over 4 ranks to one of them, over 8 ranks to two neighbours
    given: dict[str, Any] = {"framework": "nemo-automodel", "moe_dispatcher": "deepep"}
    few, many = (program(ep=ep, moe_routing="consecutive", **given) for ep in (4, 8))
    for layer, ranks in ((few, 1), (many, 2)):
        assert op(layer, "permute.forward")["bytes"] == pytest.approx((ranks + TOP) * SEQ * HIDDEN * 2, rel=1e-9)
        sent = op(layer, "dispatch.forward")
        assert (sent["top_k"], sent["chosen"], sent["tokens"]) == (ranks, 1, SEQ)
        assert not [o for o in layer.ops if o.module == "router" and o.name != "norm2.gradients"], "no router chooses"
    assert op(few, "experts.w13.forward") == op(program(ep=4, **given), "experts.w13.forward")
    forced = program(ep=4, framework="torchtitan-2026-02", moe_dispatcher="deepep", moe_routing="consecutive")
    assert op(forced, "router.forward")["n"] == EXPERTS, "torchtitan computes scores that it does not use"


def test_what_consecutive_experts_send() -> None:
    # of 256 experts over 64 ranks in 8 nodes a token goes to 8: two ranks of one node, which is its own in one case of eight
    model = load_run_config(find_model("deepseek_v3")).model
    keys, place = layer_keys("mtp", ep=64), cluster_of(DEVICE)
    layer = layer_program(keys, model, toy_layout(64, SEQ, moe_dispatcher="deepep", moe_routing="consecutive"), place, KIND)
    sent = op(layer, "dispatch.forward")
    at = Exchange(
        *(np.array([sent[name]]) for name in ("tokens", "row_bytes", "top_k", "experts", "intra", "inter")),
        bandwidth=np.array([5e10]),
        groups=np.array([sent["groups"]]),
        chosen=np.array([sent["chosen"]]),
    )
    assert (at.copies[0], at.other_nodes[0]) == pytest.approx((2, 7 / 8), rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"framework": "megatron-core", "moe_routing": "consecutive"}, "does not offer moe_routing consecutive"),
        (
            {"framework": "nemo-automodel", "moe_routing": "consecutive", "moe_imbalance": 1.2},
            "contradicts moe_routing consecutive",
        ),
    ],
)
def test_routing_that_does_not_go_together(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        check_framework(MOE, toy_layout(8, SEQ, ep=4, **changes))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_without_other_ranks_all_dispatchers_are_one(precision: str, h100_model: CostModel) -> None:
    """What Megatron writes for ep 1 (its flex dispatcher refuses that) is what was priced; with other ranks they differ."""
    model = load_run_config("configs/models/qwen3_30b_a3b.json").model
    for ep, alike in ((1, True), (8, False)):
        seconds = set()
        for dispatcher in ("alltoall", "deepep", "hybridep"):
            problem = make_problem(
                model, 8, h100_model, 4096, framework="megatron-bridge-26", precision=precision, moe_dispatcher=dispatcher
            )
            found = estimated(problem, [problem.layout(dp=8, ep=ep)])
            seconds.add(round(float(found.times.seconds[0]), 12))
        assert (len(seconds) == 1) == alike, (ep, seconds)


@pytest.mark.parametrize(
    ("given", "variant"),
    [
        ({"framework": "megatron-core"}, ""),
        ({"framework": "megatron-core", "cuda_graphs": True, "moe_capacity_factor": 1.0}, ONE_KERNEL),
        ({"framework": "megatron-core", "cuda_graphs": True, "cuda_graph_modules": "attn"}, ""),
        ({"framework": "megatron-bridge-26", "precision": "mxfp8", "moe_fused_experts": True}, ONE_KERNEL),
        ({"framework": "torchtitan-2026-02"}, ONE_KERNEL),  # torch._grouped_mm
        ({"framework": "megatron-core", "moe_grouped_gemm": False}, ""),
    ],
)
def test_the_host_launches_no_gemm_of_a_kernel_of_all_experts_or_of_a_graph(given: dict[str, Any], variant: str) -> None:
    grouped = [o for o in program(mode="msp", **given).ops if o.kind == GROUPED_LINEAR]
    assert grouped and {o.variant for o in grouped} == {variant}


@pytest.mark.parametrize(
    ("framework", "stated", "wide"),
    [
        ("megatron-core", None, False),
        ("megatron-core", True, True),
        ("megatron-bridge", None, True),
        ("megatron-bridge", False, False),
    ],
)
def test_a_router_in_fp32_casts_its_input_and_its_gradient(framework: str, stated: bool | None, wide: bool) -> None:
    ops = {o.label: o for o in program(framework=framework, moe_router_fp32=stated).ops if o.name == "router.casts"}
    assert ("router.casts.input_grad" in ops) == wide
    if wide:  # the input: read, written in fp32, read wider; its gradient: written wider, read and written
        assert float(np.ravel(ops["router.casts.input_grad"].dims["bytes"])[0]) == SEQ * HIDDEN * (2 + 4 + 2 + 2 + 4 + 2)


def test_a_sigmoid_of_one_expert_scales_the_experts_input() -> None:
    model = MOE.replace(num_experts_per_tok=1, router_score="sigmoid")
    ops = {o.label: o for o in program(model, framework="megatron-core").ops if o.name == "experts.scaled_input"}
    sizes = {label: float(np.ravel(o.dims["bytes"])[0]) for label, o in ops.items()}
    # each value is read and written; backward two products of three accesses, of which one sums its rows
    assert sizes == {
        "experts.scaled_input.forward": SEQ * HIDDEN * 2 * 2,
        "experts.scaled_input.input_grad": SEQ * HIDDEN * 6 * 2,
    }
    assert not any(o.name == "experts.scaled_input" for o in program(framework="megatron-core").ops)


@pytest.mark.parametrize(
    ("framework", "dispatcher", "kernels"),
    [("megatron-core", "deepep", 20), ("megatron-core", "alltoall", 0), ("nemo-automodel", "deepep", 0)],
)
def test_small_kernels_make_a_map_of_deepeps_indices(framework: str, dispatcher: str, kernels: int) -> None:
    ops = [o for o in program(framework=framework, ep=4, moe_dispatcher=dispatcher).ops if o.label == "permute.map.forward"]
    assert sum(float(np.ravel(o.count)[0]) for o in ops) == kernels


def test_torchtitans_gpt_oss_adds_biases_and_activates_by_kernels_of_its_own() -> None:
    """Traced in torch: with equal widths 34 and 46 accesses of a row's value each way, and 8 kept beside the probabilities."""
    model = MOE.replace(moe_intermediate_size=HIDDEN, mlp_bias=True, clamped_gate=True, attention_sinks=True)
    layer = program(model, framework="torchtitan-2026-02", fused_norm=True, moe_permute_fusion=False)
    rows = SEQ * TOP * HIDDEN * 2
    passes = dict.fromkeys((FORWARD, "input_grad"), 0.0)
    for o in layer.ops:
        if o.name.startswith(("experts.bias", "experts.activation")):
            passes[o.phase] += float(np.ravel(o.dims["bytes"])[0] * np.ravel(o.count)[0]) / rows
    assert passes == {FORWARD: 3 * 6 + 4 + 12, "input_grad": 3 * 2 + 8 + 32}
    assert not any(o.name == "experts.w3" for o in layer.ops), "gate and up are one grouped GEMM"
    kept = sum(saved(layer, name) for name in ("expert_input", "expert_act_input", "expert_act_output"))
    assert kept == 8 * rows


def test_torchtitan_compiles_no_layers_with_sinks() -> None:
    model = MOE.replace(attention_sinks=True)
    with pytest.raises(InputError, match="torchtitan-2026-02 compiles no layers of models with attention sinks"):
        check_framework(
            model,
            toy_layout(8, SEQ, framework="torchtitan-2026-02", fused_norm=True, compile=True, zero=3, dp=8, zero_shard_size=8),
        )


@pytest.mark.parametrize(
    ("framework", "given", "sentence"),
    [
        ("torchtitan-2026-02", {"compile": True}, "compiles no layers of models with attention sinks; leave out compile"),
        ("torchtitan-2026-02", {"rope_fusion": True}, "does not offer rope_fusion"),
        ("nemo-automodel", {"moe_router_fp32": False}, "does not offer moe_router_fp32"),
        ("megatron-core", {"rope_fusion": False, "moe_router_fp32": True}, ""),
    ],
)
def test_a_run_chooses_the_kernels_that_its_framework_offers(framework: str, given: dict[str, bool], sentence: str) -> None:
    release = framework_of(framework)
    run = toy_layout(8, SEQ, **{**release.flags, "framework": framework, **given})
    with pytest.raises(InputError, match=sentence) if sentence else nullcontext():
        check_run(release, MOE.replace(attention_sinks=True), run)
