"""A measured training step as a case: one JSON object on a line of a file that ``foretrain validate`` reads."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from profiler.train.layout import Layout
from profiler.units import GIB


@dataclass(frozen=True)
class Measured:
    """Outcome of a run.

    seconds: of every step after warm-up. losses: of every step. gradient_norm: of the first step. peak_bytes: 0 where unknown.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_norm: float
    peak_bytes: int


def case_of(
    layout: Layout, measured: Measured | None, hardware: str, gpus_per_node: int, device: torch.device
) -> dict[str, Any]:
    """Return the case of a run; ``measured`` is None for an OOM."""
    parts = [f"h{layout.dims.hidden_size}", f"l{layout.dims.num_hidden_layers}", f"s{layout.seq_len}", f"w{layout.world_size}"]
    parts += [f"tp{layout.tp}{'sp' if layout.sequence_parallel else ''}", f"pp{layout.pp}", f"z{layout.zero}"]
    parts += [f"mb{layout.micro_batch_size}x{layout.num_micro_batches}", layout.recompute, layout.dtype]
    return {
        "id": f"trained:{'_'.join(parts)}",
        "group": "train_step",
        "hardware": hardware,
        "cluster": {"gpus_per_node": gpus_per_node},
        "model": {**vars(layout.dims), "head_dim": layout.dims.head_dim, "gated_mlp": True, "tie_word_embeddings": False},
        "run": _run_keys(layout, device),
        "measured": _measured_keys(measured),
        "source": f"profiler.train, torch {torch.__version__}, {'nccl' if device.type == 'cuda' else 'gloo'}",
    }


def _run_keys(layout: Layout, device: torch.device) -> dict[str, Any]:
    fused_norm = device.type == "cuda"  # on a CPU PyTorch builds rms_norm from other kernels
    return {
        "framework": "profiler-train",
        "world_size": layout.world_size,
        "seq_len": layout.seq_len,
        "global_batch_size": layout.dp * layout.micro_batch_size * layout.num_micro_batches,
        "micro_batch_size": layout.micro_batch_size,
        "num_micro_batches": layout.num_micro_batches,
        "tp": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pp": layout.pp,
        "vpp": 1,
        "cp": 1,
        "dp": layout.dp,
        "schedule": "1f1b",
        "zero": layout.zero,
        "recompute": layout.recompute,
        "precision": layout.dtype,
        "grad_dtype": "fp32",
        "attention": "flash",
        "overlap_grad_reduce": layout.dp > 1,
        "overlap_param_gather": layout.zero == 3,
        "tp_comm_overlap": False,
        "p2p_overlap": False,
        "cross_entropy_fusion": False,
        "fused_norm": fused_norm,
        "compile": False,
    }


def _measured_keys(measured: Measured | None) -> dict[str, Any]:
    if measured is None:
        return {"out_of_memory": True}
    median = statistics.median(measured.seconds)
    memory = {"peak_memory_gib": measured.peak_bytes / GIB, "memory_kind": "allocated"} if measured.peak_bytes else {}
    return {
        "step_s": median,
        "spread": (max(measured.seconds) - min(measured.seconds)) / 2 / median,
        "repeats": len(measured.seconds),
        **memory,
        "losses": [round(loss, 6) for loss in measured.losses],
        "gradient_norm": measured.gradient_norm,
    }
