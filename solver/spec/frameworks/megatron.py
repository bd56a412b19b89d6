"""Megatron-LM, Megatron-Core over Transformer Engine, and what stands for a framework that is not modelled.

Sources: NVIDIA/Megatron-LM megatron/training/arguments.py of 2022 (commit 0012901), 2024 (02871b4) and 2025 (000c4ac), a fork
of late 2023 (LumiOpen a2cca9d), its CHANGELOG.md, megatron/core/distributed and megatron/core/tensor_parallel.
"""

from __future__ import annotations

from solver.spec.can_run import FUSED_CAPS, CanRun
from solver.spec.choices import CHOICES, CUDA_GRAPH_MODULES, RECOMPUTE_MODULES, SCHEDULES, TpMode
from solver.spec.framework import ASSUMED_LAUNCH, Framework
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse
from solver.spec.parallelism import DataParallel, Pipeline, TensorParallel
from solver.spec.recipes import RECIPES

#: Host time of an op of Megatron's own layers: Sailor's authors profiled Megatron-DeepSpeed's (sources in deepspeed.py), where
#: at one sequence over four tensor ranks the host needs 1.5 ms for the 14 ops of a forward pass.
OWN_LAYERS_LAUNCH = 107e-6

MEGATRON_LM_2023 = Framework(
    name="megatron-lm-2023",
    family="megatron-lm",
    released="2022-12",
    aliases=("megatron-lm", "megatronlm"),
    broad_aliases=("megatron",),
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
        replicated_kv_heads=False,  # core/transformer/attention.py divides the query groups by tp (until 0.15)
        uneven_stages=False,  # arguments.py asserts that pp divides the layers
        recomputes_groups=True,  # --recompute-num-layers with the method uniform
    ),
    linear_bias=True,  # --disable-bias-linear is off
    tied_embeddings=True,  # --untie-embeddings-and-output-weights is off
    narrow_fp16_gradients=True,  # --accumulate-allreduce-grads-in-fp32 is off, and forced for bf16 only
    # --attention-dropout and --hidden-dropout default to 0.1; core/tensor_parallel/layers.py: output + bias
    # model/transformer.py: tensor_parallel.split_tensor_along_last_dim of mixed_x_layer
    kernels=Kernels(dropout=True, bias_apart=True, launch_seconds=OWN_LAYERS_LAUNCH, joins_gradients=True),
    tensor_parallel=TensorParallel(experts_follow=True),  # --expert-tensor-parallel-size defaults to tp
    data_parallel=DataParallel(
        bucket_elements_per_rank=1e6,  # max(40 M, 1 M x dp) parameters, of experts too
        buckets_to_overlap=True,
        buffer_passes=1.0,  # zeroed
        scaling_passes=2.0,
    ),
    # p2p_communication.py: torch.cuda.synchronize() after batch_isend_irecv, which no argument turns off (batch_p2p_sync)
    pipeline=Pipeline(synchronises=True),
    memory=MemoryUse(vocab_dummy_gradient=True),  # tensor_parallel/layers.py
)

MEGATRON_LM_2021 = MEGATRON_LM_2023.derive(
    "megatron-lm-2021",
    "2021-04",  # arXiv 2104.04473
    flags={"attention": "unfused"},  # FlashAttention is of 2022
    aliases=("megatron-lm 2021", "megatron-lm v2"),
    best_practice={"overlap_grad_reduce": False},  # one all-reduce of one buffer after the backward pass
    can_run={"zero_stages": (0,), "tp_modes": (TpMode.MTP,), "recompute": ("none", "full"), "quantised": False},
    tensor_parallel={"async_backward": False},  # since early 2022 the reduction of input gradients is asynchronous
    kernels={"norm_gradient": "norm_grad_apex"},  # persistent kernels came in late 2021
    data_parallel={
        "grad_collective": "all_reduce",
        "fused_gradient_accumulation": False,  # fused since 2022
    },
    memory={"vocab_dummy_gradient": False},
)

#: Names of the releases that are described as 0.12 is.
_RELEASES_0_12_TO_0_16 = tuple(
    f"{name} {letter}0.{minor}"
    for name in ("megatron-core", "mcore", "megatron-lm core", "megatron-lm")
    for letter in ("", "v", "r")
    for minor in range(12, 17)
)

MEGATRON_CORE_0_12 = MEGATRON_LM_2023.derive(
    "megatron-core-0.12",
    "2025-05",
    aliases=("megatron-core", "megatron-lm core", "megatron-lm v0.", "mcore", *_RELEASES_0_12_TO_0_16),
    best_practice={"overlap_param_gather": True, "cross_entropy_fusion": True},  # Transformer Engine's fused cross entropy
    can_run={
        "cp_comms": CHOICES["cp_comm"],  # --cp-comm-type, since 0.10; a2a+p2p with --hierarchical-context-parallel-sizes
        # Transformer Engine's context_parallel.py: qkv_format thd by p2p; by a2a since 2.10, by all_gather since 2.18
        "packed_exchanges": ("ring",),
        "chooses_rope": True,  # --no-rope-fusion
        "chooses_router_type": True,  # --moe-router-dtype, since 0.11
        "stated_end_stages": True,  # --decoder-first-pipeline-num-layers, since 0.9; with virtual stages since 0.11 (CHANGELOG)
        "counts_embedding_and_loss": True,  # --account-for-embedding-in-pipeline-split and -loss-
        "pipeline_layout": True,  # --pipeline-model-parallel-layout, since 0.13
        "gathers_qkv_since": "Megatron-Core 0.16",  # core/transformer/attention.py
        "experts": True,
        "multi_token_prediction": True,
        "linear_attention": True,  # --experimental-attention-variant gated_delta_net, since 0.16
        "splits_linear_attention": True,
        "state_space": True,  # pretrain_mamba.py; its layers with experts since 0.16
        "experts_in_fp16": False,  # arguments.py asserts it for ep above 1 and for grouped GEMMs
        "folds_experts": True,  # --expert-tensor-parallel-size, since 0.9
        "splits_biased_experts": False,  # transformer_config.py asserts etp 1
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
        "optimizer_states": CHOICES["optimizer_states"],  # --use-precision-aware-optimizer --exp-avg-dtype, since 0.11
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
        "tf32": True,  # Transformer Engine's cublaslt_gemm.cu: CUBLAS_COMPUTE_32F_FAST_TF32 where all operands are fp32
        # transformer_config.py refuses apply_rope_fusion beside it until 0.12; since then its kernels are experimental
        "fused_latent_rope": False,
        "scaled_rope_fused": False,  # rope_utils.py: Transformer Engine's kernel takes no mscale
        "clamps_apart": True,  # fusions/fused_bias_geglu.py: clamp, clamp and cat before the fused function
        "bias_by_expert": True,  # moe/experts.py: TEGroupedMLP._apply_bias
        "experts_apart": True,  # weight0, weight1, ... of Transformer Engine's GroupedLinear
        "transformer_engine": True,
    },
    memory={
        "quantised_inputs": True,
        "original_inputs": True,  # since 0.14
        "token_buffer": True,
        "quantised_weights": True,
        "cublas_threads": 2,
        "fused_adam_copies": True,
        "dummy_gradients": True,  # with Transformer Engine 2.3 or later, of May 2025
        # arguments.py asks for the precision-aware optimizer beside --optimizer-cpu-offload, for which distrib_optimizer.py
        # makes no fp32 weights; those of HybridDeviceOptimizer are on the host
        "offloads_master": True,
        "keeps_wide_gradients": True,  # HybridDeviceOptimizer, _set_sub_optimizer_grads
    },
    data_parallel={"buffer_passes": 2.0},  # --check-for-nan-in-loss-and-grad is the default
    pipeline={"scatter_gather": False},  # core/pipeline_parallel/p2p_communication.py sends what a rank holds
    tensor_parallel={
        # Transformer Engine launches them beside the GEMMs, which leave no room for NCCL's kernels: with overlap, published
        # runs of tp 2 to 8 on B200 and on A100 PCIe would come out 3 to 12% faster than now, and 3 to 17% too fast
        "async_backward": False,
        "gathers_quantised": tuple(RECIPES),
        "splits_sequence": True,  # experts need it beside tp (arguments.py); recipes and examples set it
    },
)

#: What Megatron-Core cannot do before 0.9: MoE Parallel Folding came with it, DeepEP with 0.11 (CHANGELOG), recompute of other
#: modules than core_attn with 0.12.
BEFORE_0_9 = {
    "multi_token_prediction": False,  # multi_token_prediction.py, since 0.11
    "stated_end_stages": False,
    "counts_embedding_and_loss": False,
    "pipeline_layout": False,
    "folds_experts": False,
    "linear_attention": False,
    "state_space": False,
    "dispatchers": ("alltoall", "allgather"),
    "overlaps_exchange": False,
    "recompute_modules": ("core_attn",),
    "cuda_graph_modules": (),
    "micro_batch_groups": False,
    "optimizers": ("adam",),
    "optimizer_states": ("fp32",),
    "offloads": ("activations",),
}

MEGATRON_CORE_0_8 = MEGATRON_CORE_0_12.derive(
    "megatron-core-0.8",
    "2024-07",
    aliases=("megatron-core v0.8", "megatron-core r0.8", "megatron-lm core_v0.8", "megatron-lm v0.8", "mcore 0.8"),
    best_practice={"cross_entropy_fusion": False},
    can_run={**BEFORE_0_9, "cp_comms": ("ring",)},
    kernels={"probabilities_in_activation": False},  # since 0.13
    memory={"original_inputs": False, "dummy_gradients": False},
)

#: --transformer-impl local: Megatron's own linears and unfused attention.
MEGATRON_CORE_LOCAL = MEGATRON_CORE_0_12.derive(
    "megatron-core-local",
    "2025-05",
    family="megatron-core-local",
    aliases=("megatron-core local",),
    can_run={"cp_comms": (), "experts": False, "tp_comm_overlap": False, "linear_attention": False, "state_space": False},
    kernels={
        "transformer_engine": False,
        "norm_quantises": False,
        "tf32": False,
        "bias_apart": True,
        "bias_gradient_fused": False,
        "launch_seconds": OWN_LAYERS_LAUNCH,
    },
    tensor_parallel={"async_backward": True},  # core/tensor_parallel/layers.py
    memory={
        "quantised_inputs": False,
        "original_inputs": False,
        "quantised_weights": False,
        "scores_buffer": True,
        "dummy_gradients": False,
    },
)

#: Stands for frameworks that are not modelled: a Megatron-like one, whose runs are taken to overlap what can overlap.
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
        "soft_caps": FUSED_CAPS,
        "pipeline_layout": True,
        "cp_comms": CHOICES["cp_comm"],
        "schedules": SCHEDULES,
        "experts": True,
        "multi_token_prediction": True,
        "linear_attention": True,
        "splits_linear_attention": True,
        "state_space": True,
        "folds_experts": True,
        "shards_experts_alike": True,
        "dispatchers": CHOICES["moe_dispatcher"],
        "overlaps_exchange": True,
        "fuses_experts": True,
        "fp8_attention": True,
        "recompute_modules": RECOMPUTE_MODULES,
        "recomputes_by_stage": True,
        "cuda_graph_modules": CUDA_GRAPH_MODULES,
        "micro_batch_groups": True,
        "optimizers": ("adam", "muon"),
        "optimizer_states": CHOICES["optimizer_states"],
        "offloads": ("optimizer", "activations", "modules"),
    },
    kernels={"dropout": False},
    memory={"vocab_dummy_gradient": False},
    pipeline={"synchronises": False},
    uncertainty=0.12,
)

FAMILY = (MEGATRON_LM_2023, MEGATRON_LM_2021, MEGATRON_CORE_0_12, MEGATRON_CORE_0_8, MEGATRON_CORE_LOCAL)
