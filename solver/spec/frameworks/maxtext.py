"""Google's MaxText: JAX programs that XLA compiles, sharded as FSDP does.

Sources: AI-Hypercomputer/maxtext MaxText/layers/models.py (remat policies), base.yml; NVIDIA's recipes for it train with
remat_policy save_qkv_proj (dgxc-benchmarking maxtext/README_70b.md).
"""

from __future__ import annotations

from solver.spec.can_run import UNFUSED_CAPS, CanRun
from solver.spec.framework import Framework
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse, Recomputation
from solver.spec.parallelism import TensorParallel

MAXTEXT = Framework(
    name="maxtext",
    family="maxtext",
    released="2023-04",
    aliases=("maxtext", "maxtext (jax)"),
    flags={"zero": 3, "grad_dtype": "bf16", "compile": True},
    can_run=CanRun(
        zero_stages=(0, 3),
        tp_modes=(),
        cp_comms=(),
        pipeline=False,
        recompute=("none", "selective", "full"),
        recompute_shares=(),  # remat_policy is of the layer that a scan runs
        soft_caps=UNFUSED_CAPS,  # layers/attentions.py: attn_logits_soft_cap with dot_product
    ),
    # decoders.py, apply_output_head: logits in fp32 (cast_logits_to_fp32); max_utils.py keeps their exponentials so
    kernels=Kernels(compiled_loss=True, wide_logits=True),
    tensor_parallel=TensorParallel(vocab_parallel_loss=False),
    # XLA removes what nothing reads from what is run again, as a checkpoint that ends early does
    recomputation=Recomputation(selective_keeps_qkv=True, stops_early=True),
    # base.yml's grad_dtype: gradients are reduced in the activations' type and cast (train.py). XLA plans its buffers before it
    # runs.
    memory=MemoryUse(allocator_gaps=(0.0, 0.0), held_gradient_bytes=4, keeps_exponentials=True),
)

FAMILY = (MAXTEXT,)
