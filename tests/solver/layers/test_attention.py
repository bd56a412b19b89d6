"""Attention without a fused kernel, and the ring of context parallelism: bytes and places worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import DEVICE, TINY, layer_keys, moved, saved_bytes, toy_layout

from solver.layers.decoder import layer_program
from solver.layers.program import LayerProgram
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.model import ModelSpec

#: Two micro batches' sequences of 4 heads with 32 * 32 scores each.
SCORES = 2 * 4 * 32 * 32


def program(world: int = 1, mode: str = "mtp", tp: int = 1, cp: int = 1, **constants: Any) -> LayerProgram:
    """Return TINY's layer for sequences of 32 tokens, two in a micro batch."""
    keys = layer_keys(mode, tp, cp, micro_batch_size=2)
    return layer_program(keys, TINY, toy_layout(world, 32, **constants), cluster_of(DEVICE))


def test_scores_that_go_through_memory() -> None:
    # softmax in one kernel: 16-bit scores read and probabilities written; backward reads both gradients' factors, writes one.
    # Dropout (GPT-2's, which Megatron-LM kept): probabilities read and written, and a mask of one byte
    found = moved(program(framework="megatron-lm", attention="unfused", dropout=True))
    assert found["softmax.forward"] == ("softmax", SCORES * 2 * 2)
    assert found["softmax.input_grad"] == ("softmax_grad", SCORES * 3 * 2)
    assert found["dropout.forward"] == found["dropout.input_grad"] == ("residual", SCORES * (2 * 2 + 1))
    # so have both residual additions: three accesses, a mask; backward: three accesses, and the branch's gradient and mask
    assert [found[f"residual{i}.{phase}"][1] for i in (1, 2) for phase in ("forward", "input_grad")] == [
        2 * 32 * 64 * (3 * 2 + 1),
        2 * 32 * 64 * (3 * 2 + 2 * 2 + 1),
    ] * 2
    # without dropout nothing is moved for it; eager kernels are counted by their own kind
    found = moved(program(framework="aleph alpha", attention="unfused"))
    assert found["softmax.forward"] == ("softmax_eager", SCORES * 4)
    assert found["softmax.input_grad"] == ("softmax_eager_grad", SCORES * 6)
    assert found["dropout.forward"][1] == 0
    # a run may state that its softmax is one kernel: 32 * 32 scores of 4 heads and 2 sequences, 16 bits read and written
    found = moved(program(framework="aleph alpha", attention="unfused", fused_softmax=True))
    assert found["softmax.forward"] == ("softmax", SCORES * 4) and found["softmax.input_grad"] == ("softmax_grad", SCORES * 6)


def test_kernels_of_biases() -> None:
    # 64 tokens: q, k, v 128 wide, output and down projection 64, gate and up 256; gradients are read once, and Megatron's own
    # linears add the bias of q, k and v apart; no launch of its own, and no bias no kernel
    model = TINY.replace(qkv_bias=True, output_bias=True, mlp_bias=True)

    def biases(framework: str, model: ModelSpec = model) -> dict[str, tuple[str, float]]:
        keys = layer_keys("mtp", micro_batch_size=2)
        layer = layer_program(keys, model, toy_layout(1, 32, framework=framework), cluster_of(DEVICE))
        assert all(op.launches == 0.0 for op in layer.ops if ".bias" in op.name)
        return {label: what for label, what in moved(layer).items() if ".bias" in label}

    gradients = {
        f"{name}.bias.input_grad": ("row", 64 * width * 2.0)
        for name, width in (("wqkv", 128), ("wo", 64), ("w1", 256), ("w2", 64))
    }
    assert biases("megatron-lm-2023") == {"wqkv.bias.forward": ("residual", 64 * 128 * 4.0), **gradients}
    assert biases("megatron-core-0.12") == {} == biases("megatron-lm-2023", TINY)
    assert biases("generic")["w1.bias.input_grad"] == gradients["w1.bias.input_grad"]


def test_scores_in_fp32_go_through_eager_kernels_and_tf32_gemms() -> None:
    # no fused kernel takes fp32: the mask is read and written in place, then softmax; backward 3 accesses for softmax, then of
    # the gradient a copy, a clone, a masked clone and a copy back
    layer = program(framework="sailor", attention="unfused", precision="fp32", grad_dtype="fp32")
    found = moved(layer)
    assert found["softmax.forward"] == ("softmax", SCORES * (2 + 2) * 4)
    assert found["softmax.input_grad"] == ("softmax_grad", SCORES * (3 + 2 + 2 + 4 + 2) * 4)
    assert saved_bytes(layer)["attention_scores"] == SCORES * 4
    gemms = [op for op in layer.ops if op.kind == "linear"]
    assert {op.dtype for op in gemms} == {"tf32"} and not any(op.dims["accumulate"] for op in gemms)
    plain = program(framework="megatron-lm", attention="unfused", precision="fp32", grad_dtype="fp32")
    assert {op.dtype for op in plain.ops if op.kind == "linear"} == {"fp32"}


@pytest.mark.parametrize(("dims", "dtype"), [(64, "bf16"), (96, "bf16"), (108, "fp32"), (150, "fp32")])
def test_heads_that_no_vector_divides_are_multiplied_without_tensor_cores(dims: int, dtype: str) -> None:
    """Eight 16-bit numbers are the 16 bytes that tensor cores load at once."""
    model = TINY.replace(head_dim=dims)
    cluster, layout = cluster_of(DEVICE), toy_layout(1, 4096, framework="megatron-lm", attention="unfused")
    ops = [
        op for op in layer_program(layer_keys("mtp"), model, layout, cluster).ops if op.name.startswith(("scores", "context"))
    ]
    assert len(ops) >= 4 and {op.dtype for op in ops} == {dtype}


def test_gemms_of_scores_and_context() -> None:
    # per head, 8 of them: scores Q K^T, context P V; backward dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q. A second factor
    # that is read transposed is TN (0), one that is not NN (1), a first one that is read transposed NT (2)
    ops = [op for op in program(attention="unfused").ops if op.name.startswith(("scores", "context"))]
    found = {op.label: tuple(int(np.ravel(op.dims[n])[0]) for n in ("batch", "m", "n", "k", "layout")) for op in ops}
    assert found == {
        "scores.forward": (8, 32, 32, 16, 0),
        "context.forward": (8, 32, 16, 32, 1),
        "context.input_grad": (8, 32, 32, 16, 0),
        "context_values.input_grad": (8, 32, 16, 32, 2),
        "scores.input_grad": (8, 32, 16, 32, 1),
        "scores_keys.input_grad": (8, 32, 16, 32, 2),
    }


def test_a_rank_of_context_or_tensor_parallelism_has_its_share_of_the_scores() -> None:
    half = moved(program(2, tp=2, framework="megatron-lm", attention="unfused"))["softmax.forward"][1]
    quarter = moved(program(4, cp=4, framework="megatron-lm", attention="unfused"))["softmax.forward"][1]
    assert (half, quarter) == (SCORES * 4 / 2, SCORES * 4 / 4)


@pytest.mark.parametrize(
    ("framework", "kept", "gradients"),
    [("megatron-lm", 5, 4), ("generic", 2, 4), ("aleph alpha", 2 + 4, 4 + 8)],
)
def test_memory_of_scores_without_a_fused_kernel(framework: str, kept: int, gradients: int) -> None:
    # kept: the softmax's output of two bytes; with dropout its mask and output (Korthikanti et al. 2022); eager softmax: fp32
    # too. Gradients alive: those of probabilities and scores, two bytes each, and eager ones in fp32 as well
    layer = program(framework=framework, attention="unfused", dropout=True if framework == "megatron-lm" else None)
    assert saved_bytes(layer)["attention_scores"] == SCORES * kept and "log_sum_exp" not in saved_bytes(layer)
    stream = 2 * 32 * 64 * 2
    assert np.ravel(layer.transient_bytes)[0] == stream + SCORES * gradients


def test_the_slowest_hop_of_the_ring_is_between_nodes() -> None:
    # nodes of 8: 2 context ranks of 4 tensor ranks are in one node, 4 of them in two nodes
    def hop(cp: int) -> tuple[int, int]:
        dims = next(op.dims for op in program(4 * cp, tp=4, cp=cp).ops if op.name == "kv.send")
        return int(dims["intra"][0]), int(dims["inter"][0])

    assert hop(2) == (2, 1) and hop(4) == (1, 2)


def test_flash_attention_holds_gradients_in_backward() -> None:
    # of q, k, v and context (4 + 2 + 2 + 4 heads of 16, two bytes), and the fp32 sum of q's; more than the MLP's 2 * 128
    tokens = 2 * 32
    assert np.ravel(program().transient_bytes)[0] == tokens * (64 * 2 + 12 * 16 * 2 + 4 * 16 * 4)


def test_without_context_parallelism_no_keys_are_sent() -> None:
    for constants in ({"cp_comm": "allgather"}, {"cp_comm": "a2a"}, {"cp_comm": "ring"}, {"attention": "unfused"}):
        counts = [float(np.ravel(op.count)[0]) for op in program(**constants).ops if op.stream == "cp"]
        assert counts and not any(counts)


def test_a_ring_rescales_and_adds_its_parts_by_hand() -> None:
    # two sequences of 32 tokens on two ranks: one step, of three quarters of the rows. The context of 4 heads of 16 is read and
    # written in fp32 and its 16-bit part read; in backward 16-bit gradients of q and of 2 heads of k and v are summed
    found = {op.label: op for op in program(world=2, cp=2, cp_comm="ring").ops}
    correction, gradients = found["attention.correction.forward"], found["attention.gradients.input_grad"]
    assert np.ravel(correction.dims["bytes"]).tolist() == [2 * 16 * 64 * 0.75 * 10]
    assert np.ravel(gradients.dims["bytes"]).tolist() == [2 * 16 * 128 * 0.75 * 6]
    assert np.ravel(correction.count).tolist() == np.ravel(gradients.count).tolist() == [1.0]
    assert Recompute.SELECTIVE in correction.recomputed_by and not gradients.recomputed_by
    assert not {"attention.correction.forward", "attention.gradients.input_grad"} & set(moved(program(cp_comm="ring")))


@pytest.mark.parametrize(
    ("framework", "joins"),
    [
        ("megatron-lm", True),
        ("megatron-deepspeed", True),
        ("llm-foundry", True),
        ("fms-fsdp", True),
        ("aleph alpha", True),
        ("fsdp", False),
        ("torchtitan", False),
    ],
)
def test_gradients_of_views_of_one_product_are_joined(framework: str, joins: bool) -> None:
    """64 tokens of 4 + 2 + 2 heads of 16; not where kernels take and return all three at once, or projections are apart."""
    found = moved(program(framework=framework))
    assert found.get("qkv.join.input_grad", ("", 0.0))[1] == (64 * 8 * 16 * 4 if joins else 0.0)
    assert "qkv.split.forward" not in found


def test_megatron_copies_around_the_split_of_q_k_and_v() -> None:
    """64 tokens; 4 heads of queries in 2 groups, and 2 of values, are copied; the gradients of 8 heads are joined."""
    found = moved(program(framework="megatron-core"))
    assert found["qkv.split.forward"][1] == 64 * (4 + 2) * 16 * 4 and found["qkv.join.input_grad"][1] == 64 * 8 * 16 * 4
    keys, cluster = layer_keys("mtp", micro_batch_size=2), cluster_of(DEVICE)
    alone = moved(
        layer_program(keys, TINY.replace(num_key_value_heads=4), toy_layout(1, 32, framework="megatron-core"), cluster)
    )
    assert alone["qkv.split.forward"][1] == 64 * 4 * 16 * 4  # of the values only: each query is beside its key
    assert "qkv.split.forward" not in moved(program(framework="torchtitan"))


@pytest.mark.parametrize(("stated", "variant"), [(None, "rope"), (True, "rope"), (False, "rope_eager")])
def test_a_run_may_state_whether_rotary_embedding_is_one_kernel(stated: bool | None, variant: str) -> None:
    run = toy_layout(8, 32, framework="megatron-core", rope_fusion=stated)
    ops = {op.label: op for op in layer_program(layer_keys("mtp"), TINY, run, cluster_of(DEVICE)).ops}
    assert ops["rope.forward"].variant == variant
    assert ops["rope.input_grad"].variant == (variant if stated is not False else "rope_eager_grad")
