"""A layout in one line, as every report names it."""

from __future__ import annotations

from solver.spec.choices import ONE_F_ONE_B
from solver.spec.strategy import Strategy
from solver.step.solutions import Solutions


def describe(solutions: Solutions, index: int) -> str:
    """Return layout ``index`` in one line."""
    return describe_strategy(solutions.layouts.strategy(index, solutions.problem.run))


def describe_strategy(s: Strategy) -> str:
    """Return a layout in one line: mode and sizes that are not 1."""
    sizes = [f"{name}{getattr(s, name)}" for name in ("tp", "wp", "cp", "ep", "etp", "pp", "vpp", "dp") if getattr(s, name) > 1]
    layers = s.recompute_stage_layers or (f"{s.recompute_layers}" if s.recompute_layers >= 0 else "")
    recompute = f"{s.recompute} of {layers} layers per stage" if layers else s.recompute
    recompute += f", {s.recompute_group} layers at a time" * (s.recompute_group > 1)
    recompute += f" ({s.recompute_modules})" * (s.recompute_modules != "core_attn")
    zero = f"zero{s.zero}/{s.zero_shard_size}" if s.zero else "zero0"
    sizes += [s.schedule] if s.pp > 1 and s.schedule not in ONE_F_ONE_B else []
    counted = [end for end in ("embedding", "loss") if getattr(s, f"account_for_{end}_in_pipeline_split") and s.pp > 1]
    sizes += [f"{end} {n} layers" for end in ("first", "last") if (n := getattr(s, f"num_layers_in_{end}_pipeline_stage"))]
    sizes += [f"groups of {s.micro_batch_group}"] if s.micro_batch_group and s.vpp > 1 else []
    sizes += [s.pipeline_layout] if s.pipeline_layout else []
    sizes += [f"{' and '.join(counted)} as layer{'s' * (len(counted) > 1)}"] if counted else []
    return f"{' '.join([s.tp_mode, *sizes])}, {zero}, {s.num_micro_batches} x {s.micro_batch_size}, recompute {recompute}"
