"""Parallel layout of a measured training step, with PyTorch's own implementations.

Tensor parallel: parallelize_module over DTensors, with or without sequence parallel. Data parallel: DDP, DDP with
ZeroRedundancyOptimizer (ZeRO-1), or FSDP2 (ZeRO-3). Pipeline: torch.distributed.pipelining, 1F1B. Rank order: tp, dp, pp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from profiler.errors import InputError
from profiler.train.model import Block, Dims, Norm, Stage

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: model, batch and parallel layout, named as in the case files. ``steps`` includes three of warm-up."""

    dims: Dims
    world_size: int
    seq_len: int
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    zero: int = 0
    recompute: str = "none"
    dtype: str = "fp32"
    steps: int = 8

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    def check(self) -> None:
        """Raise InputError with one sentence for the first setting that cannot be trained."""
        dims = self.dims
        counts = {
            **vars(dims),
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch_size,
            "num_micro_batches": self.num_micro_batches,
            "tp": self.tp,
            "pp": self.pp,
        }
        small = next((name for name, value in counts.items() if value < 1), None)
        rules = (
            (small is not None, f"{small} must be at least 1"),
            (self.steps < 4, f"steps is {self.steps}; three are warm-up, so at least 4 are needed"),
            (
                small is None and self.world_size % (self.tp * self.pp) != 0,
                f"world size {self.world_size} is not a multiple of tp {self.tp} * pp {self.pp}",
            ),
            (
                small is None and dims.hidden_size % (2 * dims.num_attention_heads) != 0,
                f"hidden_size {dims.hidden_size} must be an even multiple of num_attention_heads {dims.num_attention_heads}",
            ),
            (
                small is None and dims.num_attention_heads % dims.num_key_value_heads != 0,
                f"num_attention_heads {dims.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{dims.num_key_value_heads}",
            ),
            *(
                (
                    small is None and getattr(dims, name) % self.tp != 0,
                    f"{name} {getattr(dims, name)} is not a multiple of tp {self.tp}",
                )
                for name in ("num_key_value_heads", "intermediate_size", "vocab_size")
            ),
            (self.sequence_parallel and self.tp == 1, "sequence_parallel needs tp of at least 2"),
            (
                self.sequence_parallel and self.seq_len % max(self.tp, 1) != 0,
                f"sequence_parallel needs seq_len {self.seq_len} to be a multiple of tp {self.tp}",
            ),
            (
                small is None and dims.num_hidden_layers % self.pp != 0,
                f"num_hidden_layers {dims.num_hidden_layers} is not a multiple of pp {self.pp}",
            ),
            (
                self.num_micro_batches < self.pp,
                f"num_micro_batches {self.num_micro_batches} is less than pp {self.pp}, which torch's 1F1B schedule needs",
            ),
            (
                small is None and self.tp > 1 and self.dp > 1 and self.zero != 3,
                "DDP cannot wrap tensor-parallel weights: with tp and dp both above 1 use --zero 3 (FSDP)",
            ),
            (self.zero == 1 and self.dp == 1, "zero 1 shards the optimizer over data-parallel ranks, but dp is 1"),
        )
        for broken, sentence in rules:
            if broken:
                raise InputError(sentence)


@dataclass(frozen=True)
class Trainer:
    """What one rank holds of a layout. stage: its bare layers. model: the same layers in their data-parallel wrapper."""

    layout: Layout
    device: torch.device
    mesh: DeviceMesh
    stage: Stage
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def pp_rank(self) -> int:
        return self.mesh["pp"].get_local_rank()

    @property
    def dp_rank(self) -> int:
        return self.mesh["dp"].get_local_rank()


def build(layout: Layout, device: torch.device) -> Trainer:
    """Build this rank's part of the model and its optimizer; the process group must exist."""
    names = ("pp", "dp", "tp")
    mesh = init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=names)
    split = _splitter(layout, mesh)
    per_stage = layout.dims.num_hidden_layers // layout.pp
    first = mesh["pp"].get_local_rank() * per_stage
    dtype = PRECISIONS[layout.dtype]
    layers = range(first, first + per_stage)
    stage = Stage(layout.dims, layers, layout.seq_len, device, dtype, layout.recompute == "full", split)
    model: nn.Module = stage
    if layout.zero == 3:
        fully_shard(stage, mesh=mesh["dp"], mp_policy=_mixed(layout))
    elif layout.dp > 1:
        devices = [device] if device.type == "cuda" else None
        # No rank changes buffers and every weight is used, so DDP checks for neither in every step.
        model = DistributedDataParallel(
            stage,
            device_ids=devices,
            process_group=mesh["dp"].get_group(),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
    return Trainer(layout, device, mesh, stage, model, _optimizer(layout, mesh, model.parameters()))


def _mixed(layout: Layout) -> MixedPrecisionPolicy:
    """Return the policy: all-gather weights in the compute dtype, reduce gradients in float32."""
    if layout.dtype == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=PRECISIONS[layout.dtype], reduce_dtype=torch.float32)


def _splitter(layout: Layout, mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    def split(part: nn.Module) -> nn.Module:
        if layout.tp > 1 and (plan := _plan(part, layout.sequence_parallel)) is not None:
            parallelize_module(part, mesh["tp"], plan)
        if layout.zero == 3:
            fully_shard(part, mesh=mesh["dp"], mp_policy=_mixed(layout))
        return part

    return split


def _plan(part: nn.Module, sequence_parallel: bool) -> Any:
    """Return the tensor-parallel plan of a part: heads and features by column, then by row; the vocabulary by rows.

    Between parts, activations are complete on every rank, or split along the sequence. The input of attention, and of mlp,
    takes one communication for all their projections.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    if isinstance(part, Block):
        norms = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()} if sequence_parallel else {}
        columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
        return {
            **norms,
            "attention": PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None)),
            "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
            **{name: ColwiseParallel() for name in columns},
            **{name: RowwiseParallel(output_layouts=between) for name in ("attention.o_proj", "mlp.down_proj")},
        }
    if isinstance(part, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if isinstance(part, nn.Linear):  # the head: every rank computes the loss of all logits
        return ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    return SequenceParallel() if isinstance(part, Norm) and sequence_parallel else None


def _optimizer(layout: Layout, mesh: DeviceMesh, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW in its fused form, one kernel for many weights."""
    weights = list(weights)
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
    if layout.zero == 1:
        group = mesh["dp"].get_group()
        return ZeroRedundancyOptimizer(weights, torch.optim.AdamW, process_group=group, **settings)
    kinds = ([w for w in weights if isinstance(w, DTensor)], [w for w in weights if not isinstance(w, DTensor)])
    return torch.optim.AdamW([{"params": kind} for kind in kinds if kind], **settings)  # a fused call takes one tensor kind
