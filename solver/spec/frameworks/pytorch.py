"""PyTorch's own data parallelism: DDP, both FSDPs, IBM's trainer on FSDP, and this project's (profiler/train).

Sources: torch/nn/parallel/distributed.py, torch/distributed/fsdp, torch/utils/checkpoint.py; fms-fsdp; accelerate 1.6 to 1.15.
"""

from __future__ import annotations

from dataclasses import replace

from solver.spec.can_run import FUSED_CAPS, CanRun
from solver.spec.choices import TpMode
from solver.spec.framework import Framework
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse, Recomputation
from solver.spec.parallelism import DataParallel, TensorParallel

#: Replicas; weights whole between micro batches; weights layer by layer. Optimizer states alone are never sharded.
FSDP_STAGES = (0, 2, 3)
#: FSDP on its own: no tensor, context or pipeline parallelism.
FSDP_ONLY = CanRun(zero_stages=FSDP_STAGES, tp_modes=(), cp_comms=(), pipeline=False, soft_caps=FUSED_CAPS)

#: Reads and writes of gradients of torch/nn/utils/clip_grad.py: the norm, and a scaling that is always carried out.
CLIPPING = 3.0

#: Plain torch.distributed: DDP in buckets of 25 MB, weights held in fp32 under autocast, fused AdamW.
DDP = Framework(
    name="pytorch-ddp",
    family="pytorch-ddp",
    released="2023-10",  # 2.1: non-reentrant checkpoints end early
    aliases=("torch ddp", "ddp"),
    broad_aliases=("pytorch", "torch"),
    flags={"zero": 0, "grad_dtype": "fp32", "fused_norm": False},  # nn.RMSNorm: a chain of kernels before torch 2.9
    can_run=CanRun(zero_stages=(0, 1), tp_modes=(), cp_comms=(), pipeline=False, soft_caps=FUSED_CAPS),
    kernels=Kernels(
        fused_qkv=False,
        fused_gate_up=False,
        fused_elementwise=False,
        one_layernorm=True,
        norm_gradient="norm_grad_torch",
        torch_loss=True,
        flash_attention=2,
    ),
    tensor_parallel=TensorParallel(  # DTensor's collectives are synchronous
        regathers_input=False, shares_input=True, async_backward=False, vocab_parallel_loss=False
    ),
    data_parallel=DataParallel(
        grad_collective="all_reduce",
        param_collective="broadcast",  # ZeroRedundancyOptimizer
        bucket_elements=6.5e6,
        bucket_copy_bytes=16.0,
        all_gather_copies=2.0,
        reduce_scatter_copies=2.0,
        fused_gradient_accumulation=False,
        accumulating_gemms=False,
        optimizer_bytes_per_parameter=28.0,
        gradient_passes=CLIPPING,
    ),
    recomputation=Recomputation(stops_early=True),
    # gradient_as_bucket_view is off: the buckets are as large as all gradients
    memory=MemoryUse(
        fp32_weights=True, wide_stream=True, synchronisation_bytes=(4.0, 4.0), frees_gradients=True, drops_logits=True
    ),
)

#: The reference trainer of this project, which divides a model in every way that it measures.
PROFILER_TRAIN = DDP.derive(
    "profiler-train",
    "2026-01",
    family="profiler-train",
    aliases=("profiler.train",),
    can_run={
        "zero_stages": (0, 1, 2, 3),
        "tp_modes": (TpMode.MTP, TpMode.MSP),
        "pipeline": True,
        "replicated_kv_heads": False,
    },
    data_parallel={"gradient_passes": 0.0},  # it does not clip
    kernels={"flash_attention": 0},  # scaled_dot_product_attention of torch 2.11 runs cuDNN's kernels on Hopper
    memory={
        "synchronisation_bytes": (0.0, 0.0),
        "frees_gradients": True,
        "bucket_views": True,
        "wide_stream": False,  # profiler/train/model.py casts the embedding's output
    },
)

#: Parameters are views of one buffer, whose gradients autograd joins and FSDP divides before it reduce-scatters them.
FSDP = Framework(
    name="fsdp",
    family="fsdp",
    released="2023-10",
    aliases=("pytorch fsdp", "torch fsdp", "olmo", "litgpt", "lit-gpt"),
    # the last ones train the modules of transformers with its trainer or accelerate
    broad_aliases=(
        "hugging face",
        "huggingface",
        "transformers",
        "accelerate",
        "trl",
        "axolotl",
        "llama-factory",
        "llamafactory",
        "ms-swift",
        "open-instruct",
    ),
    flags={"zero": 3, "grad_dtype": "bf16", "fused_norm": False},  # nn.RMSNorm or the like, uncompiled
    can_run=replace(FSDP_ONLY, linear_attention=True),  # modules of transformers with flash-linear-attention's kernels
    kernels=Kernels(  # the modules of transformers, uncompiled
        fused_qkv=False,
        fused_gate_up=False,
        fused_elementwise=False,
        one_layernorm=True,
        norm_gradient="norm_grad_torch",
        torch_loss=True,
        flash_attention=2,  # what scaled_dot_product_attention runs
    ),
    tensor_parallel=TensorParallel(vocab_parallel_loss=False),
    data_parallel=DataParallel(
        reduce_scatter_copies=4.0,
        joins_before_cast=True,
        accumulating_gemms=False,
        shards_units=True,
        no_sync=True,
        gradient_passes=CLIPPING,
        shard_cast_bytes=6.0,  # _flat_param.py, _use_low_precision_shard
    ),
    recomputation=Recomputation(stops_early=True),
    # the root unit has no reshard_after_forward; _runtime_utils.py, _cast_grad_to_param_dtype
    memory=MemoryUse(frees_gradients=True, root_stays=("embedding", "head"), held_gradient_bytes=4, drops_logits=True),
)

#: IBM's trainer: its selective checkpointing recomputes whole blocks (all of them unless told otherwise); AdamW is not fused.
FMS_FSDP = FSDP.derive(
    "fms-fsdp",
    "2024-03",
    family="fms-fsdp",
    can_run={"recompute": ("none", "full"), "soft_caps": "", "linear_attention": False},
    kernels={"fused_qkv": True, "joins_gradients": True},  # fms, modules/attention.py: qkv_fused(...).split
    data_parallel={"optimizer_bytes_per_parameter": 96.0, "gradient_passes": 0.0, "no_sync": False},
    recomputation={"selective_is_full": True},
    memory={"drops_logits": False},  # utils/train_utils.py: output is there until the next micro batch
    uncertainty=0.08,  # how many blocks are recomputed is stated by few runs
)

#: fully_shard of each layer and of the whole, as accelerate calls it (utils/fsdp_utils.py, fsdp2_prepare_model): also the root
#: is resharded after the forward pass, in which transformers' models compute their loss. No no_sync.
FSDP2_2025 = FSDP.derive(
    "fsdp2-2025-04",
    "2025-04",  # accelerate 1.6 to 1.10
    family="fsdp2",
    aliases=("accelerate 1.6 fsdp2",),
    can_run={"zero_stages": (2, 3)},
    data_parallel={
        "all_gather_copies": 2.0,
        "reduce_scatter_copies": 2.0,
        "joins_before_cast": False,
        "no_sync": False,
        "regathers_root": True,
        "shard_cast_bytes": 10.0,  # _fsdp_param.py, all_gather_inputs; _fsdp_collectives.py, all_gather_copy_in
    },
    memory={"copies_gradients": True},
)

#: accelerate 1.11 to 1.13: a run may keep gradients whole, which autograd sums in their own type, until a step's last micro
#: batch (accelerator.py, no_sync: set_requires_gradient_sync); weights are still gathered in every one.
FSDP2_LATE_2025 = FSDP2_2025.derive(
    "fsdp2-2025-10",
    "2025-10",
    aliases=("accelerate 1.11 fsdp2",),
    data_parallel={"no_sync": True, "accumulates_whole": True},
)

#: Since accelerate 1.14 the embedding is a unit of its own, and final norm with head another, which stays gathered; the root
#: that is left is not resharded.
FSDP2 = FSDP2_LATE_2025.derive(
    "fsdp2",
    "2026-06",
    aliases=("pytorch fsdp2", "torch fsdp2"),
    data_parallel={"regathers_root": False},
    memory={"root_stays": ("head",)},
)

FAMILY = (DDP, PROFILER_TRAIN, FSDP, FSDP2, FSDP2_LATE_2025, FSDP2_2025, FMS_FSDP)
