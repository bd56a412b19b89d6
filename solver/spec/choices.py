"""The names that a strategy is written in, and what each key may be."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from predictor.network.expert_exchange import DISPATCHERS
from profiler.errors import InputError, shown
from solver.spec.recipes import FP8_RECIPES


class TpMode(IntEnum):
    """How a tensor-parallel group splits a layer (InternEvo's names; Megatron's sequence parallelism is MSP)."""

    MTP = 0  #: weights split, activations whole on every rank
    MSP = 1  #: weights split, activations outside linears split along the sequence
    FSP = 2  #: as MSP; only the local shard of a linear's input is kept and all-gathered again in backward
    ISP = 3  #: sequence split everywhere, all-to-all to heads in attention; weights split over ``wp`` and all-gathered


class Recompute(IntEnum):
    """What the forward pass discards and the backward pass recomputes."""

    NONE = 0
    SELECTIVE = 1  #: the modules of recompute_modules
    FULL = 2  #: whole layers; only their input is kept


SCHEDULES = ("1f1b", "interleaved", "gpipe", "zb-h1", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "dualpipev")
#: Schedules that are one of these under another name.
_OTHER_SCHEDULES = {
    "dualpipe": " (DualPipe with pp stages is dualpipev with half as many and twice the replicas)",
    "zb-h2": " (zb-2p plans ZB-H2's passes by their times)",
}
#: Modules of a layer that selective recomputation may be of, in Megatron-Core's names. core_attn: scores, softmax, context;
#: moe_act: the experts' activation; moe: the whole mixture, exchange included.
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe")
#: Modules of a layer of which CUDA graphs may be, in Megatron-Core's names.
CUDA_GRAPH_MODULES = ("attn", "mlp", "moe_router", "moe_preprocess")
#: Tensors of fewer elements stay on the device (``--min-offloaded-tensor-size``).
OFFLOAD_LEAST_ELEMENTS = 1 << 20
#: Modules of a layer whose saved activations may wait on the host, in Megatron-Core's names.
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
#: One forward pass, one backward pass, of whole stages or of their chunks.
ONE_F_ONE_B = ("1f1b", "interleaved")
#: Schedules of two chunks a stage, one on the way down the pipeline and one on the way back.
V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipev")
#: Schedules that run the weight gradient as a pass of its own.
SPLIT_BACKWARD = ("zb-h1", "zb-1p", "zb-2p", *V_SHAPED)
#: Allowed values of the keys that have a fixed set of them.
CHOICES: dict[str, tuple[Any, ...]] = {
    "tp_mode": tuple(mode.name.lower() for mode in TpMode),
    "cp_comm": ("ring", "a2a", "allgather", "a2a+ring"),
    "schedule": SCHEDULES,
    "zero": (0, 1, 2, 3),
    "recompute": tuple(level.name.lower() for level in Recompute),
    "precision": ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"),
    "fp8_recipe": FP8_RECIPES,
    "fp8_amax_reduction": ("all", "tensor", "none"),
    "grad_dtype": ("fp32", "bf16", "fp16"),
    "attention": ("flash", "unfused"),
    "flash_generation": (0, 1, 2, 3, 4),
    "optimizer": ("adam", "muon"),
    "optimizer_states": ("fp32", "remainder", "bf16", "8bit"),
    "cross_entropy_fusion_impl": ("te", "native", "linear"),
    "moe_dispatcher": ("alltoall", "allgather", *DISPATCHERS),
    "moe_routing": ("random", "consecutive"),
}


def check_choice(key: str, value: Any) -> None:
    """Raise InputError for a value of a field of CHOICES that it does not have."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value not in CHOICES[key]:
        hint = _OTHER_SCHEDULES.get(value, "") if key == "schedule" and isinstance(value, str) else ""
        raise InputError(f"{key} is {shown(value)}; it must be one of {', '.join(map(str, CHOICES[key]))}{hint}")
