"""FLOPs of ops and layers, parameters of multi-token prediction, and kernels without learnt corrections, to test against."""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor.kernels.attn_physics import AttnShape, attn_times
from predictor.kernels.chunk_scan import BACKWARD_FLOPS, chunk_flops
from predictor.kernels.dtypes import FAMILIES
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.gemm_physics import gemm_times
from predictor.kernels.linear import LinearModel
from solver.layers.program import CHUNK_SCAN, FLASH_ATTN, GROUPED_LINEAR, LINEAR, Array, LayerProgram, Op
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import layer_parameters


def op_flops(op: Op) -> Array:
    """Return the FLOPs of one run of an op: 2mnk for a GEMM; 4 * area * heads * dim for attention (10 in backward); for linear
    attention those of its chunks."""
    d = op.dims
    if op.kind == LINEAR:
        return 2.0 * d["m"] * d["n"] * d["k"] * d["batch"]
    if op.kind == GROUPED_LINEAR:
        return 2.0 * d["groups"] * d["tokens_per_group"] * d["n"] * d["k"]
    if op.kind == FLASH_ATTN:
        area = d["seq_q"] * (d["seq_kv"] - np.where(d["causal"], (d["seq_q"] - 1) / 2, 0.0))
        per_score = np.where(d["backward"], 5.0, 2.0) * (d["head_dim"] + d["v_head_dim"])
        return d["batch"] * d["heads"] * area * per_score
    if op.kind == CHUNK_SCAN:
        passes = np.where(d["backward"], BACKWARD_FLOPS, 1.0)
        return 1.0 * d["batch"] * d["seq"] * d["heads"] * chunk_flops(d["key_dim"], d["value_dim"]) * passes
    return 0.0


def flops(program: LayerProgram) -> np.ndarray:
    """Return the FLOPs of one rank for one micro batch, forward and backward, without recomputation; shape [keys]."""
    return sum((op_flops(op) * op.count for op in program.ops), np.zeros(len(program.keys)))


def nextn_parameters(model: ModelSpec, active: bool = False) -> int:
    """Return the parameters of the multi-token prediction modules: a layer like the last one, a projection, three norms.

    Embedding and head are the model's own (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    found = layer_kinds(model)
    layer = layer_parameters(model, found.kinds[found.of_layer[-1]], active)
    return model.num_nextn_predict_layers * (layer + 2 * model.hidden_size**2 + 3 * model.norm_parameters)


def bare_gemm(model: LinearModel, m: Any, n: Any, k: Any, batch: Any = 1, dtype: str = "bf16") -> np.ndarray:
    """Seconds of the physical model of GEMMs, without the learnt correction; never falls when a size grows."""
    part = model.parts[FAMILIES.get(dtype, dtype)]
    arrays = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (m, n, k, batch)))
    return gemm_times(part.physics, part.machine, *(a.ravel() for a in arrays)).seconds.reshape(arrays[0].shape)


def bare_attention(model: FlashAttnModel, *shape: Any) -> np.ndarray:
    """Forward seconds of the physical model of attention, without correction; arguments in the order of AttnShape."""
    arrays = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in shape))
    flat = AttnShape(*(a.ravel() for a in arrays))
    return attn_times(model.physics, model.machine, flat).seconds.reshape(arrays[0].shape)
