"""MosaicML's llm-foundry: FSDP through Composer.

Sources: llmfoundry/models/layers/blocks.py (2023, commit 06232c5), utils/config_defaults.py (0474027), pull requests 672
and 1041.
"""

from __future__ import annotations

from dataclasses import replace

from solver.spec.framework import Framework
from solver.spec.frameworks.pytorch import FSDP_ONLY
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse
from solver.spec.parallelism import DataParallel, TensorParallel

LLM_FOUNDRY_2023 = Framework(
    name="llm-foundry-2023",
    family="llm-foundry",
    released="2023-05",
    aliases=("llm-foundry", "llmfoundry", "composer"),
    flags={"zero": 3, "grad_dtype": "bf16"},  # yamls/pretrain: mixed_precision PURE
    can_run=replace(FSDP_ONLY, soft_caps=""),
    kernels=Kernels(
        fused_gate_up=False,
        norm_gradient="norm_grad_torch",  # LPLayerNorm: torch.nn.functional.layer_norm
        torch_loss=False,  # its code fuses the loss by default; its published small models are slower than that
        flash_attention=1,  # attn_impl "triton": a kernel of the first generation
    ),
    tensor_parallel=TensorParallel(vocab_parallel_loss=False),
    data_parallel=DataParallel(
        reduce_scatter_copies=4.0,
        shards_units=True,
        accumulating_gemms=False,  # autograd of FSDP1's views: no GEMM knows a buffer
        shard_cast_bytes=6.0,  # mixed_precision PURE: _flat_param.py, _use_low_precision_shard
        optimizer_bytes_per_parameter=80.0,  # composer's DecoupledAdamW: a kernel for each operation on fp32 shards
    ),
    memory=MemoryUse(frees_gradients=True, held_gradient_bytes=4, root_stays=("embedding", "head")),
)

LLM_FOUNDRY_2024 = LLM_FOUNDRY_2023.derive(
    "llm-foundry-2024",
    "2024-03",
    aliases=("llm-foundry 2024",),
    kernels={"flash_attention": 2},  # attn_impl "flash" by default, FlashAttention-2 since October 2023
    # activation_checkpointing_reentrant is false in its benchmarks; torch 2.1 ends such a recomputation early (its pull request
    # 96866)
    recomputation={"stops_early": True},
)

FAMILY = (LLM_FOUNDRY_2023, LLM_FOUNDRY_2024)
