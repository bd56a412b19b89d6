"""Options that say what interrupts a training run (failures, checkpoints, evaluation), and the goodput that they leave."""

from __future__ import annotations

import argparse
import math
import re

from profiler.errors import InputError, printable
from profiler.units import GB
from solver.report.goodput import Failures, Goodput, checkpoints, goodput
from solver.spec.model_size import adapter_parameters, parameters
from solver.spec.precision import element_bytes
from solver.step.solutions import Solutions

_RESTART = 10.0  #: minutes; assumed where it is not stated
_MTBF = ("mtbf", "mtbf_node", "mtbf_link")
_NUMBERS = (*_MTBF, "restart", "repair", "storage", "node_storage", "checkpoint_interval")
#: Options that need another.
_NEEDS = {
    "restart": _MTBF,
    "spares": ("repair",),
    "repair": _MTBF,
    "node_storage": ("storage",),
    "checkpoint_interval": ("storage",),
    "async_checkpoints": ("storage",),
    "one_writer": ("node_storage",),
    "storage": (*_MTBF, "checkpoint_interval"),
}
_EVALUATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)/(\d{1,9})")


def add_interruption_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments that say what interrupts the training."""
    group = p.add_argument_group(
        "interruptions", "Llama 3 405B on 16,384 H100: 419 unexpected in 54 days, one in 50,700 GPU-hours (arXiv 2407.21783)"
    )
    group.add_argument("--mtbf", type=float, metavar="HOURS", help="mean hours of one GPU between failures that stop the job")
    group.add_argument("--mtbf_node", type=float, metavar="HOURS", help="the same of a node, beside those of its GPUs")
    group.add_argument("--mtbf_link", type=float, metavar="HOURS", help="the same of a network link, of which each GPU has one")
    group.add_argument(
        "--restart",
        type=float,
        metavar="MINUTES",
        help="from a failure to the first new step: noticing, "
        f"starting, reading the checkpoint, warming up (default {_RESTART:g})",
    )
    group.add_argument("--spares", type=int, metavar="NODES", help="nodes that wait to take over, paid for as long (default 0)")
    group.add_argument("--repair", type=float, metavar="HOURS", help="until a failed node is back (default 0: at once)")
    group.add_argument("--storage", type=float, metavar="GB/S", help="what storage takes from the job's checkpoints")
    group.add_argument("--node_storage", type=float, metavar="GB/S", help="what one node writes (default: as much as all)")
    group.add_argument("--one_writer", action="store_true", help="one node writes the checkpoint (default: each its share)")
    group.add_argument(
        "--async_checkpoints",
        action="store_true",
        help="train on while a checkpoint is written, once it is copied to the host (the cluster file states host_link_gb_s)",
    )
    group.add_argument("--checkpoint_interval", type=float, metavar="MINUTES", help="of training (default: what loses least)")
    group.add_argument("--evaluation", metavar="SECONDS/STEPS", help="pause for evaluation, as in 60/1000")


def check_interruptions(args: argparse.Namespace) -> None:
    """Raise InputError for values that cannot be used, and for those that need another."""
    for name in _NUMBERS:
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e12:
            raise InputError(f"--{name} is {value}; it must be a positive number")
    if args.spares is not None and not 0 <= args.spares < 100_000:
        raise InputError(f"--spares is {args.spares}; it must be a number of nodes, 0 or more")
    for name, others in _NEEDS.items():
        if getattr(args, name) and not any(getattr(args, other) for other in others):
            which = "one of them" if len(others) > 1 else "that"
            raise InputError(f"--{name} needs --{' or --'.join(others)}; give {which} too, or leave it out")
    if any(getattr(args, name) for name in _MTBF) and not args.storage:
        raise InputError("a job that fails starts again from a checkpoint: give --storage, what it writes in GB/s, with --mtbf")
    if args.evaluation is not None and (not (found := _EVALUATION.fullmatch(args.evaluation)) or not int(found[2])):
        raise InputError(f"--evaluation is {printable(args.evaluation)}; it must be SECONDS/STEPS, as in 60/1000")


def interrupted(args: argparse.Namespace) -> bool:
    """Whether any option says what interrupts the training."""
    return any(getattr(args, name) for name in (*_MTBF, "storage", "evaluation"))


def goodput_of(args: argparse.Namespace, solutions: Solutions) -> Goodput:
    """Return the goodput of the first layout of ``solutions`` with the interruptions of the options."""
    problem, step = solutions.problem, float(solutions.times.seconds[0])
    cluster, gpus = problem.cluster, problem.run.world_size
    kept = element_bytes(problem.run, problem.framework)
    each = kept.sharded if solutions.layouts.zero[0] == 3 else kept.states + kept.weight
    rank = problem.run.lora_rank
    size = each * (adapter_parameters(problem.model, rank) if rank else parameters(problem.model))
    failures = Failures(
        args.mtbf or math.inf,
        args.mtbf_node or math.inf,
        args.mtbf_link or math.inf,
        60 * (args.restart or _RESTART),
        args.spares or 0,
        args.repair or 0.0,
    )
    interval = None if args.checkpoint_interval is None else 60 * args.checkpoint_interval
    saved = checkpoints(
        size,
        gpus,
        cluster.gpus_per_node,
        storage=GB * (args.storage or math.inf),
        node=GB * (args.node_storage or math.inf),
        host_link=cluster.host_link,
        asynchronous=args.async_checkpoints,
        one_writer=args.one_writer,
        interval=interval,
    )
    pauses = 0.0
    if args.evaluation is not None:
        duration, steps = args.evaluation.split("/")
        pauses = float(duration) / (int(steps) * step)
    return goodput(failures, gpus, cluster.gpus_per_node, saved, pauses)
