"""What frameworks recompute and save: early stop of recomputation, torchtitan's selection by op; by hand and in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from toy import BYTE, DEVICE, FLOP, TINY, layer_keys, saved_bytes, tiny, toy_layout

from solver.formats.model_file import shipped_model
from solver.layers.decoder import layer_program
from solver.layers.program import FORWARD, LINEAR, LayerProgram
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import LayerKind, layer_kinds


def rerun(framework: str, level: Recompute, **layout: Any) -> set[str]:
    """Return the names of the ops of TINY's layer that are recomputed."""
    found = tiny(framework, **layout)
    ops = found.table.layer.estimates.ops
    return {op.name for op in ops if op.phase == FORWARD and level in op.recomputed_by and np.any(np.asarray(op.count) > 0)}


def test_torch_stops_before_the_last_gemm() -> None:
    # the reason for Recomputation.stops_early: forward 2, backward 4, and one GEMM recomputed, not two
    w1, w2 = torch.randn(64, 16, requires_grad=True), torch.randn(16, 64, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x + linear(silu(linear(x, w1)), w2)

    with FlopCounterMode(display=False) as counter:
        checkpoint(layer, torch.randn(8, 16, requires_grad=True), use_reentrant=False).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 8 * 16 * 64


def test_what_stands_behind_the_last_gemm_may_need_it() -> None:
    # a norm of the block's output keeps it, and a dropout its mask: both GEMMs are recomputed, 2 + 4 + 2 units
    w1, w2 = torch.randn(64, 16, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    norm, dropout = torch.nn.RMSNorm(16), torch.nn.Dropout(0.1)
    for after in (norm, dropout):

        def layer(x: torch.Tensor, after: torch.nn.Module = after) -> torch.Tensor:
            return x + after(linear(silu(linear(x, w1)), w2))

        with FlopCounterMode(display=False) as counter:
            checkpoint(layer, torch.randn(8, 16, requires_grad=True), use_reentrant=False).sum().backward()
        assert counter.get_total_flops() == 8 * 2 * 8 * 16 * 64
    assert "w2" in rerun("fsdp", Recompute.FULL, model=TINY.replace(norms_per_layer=4))
    assert "residual2" not in rerun("fsdp", Recompute.FULL, model=TINY.replace(norms_per_layer=4))


def test_recomputation_ends_with_the_last_tensor_needed() -> None:
    def recompute_seconds(framework: str) -> float:
        layer = tiny(framework).table.layer
        again = [op.phase == FORWARD and Recompute.FULL in op.recomputed_by for op in layer.estimates.ops]
        alike = [op.kind == LINEAR or op.name.startswith("residual") for op in layer.estimates.ops]
        return float(layer.exposed[np.array(again) & np.array(alike)].sum())

    # "generic" and "fsdp" have one GEMM or two for gate and up, and for queries, keys and values, which take the same time
    # here; they differ by the down projection of 32 tokens, 128 to 64, and the residual after it: two reads and a write of
    # 2,048 elements
    assert recompute_seconds("generic") - recompute_seconds("fsdp") == pytest.approx(
        2 * 32 * 64 * 128 * FLOP + 2048 * 6 * BYTE, rel=1e-9
    )
    assert "w2" in rerun("generic", Recompute.FULL) and "w2" not in rerun("fsdp", Recompute.FULL)


def test_selection_by_op_recomputes_every_second_gemm() -> None:
    recomputed = rerun("torchtitan", Recompute.SELECTIVE)
    gemms = {op.name for op in tiny("torchtitan").table.layer.estimates.ops if op.kind == LINEAR}
    assert recomputed & gemms == {"wk", "wo", "w3"}
    assert recomputed - gemms == {
        "norm1",
        "rope",
        "kv.repeat",
        "residual1",
        "norm2",
        "activation",
    }  # attention's output is saved
    assert rerun("megatron-core", Recompute.SELECTIVE) == {"attention"}


def test_what_selection_by_op_saves_by_hand() -> None:
    saved = tiny("torchtitan").table.layer.saved
    # the input (64), outputs of wq (64), wv (32), w1 (128) and w2 (64), the context (64): 2 bytes each of 32 tokens; and the
    # log-sum-exp of 4 heads in fp32
    assert saved[Recompute.SELECTIVE][0] == 32 * (2 * (64 + 64 + 32 + 128 + 64 + 64) + 4 * 4)
    assert saved[Recompute.FULL][0] == 32 * 2 * 64
    assert saved[Recompute.FULL][0] < saved[Recompute.SELECTIVE][0] < saved[Recompute.NONE][0]


def torchtitan_layer(model: str, ep: int = 1, **constants: Any) -> LayerProgram:
    """Return the last layer of a shipped model under torchtitan 0.2."""
    spec = shipped_model(model)
    run = toy_layout(8, 4096, framework="torchtitan-2026-02", **constants)
    return layer_program(layer_keys("mtp", ep=ep), spec, run, cluster_of(DEVICE), layer_kinds(spec, 4096).kinds[-1])


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("llama3_8b", ["wq", "wv", "w1", "w2"]),
        # its model calls wq_a, wq_b, wkv_a, wkv_b and wo in this order; of the shared expert w1, w3 and w2
        ("deepseek_v3", ["q_down", "kv_down", "wo", "shared.w3"]),
        ("gpt_oss_20b", []),  # linears with biases are torch's addmm, which is not among the ops that are kept
    ],
)
def test_selection_by_op_counts_calls_of_mm(model: str, kept: list[str]) -> None:
    ops = [op for op in torchtitan_layer(model).ops if op.kind == LINEAR and op.phase == FORWARD and op.module != "router"]
    assert sorted(op.name for op in ops if Recompute.SELECTIVE not in op.recomputed_by) == sorted(kept)


@pytest.mark.parametrize(("model", "keeps"), [("deepseek_v3", True), ("qwen3_30b_a3b", False)])
def test_selection_by_op_keeps_the_exchange_but_of_qwen3(model: str, keeps: bool) -> None:
    layer = torchtitan_layer(model, ep=8)
    sends = [op for op in layer.ops if op.kind == "all2all" and op.phase == FORWARD]
    assert sends and all((Recompute.SELECTIVE in op.recomputed_by) != keeps for op in sends)
    (products,) = [np.ravel(tensor.bytes)[0] for tensor in layer.saved if tensor.name == "products"]
    rows = 4096 * 8 * 2  # a token's rows at eight experts, sent and received
    spec = shipped_model(model)
    assert (products >= rows * spec.hidden_size * 2) == keeps


def test_an_eager_gate_of_experts_keeps_the_activated_half_too() -> None:
    eager, compiled = (torchtitan_layer("qwen3_30b_a3b", compile=on) for on in (False, True))
    (more, less) = (next(np.ravel(t.bytes)[0] for t in one.saved if t.name == "expert_act_output") for one in (eager, compiled))
    assert (more, less) == (2 * less, 4096 * 8 * 768 * 2)


def test_maxtext_keeps_queries_keys_and_values() -> None:
    # remat_policy save_qkv_proj: the input (64), q (64), k and v (32 each), 2 bytes each of 32 tokens; all else runs again, but
    # for what comes after the down projection's input
    table = tiny("maxtext").table.layer
    assert table.saved[Recompute.SELECTIVE][0] == 32 * 2 * (64 + 64 + 2 * 32)
    gemms = {op.name for op in table.estimates.ops if op.kind == LINEAR and op.phase == FORWARD}
    assert gemms & rerun("maxtext", Recompute.SELECTIVE) == gemms - {"wqkv", "wq", "wk", "wv", "w2"}
    assert "attention" in rerun("maxtext", Recompute.SELECTIVE)


def test_flash_attention_in_sequence_first_code_copies_batches() -> None:
    def copied(micro_batch_size: int) -> float:
        ops = [
            op for op in tiny("aleph alpha", micro_batch_size=micro_batch_size).table.layer.estimates.ops if op.name == "layout"
        ]
        return float(sum(np.ravel(op.dims["bytes"] * op.count)[0] for op in ops))

    # the context twice (4 heads) of 16 values and 2 bytes, read and written, in both passes; q, k and v are views
    assert copied(2) == 2 * 64 * 2 * 4 * 16 * 4
    assert copied(1) == 0


def test_split_and_compiled_losses_hold_less() -> None:
    def loss(framework: str, compiled: bool, tp: int = 1, **run: Any) -> float:
        found = tiny(framework, tp, run={"compile": compiled, **run}, tp=tp, dp=1)
        return float(found.table.head.saved[0][0] + found.table.head.transient[0])

    stream, logits = 2 * 32 * 64 * 2, 32 * 256  # inputs of the final norm and the projection; logits
    assert loss("torchtitan", False) == stream + logits * (4 + 2 * 4)
    assert loss("fms-fsdp", False) == loss("nemo-automodel", False) == stream + logits * (4 + 2 + 2 * 4)  # the output is kept
    assert loss("torchtitan-2025-06", True) == stream + logits * (2 + 2)
    assert loss("torchtitan-2024-12", True) == loss("torchtitan", False)  # the loss was not compiled yet
    assert loss("torchtitan-2026-02", False, compile_loss=True) == loss("torchtitan-2025-06", True)
    assert loss("torchtitan-2026-02", True, compile_loss=False) == loss("torchtitan", False)
    assert loss("torchtitan", False, 2) == stream + logits / 2 * (4 + 3 * 4)
    assert loss("fsdp", False, 2) == stream + logits * (4 + 2 * 4)  # the logits are all-gathered


@pytest.mark.parametrize(("constants", "kept"), [({}, 4), ({"compile": True}, 3)])
def test_automodel_checkpoints_the_modules_of_a_dense_layer(constants: dict[str, Any], kept: int) -> None:
    """Inputs of both norms, attention and MLP stay (compiled one less), in 16 bits; of a layer with experts its input alone."""
    spec, stream = shipped_model("llama3_8b"), 4096 * 4096 * 2
    run = toy_layout(8, 4096, framework="nemo-automodel", **constants)
    layer = layer_program(layer_keys("mtp"), spec, run, cluster_of(DEVICE), layer_kinds(spec, 4096).kinds[-1])
    assert layer.saved_bytes(Recompute.FULL)[0] == kept * stream
    experts = shipped_model("qwen3_30b_a3b")
    whole = layer_program(layer_keys("mtp"), experts, run, cluster_of(DEVICE), layer_kinds(experts, 4096).kinds[-1])
    assert whole.saved_bytes(Recompute.FULL)[0] == 4096 * 2048 * 2


@pytest.mark.parametrize(("mode", "tp"), [("mtp", 1), ("msp", 2)])
def test_a_layer_that_torch_compiles_with_its_checkpoint_keeps_nothing_behind_what_backward_needs(mode: str, tp: int) -> None:
    def kept(**run: bool) -> float:
        layer = layer_program(layer_keys(mode, tp), TINY, toy_layout(8, 32, framework="torchtitan", **run), cluster_of(DEVICE))
        return saved_bytes(layer)["products"]

    # not the down projection's product of 32 tokens and 64 values in 16 bits, nor a rank's share of its sum over the group
    product, share = 32 * 64 * 2, 32 // tp * 64 * 2 * (tp > 1)
    assert kept() - kept(compile=True) == product + share


@pytest.mark.parametrize(
    ("release", "compiled", "again"), [("torchtitan-2026-02", False, True), ("torchtitan-2026-02", True, False)]
)
def test_compiled_checkpoints_end_early_whatever_eager_ones_do(release: str, compiled: bool, again: bool) -> None:
    run = toy_layout(8, 32, framework=release, compile=compiled)
    ops = {op.label: op for op in layer_program(layer_keys("mtp"), TINY, run, cluster_of(DEVICE)).ops}
    assert (Recompute.FULL in ops["w2.forward"].recomputed_by) == again


def test_modules_with_experts_that_are_compiled_inside_a_checkpoint_keep_no_products() -> None:
    moe = TINY.replace(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

    def kept(compiled: bool) -> float:
        run = toy_layout(8, 32, framework="torchtitan-2026-02", compile=compiled)
        layer = layer_program(layer_keys("mtp", ep=4), moe, run, cluster_of(DEVICE), LayerKind(experts=True))
        return saved_bytes(layer)["products"]

    # of wq, wk, wv and wo every second GEMM: queries of 64 and values of 32 columns
    assert kept(False) - kept(True) == 32 * (64 + 32) * 2
