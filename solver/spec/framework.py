"""The habits of a training framework: what its code does that a layout does not choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from solver.spec.strategy import TpMode


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
    checkpoints since 2.1; torch.compile drops it as dead code). selective_by_op: selective recomputation keeps every second
    product, what fused attention leaves and scattered sums, and runs everything else again (torchtitan's mode "op").
    flash_copies: how often q, k and v, and how often the context, are copied between the framework's order of dimensions,
    sequence first, and FlashAttention's, batch first; the two are one where there is one sequence in a micro batch.
    norm_kernels: (kind, forward, backward) of a norm's kernels, bytes an element of 16-bit activations (empty: one kernel).
    reserve: what the caching allocator holds beyond the allocated peak, as a share of what comes and goes within a step:
    weights, gradients and states are allocated once and leave no gaps. On the slices of Llama that SimuMax publishes (8 B200,
    8 A100) 6.4% of the whole peak is held so, which is 35% of their activations, logits and working memory.
    host_op_seconds: what the host needs to launch one op: steps of many tiny kernels run at the host's speed (assumed).
    """

    name: str
    prefixes: tuple[str, ...]  #: words by which its name begins
    umbrellas: tuple[str, ...] = ()  #: words of what it and others stand under: they mean it where nothing else is named
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fused_gate_up: bool = True
    regathers_input: bool = True
    grad_sync: str = "reduce_scatter"
    param_sync: str = "all_gather"
    bucket_elements: float = 40e6
    bucket_elements_per_rank: float = 0.0
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
    selective_by_op: bool = False
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
    parallel_loss: bool = True  #: the cross entropy works on split logits; otherwise on gathered ones
    torch_loss: bool = False  #: the cross entropy is torch's, in fp32; otherwise Megatron's, in place
    compiles_loss: bool = False  #: torch.compile takes the cross entropy too
    fused_elementwise: bool = True  #: rotary embedding and gated activation are one kernel each, not a chain of eager ones
    fused_softmax: bool = True  #: of unfused attention: scale, mask and softmax in one kernel
