"""Megatron-DeepSpeed, and Aleph Alpha's research code: Megatron's tensor parallelism with DeepSpeed's pipeline engine.

Sources: deepspeed/runtime/pipe/engine.py (commit 03f6f75); Aleph Alpha scaling 0.1 and 0.2, the code of arXiv 2311.05610;
eth-easl/sailor at 494eaa5 (the training framework of SOSP 2025's Sailor: its deepspeed folder, opt_model.py and run.sh).
"""

from __future__ import annotations

from profiler.units import GIB
from solver.spec.can_run import FUSED_CAPS, CanRun
from solver.spec.framework import Framework
from solver.spec.frameworks.megatron import OWN_LAYERS_LAUNCH
from solver.spec.frameworks.pytorch import FSDP
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse, Recomputation
from solver.spec.parallelism import DataParallel, Pipeline, TensorParallel

MEGATRON_DEEPSPEED = Framework(
    name="megatron-deepspeed",
    family="megatron-deepspeed",
    released="2021-07",
    aliases=("deepspeed", "gpt-neox"),
    flags={
        "zero": 0,  # runtime/zero/config.py: a configuration that names no stage
        "grad_dtype": "fp16",  # in flat buffers
        "overlap_grad_reduce": None,
        "overlap_param_gather": True,  # of ZeRO-3: partitioned_param_coordinator.py gathers ahead, whatever overlap_comm says
        "attention": "unfused",
    },
    best_practice={"overlap_grad_reduce": True},  # overlap_comm, on in ZeRO-3 alone unless a file says so
    can_run=CanRun(
        zero_stages=(0, 1, 2, 3),
        replicated_kv_heads=False,  # Megatron's tensor parallelism
        cp_comms=(),
        schedules=("1f1b",),  # the engine runs nothing else
        quantised=False,
        shards="all",
        recompute_shares=(),
        recomputes_groups=True,  # Megatron-DeepSpeed's --recompute-num-layers (checkpoint_num_layers of DeepSpeed's pipeline)
        unsharded_gradients_as_model=True,  # runtime/engine.py: _do_optimizer_sanity_check
        offloads=("optimizer", "gradients"),  # zero_optimization.offload_optimizer
    ),
    linear_bias=True,  # GPT-2's and BLOOM's, as in Megatron-LM
    tied_embeddings=True,
    # its MixedFusedLayerNorm is Apex's FusedLayerNorm
    kernels=Kernels(
        dropout=True, bias_apart=True, norm_gradient="norm_grad_apex", launch_seconds=OWN_LAYERS_LAUNCH, joins_gradients=True
    ),
    tensor_parallel=TensorParallel(regathers_input=False),
    data_parallel=DataParallel(
        grad_collective="all_reduce",
        reduces_whole_buckets=True,  # runtime/zero/stage_1_and_2.py: use_multi_rank_bucket_allreduce, on unless a file says no
        bucket_elements=500e6,  # reduce_bucket_size
        gather_bucket_elements=500e6,  # allgather_bucket_size, which transformers' "auto" is not of
        fused_gradient_accumulation=False,
        accumulation_casts=True,  # runtime/bf16_optimizer.py, _update_hp_grad: lp.grad.to(hp_grad.dtype), then add_
        # stage_1_and_2.py: into the bucket, div_ in average_tensor, flatten in allreduce_bucket; without ZeRO engine.py:
        # flatten, mul_, and back
        bucket_copy_bytes=12.0,
        # stage3.py: into the bucket; comm/coalesced_collectives.py: cat and div_ of the whole
        reduce_scatter_copies=6.0,
        sharded_gather_copies=2.0,  # partition_parameters.py, AllGatherCoalescedHandle.wait: cat of the partitions
        # engine.py: buffered_allreduce_fallback after the backward pass without ZeRO; with a pipeline overlap is turned off
        overlaps_sharded_alone=True,
        overlaps_sharded_unless_told=True,  # runtime/zero/config.py: overlap_comm
        gathers_in_step=True,
        gather_elements=50e6,  # stage3_prefetch_bucket_size
        # runtime/zero/stage_1_and_2.py, stage3.py: norm in fp64 18 (get_grad_norm_direct), joined 4, to fp32 6, unscaled 8,
        # fused Adam 28, to 16 bits 6: 70 instead of 34; of fp16 _has_inf_or_nan
        shard_step_bytes=36.0,
        overflow_bytes=28.0,
        # fp16/fused_optimizer.py: search for overflows 4, join 8, norm 4, unscaling 8, weights in 16 bits 6 (casts are counted)
        whole_step_bytes=30.0,
    ),
    pipeline=Pipeline(blocking_sends=4.0),  # the engine sends and receives one after the other
    # runtime/zero/stage_1_and_2.py: a bucket of reduce_bucket_size, two with overlap_comm (setup_buckets), and, in step, an
    # fp32 copy of the partition's gradients; stage3.py: of sub_group_size elements at a time, and lp_param_buffer beside the
    # fp32 partitions. With the optimizer on the host unscale_and_clip_grads runs there.
    # runtime/bf16_optimizer.py and pipe/engine.py: update_hp_grads leaves the 16-bit gradients. NCCL of 2021 keeps about
    # 0.4 GiB for each of the groups for data, tensors, pipeline, model, embedding and all (assumed)
    memory=MemoryUse(
        fp32_gradient_copy=1e9,
        keeps_half_gradients=True,
        frees_half_gradients=True,  # stage_1_and_2.py, step: free_grad_in_param_list, averaged_gradients
        gradient_buckets=1.0,
        second_bucket=True,
        joins_buckets=True,
        live_elements=1e9,  # stage3_max_live_parameters
        runtime_bytes=3.9 * GIB,
        keeps_shards=True,
        offloads_master=True,
        clips_on_host=True,
    ),
    uncertainty=0.09,  # which kernels were fused is stated by few runs
)

# DeepSpeed 0.3.11 to 0.4, runtime/zero/partition_parameters.py and stage3.py: _allgather_param synchronises the device, makes a
# view for every rank and calls torch's all_gather with their list, which copies each out of one buffer; gradients likewise.
# Pull request 1188 of June 2021 says that therefore nothing is asynchronous, and mends some of it. A view takes Python 8 us
# (measured with torch 2.13 on a server's CPU), a copy 6 us (assumed).
MEGATRON_DEEPSPEED_2021 = MEGATRON_DEEPSPEED.derive(
    "megatron-deepspeed-2021",
    "2021-03",
    aliases=("deepspeed 0.3",),
    data_parallel={
        "zero3_by_tensor": True,
        "list_seconds_per_rank": 14e-6,
        "reduce_scatter_copies": 0.0,
        "sharded_gather_copies": 0.0,
    },
    uncertainty=0.15,
)

#: DeepSpeed's ZeRO around the modules of transformers, as its trainer starts it: kernels are those under FSDP, attention is
#: torch's scaled_dot_product_attention; models are not divided. The trainer's checkpoints are of whole layers
#: (modeling_layers.py, GradientCheckpointingLayer) and reentrant, so that they run to their end.
TRANSFORMERS_DEEPSPEED = MEGATRON_DEEPSPEED.derive(
    "transformers-deepspeed",
    "2023-10",
    family="transformers-deepspeed",
    aliases=(
        "transformers deepspeed",
        "hugging face deepspeed",
        "accelerate deepspeed",
        "trl deepspeed",
        "axolotl deepspeed",
        "llama-factory deepspeed",
        "ms-swift deepspeed",
    ),
    flags={"grad_dtype": "bf16", "attention": "flash", "fused_norm": False},
    can_run={
        "tp_modes": (),
        "pipeline": False,
        "schedules": (),
        "recompute": ("none", "full"),
        "recomputes_groups": False,
        "soft_caps": FUSED_CAPS,
        "linear_attention": True,
    },
    linear_bias=False,
    tied_embeddings=False,
    kernels={name: getattr(FSDP.kernels, name) for name in Kernels.__dataclass_fields__},
    tensor_parallel={"vocab_parallel_loss": False},
    data_parallel={"accumulating_gemms": False, "buckets_by_hidden": True},  # what its trainer fills in for "auto"
    memory={"runtime_bytes": MemoryUse.runtime_bytes, "drops_logits": True},
)

# Its launcher for OPT sets neither fp16 nor bf16, and DeepSpeed's configuration names no ZeRO stage; attention is GPT-2's,
# without dropout. It runs in NVIDIA's container 24.10, with DeepSpeed 0.16.5. In its profile of GPT-Neo 2.7B
# on GH200 Adam takes 2.86 ms for 78.7M parameters, at the 3.6 TB/s that plain kernels reach.
SAILOR = MEGATRON_DEEPSPEED.derive(
    "sailor",
    "2025-04",
    family="sailor",
    aliases=("megatron-deepspeed (sailor)",),
    flags={"zero": 0, "precision": "fp32", "grad_dtype": "fp32"},
    # --layers-per-stage; its model is always a pipeline, and the engine of pipelines asserts ZeRO below 2
    can_run={"pipeline_layout": True, "zero_stages": (0, 1), "offloads": ()},
    kernels={"dropout": False, "bias_apart": False, "tf32": True},
    data_parallel={"optimizer_bytes_per_parameter": 131.0, "bucket_copy_bytes": 24.0},
    memory={"fp32_gradient_copy": 0.0, "keeps_half_gradients": False},
)

ALEPH_ALPHA = Framework(
    name="aleph-alpha-scaling",
    family="aleph-alpha-scaling",
    released="2023-11",
    aliases=("aleph alpha",),
    flags={
        "zero": 1,
        "grad_dtype": "bf16",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "fused_norm": False,
    },
    can_run=CanRun(zero_stages=(0, 1), cp_comms=(), replicated_kv_heads=False, schedules=("1f1b",), quantised=False),
    kernels=Kernels(
        fused_gate_up=False,
        fused_elementwise=False,
        fused_softmax=False,
        torch_loss=True,
        flash_unstated=1,  # the paper compares runs with FlashAttention 1 and 2, which cases both call flash
        loss_metric=1,  # its language model's loss function also counts the tokens whose largest logit is right
        attention_layout_copies=(0, 2),
        joins_gradients=True,
    ),
    # core/nn/norm/rms_norm.py all-gathers the norm's output; each ColumnParallelLinear all-reduces its own input's gradient
    tensor_parallel=TensorParallel(
        regathers_input=False, norm_gathers=True, async_backward=False, vocab_parallel_loss=False, joins_logits=True
    ),
    # after the last backward pass gradients are joined in buckets, divided, cast to fp32, all-reduced whole, copied back, and
    # their norm is taken: 26 + 6 bytes per parameter
    data_parallel=DataParallel(
        grad_collective="all_reduce",
        communicated_gradient_bytes=4,
        bucket_elements=500e6,
        bucket_copy_bytes=32.0,
        optimizer_bytes_per_parameter=112.0,  # torch's AdamW on fp32 copies, a kernel for each operation; and the 16-bit ones
        fused_gradient_accumulation=False,
        gradient_passes=0.0,
    ),
    pipeline=Pipeline(scatter_gather=False, blocking_sends=4.0, assignment="items"),
    recomputation=Recomputation(includes_head=True),
)

FAMILY = (MEGATRON_DEEPSPEED, TRANSFORMERS_DEEPSPEED, MEGATRON_DEEPSPEED_2021, SAILOR, ALEPH_ALPHA)
