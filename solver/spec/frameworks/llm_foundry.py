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
    # yamls/pretrain: mixed_precision PURE; modeling_mpt.py: loss_fn is fused_crossentropy (xentropy-cuda-lib) by default
    flags={"zero": 3, "grad_dtype": "bf16", "cross_entropy_fusion": True},
    can_run=replace(FSDP_ONLY, soft_caps=""),
    kernels=Kernels(
        fused_gate_up=False,
        joins_gradients=True,  # layers/attention.py: qkv.chunk(3, dim=2)
        norm_gradient="norm_grad_torch",  # LPLayerNorm: torch.nn.functional.layer_norm
        # Composer computes train_metrics (LanguageCrossEntropy, LanguagePerplexity) in every micro batch (_eval_train_metrics),
        # each a torch cross entropy of all logits: log_softmax reads and writes 16 bits
        loss_metric=2,
        flash_attention=1,  # attn_impl "triton": a kernel of the first generation
    ),
    tensor_parallel=TensorParallel(vocab_parallel_loss=False),
    data_parallel=DataParallel(
        reduce_scatter_copies=4.0,
        joins_before_cast=True,
        shards_units=True,
        accumulating_gemms=False,  # autograd of FSDP1's views: no GEMM knows a buffer
        shard_cast_bytes=6.0,  # mixed_precision PURE: _flat_param.py, _use_low_precision_shard
        optimizer_bytes_per_parameter=80.0,  # composer's DecoupledAdamW: a kernel for each operation on fp32 shards
    ),
    memory=MemoryUse(
        frees_gradients=True,
        held_gradient_bytes=4,
        root_stays=("embedding", "head"),
        keeps_logits=True,  # trainer.py: state.outputs, which _eval_train_metrics reads after backward; modeling_mpt.py
    ),
)

# scripts/train/benchmarking/sweep.sh of pull request 543 (October 2023, commit a7c7567) runs the tables of H100 and A100 80 GB
# in the image mosaicml/pytorch:2.1.0_cu121; their rows are those with mixed_precision DEFAULT. submit_benchmarks.py sets
# activation_checkpointing_reentrant false, and torch 2.1 ends such a recomputation early (its pull request 96866).
LLM_FOUNDRY_OCTOBER_2023 = LLM_FOUNDRY_2023.derive(
    "llm-foundry-2023-10",
    "2023-10",
    aliases=("llm-foundry 2023-10",),
    # under amp_bf16 both metrics cast the logits to fp32 (6 bytes) before log_softmax reads and writes those (8)
    kernels={"loss_metric": 7},
    recomputation={"stops_early": True},
)

LLM_FOUNDRY_2024 = LLM_FOUNDRY_OCTOBER_2023.derive(
    "llm-foundry-2024",
    "2024-03",
    aliases=("llm-foundry 2024",),
    kernels={"flash_attention": 2},  # attn_impl "flash" by default, FlashAttention-2 since October 2023
)

FAMILY = (LLM_FOUNDRY_2023, LLM_FOUNDRY_OCTOBER_2023, LLM_FOUNDRY_2024)
