"""What a profile loses that the harness measures: two nodes of 8 H100 with known times are "measured" by its plan.

    python benchmarks/harness_plan.py [--minutes 1 5]

Every time that the plan asks for is taken from the shipped profile's cost model, with 1% of noise. The profile of them is
fitted, and predicts layouts of some jobs beside that cost model. Budgets are spent as the harness spends them at most. Real
kernels are less smooth than the cost model, so this shows what the choice of shapes loses, not what a measurement does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as RichTable

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from profiler.measure.grouped import PASSES, grouped_items
from profiler.measure.hardware import limits
from profiler.measure.run import WEIGHTS
from profiler.measure.session import Session
from profiler.measure.sweeps import ROW_SECONDS
from profiler.profile.plan import (
    KINDS,
    LAYOUTS,
    Item,
    Limits,
    attention_items,
    collective_items,
    group_shapes,
    linear_items,
    memory_bound_items,
)
from profiler.profile.profile import Profile
from profiler.profile.profiles import find_profile
from profiler.profile.recorder import Row, table_of
from solver import load_problem, search
from solver.step.problem import problem_of
from solver.step.solutions import Solutions, estimate_layouts

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
NODES, GPUS, NOISE = 2, 8, 0.01
#: Model, framework, GPUs, tokens per sequence.
JOBS = (
    ("llama3_8b", "fsdp", 8, 4096),
    ("llama3_8b", "megatron-core", 64, 8192),
    ("llama3_8b", "torchtitan", 64, 8192),
    ("llama3_70b", "megatron-core", 128, 8192),
    ("llama3_405b", "megatron-core", 1024, 8192),
    ("qwen3_30b_a3b", "megatron-core", 64, 4096),
)
TOKENS = 4_194_304


def plans(size: Limits) -> dict[str, list[list[Item]]]:
    """Return what each sweep measures: lists that share its time."""
    return {
        "linear": [linear_items(size, [], ["bf16"])],
        "flash_attn": [attention_items(size, [], "bf16", ("torch_cudnn",))],
        "memory_bound": [memory_bound_items(size, 64 * 1024, KINDS, "bf16")],
        "grouped_linear": [grouped_items(size, [], "bf16")],
        "collectives": [collective_items(*shape, size, "bf16") for shape in group_shapes(GPUS, NODES)],
    }


def seconds_of(item: Item, cost: CostModel) -> float:
    """Return the time of an item on the machine that is measured."""
    c: dict[str, Any] = {name: value if isinstance(value, str) else np.array([value]) for name, value in item.columns.items()}
    if item.op == "linear":
        layout = LAYOUTS.index(str(c["layout"]))
        found = cost.kernels.linear(c["m"], c["n"], c["k"], layout=layout, accumulate=c["accumulate"] > 0)
    elif item.op == "grouped_linear":
        which = list(PASSES).index(str(c["pass"]))
        found = cost.kernels.grouped_linear(c["groups"], c["tokens_per_group"], c["n"], c["k"], passes=which)
    elif item.op == "flash_attn":
        sizes = (c[name] for name in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "v_head_dim"))
        found = cost.kernels.flash_attn(*sizes, causal=True, backward=c["pass"] == "backward")
    elif item.op == "memory_bound":
        found = cost.kernels.memory_bound(str(c["kind"]), c["bytes"])
    else:
        found = cost.network.collective(item.op, c["bytes"], c["intra"], c["inter"], False)
    return float(np.ravel(found.seconds)[0])


def measured(cost: CostModel, minutes: float) -> Profile:
    """Return the profile that the harness makes of a machine in some minutes."""
    device, random = cost.device, np.random.default_rng(0)
    size = limits(Session(0, 1, 1, torch.device("cuda"), "", None), device, quick=False)
    rows: dict[str, list[Row]] = {}
    for item in _in_time(plans(size), minutes * 60):
        noisy = seconds_of(item, cost) * float(np.exp(random.normal(0, NOISE)))
        rows.setdefault(item.op, []).append(
            {**item.columns, "seconds": noisy, "spread": NOISE, "repeats": 20, "source": "known"}
        )
    tables = {op: table_of(op, found) for op, found in rows.items()}
    return Profile(f"{minutes:g} minutes", device, tables, {"sustained_scale": 1.0}, f"harness-plan-{minutes}")


def _in_time(planned: dict[str, list[list[Item]]], seconds: float) -> Iterator[Item]:
    for sweep, parts in planned.items():
        ranks = 1 if sweep == "collectives" else GPUS * NODES
        for items in parts:
            share = seconds * WEIGHTS[sweep] / sum(WEIGHTS.values()) / len(parts) * ranks
            yield from items[: int(share / np.clip(share / len(items), *ROW_SECONDS))]


def best_layouts(job: tuple[str, str, int, int], profile: Profile) -> Solutions:
    """Return the best layout of each tp x cp x pp of a job."""
    model, framework, world, length = job
    problem = load_problem(MODELS / f"{model}.json", world, profile=profile, seq_len=length, framework=framework)
    return search(problem, global_batch_tokens=TOKENS).best_of_sizes


def errors(known: Solutions, cost: CostModel) -> tuple[float, float]:
    """Return the error of the best layout's step by a cost model, and the median over all layouts without their sign."""
    was = known.problem
    problem = problem_of(was.model, was.run, was.cluster, cost.with_network(was.cluster.network_bandwidth))
    found = estimate_layouts(problem, known.layouts).times.seconds / known.times.seconds - 1
    return float(found[0]), float(np.median(np.abs(found)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs="+", default=[0.5, 1, 5], help="budgets of the harness")
    args = parser.parse_args(arguments)
    shipped = find_profile("h100_sxm")[0]
    truth = cost_model(shipped)
    profiles = [measured(truth, minutes) for minutes in args.minutes]
    costs = [cost_model(profile) for profile in profiles]
    table = RichTable(title="Error of a step: best layout (median over the best of each tp x cp x pp)", title_justify="left")
    for name in ("job", *(f"{p.name}, {sum(map(len, p.tables.values())):,} times" for p in profiles)):
        table.add_column(name)
    for job in JOBS:
        known = best_layouts(job, shipped)
        found = [errors(known, cost) for cost in costs]
        table.add_row(f"{job[0]}, {job[1]}, {job[2]} GPUs", *(f"{best:+.1%} ({all_:.1%})" for best, all_ in found))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
