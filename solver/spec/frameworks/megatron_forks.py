"""Forks of Megatron-LM: the zero-bubble schedules' authors' own, and AMD's Primus."""

from __future__ import annotations

from solver.spec.choices import ONE_F_ONE_B
from solver.spec.frameworks.megatron import MEGATRON_CORE_0_12, MEGATRON_LM_2023

#: Qi et al. 2023 (arXiv 2401.10241): Megatron-LM of that year, whose attention is unfused unless asked otherwise.
ZERO_BUBBLE = MEGATRON_LM_2023.derive(
    "megatron-lm-zero-bubble",
    "2023-11",
    family="megatron-lm-zero-bubble",
    aliases=("megatron-lm (zero-bubble",),
    # examples/pretrain_zbh1.sh: a SentencePiece model; the names of the paper's models (14.6B, 28.3B) leave it about 32,000
    example_vocab=32000,
    tied_embeddings=False,  # examples/pretrain_zero_bubble.sh: --untie-embeddings-and-output-weights
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
    pipeline={"validates_later": ("fp16",)},  # core/zbpp_utils.py: validate_arguments; its examples ask for it then
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
        "layout_schedules": ONE_F_ONE_B,  # utils.py: V-shaped ones divide the layers evenly
        "overlaps_split_backward": False,  # utils.py: validate_arguments
        "splits_backward_tied": False,
        "recomputes_by_stage": True,  # recompute_layer_ids (backends/megatron/patches/recompute_layer_patches.py)
        "linear_attention": False,
        "state_space": False,
        "tp_comm_overlap": False,  # not modelled over ROCm
        "dispatchers": ("alltoall", "allgather", "deepep"),  # hybrid-EP is NVIDIA's
        "deepep_of_amd": True,  # Primus-Turbo's
    },
)

FAMILY = (ZERO_BUBBLE, PRIMUS)
