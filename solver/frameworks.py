"""What known training frameworks do when nobody says otherwise: their defaults and their habits, each from its source.

``defaults`` are Strategy fields; the other fields are properties of the framework's code that a layout does not choose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from profiler.errors import InputError
from solver.strategy import TpMode


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Habits of one framework.

    fused_gate_up: gate and up projection are one GEMM. regathers_input: under sequence parallelism a linear keeps only
    its shard of the input and gathers it again in backward (Megatron), whatever the mode says. grad_sync/param_sync:
    the collective that ZeRO-1 uses. bucket_elements: gradients (and parameters) of one collective, or
    bucket_elements_per_rank for each rank of the group if that is more; the last bucket cannot be hidden.
    fused_accumulation: gradients of further micro batches are added inside the weight-gradient GEMM (or, under FSDP, on
    shards); otherwise a kernel adds them to the buffer. async_tp_reduce: tensor-parallel communication of the backward pass
    (reduction of input gradients, gathering of kept shards) runs beside GEMMs. flash_version: generation of FlashAttention
    (0: the device's best). dropout: unfused attention and residuals drop out, as GPT-2 did.
    dummy_gradients: beside the gradients a 16-bit buffer is kept for each distinct shape of a layer's linears (Transformer
    Engine since 2.11, where a GEMM that accumulates into fp32 gradients must still hand autograd something).
    head_dummy_gradient: likewise for the vocabulary's weight, while its backward pass runs (Megatron's own linears).
    optimizer_bytes_per_parameter: traffic of one Adam step. gradient_passes: how often else a step reads or writes its
    gradients (their norm, clipping, zeroing). bucket_copy_bytes: per parameter, of copying gradients into buckets and back,
    casts and averaging included. reduce_bytes: of a gradient on the wire (0: as it is accumulated). gather_copies,
    scatter_copies: reads and writes of gathered weights, and of whole gradients, by copies between the parameters and FSDP's
    buffers (FSDP2 copies both; FSDP1's parameters are views, whose gradients autograd joins and FSDP divides before it
    scatters them). whole_tensors: ZeRO deals whole tensors, so that some rank updates the largest. splits_transfers: a tensor
    rank sends its part of the activation to the next stage, where the parts are gathered; transfers: how many a stage waits
    for in a micro batch, one after the other. counts_ends: layers are dealt to stages as items of a list with the embedding
    before and norm and head behind them. recomputes_head: full recomputation runs norm and head again too.
    selective_is_full: what the framework calls selective recomputation are whole layers. stops_recompute: recomputation of a
    layer ends with the last tensor that backward needs, so its down projection does not run again (torch's non-reentrant
    checkpoints since 2.1; torch.compile drops it as dead code).
    flash_copies: how often q, k and v, and how often the context, are copied between the framework's order of dimensions, sequence
    first, and FlashAttention's, batch first; the two are one where there is one sequence in a micro batch.
    norm_kernels: (kind, forward, backward) of a norm's kernels, bytes an element of 16-bit activations (empty: one kernel).
    reserve: what the caching allocator holds beyond the allocated peak, as a share of what comes and goes within a step:
    weights, gradients and states are allocated once and leave no gaps. On the slices of Llama that SimuMax publishes (8 B200,
    8 A100) 6.4% of the whole peak is held so, which is 35% of their activations, logits and working memory.
    host_op_seconds: what the host needs to launch one op: steps of many tiny kernels run at the host's speed (assumed).
    """

    name: str
    prefixes: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fused_gate_up: bool = True
    regathers_input: bool = True
    grad_sync: str = "reduce_scatter"
    param_sync: str = "all_gather"
    bucket_elements: float = 40e6
    bucket_elements_per_rank: float = 1e6
    optimizer_bytes_per_parameter: float = 30.0
    reserve: float = 0.35
    host_op_seconds: float = 6e-6
    gradient_passes: float = 2.0
    bucket_copy_bytes: float = 0.0
    reduce_bytes: int = 0
    gather_copies: float = 0.0
    scatter_copies: float = 0.0
    whole_tensors: bool = False
    tensors_per_layer: int = 7  #: five or so linears and two norms
    splits_transfers: bool = True
    transfers: float = 2.0
    counts_ends: bool = False
    recomputes_head: bool = False
    selective_is_full: bool = False
    stops_recompute: bool = False
    flash_copies: tuple[int, int] = (0, 0)
    norm_kernels: tuple[tuple[str, float, float], ...] = ()
    autocast: bool = False  #: weights are held in fp32 and cast for each product
    fused_qkv: bool = True  #: the q, k and v projections are one GEMM
    head_dummy_gradient: bool = False
    dummy_gradients: bool = False
    shares_input: bool = False  #: projections of one input communicate once for all, not once each
    fused_accumulation: bool = True
    async_tp_reduce: bool = True
    flash_version: int = 0
    dropout: bool = False
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  #: what a search may choose
    tp_modes: tuple[TpMode, ...] = (TpMode.MTP, TpMode.MSP)  #: likewise; where shards are gathered again, FSP is MSP
    parallel_loss: bool = True  #: the cross entropy works on split logits; otherwise on gathered ones, by torch's kernels
    fused_elementwise: bool = True  #: rotary embedding and gated activation are one kernel each, not a chain of eager ones
    fused_softmax: bool = True  #: of unfused attention: scale, mask and softmax in one kernel


#: FSDP2 with per-layer gathers and prefetch; DTensor, eager kernels, loss on gathered logits.
_TORCHTITAN = Framework(
    name="torchtitan",
    prefixes=("torchtitan",),
    defaults={"zero": 3, "grad_dtype": "fp32"},
    gather_copies=2.0,
    scatter_copies=2.0,
    stops_recompute=True,
    fused_gate_up=False,
    fused_qkv=False,
    shares_input=True,
    regathers_input=False,
    async_tp_reduce=False,
    fused_elementwise=False,
    parallel_loss=False,
    flash_version=2,
)

_FSDP1 = Framework(
    name="fsdp",
    prefixes=("fsdp", "pytorch fsdp"),
    defaults={"zero": 3, "grad_dtype": "bf16"},
    fused_gate_up=False,
    parallel_loss=False,
    scatter_copies=4.0,
    stops_recompute=True,
    flash_version=2,  # what torch's scaled_dot_product_attention runs
)

_ENGINE = re.compile(r"transformer[-_ ]engine\D{0,10}(\d+)\.(\d+)")
_DUMMY_GRADIENTS_SINCE = (2, 11)

_MEGATRON = {
    "zero": 1, "grad_dtype": "fp32", "overlap_grad_reduce": True, "overlap_param_gather": True,
    "cross_entropy_fusion": False, "fused_norm": True, "p2p_overlap": True,
}  # fmt: skip

#: Both generations: bf16 gradients all-reduced, whole tensors dealt to ZeRO-1 ranks, each of which broadcasts its own;
#: flash-attn's cross entropy, in place.
_INTERNEVO = Framework(
    name="internevo-2024",
    prefixes=("internevo-2024",),
    defaults={"zero": 1, "grad_dtype": "bf16", "cross_entropy_fusion": True},
    fused_gate_up=False,
    regathers_input=False,
    grad_sync="all_reduce",
    param_sync="broadcast",
    bucket_elements=512 * 2**20,
    optimizer_bytes_per_parameter=36.0,
    fused_accumulation=False,
    whole_tensors=True,
    zero_stages=(0, 1, 3),
    tp_modes=(TpMode.MTP, TpMode.MSP, TpMode.FSP, TpMode.ISP),
)

FRAMEWORKS: tuple[Framework, ...] = (
    _INTERNEVO,
    # Its releases of 2023 (InternLM 0.1 and 0.2), whose figures are published: FlashAttention 1, apex norms on fp32 copies that
    # backward computes again, eager AdamW after a finite check, a norm, a cast and an unscaling of every gradient (132 bytes a
    # parameter in all), parameters broadcast after the step
    replace(
        _INTERNEVO,
        name="internevo",
        prefixes=("internevo", "internlm"),
        defaults={**_INTERNEVO.defaults, "overlap_param_gather": False},
        flash_version=1,
        optimizer_bytes_per_parameter=132.0,
        gradient_passes=0.0,
        bucket_copy_bytes=12.0,
        norm_kernels=(("residual", 6, 15), ("norm", 6, 22)),
        tensors_per_layer=9,  # its attention has biases
    ),
    Framework(  # Megatron-LM as published in 2021-22: distributed optimizer, fp32 main gradients, its own linears
        name="megatron-lm",
        prefixes=("megatron-lm",),
        defaults=_MEGATRON,
        head_dummy_gradient=True,
        dropout=True,
    ),
    Framework(  # Megatron-Core over Transformer Engine, whose GEMMs leave no room beside them for NCCL's kernels
        name="megatron-core",
        prefixes=("megatron-core", "megatron-lm core", "megatron-lm v0.", "mcore"),
        defaults=_MEGATRON,
        head_dummy_gradient=True,
        async_tp_reduce=False,
    ),
    Framework(  # NeMo: Megatron-Core with tensor-parallel communication pipelined into the GEMMs (user buffers)
        name="nemo",
        prefixes=("nemo",),
        defaults={**_MEGATRON, "tp_comm_overlap": True},
        head_dummy_gradient=True,
        async_tp_reduce=False,
    ),
    Framework(  # Qi et al. 2023: Megatron-LM of that year, whose attention is unfused unless asked otherwise
        name="megatron-lm-zero-bubble",
        prefixes=("megatron-lm (zero-bubble", "megatron-lm-zero-bubble"),
        defaults={**_MEGATRON, "attention": "unfused"},
        dropout=True,
    ),
    Framework(  # fp16 gradients in flat buffers, no overlap
        name="megatron-deepspeed",
        prefixes=("megatron-deepspeed", "deepspeed"),
        defaults={"zero": 1, "grad_dtype": "fp16", "overlap_grad_reduce": False, "overlap_param_gather": False,
                  "attention": "unfused"},
        grad_sync="all_reduce",
        regathers_input=False,
        fused_accumulation=False,
        bucket_elements=500e6,
        transfers=4.0,  # its pipeline engine sends and receives one after the other
        dropout=True,
    ),
    # Research code of 2023, Megatron's tensor parallelism and DeepSpeed's pipeline: after the step's last backward pass bf16
    # gradients are joined in buckets, divided, cast to fp32, all-reduced whole, copied back, and their norm is taken
    # (26 + 6 bytes a parameter); stages pass whole activations by blocking sends and receives
    Framework(
        name="aleph-alpha-scaling",
        prefixes=("aleph alpha", "aleph-alpha"),
        defaults={"zero": 1, "grad_dtype": "bf16", "overlap_grad_reduce": False, "overlap_param_gather": False,
                  "fused_norm": False},
        fused_gate_up=False,
        regathers_input=False,
        fused_accumulation=False,
        async_tp_reduce=False,
        fused_elementwise=False,
        fused_softmax=False,
        parallel_loss=False,
        grad_sync="all_reduce",
        flash_copies=(1, 2),
        reduce_bytes=4,
        bucket_elements=500e6,
        bucket_copy_bytes=32.0,
        gradient_passes=0.0,
        splits_transfers=False,
        transfers=4.0,
        counts_ends=True,
        recomputes_head=True,
    ),
    _TORCHTITAN,
    # plain torch.distributed: DDP in 25 MB buckets, weights held in fp32 under autocast, fused AdamW, no clipping
    replace(
        _TORCHTITAN,
        name="pytorch",
        prefixes=("pytorch",),
        defaults={"zero": 0, "grad_dtype": "fp32"},
        autocast=True,
        optimizer_bytes_per_parameter=28.0,
        gradient_passes=0.0,
        bucket_copy_bytes=16.0,
        grad_sync="all_reduce",
        param_sync="broadcast",
        bucket_elements=6.5e6,
        bucket_elements_per_rank=0.0,
        fused_accumulation=False,
    ),
    Framework(  # its published tables are of 2023, when its attention was the Triton kernel of the first generation
        name="llm-foundry",
        prefixes=("llm-foundry", "composer"),
        defaults={"zero": 3, "grad_dtype": "fp32"},
        fused_gate_up=False,
        parallel_loss=False,
        scatter_copies=4.0,
        flash_version=1,
    ),
    _FSDP1,
    # IBM's trainer: its selective checkpointing recomputes whole blocks (all of them unless told otherwise), AdamW is not fused
    replace(
        _FSDP1,
        name="fms-fsdp",
        prefixes=("fms-fsdp",),
        optimizer_bytes_per_parameter=96.0,
        gradient_passes=0.0,
        selective_is_full=True,
    ),
)  # fmt: skip

GENERIC = Framework(
    name="generic",
    prefixes=(),
    defaults=_MEGATRON,
    tp_modes=(TpMode.MTP, TpMode.MSP, TpMode.ISP),
)


def known_framework(name: str) -> Framework:
    """As framework_of, for a name that a user chose: raises InputError where no framework answers to it."""
    framework = framework_of(name)
    if framework is GENERIC and name != GENERIC.name:
        names = ", ".join([f.name for f in FRAMEWORKS] + [GENERIC.name])
        raise InputError(f"no framework is called {name!r}; known are {names}")
    return framework


def framework_of(name: str) -> Framework:
    """The framework whose prefix starts ``name`` (longest wins, case ignored); GENERIC, a Megatron-like one, otherwise.

    A release of Transformer Engine in the name ("..., transformer-engine 2.11.0") decides what depends on it.
    """
    lowered = name.lower()
    found = [(len(prefix), f) for f in FRAMEWORKS for prefix in f.prefixes if lowered.startswith(prefix)]
    framework = max(found, key=lambda pair: pair[0])[1] if found else GENERIC
    engine = _ENGINE.search(lowered)
    if engine and (int(engine[1]), int(engine[2])) >= _DUMMY_GRADIENTS_SINCE:
        return replace(framework, dummy_gradients=True)
    return framework
