"""Hugging Face's nanotron.

Sources: huggingface/nanotron src/nanotron: models/base.py and llama.py (compute costs of blocks), parallel/tensor_parallel/
functional.py (its linears, its cross entropy), optim/gradient_accumulator.py, parallel/pipeline_parallel; commits of winter
2024-25 (00708b8, 069c21c, 1cc9cb3).
"""

from __future__ import annotations

from solver.spec.can_run import CanRun
from solver.spec.choices import TpMode
from solver.spec.framework import Framework
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse
from solver.spec.parallelism import DataParallel, Pipeline, TensorParallel

NANOTRON = Framework(
    name="nanotron",
    family="nanotron",
    released="2024-01",
    aliases=("hugging face nanotron", "ultra-scale playbook"),
    flags={
        "zero": 0,
        "grad_dtype": "fp32",  # accumulate_grad_in_fp32
        "overlap_param_gather": False,  # parameters are gathered after the optimizer step
    },
    can_run=CanRun(
        zero_stages=(0, 1),
        tp_modes=(TpMode.MTP, TpMode.MSP),
        replicated_kv_heads=False,
        cp_comms=(),
        schedules=("1f1b", "gpipe"),
        shards="all",
        recompute=("none", "full"),
        recompute_shares=(),
        quantised=False,
        unfilled_stages=1,  # parallel/pipeline_parallel/engine.py
    ),
    kernels=Kernels(
        fused_elementwise=False,
        fused_rope=True,  # flash-attn's
        flash_attention=2,
        # models/llama.py, CausalSelfAttention: view, permute and contiguous of all three, cat of keys and values, permute and
        # contiguous of both, split
        splits_and_joins_kv=True,
        attention_layout_copies=(0, 1),  # the context back to sequence first
        # Runs of 1.3B and 3.6B models on 8 H100 with tp 4 and 8 and micro batches of one sequence take 4.5 ms a layer, whatever
        # the model and tp are; the program of a layer has 39 ops
        launch_seconds=115e-6,
    ),
    tensor_parallel=TensorParallel(
        async_all_reduce=False,  # functional.py: DifferentiableIdentity.backward
        # From the same runs with one sequence a micro batch: 8.0 ms a layer with tp 16, 18 (1.3B) and 15 (3.6B) with tp 32,
        # where tp 8 takes 4.5; more sequences add what they add in a node. The code does not tell why
        ring_step_delay=40e-6,
    ),
    scripts_check_collectives=True,  # run_multinode.sh
    data_parallel=DataParallel(
        grad_collective="reduce_scatter",
        buckets_of_tensors=True,
        bucket_copy_bytes=8.0,  # DDP copies gradients into buckets, and what was reduced back (reducer.cpp)
        # trainer.py makes no DDP of models whose gradients ZeRO shards in fp32: sync_gradients_across_dp follows
        shards_at_once=True,
        # distributed.py views, checks and joins the parts of all tensors for each rank, twice, and copies each gathered one
        # back: a few views and a launch. Runs of equal layouts with and without ZeRO-1 show 5 to 9 us
        seconds_per_part=7e-6,
        tensors_per_layer=6,
        norm_of_model=True,  # optim/clip_grads.py: mp_pg; trainer.py: dp_pg
        fused_gradient_accumulation=False,  # every backward pass ends with fp32_grad.add_(grad)
        accumulating_gemms=False,
        optimizer_bytes_per_parameter=34.0,  # fused AdamW on fp32 parameters, and their 16-bit copies
        # helpers.py makes a group of parameters of each tensor: step counter and AdamW; its norm and scale (clip_grads.py), its
        # copy (gradient_accumulator.py)
        optimizer_launches=5.0,
        # optim/clip_grads.py: norm and scaling are of the whole fp32 buffer under ZeRO-1 too; and it is set to zero
        gradient_passes=0.0,
        buffer_passes=4.0,
        # distributed.py: reduce_scatter_coalesced flattens all ranks' parts, and the collective of a list does so again;
        # all_gather_coalesced copies each part from the joined output, which its collective of a list has filled part by part
        reduce_scatter_copies=4.0,
        all_gather_copies=6.0,
    ),
    # DDP's buckets of 16-bit gradients, and with ZeRO-1 two bytes of what a rank owns (from what is allocated between steps:
    # 20.0 bytes a parameter without ZeRO, with ZeRO-1 6.0 + 14 / ranks and 4.0 that are left of the last step's fp32 lists, in
    # whose place the activations come). Such lists take 4.0, those of 16-bit parameters 2.0 (distributed.py). MemoryBuffer
    # holds the gathered inputs (parallel/tensor_parallel/functional.py), of which there are two
    memory=MemoryUse(
        half_gradients_at_end=True,  # gradient_accumulator.py: fp32 ones are added to when the backward pass has ended
        synchronisation_bytes=(2.0, 0.0),
        partition_bytes=2.0,
        list_bytes=6.0,
        allocator_gaps=(0.35, 0.35),  # as elsewhere with several stages; reserved peaks show it with one too
        gathered_activation_buffers=2,
        cublas_threads=2,
        collective_gaps=2.0,  # inputs of a layer's two column linears
    ),
    uncertainty=0.08,  # one cluster, between whose nodes collectives are late for a reason that is not known
    pipeline=Pipeline(
        scatter_gather=False,  # parallel/pipeline_parallel/p2p.py: isend_tensors sends what a rank holds
        assignment="cost",
        blocking_sends=4.0,  # shapes are sent before tensors
    ),
)

FAMILY = (NANOTRON,)
