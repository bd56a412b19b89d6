"""Why a search has no layout with the axes that are fixed: a limit, a rule of the model or of the framework, or the ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profiler.errors import InputError
from solver.search.divisions import Division, divisors
from solver.search.fixed import agreeing
from solver.spec.can_run import CanRun
from solver.spec.choices import V_SHAPED, TpMode
from solver.spec.feasibility import rules_broken
from solver.spec.run import Run
from solver.spec.strategy import replicas
from solver.step.layouts import Splits
from solver.step.problem import Problem

_TRIED = 256  #: layouts with the fixed axes that are tried before no rule is said to exclude them


def why_none(problem: Problem, sequences: int, splits: Splits, fixed: Mapping[str, Any], max_sizes: Mapping[str, int]) -> str:
    """Return the sentence for a search none of whose ``splits`` agrees with ``fixed`` and ``max_sizes``."""
    alone = {name: agreeing(splits, {name: value}).any() for name, value in fixed.items()}
    names = [name for name, found in alone.items() if not found]
    if limited := _limits(splits, fixed, max_sizes):
        return f"no layout of this search has {_listed(fixed)} within {limited}; raise the limit or fix less"
    if not names:
        # the first axis that leaves none beside those before it
        names = [next(name for count, name in enumerate(fixed, 1) if not agreeing(splits, _first(fixed, count)).any())]
    name = names[0]
    others = {other: value for other, value in fixed.items() if other != name}
    if alone[name]:
        context, reason = f" together with what else is fixed ({_listed(others)})", broken(problem, sequences, fixed)
    else:
        named = {axis: value for axis, value in fixed.items() if axis in (name, "tp_mode")}
        context, reason = ", whatever else is fixed", broken(problem, sequences, named)
    return _sentence(f"{name} {fixed[name]}{context}", reason)


def why_no_layout(problem: Problem, sequences: int, fixed: Mapping[str, Any]) -> str:
    """Return the sentence for a search whose splits agree with ``fixed``, but not with a ZeRO stage or recomputation too."""
    reason, shares = broken(problem, sequences, fixed), problem.framework.can_run.recompute_shares
    stages = problem.framework.can_run.zero_stages
    if problem.run.world_size == 1 and 0 not in stages:
        listed = " or ".join(f"ZeRO-{stage}" for stage in stages)
        return f"{problem.framework.name} has no layout for 1 GPU: it runs {listed}, which shard over two GPUs or more"
    if not reason and fixed.get("recompute_layers", -1) >= 0:
        reason = f"a search recomputes {', '.join(map(str, shares))} of a stage's layers, rounded up, none or all of them"
    return _sentence(_listed(fixed), reason)


def _sentence(what: str, reason: str) -> str:
    none = f"no layout of this search has {what}" if what else "there is no layout for this search"
    if reason:
        return f"{none}: {reason}"
    return (
        f"{none}; sizes that do not divide the ranks, the batch or the layers, or that the "
        "framework does not run, are not searched"
    )


def _limits(splits: Splits, fixed: Mapping[str, Any], max_sizes: Mapping[str, int]) -> str:
    """Return the limits that exclude every split that agrees, as the command line has them, or "" where they do not."""
    agrees = agreeing(splits, fixed)
    if not agrees.any():
        return ""
    excluding = [name for name, size in max_sizes.items() if not (agrees & (getattr(splits, name) <= size)).any()]
    return " and ".join(f"--max-{name} {max_sizes[name]}" for name in excluding or max_sizes)


def broken(problem: Problem, sequences: int, fixed: Mapping[str, Any]) -> str:
    """Return what every layout with the fixed axes breaks, or "" where nothing is found."""
    found = [_rule_broken(problem, fixed), _world_broken(problem.run.world_size, fixed), _batch_broken(sequences, fixed)]
    return ", and ".join(filter(None, found))


def _rule_broken(problem: Problem, fixed: Mapping[str, Any]) -> str:
    """Return the rule of the model or of the framework that every layout with the fixed axes breaks, or else the first of the
    least one, if all break one."""
    found = [_layout_broken(problem, values) for values in itertools.islice(_candidates(problem, fixed), _TRIED)]
    if not all(found):
        return ""
    return next((rule for rule in found[0] if all(rule in broken for broken in found)), found[0][0])


def _layout_broken(problem: Problem, values: Mapping[str, Any]) -> list[str]:
    """Return all rules that a layout breaks."""
    try:
        return rules_broken(problem.model, problem.layout(**values))
    except InputError as error:
        return [str(error)]


def _world_broken(world: int, fixed: Mapping[str, Any]) -> str:
    """Return which sizes do not divide the ranks, or ""."""
    if wrong := _undivided(fixed, ("tp", "cp", "pp", "dp"), world, f"world_size {world}"):
        return wrong
    stage = world // fixed.get("pp", 1)
    for names in (("ep", "etp"), ("wp",), ("zero_shard_size",)):
        if wrong := _undivided(fixed, names, stage, f"the {stage} ranks of a pipeline stage"):
            return wrong
    return ""


def _batch_broken(sequences: int, fixed: Mapping[str, Any]) -> str:
    names = ("dp", "micro_batch_size", "num_micro_batches")
    return _undivided(fixed, names, sequences, f"the global batch of {sequences} sequences")


def _undivided(fixed: Mapping[str, Any], names: Sequence[str], whole: int, dividend: str) -> str:
    """Return that the product of the fixed sizes among ``names`` does not divide ``whole``, or ""."""
    stated = [name for name in names if name in fixed]
    product = math.prod(int(fixed[name]) for name in stated)
    return f"{' * '.join(stated)} is {product}, which does not divide {dividend}" if whole % product else ""


def _candidates(problem: Problem, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield layouts with the fixed axes, smallest first, in which what an axis needs beside it is there."""
    can, world = problem.framework.can_run, problem.run.world_size
    sizes = [int(size) for size in divisors(world) if size > 1][:8] or [2]
    staged = {"schedule", "vpp", *Division._fields} & fixed.keys() and fixed.get("schedule") != "1f1b"
    axes: dict[str, Sequence[Any]] = {
        "pp": sizes if staged and fixed.get("vpp") != 1 else [1],
        "tp": [1, *sizes] if "etp" in fixed else sizes if fixed.get("tp_mode", "mtp") != "mtp" else [1],
        "cp": [1],
        "vpp": _chunks(fixed),
        "zero": can.zero_stages,
    }
    axes |= {name: [fixed[name]] for name in axes if name in fixed}
    axes["tp_mode"] = [fixed["tp_mode"]] if "tp_mode" in fixed else _modes(can, fixed)
    for values in itertools.product(*axes.values()):
        yield _filled(problem, fixed, dict(zip(axes, values, strict=True)))


def _chunks(fixed: Mapping[str, Any]) -> Sequence[int]:
    """Return how many chunks a stage may have beside what is fixed."""
    return [2] if fixed.get("schedule") in V_SHAPED else [2, 3, 5] if fixed.get("schedule") == "interleaved" else [1]


def _modes(can_run: CanRun, fixed: Mapping[str, Any]) -> Sequence[str]:
    """Return the tensor-parallel modes that may be beside what is fixed: weights are divided further in isp alone."""
    if fixed.get("wp", 1) > 1:
        return ["isp"]
    return [mode.name.lower() for mode in can_run.tp_modes if mode != TpMode.ISP or fixed.get("tp", 1) > 1] or ["mtp"]


def _filled(problem: Problem, fixed: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return a layout with ``fixed`` and ``values``, on the fewest ranks and with the fewest micro batches that they need."""
    found: dict[str, Any] = {**values, **fixed}
    tp, cp, pp, vpp = (int(found.get(name, 1)) for name in ("tp", "cp", "pp", "vpp"))
    ep, etp, wp, shard = (int(found.get(name, 1)) for name in ("ep", "etp", "wp", "zero_shard_size"))
    together = [ep * etp, wp, *([tp * shard] if found["tp_mode"] != "isp" else [wp * shard])]
    dp = math.lcm(*(size // math.gcd(size, tp * cp) for size in together))
    if "zero" in fixed and dp * cp == 1:
        dp = 2  # of one rank all stages are alike
    dp = int(fixed.get("dp", dp))
    whole = int(replicas(found["tp_mode"] == "isp", tp, cp, dp, wp))
    least = "none" if problem.run.recompute_modules == Run.recompute_modules else "selective"
    plain = {
        "dp": dp,
        "world_size": tp * cp * pp * dp,
        "zero_shard_size": whole if found["zero"] else 1,
        "num_micro_batches": 2 * pp,
        "micro_batch_size": 1,
        "schedule": "1f1b" if vpp == 1 else "interleaved",
        "recompute": "full" if fixed.get("recompute_layers", -1) >= 0 else least,
    }
    return {**plain, **found}


def _first(fixed: Mapping[str, Any], count: int) -> dict[str, Any]:
    return dict(itertools.islice(fixed.items(), count))


def _listed(fixed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fixed.items())
