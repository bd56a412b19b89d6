"""Latent attention and windows: sizes by hand, FLOPs and parameters, and the limits at which they are plain attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references import flops
from toy import DEVICE, TINY, layer_keys, saved_bytes, toy_layout

from profiler.errors import InputError
from solver.layers.decoder import layer_program
from solver.layers.program import FLASH_ATTN, LayerProgram, Op
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import PLAIN, LayerKind, layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import layer_parameters

SEQ, HIDDEN, HEADS = 256, 64, 4
#: Ranks of 24 and 16; queries and keys of 8 + 4, values of 6.
MLA = TINY.replace(
    num_key_value_heads=4, head_dim=12, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
)


def program(
    model: ModelSpec, mode: str = "mtp", tp: int = 1, cp: int = 1, kind: LayerKind = PLAIN, **given: Any
) -> LayerProgram:
    return layer_program(layer_keys(mode, tp, cp), model, toy_layout(64, SEQ, **given), cluster_of(DEVICE), kind)


def core(layer: LayerProgram) -> Op:
    """Return the forward call of the core."""
    (found,) = [o for o in layer.ops if o.kind == FLASH_ATTN and o.label == "attention.forward"]
    return found


def gemms(layer: LayerProgram) -> dict[str, tuple[float, float, float]]:
    return {
        o.name: tuple(float(np.ravel(o.dims[d])[0]) for d in "mnk")
        for o in layer.ops
        if o.kind == "linear" and o.phase == "forward"
    }  # type: ignore[misc]


def test_projections_of_latent_attention_by_hand() -> None:
    found = gemms(program(MLA, "msp", tp=2))
    # down projections work on a rank's own tokens, up projections on all of them and on its 2 heads
    assert found["q_down"] == (SEQ / 2, 24, HIDDEN) and found["kv_down"] == (SEQ / 2, 16 + 4, HIDDEN)
    assert found["q_up"] == (SEQ, 2 * 12, 24) and found["kv_up"] == (SEQ, 2 * (8 + 6), 16)
    assert found["wo"] == (SEQ, HIDDEN, 2 * 6)


def test_without_a_rank_queries_are_projected_at_once() -> None:
    found = gemms(program(MLA.replace(q_lora_rank=0), "msp", tp=2))
    assert found["wq"] == (SEQ, 2 * 12, HIDDEN) and "q_up" not in found


def test_fused_kernels_turn_queries_in_place_and_write_keys_and_values_once() -> None:
    def moved(framework: str) -> dict[str, float]:
        layer = program(MLA, framework=framework)
        return {o.label: float(np.ravel(o.dims["bytes"])[0]) for o in layer.ops if o.name in ("rope", "assembly")}

    elements = SEQ * HEADS * 2  # 16 bits
    fused = moved("megatron-bridge-25")
    # rotary parts of 4 read and written; of keys and values 8 + 6 read, 12 and 6 written
    assert fused["rope.forward"] == fused["rope.input_grad"] == elements * 2 * 4
    assert fused["assembly.forward"] == fused["assembly.input_grad"] == elements * (8 + 6 + 12 + 6)
    # else the rotary part of the one key too, and queries, keys and values are all read and written
    apart = moved("megatron-core-0.12")
    assert apart["rope.forward"] == SEQ * (HEADS + 1) * 4 * 2 * 2
    assert apart["assembly.forward"] == elements * 2 * (12 + 12 + 6)


@pytest.mark.parametrize(
    ("framework", "variant"),
    [("megatron-core-0.12", "rope_eager"), ("nemo-24", "rope_eager"), ("megatron-bridge-25", "rope"), ("generic", "rope")],
)
def test_megatron_core_turns_latent_attention_with_a_chain_of_kernels(framework: str, variant: str) -> None:
    """It refuses apply_rope_fusion beside it, though that of other attention is one kernel (transformer_config.py)."""
    kinds = {op.label: op.variant for op in program(MLA, framework=framework).ops if op.name == "rope"}
    assert kinds == {"rope.forward": variant, "rope.input_grad": f"{variant}_grad" if variant == "rope_eager" else variant}


@pytest.mark.parametrize(
    ("framework", "stated", "variant"), [("megatron-bridge-25", False, "rope_eager"), ("megatron-core-0.12", True, "rope")]
)
def test_a_run_may_state_how_it_turns_latent_attention(framework: str, stated: bool, variant: str) -> None:
    kinds = {op.label: op.variant for op in program(MLA, framework=framework, rope_fusion=stated).ops}
    assert kinds["rope.forward"] == variant
    assert kinds["assembly.forward"] == ("rope" if stated else "copy")


def test_what_goes_over_the_tensor_group_is_of_low_rank() -> None:
    layer = program(MLA, "msp", tp=2)
    sent = {o.label: float(np.ravel(o.dims["bytes"])[0]) for o in layer.ops if o.stream == "tp" and np.any(o.count)}
    assert sent["q_up.all_gather.forward"] == SEQ * 24 * 2 and sent["kv_up.all_gather.forward"] == SEQ * 16 * 2
    assert sent["rotary_key.forward"] == SEQ * 4 * 2


@pytest.mark.parametrize("q_rank", [0, 24])
def test_parameters_and_flops_of_latent_attention(q_rank: int) -> None:
    model = MLA.replace(q_lora_rank=q_rank)
    layer = program(model)
    assert layer.weight_elements()[0] == layer_parameters(model, PLAIN)
    area = SEQ * (SEQ + 1) / 2
    core = HEADS * area * (12 + 6) * (2 + 5)
    assert flops(layer)[0] == pytest.approx(6.0 * SEQ * layer.weight_elements("linears")[0] + core, rel=1e-12)


def test_the_output_alone_has_a_bias() -> None:
    """Megatron-Core's multi_latent_attention.py: linear_proj has the bias of add_bias_linear, no other projection has one."""
    model = MLA.replace(output_bias=True)
    plain, biased = program(MLA), program(model)
    assert biased.weight_elements("others")[0] - plain.weight_elements("others")[0] == HIDDEN
    assert biased.weight_elements("linears")[0] == plain.weight_elements("linears")[0]
    assert layer_parameters(model, PLAIN) - layer_parameters(MLA, PLAIN) == HIDDEN
    further = {o.label for o in biased.ops} - {o.label for o in plain.ops}
    assert further == {"wo.bias.input_grad"}
    for changes in ({"qkv_bias": True}, {"qk_norm": "head"}):
        with pytest.raises(InputError, match="qkv_bias, or qk_norm beside the norms that it has, with latent attention"):
            MLA.replace(**changes)


def test_the_core_sees_wider_keys_than_values() -> None:
    forward = core(program(MLA))
    assert (forward.dims["head_dim"], forward.dims["v_head_dim"]) == (12, 6)
    assert np.ravel(forward.dims["kv_heads"])[0] == HEADS


# windows and chunks


def test_a_window_no_shorter_than_the_sequence_is_full_attention() -> None:
    plain = layer_kinds(TINY, SEQ)
    for window in (SEQ, SEQ + 1, 10 * SEQ):
        assert layer_kinds(TINY.replace(sliding_window=window), SEQ).kinds == plain.kinds
        assert layer_kinds(TINY.replace(attention_chunk_size=window), SEQ).kinds == plain.kinds


@given(st.integers(1, SEQ - 1), st.integers(1, SEQ - 1))
def test_a_wider_window_never_computes_less(one: int, other: int) -> None:
    narrow, wide = (flops(program(TINY, kind=LayerKind(window=w)))[0] for w in sorted((one, other)))
    assert narrow <= wide <= flops(program(TINY))[0]


def test_chunks_are_shorter_sequences() -> None:
    # 4 chunks of 64: a quarter of the score matrix, in which each is causal
    call = core(program(TINY, kind=LayerKind(chunk=64)))
    assert (np.ravel(call.dims["batch"])[0], call.dims["seq_q"], call.dims["causal"]) == (4, 64, True)


def test_alternating_layers_are_two_kinds() -> None:
    found = layer_kinds(TINY.replace(num_hidden_layers=5, sliding_window=32, sliding_window_every=2), SEQ)
    assert [kind.window for kind in found.kinds] == [32, 0]
    assert found.of_layer.tolist() == [0, 1, 0, 1, 0] and found.counts.tolist() == [3, 2]


def test_layers_without_rotary_embedding_have_no_rope() -> None:
    names = [{o.name for o in program(TINY, kind=LayerKind(rope=rope)).ops} for rope in (True, False)]
    assert names[0] - names[1] == {"rope"}


def test_a_rank_keeps_its_tokens_of_the_normed_low_ranks_where_they_are_gathered_again() -> None:
    # 24 + 16 values of 256 tokens in two bytes; half of the tokens under a sequence split that gathers them again
    def kept(mode: str, **given: Any) -> float:
        layer = program(MLA, mode, tp=2, **given)
        return float(np.ravel(next(tensor.bytes for tensor in layer.saved if tensor.name == "low_ranks_normed"))[0])

    whole = 40 * SEQ * 2
    assert [kept(mode, framework="megatron-core") for mode in ("mtp", "msp")] == [whole, whole / 2]


def test_values_that_are_views_keep_the_keys_beside_them_alive() -> None:
    views, copies = (saved_bytes(program(MLA, framework=name))["qkv"] for name in ("torchtitan-2026-02", "megatron-core-0.12"))
    assert views - copies == SEQ * HEADS * MLA.qk_nope_head_dim * 2
