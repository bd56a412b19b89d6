"""Megatron-LM, Megatron-Core over Transformer Engine, NeMo, and the zero-bubble fork.

Sources: NVIDIA/Megatron-LM megatron/training/arguments.py of 2022 (commit 0012901), 2024 (02871b4) and 2025 (000c4ac), a fork
of late 2023 (LumiOpen a2cca9d), its CHANGELOG.md, megatron/core/distributed and megatron/core/tensor_parallel; NVIDIA/NeMo
nemo/collections/llm/recipes and scripts/performance.
"""

from __future__ import annotations

from solver.spec.framework import ASSUMED_LAUNCH, CanRun, DataParallel, Framework, Kernels, MemoryUse, TensorParallel
from solver.spec.strategy import CHOICES, CUDA_GRAPH_MODULES, RECOMPUTE_MODULES, SCHEDULES, TpMode

#: Host time of an op of Megatron's own layers: Sailor's authors profiled Megatron-DeepSpeed's (sources in deepspeed.py), where
#: at one sequence over four tensor ranks the host needs 1.5 ms for the 14 ops of a forward pass.
OWN_LAYERS_LAUNCH = 107e-6

MEGATRON_LM_2023 = Framework(
    name="megatron-lm-2023",
    family="megatron-lm",
    released="2022-12",
    aliases=("megatron-lm", "megatronlm"),
    flags={  # switches of arguments.py: off unless given; bf16 forces fp32 gradients
        "zero": 0,  # --use-distributed-optimizer, which is ZeRO-1
        "grad_dtype": "fp32",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "cross_entropy_fusion": False,
        "fused_norm": True,
        "p2p_overlap": True,  # read only where stages are interleaved
    },
    best_practice={"overlap_grad_reduce": True},
    can_run=CanRun(
        zero_stages=(0, 1),
        cp_comms=(),  # context parallelism came with Megatron-Core 0.4 (CHANGELOG)
        replicated_kv_heads=False,  # core/transformer/attention.py divides the query groups by tp
        uneven_stages=False,  # arguments.py asserts that pp divides the layers
    ),
    linear_bias=True,  # --disable-bias-linear is off
    # --attention-dropout and --hidden-dropout default to 0.1; core/tensor_parallel/layers.py: output + bias
    kernels=Kernels(dropout=True, bias_apart=True, launch_seconds=OWN_LAYERS_LAUNCH),
    tensor_parallel=TensorParallel(experts_follow=True),  # --expert-tensor-parallel-size defaults to tp
    data_parallel=DataParallel(
        bucket_elements_per_rank=1e6,  # max(40 M, 1 M x dp) parameters
        buffer_passes=3.0,  # zeroed, and divided by the number of ranks
    ),
    memory=MemoryUse(vocab_dummy_gradient=True),  # tensor_parallel/layers.py
)

MEGATRON_LM_2021 = MEGATRON_LM_2023.derive(
    "megatron-lm-2021",
    "2021-04",  # arXiv 2104.04473
    aliases=("megatron-lm 2021", "megatron-lm v2"),
    best_practice={"overlap_grad_reduce": False},  # one all-reduce of one buffer after the backward pass
    can_run={"zero_stages": (0,), "tp_modes": (TpMode.MTP,), "recompute": ("none", "full")},
    tensor_parallel={"async_backward": False},  # since early 2022 the reduction of input gradients is asynchronous
    data_parallel={
        "grad_collective": "all_reduce",
        "bucket_elements": float("inf"),
        "bucket_elements_per_rank": 0.0,
        "fused_gradient_accumulation": False,  # fused since 2022
    },
    memory={"vocab_dummy_gradient": False},
)

MEGATRON_CORE_0_12 = MEGATRON_LM_2023.derive(
    "megatron-core-0.12",
    "2025-05",
    aliases=("megatron-core", "megatron-lm core", "megatron-lm v0.", "mcore"),
    best_practice={"overlap_param_gather": True, "cross_entropy_fusion": True},  # Transformer Engine's fused cross entropy
    can_run={
        "cp_comms": CHOICES["cp_comm"],  # --cp-comm-type, since 0.10; a2a+p2p with --hierarchical-context-parallel-sizes
        "stated_end_stages": True,  # --decoder-first-pipeline-num-layers, since 0.9; with virtual stages since 0.11 (CHANGELOG)
        "counts_embedding_and_loss": True,  # --account-for-embedding-in-pipeline-split and -loss-
        "pipeline_layout": True,  # --pipeline-model-parallel-layout, since 0.13
        # asserted in arguments.py until about 0.14; the guide to multi-token prediction says that it is not supported yet
        "predicts_with_context": False,
        "experts": True,
        "experts_in_fp16": False,  # arguments.py asserts it for ep above 1 and for grouped GEMMs
        "folds_experts": True,  # --expert-tensor-parallel-size, since 0.9
        # --moe-token-dispatcher-type flex, since 0.11; --moe-flex-dispatcher-backend hybridep, since 0.15
        "dispatchers": ("alltoall", "allgather", "deepep", "hybridep"),
        "tp_comm_overlap": True,
        "micro_batch_groups": True,  # --microbatch-group-size-per-virtual-pipeline-stage, since 0.9
        "defers_head": True,  # --defer-embedding-wgrad-compute, since 0.7
        "overlaps_exchange": True,  # --overlap-moe-expert-parallel-comm, since 0.14
        "recompute_modules": RECOMPUTE_MODULES,  # --recompute-modules
        "cuda_graph_modules": CUDA_GRAPH_MODULES,  # --cuda-graph-scope, since 0.15
        "optimizers": ("adam", "muon"),  # --optimizer muon and dist_muon, since 0.16
        "shards_experts_alike": True,  # parallel_state.py: --num-distributed-optimizer-instances divides their copies too
        "gathers_after_reducing": True,  # arguments.py
        "changed_states_need_zero": True,  # optimizer_config.py: the precision-aware optimizer is the distributed one's
        "overlaps_muon": False,  # arguments.py asserts that --overlap-grad-reduce is off
        "optimizer_states": ("fp32", "bf16", "8bit"),  # --use-precision-aware-optimizer --exp-avg-dtype, since 0.11
        # --optimizer-cpu-offload, since 0.12; --cpu-offloading-num-layers; --fine-grained-activation-offloading, since 2026
        "offloads": ("optimizer", "activations", "modules"),
    },
    kernels={
        "dropout": False,  # current recipes set both dropouts to 0
        "splits_interleaved": True,
        "launch_seconds": ASSUMED_LAUNCH,  # Transformer Engine's layers were not profiled: assumed
        "bias_apart": False,
        "bias_gradient_fused": True,
        "norm_quantises": True,
        "fused_latent_rope": True,  # --no-rope-fusion off, rope_type yarn; since 0.14
        "scaled_rope_fused": False,  # rope_utils.py: Transformer Engine's kernel takes no mscale
        "clamps_apart": True,  # fusions/fused_bias_geglu.py: clamp, clamp and cat before the fused function
        "bias_by_expert": True,  # moe/experts.py: TEGroupedMLP._apply_bias
        "experts_apart": True,  # weight0, weight1, ... of Transformer Engine's GroupedLinear
    },
    memory={
        "quantised_inputs": True,
        "quantised_weights": True,
        "cublas_threads": 2,
        "transformer_engine": True,
        "fused_adam_copies": True,
    },  # fmt: skip
    data_parallel={"buffer_passes": 4.0},  # --check-for-nan-in-loss-and-grad is the default
    pipeline={"scatter_gather": False},  # core/pipeline_parallel/p2p_communication.py sends what a rank holds
    tensor_parallel={
        "async_backward": False,  # Transformer Engine's GEMMs leave no room for NCCL's kernels
        "gathers_quantised": True,
        "splits_sequence": True,  # experts need it beside tp (arguments.py); recipes and examples set it
    },
)

MEGATRON_CORE_0_8 = MEGATRON_CORE_0_12.derive(
    "megatron-core-0.8",
    "2024-07",
    aliases=("megatron-core v0.8", "megatron-core r0.8", "megatron-lm core_v0.8", "megatron-lm v0.8", "mcore 0.8"),
    best_practice={"cross_entropy_fusion": False},
    can_run={
        "cp_comms": ("ring",),
        "stated_end_stages": False,
        "counts_embedding_and_loss": False,
        "pipeline_layout": False,
        "folds_experts": False,
        "dispatchers": ("alltoall", "allgather"),
        "overlaps_exchange": False,
        "recompute_modules": ("core_attn",),  # others since 0.12
        "cuda_graph_modules": (),
        "micro_batch_groups": False,
        "optimizers": ("adam",),
        "optimizer_states": ("fp32",),
        "offloads": ("activations",),
    },  # MoE Parallel Folding since 0.9, DeepEP since 0.11 (CHANGELOG)
    kernels={"probabilities_in_activation": False, "fused_latent_rope": False},  # since 0.13 and 0.14
)

#: --transformer-impl local: Megatron's own linears and unfused attention.
MEGATRON_CORE_LOCAL = MEGATRON_CORE_0_12.derive(
    "megatron-core-local",
    "2025-05",
    family="megatron-core-local",
    aliases=("megatron-core local",),
    can_run={"cp_comms": (), "experts": False, "tp_comm_overlap": False},
    kernels={
        "norm_quantises": False,
        "bias_apart": True,
        "bias_gradient_fused": False,
        "launch_seconds": OWN_LAYERS_LAUNCH,
    },
    memory={"quantised_inputs": False, "quantised_weights": False, "transformer_engine": False, "scores_buffer": True},
)

NEMO_24 = MEGATRON_CORE_0_12.derive(
    "nemo-24",
    "2024-07",
    family="nemo",
    aliases=("nemo", "megascale"),
    linear_bias=False,  # its recipes say: Nemotron has none, GPT-3 does
    flags={  # recipes/llama3_70b.py: ddp settings; user buffers as in the recipes' performance mode
        "zero": 1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "tp_comm_overlap": True,
        "fp8_param_gather": True,  # recipes/precision/mixed_precision.py
        "grad_dtype": "bf16",  # NeMo-Framework-Launcher examples/training/*/h100: grad_sync_dtype
    },
    best_practice={"cross_entropy_fusion": False},
    can_run={
        "shards": "all",  # distributed_fused_adam
        "stated_end_stages": False,
        "counts_embedding_and_loss": False,
        "pipeline_layout": False,
        "folds_experts": False,
        "dispatchers": ("alltoall", "allgather"),
        "overlaps_exchange": False,
        "recompute_modules": ("core_attn",),
        "cuda_graph_modules": (),
        "micro_batch_groups": False,
        "optimizers": ("adam",),
        "optimizer_states": ("fp32",),
        "offloads": ("activations",),
    },
    # Of the attention kernels that Transformer Engine chooses from: runs of 24.07 and before with 4k to 1M tokens all take as
    # long as with FlashAttention 2
    kernels={"probabilities_in_activation": False, "fused_latent_rope": False, "flash_attention": 2},
    data_parallel={"buffer_passes": 1.0},  # grad_div_ar_fusion, later average_in_collective; no search for NaN
)

#: Its runs take as long as with cuDNN's attention.
NEMO_24_09 = NEMO_24.derive(
    "nemo-24.09",
    "2024-09",
    aliases=("nemo 24.10", "nemo 24.11", "nemo 24.12"),
    kernels={"flash_attention": 0},
)

NEMO_25 = NEMO_24_09.derive(
    "nemo-25",
    "2025-02",
    aliases=("nemo 25",),
    # scripts/performance/helpers.py: implementation "te"; the recipe of precision bf16-mixed reduces in fp32
    flags={"cross_entropy_fusion": True, "grad_dtype": "fp32"},
    best_practice={"cross_entropy_fusion": True},
    can_run={
        "shards": "any",
        "stated_end_stages": True,
        "counts_embedding_and_loss": True,
        "pipeline_layout": True,
        "folds_experts": True,
        "dispatchers": ("alltoall", "allgather", "deepep", "hybridep"),
        "overlaps_exchange": True,
        "recompute_modules": RECOMPUTE_MODULES,
        "cuda_graph_modules": CUDA_GRAPH_MODULES,
        "optimizer_states": ("fp32", "bf16", "8bit"),
        "offloads": ("optimizer", "activations"),
    },
    kernels={"probabilities_in_activation": True},
)

#: Megatron-Bridge, which follows NeMo: src/megatron/bridge/models set expert_tensor_parallel_size to 1.
MEGATRON_BRIDGE_25 = NEMO_25.derive(
    "megatron-bridge-25",
    "2025-09",
    family="megatron-bridge",
    aliases=("megatron-bridge",),
    # Megatron-FSDP shards what it is told to; arguments.py is not run
    can_run={"zero_stages": (0, 1, 2, 3), "overlaps_muon": True, "gathers_after_reducing": False},
    tensor_parallel={"experts_follow": False},
    # scripts/performance: fp8_cs, without 16-bit layers at the ends; every model's common settings reduce in bf16
    flags={"fp8_recipe": "tensorwise", "grad_dtype": "bf16"},
    # TORCH_NCCL_AVOID_RECORD_STREAMS (scripts/performance/utils/executors.py): blocks are free after their last use. The
    # shares are not measured: the most that runs of its recipes, which fitted, leave room for
    memory={"allocator_gaps": (0.03, 0.14)},
)

#: Its recipes (scripts/performance/configs/*_workload_base_configs.py, 01b2977) exchange tokens by hybrid-EP on most systems.
MEGATRON_BRIDGE_26 = MEGATRON_BRIDGE_25.derive(
    "megatron-bridge-26",
    "2026-02",
    aliases=("megatron-bridge 26",),
    flags={"moe_dispatcher": "hybridep"},
    can_run={"offloads": ("optimizer", "activations", "modules")},
)

#: Since 26.06 the grouped GEMMs of MXFP8 experts may include what stands between them (NVTE_CUTEDSL_FUSED_GROUPED_MLP).
MEGATRON_BRIDGE_26_06 = MEGATRON_BRIDGE_26.derive(
    "megatron-bridge-26.06",
    "2026-06",
    aliases=("megatron-bridge 26.06", "megatron-bridge 26.08"),
    can_run={"fuses_experts": True},
)

#: Qi et al. 2023 (arXiv 2401.10241): Megatron-LM of that year, whose attention is unfused unless asked otherwise.
ZERO_BUBBLE = MEGATRON_LM_2023.derive(
    "megatron-lm-zero-bubble",
    "2023-11",
    family="megatron-lm-zero-bubble",
    aliases=("megatron-lm (zero-bubble",),
    # examples/pretrain_zbh1.sh: a SentencePiece model; the names of the paper's models (14.6B, 28.3B) leave it about 32,000
    example_vocab=32000,
    flags={
        "attention": "unfused",
        "p2p_overlap": False,  # examples/pretrain_zero_bubble.sh: --no-overlap-p2p-communication
        "account_for_embedding_in_pipeline_split": True,  # its first and last stage hold a layer less
        "account_for_loss_in_pipeline_split": True,
    },
    best_practice={"overlap_grad_reduce": False},
    can_run={
        "uneven_stages": True,
        "counts_embedding_and_loss": True,
        "overlaps_split_backward": False,  # core/zbpp_utils.py: "not supported yet"; its store of weight gradients neither
        "schedules": ("1f1b", "interleaved", "zb-h1", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min"),
    },
    pipeline={"waits_for_norm": False},
    memory={"vocab_dummy_gradient": False},  # not read in the fork
)

#: AMD's Primus over Megatron-Core (AMD-AGI/Primus, as read in 2026): its patches recompute layers by their numbers, and run the
#: zero-bubble authors' schedules (backends/megatron/core/pipeline_parallel/zerobubble).
PRIMUS = MEGATRON_CORE_0_12.derive(
    "primus-2026",
    "2026-01",
    family="primus",
    aliases=("primus", "primus-lm"),
    can_run={
        "schedules": ("1f1b", "interleaved", "zb-1p", "zb-v", "v-half", "v-min"),  # README.md there; ZB-2p is to come
        "layout_schedules": ("1f1b", "interleaved"),  # utils.py: V-shaped ones divide the layers evenly
        "overlaps_split_backward": False,  # utils.py: validate_arguments
        "splits_backward_tied": False,
        "recomputes_by_stage": True,  # recompute_layer_ids (backends/megatron/patches/recompute_layer_patches.py)
        "tp_comm_overlap": False,  # not described over ROCm
        "dispatchers": ("alltoall", "allgather", "deepep"),  # hybrid-EP is NVIDIA's
    },
)

#: Stands for frameworks that are not described: a Megatron-like one, whose runs are taken to overlap what can overlap.
GENERIC = MEGATRON_LM_2023.derive(
    "generic",
    "2022-12",
    family="generic",
    flags={"zero": 1, "overlap_grad_reduce": True, "overlap_param_gather": True},
    can_run={
        "zero_stages": (0, 1, 2, 3),
        "tp_modes": (TpMode.MTP, TpMode.MSP, TpMode.ISP),
        "replicated_kv_heads": True,
        "uneven_stages": True,
        "fuses_projection": True,
        "pipeline_layout": True,
        "cp_comms": CHOICES["cp_comm"],
        "schedules": SCHEDULES,
        "experts": True,
        "folds_experts": True,
        "dispatchers": CHOICES["moe_dispatcher"],
        "overlaps_exchange": True,
        "fuses_experts": True,
        "recompute_modules": RECOMPUTE_MODULES,
        "recomputes_by_stage": True,
        "cuda_graph_modules": CUDA_GRAPH_MODULES,
        "micro_batch_groups": True,
        "optimizers": ("adam", "muon"),
        "optimizer_states": ("fp32", "bf16", "8bit"),
        "offloads": ("optimizer", "activations", "modules"),
    },
    kernels={"dropout": False},
    memory={"vocab_dummy_gradient": False},
    doubt=0.12,
)

FAMILY = (
    MEGATRON_LM_2023,
    MEGATRON_LM_2021,
    MEGATRON_CORE_0_12,
    MEGATRON_CORE_0_8,
    MEGATRON_CORE_LOCAL,
    NEMO_24,
    NEMO_24_09,
    NEMO_25,
    MEGATRON_BRIDGE_25,
    MEGATRON_BRIDGE_26_06,
    MEGATRON_BRIDGE_26,
    ZERO_BUBBLE,
    PRIMUS,
)
