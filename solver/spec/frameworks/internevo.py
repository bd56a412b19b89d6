"""InternEvo and the InternLM releases before it.

Sources: InternLM 0.1 and 0.2 (2023); InternEvo internlm/initialize/launch.py (commit 00f25c9) and
doc/code-docs/source/parallel.rst.
"""

from __future__ import annotations

from solver.spec.can_run import CanRun
from solver.spec.choices import TpMode
from solver.spec.framework import Framework
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse, Recomputation
from solver.spec.parallelism import DataParallel, Pipeline, TensorParallel

INTERNEVO_2024 = Framework(
    name="internevo-2024",
    family="internevo",
    released="2024-01",  # InternEvo 0.3: tp modes msp, fsp and isp
    flags={
        "zero": 1,
        "grad_dtype": "bf16",
        "cross_entropy_fusion": True,  # flash-attn's, in place
        "p2p_overlap": True,  # launch.py asserts interleaved_overlap where stages are interleaved
        "expandable_segments": True,  # train.py: enable_pytorch_expandable_segments
    },
    can_run=CanRun(
        zero_stages=(0, 1, 3),
        tp_modes=(TpMode.MTP, TpMode.MSP, TpMode.FSP, TpMode.ISP),
        context_modes=(TpMode.ISP,),  # sequence_2D
        recompute=("none", "full"),  # model.checkpoint is of whole layers
        overlaps_interleaving=True,
        overlaps_split_backward=False,  # launch.py, of ZBH1
        quantised=False,
    ),
    kernels=Kernels(
        fused_gate_up=False,
        splits_groups=True,  # modules/mha.py
        # modeling_internlm2.py and ops/norm.py: Apex's norms, the second one of an fp32 copy (6 bytes), whose gradient is cast
        # back; bytes of the two on average
        norm_kernels=(("residual", 3, 3), ("norm", 5, 0), ("norm_grad_apex", 0, 8)),
        wide_logits=True,  # train/pipeline.py: NaiveAMPModel with output_to_fp32
        # model/metrics.py after every forward pass, of each logit: a second cross entropy 1, two maxima and their place 3, less
        # the maximum 2, exponentials 2, their sum 1
        loss_metric=9,
    ),
    tensor_parallel=TensorParallel(regathers_input=False),
    data_parallel=DataParallel(
        grad_collective="all_reduce",  # of bf16 gradients
        param_collective="broadcast",  # each ZeRO-1 rank broadcasts the whole tensors that it updates
        bucket_elements=512 * 2**20,  # reduce_bucket_size of the shipped configs
        # of gradients: flattened into a bucket and copied back (optimizer/store.py); of what a rank updates, 62 bytes: cast and
        # norm 10, flattened 4, cast 6, unscaled 8, fused Adam 28, cast to 16 bits 6 (hybrid_zero_optim.py)
        bucket_copy_bytes=8.0,
        optimizer_bytes_per_parameter=62.0,
        gradient_passes=0.0,
        fused_gradient_accumulation=False,
        partitions_whole_tensors=True,
        reduce_scatter_copies=4.0,  # ZeRO-3 is torch's FSDP (train/pipeline.py, wrap_FSDP_model)
    ),
    recomputation=Recomputation(norms_alone=True),  # dropout_selective_checkpoint
    # core/parallel/shard.py: partition_uniform
    pipeline=Pipeline(assignment="last"),
    memory=MemoryUse(
        frees_gradients=True,  # zero_grad with set_to_none
        # hybrid_zero_optim.py, _step: gradients are flattened (2 bytes) and let go, then cast (4), beside the states (12)
        step_peak=18.0,
        # _reduce_grads_by_rank: the next bucket is flattened before the one on its way is copied back
        gradient_buckets=2.0,
        buckets_as_needed=True,
    ),
)

#: The releases of 2023, whose figures are published.
INTERNEVO_2023 = INTERNEVO_2024.derive(
    "internevo-2023",
    "2023-07",
    aliases=("internevo", "internlm"),
    flags={"overlap_param_gather": False, "expandable_segments": False},  # parameters are broadcast after the step
    recomputation={"norms_alone": False},  # but counted in the kernels below
    memory={"step_peak": 24.0},  # AdamW is not fused: two temporaries of 4 bytes instead of the flat 16-bit gradients
    kernels={
        "flash_attention": 1,
        "loss_metric": 0,  # logs of July 2023 have no accuracy and no perplexity
        "norm_kernels": (("residual", 6, 15), ("row", 6, 22)),  # apex norms on fp32 copies, computed again in backward
    },
    data_parallel={
        # eager AdamW after a finite check, a norm, a cast and an unscaling of every gradient
        "optimizer_bytes_per_parameter": 132.0,
        "gradient_passes": 0.0,
        "bucket_copy_bytes": 12.0,
        "tensors_per_layer": 9,  # its attention has biases
    },
)

FAMILY = (INTERNEVO_2024, INTERNEVO_2023)
