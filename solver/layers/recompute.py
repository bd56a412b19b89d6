"""What recomputation runs again and keeps, where that is not the whole layer or its attention core.

Selective recomputation is of modules of a layer (Megatron-Core's names; transformer_config.py and the modules that it names, as
read), or what a framework makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver.layers.expert_rows import expert_rows, sent_rows
from solver.layers.program import (
    CONTEXT,
    DOWN_LINEAR,
    EXCHANGE,
    EXPERT_MODULE,
    FLASH_ATTN,
    FORWARD,
    OUTPUT_LINEAR,
    QKV_LINEARS,
    ROUTER,
    SHARED_EXPERTS,
    UP_LINEARS,
    Op,
    Saved,
    weight_gemms,
)
from solver.layers.shapes import Shapes
from solver.spec.choices import Recompute
from solver.spec.norms import NORMS_OF_A_LAYER, norms_apart


@dataclass(frozen=True)
class Discarded:
    """What recomputing one module runs again (ops by name, or by the module they are of), and the tensors not kept for it."""

    saved: tuple[str, ...]
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def runs(self, op: Op) -> bool:
        """Whether ``op`` runs again: it, or a cast or collective that belongs to it (``name.what``)."""
        return op.module in self.modules or any(op.name == name or op.name.startswith(f"{name}.") for name in self.ops)


_SHARED = ("shared_act_input", "shared_act_output", "shared_output")
#: By module; what the attention core runs again is marked where its ops are made.
DISCARDED = {
    "layernorm": Discarded(("norm1_output", "norm2_output"), ops=NORMS_OF_A_LAYER),
    "mla_up_proj": Discarded(("qkv", "low_ranks_normed"), ops=("q_up", "kv_up", "rope", "assembly")),
    "mlp": Discarded(("act_input", "act_output"), ops=(*UP_LINEARS, "activation", DOWN_LINEAR)),
    "moe_act": Discarded(("expert_act_output", "expert_act_weighted", "expert_clamped"), ops=("experts.activation",)),
    "shared_experts": Discarded(_SHARED, modules=(SHARED_EXPERTS,)),
    "moe": Discarded(
        (
            "router_scores",
            "expert_input",
            "expert_act_input",
            "expert_act_output",
            "expert_act_weighted",
            "expert_clamped",
            "expert_output",
            "probabilities",
            *_SHARED,
        ),
        modules=(ROUTER, EXCHANGE, EXPERT_MODULE, SHARED_EXPERTS),
    ),
}


def discarded(shapes: Shapes, module: str) -> Discarded:
    """Return what recomputing a module means in this kind of layer: norms that are parts of linears are recomputed with these,
    so never alone, and the second one with a dense MLP.

    The second norm of a layer with experts is kept where the graph of its router returns it (transformer_layer.py).
    """
    found, run = DISCARDED[module], shapes.run
    if module == "moe_act" and shapes.casts_kept_inputs:  # TEGroupedMLP: set_save_original_input of the down projection
        return replace(found, ops=(*found.ops, "experts.w2.input_cast", "experts.w2.input_scale"))
    apart = norms_apart(shapes.framework, shapes.model, shapes.kind.experts)
    if module == "mlp" and "norm2" not in apart:
        return replace(found, saved=(*found.saved, "norm2_output"), ops=(*found.ops, "norm2"))
    if module != "layernorm":
        return found
    inside = run.moe_dispatcher == "alltoall" and "moe_preprocess" in run.modules_graphed and not run.moe_shared_expert_overlap
    if "moe_router" in run.modules_graphed and shapes.kind.experts and not inside:
        apart = tuple(name for name in apart if name != "norm2")
    return Discarded(tuple(f"{name}_output" for name in apart), ops=apart)


#: Ops of the forward pass after the last tensor that backward needs, which is the down projection's input.
AFTER_LAST_SAVED = (DOWN_LINEAR, f"{DOWN_LINEAR}.reduce_scatter", f"{DOWN_LINEAR}.all_reduce", "residual2")
_PROJECTED = ("layer_input", "qkv", "qkv_exchanged")
#: Inputs of attention, MLP and their norms, each of which is a checkpoint of its own; where the layer is compiled the norms are
#: none, and of the two norms' outputs as much as one is kept (counted in torch on a layer of Llama).
_INPUTS_OF_MODULES, _COMPILED_INPUTS = ("norm1_output", "residual1", "norm2_output"), ("residual1", "norm2_output")
#: What selective recomputation by op keeps besides outputs of GEMMs: the layer's input, and what fused attention saves.
_KEPT = ("layer_input", CONTEXT, "log_sum_exp")


def recomputed_ops(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` of a layer, marked with the recompute levels under which the framework of ``shapes`` runs them again."""
    again, framework = [_of_modules(shapes, op) for op in ops], shapes.framework
    if framework.recomputation.norms_alone:
        again = [replace(op, recomputed_by=(*op.recomputed_by, Recompute.NONE)) if _in_norms(op) else op for op in again]
    if framework.recomputation.selective_keeps_qkv:
        levels = [_selective(op.recomputed_by, op.name not in QKV_LINEARS) for op in again]
        again = [replace(op, recomputed_by=by) if op.phase == FORWARD else op for op, by in zip(again, levels, strict=True)]
    if framework.recomputation.selective_by_op:
        kept = {op.name for op in _kept_gemms(shapes, ops)}
        again = [_by_op(op, kept, _keeps_exchange(shapes)) for op in again]
    if framework.recomputation.stops_early or _compiled_whole(shapes):
        unneeded = _after_last_saved(shapes)
        again = [replace(op, recomputed_by=()) if op.name in unneeded else op for op in again]
    return again


def _in_norms(op: Op) -> bool:
    """Whether an op is in the forward pass of a norm, or the residual addition before the second one."""
    return op.phase == FORWARD and op.name in ("norm1", "residual1", "norm2")


def _compiled_whole(shapes: Shapes) -> bool:
    """Whether torch compiles the layer with its checkpoint: what comes after the last tensor that backward needs is then in no
    backward graph, whatever a checkpoint keeps or runs again.

    Traced in torch 2.13 on torchtitan's layer of Llama; layers with experts are compiled module by module in the checkpoint.
    """
    return shapes.run.compile and shapes.framework.recomputation.compiled_with_layers and not shapes.kind.experts


def _after_last_saved(shapes: Shapes) -> set[str]:
    """Return the forward ops behind the last tensor that backward needs, which no checkpoint that stops early runs again.

    Counted in torch with FlopCounterMode: a dropout keeps its mask, a norm after the down projection its input, which that
    made. What an adapter keeps is made after its linear has run.
    """
    if shapes.dropout:
        return set()
    if shapes.model.norms_per_layer == 4:
        return {"residual2"}
    return set(AFTER_LAST_SAVED) - ({DOWN_LINEAR} if shapes.run.lora_rank else set())


def recomputed_saved(shapes: Shapes, ops: Sequence[Op], saved: Sequence[Saved]) -> list[Saved]:
    """Return the ``saved`` tensors of a layer, and under selective recomputation by op the outputs that it keeps instead."""
    saved = [_kept_by_modules(shapes, tensor) for tensor in saved]
    if shapes.framework.recomputation.full_by_module and not shapes.kind.experts:
        inputs = _COMPILED_INPUTS if shapes.run.compile else _INPUTS_OF_MODULES
        saved = [replace(tensor, dropped_by=()) if tensor.name in inputs else tensor for tensor in saved]
    if shapes.framework.recomputation.selective_keeps_qkv:
        return [replace(tensor, dropped_by=_selective(tensor.dropped_by, tensor.name not in _PROJECTED)) for tensor in saved]
    if not shapes.framework.recomputation.selective_by_op:
        return list(saved)
    rest = [replace(tensor, dropped_by=_selective(tensor.dropped_by, tensor.name not in _KEPT)) for tensor in saved]
    products = [op for op in _kept_gemms(shapes, ops) if not (_compiled_whole(shapes) and op.name == DOWN_LINEAR)]
    outputs = sum((op.dims["m"] * op.dims["n"] for op in products), np.zeros(len(shapes.keys))) * shapes.element
    scattered = (
        (1 if _compiled_whole(shapes) else 2)
        * np.where(shapes.sequence_split, shapes.local_tokens, 0)
        * shapes.model.hidden_size
        * shapes.element
    )
    kept = outputs + scattered + _exchanged(shapes)
    return [*rest, Saved("products", kept, dropped_by=(Recompute.NONE, Recompute.FULL))]


def _exchanged(shapes: Shapes) -> np.ndarray:
    """Return the bytes of rows that a rank received from and for the experts of others, where they are kept; [keys]."""
    if not shapes.kind.experts or not _keeps_exchange(shapes):
        return np.zeros(len(shapes.keys))
    rows = (expert_rows(shapes) + sent_rows(shapes)) * (shapes.keys.ep > 1)
    return rows * shapes.model.hidden_size * shapes.element


def _of_modules(shapes: Shapes, op: Op) -> Op:
    """Return the op, recomputed under SELECTIVE if a recomputed module runs it again."""
    modules = shapes.run.modules_recomputed
    if op.phase != FORWARD or modules == ("core_attn",):
        return op
    core = "core_attn" in modules and Recompute.SELECTIVE in op.recomputed_by
    others = any(discarded(shapes, name).runs(op) for name in modules if name != "core_attn")
    return replace(op, recomputed_by=_selective(op.recomputed_by, (core or others) and Recompute.FULL in op.recomputed_by))


def _kept_by_modules(shapes: Shapes, tensor: Saved) -> Saved:
    """Return the tensor, dropped under SELECTIVE if a recomputed module discards it."""
    modules = shapes.run.modules_recomputed
    if modules == ("core_attn",):
        return tensor
    core = "core_attn" in modules and Recompute.SELECTIVE in tensor.dropped_by
    others = any(tensor.name in discarded(shapes, name).saved for name in modules if name != "core_attn")
    return replace(tensor, dropped_by=_selective(tensor.dropped_by, core or others))


#: The projections of latent attention in the order in which torchtitan's model calls them (models/deepseek_v3/model/model.py).
_LATENT_CALLS = ("wq", "q_down", "q_up", "kv_down", "kv_up")


def _kept_gemms(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return every second GEMM of those that selective recomputation by op counts: not the router's, nor those of experts, nor
    of linears with biases, which torch adds in another op (addmm); none in modules that are compiled inside the checkpoint,
    whose GEMMs are inductor's calls (aten.mm.out, traced)."""
    model = shapes.model
    if shapes.run.compile and shapes.kind.experts and shapes.framework.recomputation.compiled_with_layers:
        return []
    biased = QKV_LINEARS * model.qkv_bias + (OUTPUT_LINEAR,) * model.output_bias + (*UP_LINEARS, DOWN_LINEAR) * model.mlp_bias
    counted = [op for op in weight_gemms(ops) if op.module not in (ROUTER, EXPERT_MODULE) and op.name not in biased]
    if model.has_latent_attention:
        counted.sort(key=lambda op: _LATENT_CALLS.index(op.name) if op.name in _LATENT_CALLS else len(_LATENT_CALLS))
    return counted[::2]


def _keeps_exchange(shapes: Shapes) -> bool:
    return shapes.framework.recomputation.keeps_exchange_of_normed or shapes.model.qk_norm == "none"


def _by_op(op: Op, kept: set[str], keeps_exchange: bool) -> Op:
    """Return the op, recomputed under SELECTIVE unless its output is kept.

    Kept are the outputs of every second GEMM, fused attention, reduce-scatters and, for most models, the exchange of tokens
    (with the numbers of rows, for which the host waited); the router's GEMM and the experts' grouped ones run again.
    """
    if op.phase != FORWARD:
        return op
    exchanged = op.module == EXCHANGE and op.stream == "ep"
    is_kept = op.name in kept or (exchanged and keeps_exchange) or op.kind in (FLASH_ATTN, "reduce_scatter")
    return replace(op, recomputed_by=_selective(op.recomputed_by, not is_kept))


def _selective(levels: tuple[Recompute, ...], included: bool) -> tuple[Recompute, ...]:
    """Return ``levels`` with SELECTIVE if ``included``, else without it."""
    others = tuple(level for level in levels if level != Recompute.SELECTIVE)
    return (*others, Recompute.SELECTIVE) if included else others
