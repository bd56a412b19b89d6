"""Results as data: the JSON and CSV files, in SI units, every key explained in docs/json.md."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiler.files import write_text
from solver.report.explain import Explanation, explain, tied
from solver.report.health import Finding
from solver.report.other_settings import other_settings
from solver.search.balance import Balanced
from solver.search.best_layout import Variant, surest
from solver.search.search import SearchResult
from solver.spec.model_size import parameters
from solver.spec.pipeline_layout import layout_text
from solver.spec.strategy import AXES, CONSTANTS, Strategy
from solver.step.memory import MEMORY_PARTS
from solver.step.per_stage import chunks_of, layers_of_stages, memory_of_stages, time_of_stages
from solver.step.solutions import Solutions
from solver.step.time import TIME_PARTS

LAYOUT_KEYS = ("world_size", *AXES, *(name for name in CONSTANTS if name != "world_size"))


def layout_dict(solutions: Solutions, index: int) -> dict[str, Any]:
    """Return layout ``index`` as plain values."""
    return strategy_dict(solutions.layouts.strategy(index, solutions.problem.run))


def strategy_dict(strategy: Strategy) -> dict[str, Any]:
    """Return a layout as plain values, with its global batch in sequences."""
    return {key: getattr(strategy, key) for key in LAYOUT_KEYS} | {"global_batch_sequences": strategy.global_batch_sequences}


def solution_dict(solutions: Solutions, index: int, explanation: Explanation | None = None) -> dict[str, Any]:
    """Return everything about one estimated layout."""
    why = explanation or explain(solutions, index)
    memory = solutions.memory
    return {
        "layout": layout_dict(solutions, index),
        "step_s": why.seconds,
        "interval_s": list(why.interval),
        "tgs": float(solutions.tgs[index]),
        "mfu": float(solutions.mfu[index]),
        "mfu_whole_square": float(solutions.mfu_whole_square[index]),
        "model_flops_per_second": float(solutions.flops_per_second[index]),
        "peak_memory_bytes": float(memory.device[index]),
        "allocated_memory_bytes": float(memory.allocated[index]),
        "reserved_memory_bytes": float(memory.reserved[index]),
        "memory_bound_bytes": float(memory.bound[index]),
        "memory_parts_bytes": dict(zip(MEMORY_PARTS, memory.parts[:, index].tolist(), strict=True)),
        "stages": _stages(solutions, index),
        "pipeline_layout": layout_text(chunks_of(solutions, index), solutions.problem.model.num_nextn_predict_layers),
        "fits": bool(solutions.fits[index]),
        "verdict": solutions.verdict(index),
        "breakdown_s": why.by_part(),
        "compute_by_module_s": why.by_module(),
        "basis": why.by_basis(),
        "ops": [
            {
                "name": line.name,
                "module": line.module,
                "part": line.part,
                "seconds": line.seconds,
                "relative_std": line.relative_std,
                "basis": line.basis.name.lower() if line.basis is not None else None,
            }
            for line in why.lines
        ],
    }


def _stages(solutions: Solutions, index: int) -> list[dict[str, Any]]:
    """Return layers, parts of the step and memory of every pipeline stage."""
    layers, times, memory = (
        layers_of_stages(solutions, index),
        time_of_stages(solutions, index),
        memory_of_stages(solutions, index),
    )
    return [
        {
            "layers": int(layers[stage]),
            "breakdown_s": dict(zip(TIME_PARTS, times[:, stage].tolist(), strict=True)),
            "memory_parts_bytes": dict(zip(MEMORY_PARTS, memory.parts[:, stage].tolist(), strict=True)),
            "peak_memory_bytes": float(memory.device[stage]),
        }
        for stage in range(len(layers))
    ]


def problem_dict(solutions: Solutions, profile: str) -> dict[str, Any]:
    """Return the inputs: model, cluster, profile and the constants that all layouts share."""
    problem = solutions.problem
    return {
        "model": dict(vars(problem.model)) | {"parameters": parameters(problem.model)},
        "cluster": vars(problem.cluster),
        "profile": profile,
        "run": {key: getattr(problem.run, key) for key in CONSTANTS if key != "world_size"},
        "sustained_scale": problem.cost.kernels.deratings.linear,
        "sustained_scale_of_attention": problem.cost.kernels.deratings.attention,
        "command": shlex.join(sys.argv),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    """Return the versions that made the result; an uninstalled checkout of this program has none."""
    try:
        own = importlib.metadata.version("foretrain")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"foretrain": own, "python": platform.python_version(), "numpy": np.__version__}


def search_dict(result: SearchResult, profile: str) -> dict[str, Any]:
    """Return the JSON content of a search."""
    return {
        **problem_dict(result.best, profile),
        "search": {
            "layouts_priced": result.layouts_estimated,
            "feasible": result.feasible,
            "seconds": result.seconds,
            "layouts_per_second": result.layouts_per_second,
            "rejected": dict(result.rejected),
        },
        "best": [solution_dict(result.best, i) for i in range(len(result.best))],
        "sure_to_fit": _sure_dict(result),
        "other_settings": settings_list(result.best),
        "best_of_sizes": [
            solution_dict(result.best_of_sizes, i) | {"tied": tied(result.best_of_sizes, i)}
            for i in range(len(result.best_of_sizes))
        ],
        "best_of_mode": {mode: solution_dict(found, 0) for mode, found in result.best_of_mode.items()},
        "pareto": [
            {
                "layout": layout_dict(result.pareto, i),
                "step_s": float(result.pareto.times.seconds[i]),
                "tgs": float(result.pareto.tgs[i]),
                "peak_memory_bytes": float(result.pareto.memory.device[i]),
            }
            for i in range(len(result.pareto))
        ],
    }


def _sure_dict(result: SearchResult) -> dict[str, Any] | None:
    """Return the fastest layout kept that is sure to fit; None where none is."""
    sure = surest(result)
    if sure is None:
        return None
    sizes = {"peak_memory_bytes": sure.memory, "memory_bound_bytes": sure.bound}
    return {"layout": strategy_dict(sure.layout), "step_s": sure.seconds, **sizes}


def variants_list(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return what the search with each combination of constants found, the fastest first."""
    found: list[dict[str, Any]] = []
    for variant in variants:
        row: dict[str, Any] = {"constants": dict(variant.constants), "step_s": None, "reason": variant.reason}
        if variant.best:
            row |= {
                "step_s": variant.seconds,
                "layouts_priced": variant.best.layouts_estimated,
                "layout": strategy_dict(variant.best.layout),
            }
        found.append(row)
    return found


def balanced_dict(balance: Balanced | None) -> dict[str, Any]:
    """Return what assigning single layers to the stages brings, if that was asked for."""
    if balance is None:
        return {}
    found = {
        "layout": layout_dict(balance.solutions, 0),
        "step_s": balance.seconds,
        "evenly_dealt_step_s": balance.before,
        "same_recomputation_step_s": balance.uniform if np.isfinite(balance.uniform) else None,
        "peak_memory_bytes": float(balance.solutions.memory.device[0]),
    }
    return {"balanced": found}


def settings_list(solutions: Solutions) -> list[dict[str, Any]]:
    """Return the settings that would change the step of the first layout, the largest change first."""
    return [{"if": setting.text, "step_s": setting.seconds} for setting in other_settings(solutions, 0)]


def findings_list(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Return the findings on a measured job."""
    return [{"verdict": finding.verdict, "text": finding.text} for finding in findings]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` atomically; numbers that JSON cannot hold (NaN, infinity) are rejected."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_csv(path: Path, solutions: Solutions) -> None:
    """Write the solutions as a table, one row per layout.

    Columns: the layout's keys, then seconds, interval, TGS, MFU, bytes, whether the device's kernels were measured, and each
    part in seconds.
    """
    rows = []
    for index in range(len(solutions)):
        why = explain(solutions, index)
        low, high = why.interval
        rows.append(
            layout_dict(solutions, index)
            | {"step_s": why.seconds, "interval_low_s": low, "interval_high_s": high, "tgs": float(solutions.tgs[index])}
            | {"mfu": float(solutions.mfu[index]), "peak_memory_bytes": float(solutions.memory.device[index])}
            | {"kernels": solutions.problem.cost.origin}
            | {f"{part}_s": seconds for part, seconds in why.by_part().items()}
        )
    write_text(path, csv_text(rows))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys, at least one, as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
