"""Rules on attention in 8 bits: which scales, heads and masks the kernels have that Transformer Engine calls for it.

Source: Transformer Engine's get_attention_backend and nvte_get_fused_attn_backend (cuDNN's kernels), as described in 2026-06.
"""

from __future__ import annotations

from profiler.profile.profile import Device
from solver.spec.model import ModelSpec
from solver.spec.recipes import recipe_name
from solver.spec.run import Run

#: Scales of no kernel: in blocks of 128 values, and of 4-bit values.
NO_KERNEL = ("blockwise", "nvfp4")
HOPPER_DIMS = (128, 128)  #: of q and k, and of v
MOST_DIMS = (192, 128)


def fp8_attention_broken(model: ModelSpec, run: Run, device: Device) -> str:
    """Return what attention in 8 bits (``fp8_attention``) does not run with on a device, or ""."""
    if not run.fp8_attention:
        return ""
    recipe, dims = recipe_name(run.precision, run.fp8_recipe), (model.qk_head_dim, model.value_head_dim)
    if recipe in NO_KERNEL:
        return f"fp8_attention has no kernel with {recipe} scales; leave it out"
    if run.document_tokens:
        return "fp8_attention has no kernel for packed documents; leave it out"
    windows = 0 < model.sliding_window < run.seq_len
    if device.transposes_fp8 and (recipe != "delayed" or dims != HOPPER_DIMS or windows or model.attention_sinks):
        return f"fp8_attention on {device.name} needs fp8_recipe delayed and heads of 128, without windows and sinks"
    if any(dim > most or dim % 16 for dim, most in zip(dims, MOST_DIMS, strict=True)):
        return f"fp8_attention has no kernel for heads of {dims[0]}; its largest are {MOST_DIMS[0]}, {MOST_DIMS[1]} of values"
    return ""
