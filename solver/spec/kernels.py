"""Which kernels a framework runs, and what is fused into one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which kernels run, and what is fused into one."""

    transformer_engine: bool = False  #: layers are made of Transformer Engine's modules
    fused_qkv: bool = True  #: the q, k and v projections are one GEMM
    splits_interleaved: bool = False  #: their product holds them group by group, and is copied apart and joined again
    #: They are views of it (torch.split, chunk), so that autograd joins their gradients by a copy; not beside the one above.
    joins_gradients: bool = False
    fused_gate_up: bool = True  #: gate and up projection are one GEMM
    one_layernorm: bool = False  #: LayerNorm is one kernel even where norms are not fused, as torch.nn.functional.layer_norm
    fused_elementwise: bool = True  #: rotary embedding and gated activation are one kernel each, not a chain of eager ones
    #: Rotary embedding of latent attention and what puts keys together are two kernels; False: chains of eager ones, even where
    #: that of other attention is one kernel; None: as that of other attention.
    fused_latent_rope: bool | None = None
    latent_values_are_views: bool = False  #: values of latent attention are views of the product that also holds parts of keys
    fused_rope: bool = False  #: rotary embedding is one kernel even where other chains are not
    fused_softmax: bool = True  #: unfused attention: scale, mask and softmax are one kernel
    #: Kernels of a fused norm: (memory-bound kind, bytes per 16-bit element forward, backward); empty: one kernel.
    norm_kernels: tuple[tuple[str, float, float], ...] = ()
    #: Backward kernel of a fused norm: norm_grad (Apex's FastLayerNorm, Transformer Engine's, Triton's), norm_grad_apex (Apex's
    #: FusedLayerNorm) or norm_grad_torch (torch's own, or compiled).
    norm_gradient: Literal["norm_grad", "norm_grad_apex", "norm_grad_torch"] = "norm_grad"
    flash_attention: int = 0  #: generation of FlashAttention; 0: the best one for the device
    flex_sinks: bool = False  #: attention with sinks is torch's FlexAttention
    flash_unstated: int = 0  #: an older generation that runs which state none may have had; 0: none
    #: Whatever the micro batch, queries, keys and values of one GEMM are copied into tensors of their own, keys and values are
    #: joined and copied again; in the backward pass keys' and values' gradients are joined, all three joined and copied.
    splits_and_joins_kv: bool = False
    splits_groups: bool = False  #: queries, keys and values of groups are slices of one tensor, each copied
    #: How often q, k and v, and how often the context, are copied between the framework's order of dimensions (sequence first)
    #: and FlashAttention's (batch first). With one sequence in a micro batch the two orders are the same.
    attention_layout_copies: tuple[int, int] = (0, 0)
    torch_context_parallel: bool = False  #: a ring is that of torch.distributed.tensor.experimental
    repeats_kv: bool = False  #: keys and values are copied to as many heads as queries have before attention
    scaled_rope_fused: bool = True  #: the kernel of rotary embedding also multiplies by YaRN's attention factor
    clamps_apart: bool = False  #: clamps of experts' gate and up projections are kernels of their own
    #: Each expert's weights are parameters of their own: the host fetches each forward, and handles its gradient and its hook.
    experts_apart: bool = False
    #: Gate and up projections of the experts are grouped GEMMs of their own, the gradients of whose input are added.
    experts_gate_apart: bool = False
    router_fp32: bool = False  #: the router multiplies in fp32, but GPT-OSS's and Llama 4's, unless a run says
    routes_consecutive: bool = True  #: with moe_routing consecutive the router runs all the same
    #: The bias of the experts' output is added expert by expert: multiplied by the probabilities in fp32, added, joined.
    bias_by_expert: bool = False
    #: Experts with biases and clamped gates are eager whatever is compiled: gate and up are one grouped GEMM, biases are
    #: repeated for every row, joined with padding and added, and the activation works on interleaved halves.
    biased_experts_eager: bool = False
    #: The GEMMs of all experts are one kernel (torch._grouped_mm); otherwise the host launches one for each, as Transformer
    #: Engine does.
    one_grouped_kernel: bool = False
    #: The bias of the q, k and v projection is added by a kernel of its own (Megatron's own linears); otherwise in the GEMM.
    #: The others are added in it, or in the activation's and the residual's kernel.
    bias_apart: bool = False
    bias_gradient_fused: bool = False  #: weight-gradient GEMMs also sum the gradients of biases (Transformer Engine)
    dropout: bool = False  #: unfused attention and residuals apply dropout, as GPT-2 did
    norm_quantises: bool = False  #: a norm before a quantised linear writes quantised values (Transformer Engine)
    #: So does one before a linear of MXFP8, where widths are multiples of 128: cuDNN's norms (NVTE_NORM_FWD_USE_CUDNN).
    norm_quantises_blocks: bool = False
    #: Formats whose casts write scales as GEMMs read them (Transformer Engine); in others a kernel of its own reorders them.
    swizzled_casts: tuple[str, ...] = ()
    #: GEMMs of fp32 runs round their operands to TF32: Transformer Engine's, and torch's with allow_tf32 (NVIDIA's containers).
    tf32: bool = False
    torch_loss: bool = False  #: the cross entropy is torch's, in fp32; otherwise Megatron's, in place
    compiled_loss: bool = False  #: torch.compile includes the cross entropy
    wide_logits: bool = False  #: the logits are cast to fp32 before the loss
    loss_metric: int = 0  #: reads and writes of each fp32 logit beside the loss, for what a log says of it
    #: Host time to launch one op: steps of many tiny kernels are bound by the host. None: of layers of plain PyTorch modules,
    #: which the profiler measures (solver/step/host.py).
    launch_seconds: float | None = None
    #: The probabilities are applied to the activation, so that the experts' outputs need not be kept.
    probabilities_in_activation: bool = True
    combines_in_fp32: bool = False  #: torch's own kernels weight and add the experts' outputs, in fp32

    def arithmetic(self, precision: str) -> str:
        """Return the number format in which GEMMs of a run of ``precision`` multiply."""
        return "tf32" if precision == "fp32" and self.tf32 else precision
