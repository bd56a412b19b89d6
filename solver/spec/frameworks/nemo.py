"""NeMo and Megatron-Bridge, which train with Megatron-Core.

Sources: NVIDIA/NeMo nemo/collections/llm/recipes and scripts/performance; NVIDIA-NeMo/Megatron-Bridge scripts/performance.
"""

from __future__ import annotations

from solver.spec.can_run import UNFUSED_CAPS
from solver.spec.choices import CHOICES, CUDA_GRAPH_MODULES, RECOMPUTE_MODULES
from solver.spec.frameworks.megatron import BEFORE_0_9, MEGATRON_CORE_0_12

NEMO_24 = MEGATRON_CORE_0_12.derive(
    "nemo-24",
    "2024-07",
    family="nemo",
    aliases=("nemo", "megascale"),
    linear_bias=False,  # its recipes say: Nemotron has none, GPT-3 does
    tied_embeddings=False,
    # Transformer Engine 1; no optimizer asks for the precision-aware one beside offload
    memory={"original_inputs": False, "dummy_gradients": False, "offloads_master": False, "keeps_wide_gradients": False},
    flags={  # recipes/llama3_70b.py: ddp settings; user buffers as in the recipes' performance mode
        "zero": 1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "tp_comm_overlap": True,
        "fp8_param_gather": True,  # recipes/precision/mixed_precision.py
        "grad_dtype": "bf16",  # NeMo-Framework-Launcher examples/training/*/h100: grad_sync_dtype
    },
    best_practice={"cross_entropy_fusion": False},
    can_run={**BEFORE_0_9, "shards": "all"},  # distributed_fused_adam
    # Of the attention kernels that Transformer Engine chooses from: runs of 24.07 and before with 4k to 1M tokens all take as
    # long as with FlashAttention 2
    kernels={"probabilities_in_activation": False, "flash_attention": 2},
    # grad_div_ar_fusion, later average_in_collective; no search for NaN
    data_parallel={"buffer_passes": 1.0, "scaling_passes": 0.0},
)

#: Its runs take as long as with cuDNN's attention.
NEMO_24_09 = NEMO_24.derive(
    "nemo-24.09",
    "2024-09",
    aliases=("nemo 24.10", "nemo 24.11", "nemo 24.12"),
    kernels={"flash_attention": 0},  # NVTE_FUSED_ATTN=1 (NVIDIA/dgxc-benchmarking llama3.1/configure.sh)
    can_run={"soft_caps": UNFUSED_CAPS},  # nemo/collections/llm/gpt/model/gemma2.py
)

NEMO_25 = NEMO_24_09.derive(
    "nemo-25",
    "2025-02",
    aliases=("nemo 25", "nemo framework 25"),
    # scripts/performance/helpers.py: implementation "te"; the recipe of precision bf16-mixed reduces in fp32
    flags={"cross_entropy_fusion": True, "grad_dtype": "fp32"},
    best_practice={"cross_entropy_fusion": True},
    can_run={
        "fp8_attention": True,
        "zero_stages": (0, 1, 2, 3),  # Megatron's FSDP (scripts/performance/helpers.py, set_mcore_fsdp_configs)
        "shards": "any",
        "multi_token_prediction": True,
        "predicts_with_context": False,  # Megatron-Core's arguments.py asserted cp 1 until about 0.14
        "stated_end_stages": True,
        "counts_embedding_and_loss": True,
        "pipeline_layout": True,
        "folds_experts": True,
        "dispatchers": ("alltoall", "allgather", "deepep", "hybridep"),
        "overlaps_exchange": True,
        "recompute_modules": RECOMPUTE_MODULES,
        "cuda_graph_modules": CUDA_GRAPH_MODULES,
        "optimizer_states": CHOICES["optimizer_states"],
        "offloads": ("optimizer", "activations"),
    },
    # launchers of NeMo and Bridge set NVTE_NORM_FWD_USE_CUDNN
    kernels={"probabilities_in_activation": True, "norm_quantises_blocks": True},
    # param_and_grad_buffer.py: model_weight_buffer and main_weight_buffer; mcore_fsdp_adapter.py: its units are layers, so
    # embedding and head stay gathered; megatron_fsdp.py: the least unit
    memory={"keeps_shards": True, "root_stays": ("embedding", "head"), "communication_unit": 1e9},
)

#: Megatron-Bridge, which follows NeMo: src/megatron/bridge/models set expert_tensor_parallel_size to 1.
MEGATRON_BRIDGE_25 = NEMO_25.derive(
    "megatron-bridge-25",
    "2025-09",
    family="megatron-bridge",
    aliases=("megatron-bridge",),
    # Megatron-FSDP shards what it is told to; arguments.py is not run
    can_run={
        "overlaps_muon": True,
        "gathers_after_reducing": False,
        "linear_attention": True,
        "state_space": True,
        "predicts_with_context": True,
    },
    tensor_parallel={"experts_follow": False},
    # apply_rope_fusion in the configuration that its DeepSeek recipe prints; under Megatron-LM the kernels are experimental,
    # and scripts with latent attention turn them off (--no-rope-fusion)
    # moe_router_dtype of its Qwen3, DeepSeek, Kimi, GLM and OLMoE; GPT-OSS and Llama 4 leave the router in 16 bits
    kernels={"fused_latent_rope": True, "router_fp32": True},
    # scripts/performance: fp8_cs, without 16-bit layers at the ends; every model's common settings reduce in bf16
    flags={"fp8_recipe": "tensorwise", "grad_dtype": "bf16"},
    reduces_narrow=True,
    # TORCH_NCCL_AVOID_RECORD_STREAMS (scripts/performance/utils/executors.py): blocks are free after their last use. The
    # shares are not measured: the most that runs of its recipes, which fitted, leave room for
    memory={
        "allocator_gaps": (0.03, 0.13),
        "original_inputs": True,
        "dummy_gradients": True,
    },  # Transformer Engine 2.7 and later
)

#: Its recipes (scripts/performance/configs/*_workload_base_configs.py, 01b2977) exchange tokens by hybrid-EP on most systems.
MEGATRON_BRIDGE_26 = MEGATRON_BRIDGE_25.derive(
    "megatron-bridge-26",
    "2026-02",
    aliases=("megatron-bridge 26",),
    flags={"moe_dispatcher": "hybridep"},
    kernels={"swizzled_casts": ("mxfp8",)},  # Transformer Engine's pull request 2486 of January 2026, as of 2.12 (inferred)
    can_run={"offloads": ("optimizer", "activations", "modules"), "packed_exchanges": ("ring", "a2a")},
)

#: Since 26.06 the grouped GEMMs of MXFP8 experts may include what stands between them (NVTE_CUTEDSL_FUSED_GROUPED_MLP).
MEGATRON_BRIDGE_26_06 = MEGATRON_BRIDGE_26.derive(
    "megatron-bridge-26.06",
    "2026-06",
    aliases=("megatron-bridge 26.06", "megatron-bridge 26.08"),
    can_run={"fuses_experts": True},
)

FAMILY = (NEMO_24, NEMO_24_09, NEMO_25, MEGATRON_BRIDGE_25, MEGATRON_BRIDGE_26_06, MEGATRON_BRIDGE_26)
