"""What known training frameworks do when nobody says otherwise: their defaults and their habits, each from its source.

``defaults`` are Strategy fields; the other fields are properties of the framework's code that a layout does not choose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from profiler.errors import InputError
from solver.spec.framework import Framework
from solver.spec.strategy import TpMode

#: Replicas, weights whole between micro batches or layer by layer; optimizer states alone are never sharded.
_FSDP_STAGES = (0, 2, 3)

#: FSDP2 with per-layer gathers and prefetch; DTensor, eager kernels unless compiled.
_TORCH = Framework(
    name="torch",
    prefixes=(),
    gather_copies=2.0,
    scatter_copies=2.0,
    stops_recompute=True,
    fused_gate_up=False,
    fused_qkv=False,
    shares_input=True,
    regathers_input=False,
    async_tp_reduce=False,
    fused_elementwise=False,
    torch_loss=True,
    flash_version=2,
)

_FSDP1 = Framework(
    name="fsdp",
    prefixes=("fsdp", "pytorch fsdp", "torch fsdp", "olmo", "litgpt", "lit-gpt"),
    umbrellas=("hugging face", "huggingface", "transformers", "accelerate"),
    defaults={"zero": 3, "grad_dtype": "bf16"},
    fused_gate_up=False,
    parallel_loss=False,
    torch_loss=True,
    scatter_copies=4.0,
    zero_stages=_FSDP_STAGES,
    stops_recompute=True,
    flash_version=2,  # what torch's scaled_dot_product_attention runs
)

_ENGINE = re.compile(r"transformer[-_ ]engine\D{0,10}(\d+)\.(\d+)")
_DUMMY_GRADIENTS_SINCE = (2, 11)

_MEGATRON = {
    "zero": 1, "grad_dtype": "fp32", "overlap_grad_reduce": True, "overlap_param_gather": True,
    "cross_entropy_fusion": False, "fused_norm": True, "p2p_overlap": True,
}  # fmt: skip

#: Both generations: bf16 gradients all-reduced, whole tensors dealt to ZeRO-1 ranks, each of which broadcasts its own;
#: flash-attn's cross entropy, in place.
_INTERNEVO = Framework(
    name="internevo-2024",
    prefixes=("internevo-2024",),
    defaults={"zero": 1, "grad_dtype": "bf16", "cross_entropy_fusion": True},
    fused_gate_up=False,
    regathers_input=False,
    grad_sync="all_reduce",
    param_sync="broadcast",
    bucket_elements=512 * 2**20,
    optimizer_bytes_per_parameter=36.0,
    fused_accumulation=False,
    whole_tensors=True,
    zero_stages=(0, 1, 3),
    tp_modes=(TpMode.MTP, TpMode.MSP, TpMode.FSP, TpMode.ISP),
)

FRAMEWORKS: tuple[Framework, ...] = (
    _INTERNEVO,
    # Its releases of 2023 (InternLM 0.1 and 0.2), whose figures are published: FlashAttention 1, apex norms on fp32 copies that
    # backward computes again, eager AdamW after a finite check, a norm, a cast and an unscaling of every gradient (132 bytes a
    # parameter in all), parameters broadcast after the step
    replace(
        _INTERNEVO,
        name="internevo",
        prefixes=("internevo", "internlm"),
        defaults={**_INTERNEVO.defaults, "overlap_param_gather": False},
        flash_version=1,
        optimizer_bytes_per_parameter=132.0,
        gradient_passes=0.0,
        bucket_copy_bytes=12.0,
        norm_kernels=(("residual", 6, 15), ("norm", 6, 22)),
        tensors_per_layer=9,  # its attention has biases
    ),
    Framework(  # Megatron-LM as published in 2021-22: distributed optimizer, fp32 main gradients, its own linears
        name="megatron-lm",
        prefixes=("megatron-lm", "megatronlm"),
        defaults=_MEGATRON,
        bucket_elements_per_rank=1e6,
        head_dummy_gradient=True,
        dropout=True,
    ),
    Framework(  # Megatron-Core over Transformer Engine, whose GEMMs leave no room beside them for NCCL's kernels
        name="megatron-core",
        prefixes=("megatron-core", "megatron-lm core", "megatron-lm v0.", "mcore"),
        defaults=_MEGATRON,
        bucket_elements_per_rank=1e6,
        head_dummy_gradient=True,
        async_tp_reduce=False,
    ),
    Framework(  # NeMo: Megatron-Core with tensor-parallel communication pipelined into the GEMMs (user buffers)
        name="nemo",
        prefixes=("nemo", "megatron-bridge", "megascale"),
        defaults={**_MEGATRON, "tp_comm_overlap": True},
        bucket_elements_per_rank=1e6,
        head_dummy_gradient=True,
        async_tp_reduce=False,
    ),
    Framework(  # Qi et al. 2023: Megatron-LM of that year, whose attention is unfused unless asked otherwise
        name="megatron-lm-zero-bubble",
        prefixes=("megatron-lm (zero-bubble", "megatron-lm-zero-bubble"),
        defaults={**_MEGATRON, "attention": "unfused"},
        bucket_elements_per_rank=1e6,
        dropout=True,
    ),
    Framework(  # fp16 gradients in flat buffers, no overlap
        name="megatron-deepspeed",
        prefixes=("megatron-deepspeed", "deepspeed", "gpt-neox"),
        defaults={"zero": 1, "grad_dtype": "fp16", "overlap_grad_reduce": False, "overlap_param_gather": False,
                  "attention": "unfused"},
        grad_sync="all_reduce",
        regathers_input=False,
        fused_accumulation=False,
        bucket_elements=500e6,
        transfers=4.0,  # its pipeline engine sends and receives one after the other
        dropout=True,
    ),
    # Research code of 2023, Megatron's tensor parallelism and DeepSpeed's pipeline: after the step's last backward pass bf16
    # gradients are joined in buckets, divided, cast to fp32, all-reduced whole, copied back, and their norm is taken
    # (26 + 6 bytes a parameter); stages pass whole activations by blocking sends and receives
    Framework(
        name="aleph-alpha-scaling",
        prefixes=("aleph alpha", "aleph-alpha"),
        defaults={"zero": 1, "grad_dtype": "bf16", "overlap_grad_reduce": False, "overlap_param_gather": False,
                  "fused_norm": False},
        fused_gate_up=False,
        regathers_input=False,
        fused_accumulation=False,
        async_tp_reduce=False,
        fused_elementwise=False,
        fused_softmax=False,
        parallel_loss=False,
        torch_loss=True,
        grad_sync="all_reduce",
        flash_copies=(1, 2),
        reduce_bytes=4,
        bucket_elements=500e6,
        bucket_copy_bytes=32.0,
        gradient_passes=0.0,
        splits_transfers=False,
        transfers=4.0,
        counts_ends=True,
        recomputes_head=True,
    ),
    replace(
        _TORCH,
        name="torchtitan",
        prefixes=("torchtitan", "fsdp2", "pytorch fsdp2", "torch fsdp2"),
        defaults={"zero": 3, "grad_dtype": "fp32"},
        zero_stages=_FSDP_STAGES,
        selective_by_op=True,
        compiles_loss=True,
        reserve=0.1,  # it asks for expandable segments, which leave few gaps (assumed)
    ),
    # plain torch.distributed: DDP in 25 MB buckets, weights held in fp32 under autocast, fused AdamW, no clipping
    replace(
        _TORCH,
        name="pytorch",
        prefixes=("pytorch ddp", "torch ddp", "ddp"),
        umbrellas=("pytorch", "torch"),
        defaults={"zero": 0, "grad_dtype": "fp32"},
        parallel_loss=False,
        autocast=True,
        optimizer_bytes_per_parameter=28.0,
        gradient_passes=0.0,
        bucket_copy_bytes=16.0,
        grad_sync="all_reduce",
        param_sync="broadcast",
        bucket_elements=6.5e6,
        fused_accumulation=False,
    ),
    Framework(  # its published tables are of 2023, when its attention was the Triton kernel of the first generation
        name="llm-foundry",
        prefixes=("llm-foundry", "llmfoundry", "composer"),
        defaults={"zero": 3, "grad_dtype": "fp32"},
        fused_gate_up=False,
        parallel_loss=False,
        torch_loss=True,
        zero_stages=_FSDP_STAGES,
        scatter_copies=4.0,
        flash_version=1,
    ),
    _FSDP1,
    # IBM's trainer: its selective checkpointing recomputes whole blocks (all of them unless told otherwise), AdamW is not fused
    replace(
        _FSDP1,
        name="fms-fsdp",
        prefixes=("fms-fsdp",),
        umbrellas=(),
        optimizer_bytes_per_parameter=96.0,
        gradient_passes=0.0,
        selective_is_full=True,
    ),
)  # fmt: skip

GENERIC = Framework(
    name="generic",
    prefixes=(),
    defaults=_MEGATRON,
    bucket_elements_per_rank=1e6,
    tp_modes=(TpMode.MTP, TpMode.MSP, TpMode.ISP),
)


def known_framework(name: str) -> Framework:
    """As framework_of, for a name that a user chose: raises InputError where no framework answers to it."""
    framework = framework_of(name)
    if framework.name == GENERIC.name and name != GENERIC.name:
        names = ", ".join([f.name for f in FRAMEWORKS] + [GENERIC.name])
        raise InputError(f"no framework is called {name!r}; known are {names}")
    return framework


def _first_named(name: str, words: Sequence[tuple[Framework, tuple[str, ...]]]) -> Framework | None:
    """The framework one of whose ``words`` stands first in ``name``; of several at one place the longest decides."""
    said, found = _spaced(name), []
    for i, (_, prefixes) in enumerate(words):
        for prefix in prefixes:
            place = re.search(re.escape(_spaced(prefix)) + "(?![a-z])", said)
            found += [(-place.start(), len(prefix), i)] if place else []
    return words[max(found)[2]][0] if found else None


def _spaced(name: str) -> str:
    """Lower case, one space before every word."""
    return " " + re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()


@cache
def framework_of(name: str) -> Framework:
    """The framework that ``name`` speaks of first, in whole words (of several prefixes there the longest; case and punctuation
    do not matter); else what an umbrella in it means; GENERIC, a Megatron-like one, where it speaks of none.

    A release of Transformer Engine in the name ("..., transformer-engine 2.11.0") decides what depends on it.
    """
    framework = _first_named(name, [(f, f.prefixes) for f in FRAMEWORKS])
    framework = framework or _first_named(name, [(f, f.umbrellas) for f in FRAMEWORKS]) or GENERIC
    engine = _ENGINE.search(name.lower())
    if engine and (int(engine[1]), int(engine[2])) >= _DUMMY_GRADIENTS_SINCE:
        return replace(framework, dummy_gradients=True)
    return framework
