"""Train a real transformer for a few steps and write the step time as a measured case.

    torchrun --nproc-per-node=2 -m profiler.train --hidden_size 512 --num_hidden_layers 4 \\
        --num_attention_heads 8 --intermediate_size 1376 --vocab_size 8192 --seq_len 512 --tp 2 --output cases.jsonl

The case is one JSON object on a line, as ``foretrain validate`` reads it: the median over the steps after three of warm-up,
where the slowest rank counts for each step, and the peak of allocated memory where the device reports it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError, say_once
from profiler.files import append_line
from profiler.train.allocator import keep_freed_memory
from profiler.train.case import Measured, case_of
from profiler.train.layout import PRECISIONS, Layout, Trainer, build
from profiler.train.model import Dims, loss_of

WARM_UP = 3  # steps until the allocator holds all blocks that a step needs
_TIMEOUT = timedelta(minutes=5)  # after which a rank that hangs or died ends the job


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the job that torchrun started (or one process without it), on GPUs, else on CPUs over gloo; yield the device."""
    local, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def leave(code: int = 0) -> None:
    """End this rank of a job without destructors once all ranks are done: those of gloo's threads sometimes abort.

    Does nothing in a process that torchrun did not start.
    """
    if "RANK" in os.environ:
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def measure(layout: Layout, device: torch.device) -> Measured:
    """Train ``layout`` for its steps on one fixed batch; all ranks of the process group call this together."""
    layout.check()
    trainer = build(layout, device)
    step = _pipeline_step(trainer) if layout.pp > 1 else _plain_step(trainer)
    tokens, labels = _batch(trainer)
    seconds, losses, norm = [], [], 0.0
    for number in range(layout.steps):
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _wait(device)
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(tokens, labels))
        if number == 0:
            norm = _gradient_norm(trainer)  # in a warm-up step, so never part of a measured time
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    slowest = _over_ranks(torch.tensor([*seconds, float(peak)], dtype=torch.float64), device, dist.ReduceOp.MAX)
    return Measured(tuple(slowest[WARM_UP:-1].tolist()), _mean_losses(trainer, losses), norm, int(slowest[-1]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _over_ranks(values: Tensor, device: torch.device, op: Any) -> Tensor:
    values = values.to(device)
    dist.all_reduce(values, op)
    return values.cpu()


def _batch(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Return this data-parallel rank's tokens and labels, [num_micro_batches * micro_batch_size, seq]."""
    layout = trainer.layout
    rows = layout.micro_batch_size * layout.num_micro_batches
    drawn = torch.Generator().manual_seed(0)
    text = torch.randint(layout.dims.vocab_size, (layout.dp * rows, layout.seq_len + 1), generator=drawn)
    mine = text[trainer.dp_rank * rows : (trainer.dp_rank + 1) * rows].to(trainer.device)
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def _plain_step(trainer: Trainer) -> Any:
    """Return the step: forward and backward of all micro batches.

    DDP reduces gradients after the last micro batch, FSDP after each, on shards.
    """
    count, model = trainer.layout.num_micro_batches, trainer.model

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=trainer.device)
        for number, (x, y) in enumerate(zip(tokens.chunk(count), labels.chunk(count), strict=True), 1):
            held = (
                model.no_sync() if isinstance(model, DistributedDataParallel) and number < count else contextlib.nullcontext()
            )
            with held:
                loss = loss_of(model(x), y) / count
                torch.autograd.backward(loss)
            total += loss.detach()
        return total

    return step


def _pipeline_step(trainer: Trainer) -> Any:
    layout, last = trainer.layout, trainer.pp_rank == trainer.layout.pp - 1
    takes, gives = _stage_ends(trainer)
    stage = PipelineStage(
        trainer.model, trainer.pp_rank, layout.pp, trainer.device, takes, gives, group=trainer.mesh["pp"].get_group()
    )
    schedule = Schedule1F1B(stage, layout.num_micro_batches, loss_fn=loss_of)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = (tokens,) if trainer.pp_rank == 0 else ()
        schedule.step(*inputs, target=labels if last else None, losses=losses if last else None, return_outputs=False)
        return torch.stack(losses).mean().detach() if last else torch.zeros((), device=trainer.device)

    return step


def _stage_ends(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Return empty tensors like a stage's input and output; without them torch runs a forward pass that interferes with DDP."""
    layout = trainer.layout
    seq = layout.seq_len // (layout.tp if layout.sequence_parallel else 1)
    between = torch.empty(
        (layout.micro_batch_size, seq, layout.dims.hidden_size),
        dtype=PRECISIONS[layout.dtype],
        device="meta",
        requires_grad=True,
    )
    tokens = torch.empty((layout.micro_batch_size, layout.seq_len), dtype=torch.int64, device="meta")
    logits = between.new_empty((layout.micro_batch_size, layout.seq_len, layout.dims.vocab_size), requires_grad=True)
    last = trainer.pp_rank == layout.pp - 1
    return (between if trainer.pp_rank else tokens), (logits if last else between)


def _gradient_norm(trainer: Trainer) -> float:
    """Return the norm of the whole model's gradient, equal on all ranks; NaN is reported, not hidden."""
    total = torch.zeros((), device=trainer.device, dtype=torch.float64)
    for weight in trainer.stage.parameters():
        if weight.grad is not None:
            norm = weight.grad.float().norm()
            total += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double() ** 2
    dist.all_reduce(total, group=trainer.mesh["pp"].get_group())
    return float(total.sqrt())


def _mean_losses(trainer: Trainer, losses: list[Tensor]) -> tuple[float, ...]:
    """Return the mean losses over data-parallel ranks.

    Only last stages know a loss, and all ranks of a tensor-parallel group know the same.
    """
    layout = trainer.layout
    total = _over_ranks(torch.stack(losses).double(), trainer.device, dist.ReduceOp.SUM)
    return tuple((total / (layout.dp * layout.tp)).tolist())


def _arguments(argv: Sequence[str] | None) -> tuple[Layout, argparse.Namespace]:
    parser = ArgumentParser(prog="torchrun -m profiler.train", description=(__doc__ or "").split("\n\n")[0])
    for name in (field.name for field in fields(Dims)):
        parser.add_argument(f"--{name}", type=int, required=name != "num_key_value_heads")
    parser.add_argument("--seq_len", type=int, required=True)
    for name in ("micro_batch_size", "num_micro_batches", "tp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sequence_parallel", action="store_true", help="split activations between tensor-parallel parts")
    parser.add_argument("--zero", type=int, choices=(0, 1, 3), default=0, help="DDP, ZeroRedundancyOptimizer or FSDP2")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--dtype", choices=sorted(PRECISIONS), default="bf16", help="of activations and GEMMs")
    parser.add_argument("--steps", type=int, default=8, help="of which three are warm-up (default: %(default)s)")
    parser.add_argument("--hardware", default="data", help="profile that this machine is (default: its own, data)")
    parser.add_argument("--output", type=Path, help="JSON-lines file to append the case to (default: print it)")
    args = parser.parse_args(argv)
    args.num_key_value_heads = args.num_key_value_heads or args.num_attention_heads
    dims = Dims(**{field.name: getattr(args, field.name) for field in fields(Dims)})
    own = {field.name: getattr(args, field.name) for field in fields(Layout) if hasattr(args, field.name)}
    return Layout(dims=dims, world_size=int(os.environ.get("WORLD_SIZE", 1)), **own), args


def _write(case: dict[str, Any], output: Path | None) -> None:
    if output is None:
        print(json.dumps(case))
    else:
        append_line(output, json.dumps(case))
        took = case["measured"].get("step_s")
        print(f"{case['id']}: {f'{took:.4g} s per step' if took else 'out of memory'}; appended to {output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 with one sentence for unusable input, or 3 on OOM (the case states it)."""
    layout, args = _arguments(argv)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    try:
        layout.check()
        with process_group() as device:
            try:
                measured = measure(layout, device)
            except torch.OutOfMemoryError:
                _write(case_of(layout, None, args.hardware, per_node, device), args.output)
                sys.stdout.flush()
                os._exit(3)  # at once, so that torchrun ends the ranks that wait for this one
            if dist.get_rank() == 0:
                _write(case_of(layout, measured, args.hardware, per_node, device), args.output)
            leave()
    except InputError as error:
        say_once(f"error: {error}")
        return 2
    return 0
