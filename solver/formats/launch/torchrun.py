"""How many nodes a layout runs on, and the words with which torchrun starts it there."""

from __future__ import annotations

from solver.spec.strategy import Strategy


def nodes_of(run: Strategy, gpus_per_node: int) -> tuple[int, int]:
    """Return (nodes, GPUs of each)."""
    each = min(gpus_per_node, run.world_size)
    return run.world_size // each, each


def torchrun(run: Strategy, gpus_per_node: int) -> str:
    """Return the beginning of a command that starts one process on every GPU."""
    nodes, each = nodes_of(run, gpus_per_node)
    return f"torchrun --nnodes {nodes} --nproc-per-node {each}"
