"""Bounds of every number that a layout, a cluster or an option may state, applied whatever way it comes in."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from profiler.errors import InputError, shown

#: Name -> (least, most). Within them no product of sizes leaves 64 bits.
WHOLE_NUMBERS = {
    "world_size": (1, 1 << 20),
    "tp": (1, 1 << 20),
    "cp": (1, 1 << 20),
    "pp": (1, 1 << 20),
    "vpp": (1, 1 << 12),
    "wp": (1, 1 << 20),
    "ep": (1, 1 << 20),
    "etp": (1, 1 << 20),
    "dp": (1, 1 << 20),
    "zero_shard_size": (1, 1 << 20),
    "micro_batch_size": (1, 1 << 16),
    "num_micro_batches": (1, 1 << 24),
    "seq_len": (1, 1 << 26),
    "num_layers_in_first_pipeline_stage": (0, 1 << 12),
    "num_layers_in_last_pipeline_stage": (0, 1 << 12),
    "num_layers_at_start_in_bf16": (0, 1 << 12),
    "num_layers_at_end_in_bf16": (0, 1 << 12),
    "recompute_layers": (-1, 1 << 12),
    "recompute_group": (1, 1 << 12),
    "lora_rank": (0, 1 << 12),
    "offload_layers": (0, 1 << 12),
    "micro_batch_group": (0, 1 << 24),
    "wgrad_deferral_limit": (0, 1 << 24),
    "cp_a2a_size": (0, 1 << 20),
    "gpus_per_node": (1, 1 << 12),
    "nvlink_domain": (0, 1 << 12),  # 0: those of a node
    "link_peers": (0, 1 << 12),  # 0: a switch
    "gpus_per_leaf": (1, 1 << 24),
    "global_batch_size": (1, 1 << 40),  # tokens, the option of the command line
    "global_batch_tokens": (1, 1 << 40),
    "global_batch_sequences": (1, 1 << 40),
    "top": (1, 1000),
    "jobs": (1, 256),
}
NUMBERS = {
    "inter_node_gbit_per_gpu": (0.05, 1e6),  # a gigabit for the 16 GPUs of a node
    "memory_gib": (1e-3, 8192),
    "oversubscription": (1, 1000),
    "host_link_gb_s": (1e-3, 1e5),
    "host_memory_gb_s": (1e-3, 1e5),
    "optimizer_offload_fraction": (0, 1),
    "all_reduce_busbw_gb_s": (1e-3, 1e5),
    "all_reduce_busbw_in_node_gb_s": (1e-3, 1e5),
    "memory_limit_gib": (1e-3, 8192),
    "step_s": (1e-9, 1e9),
    "moe_capacity_factor": (0, 100),
    "moe_imbalance": (1, 100),
    "peak_memory_gib": (1e-6, 1e6),
    "tgs": (1e-6, 1e9),
    "train_steps_per_second": (1e-9, 1e9),
}


def whole_number(name: str, value: Any, called: str = "") -> int:
    """Return ``value`` if it is a whole number within the bounds of ``name``; else raise InputError.

    called: its name where it is given by another one.
    """
    least, most = WHOLE_NUMBERS[name]
    whole = _index(value)
    if whole is None or not least <= whole <= most:
        raise InputError(
            f"{called or name} is {shown(value)}; it must be a whole number of at least {least} and at most {most}"
        )
    return whole


def _index(value: Any) -> int | None:
    if type(value) is int:  # most are; to ask whether others have an index takes 20 times as long
        return value
    return operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None


def number(name: str, value: Any) -> float:
    """Return ``value`` if it is a finite number within the bounds of ``name``; else raise InputError."""
    least, most = NUMBERS[name]
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not sound or not least <= value <= most:  # no comparison with nan holds
        raise InputError(
            f"{name} is {shown(value)}; it must be a {'positive ' * (least > 0)}number between {least:g} and {most:g}"
        )
    return float(value)
