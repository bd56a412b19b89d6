"""Make the shipped profiles from collected public measurements.

    python -m profiler.published HARDWARE_DIR --output prof_data

HARDWARE_DIR holds the collected parquet and csv files. The command writes one profile per GPU, and SOURCES.md, which
states for all measurements the source, the licence, how they were measured and what was left out.
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError
from profiler.files import write_text
from profiler.profile.devices import device
from profiler.profile.profile import SUSTAINED_SCALE, Device, Profile, Table
from profiler.profile.store import write_profile
from profiler.published.comm import LICENCES, collectives, intra_node_constants, memory_bound_constants, repository
from profiler.published.expert_exchange import expert_exchange
from profiler.published.notes import PROFILE_NOTES, SAME_CHIP_SCALE, SUSTAINED, sources_page
from profiler.published.rows import Collection, Columns, Ledger, count
from profiler.published.tables import Kernels, flash_attn, grouped_linear, linear, memory_bound, on_other_memory

NETWORK_FITS = "network_fits.json"


@dataclass(frozen=True)
class Recipe:
    """Files that make up one profile.

    collection: prefix of <prefix>_gemm.parquet and similar files. simumax: prefix of simumax_<prefix>_*.csv. kernels: (backend,
    version, kernel) of the attention that training can use. training: prefix of the memory-bound kernels of training steps.
    measured_on: profile of the part on which the rows were measured ("" = this one).
    """

    collection: str = ""
    simumax: str = ""
    kernels: Kernels = ()
    training: str = ""
    measured_on: str = ""


_FA2 = (("sglang", "0.5.10", "flash_attention"),)
_FA3 = (("sglang", "0.5.14", "fa3"),)

RECIPES: dict[str, Recipe] = {
    "h100_sxm": Recipe("h100_sxm", "", _FA3, "gh200"),
    "h200_sxm": Recipe("h200_sxm", "", _FA3, "gh200"),
    "b200_sxm": Recipe("b200_sxm", "b200", (("sglang", "0.5.9", "trtllm_mha"),)),
    "a100_sxm_80gb": Recipe("a100_sxm", "", _FA2, "a100_sxm"),
    "a100_sxm_40gb": Recipe("a100_sxm", "", _FA2, "a100_sxm", measured_on="a100_sxm_80gb"),
    "a100_pcie_80gb": Recipe("", "a100_pcie"),
}


def build(name: str, files: Collection, ledger: Ledger, network_fits: dict[str, Any] | None = None) -> Profile:
    """Build the profile ``name`` from the collected files; rows left out are counted in ``ledger``."""
    recipe, part = RECIPES[name], device(name)
    measured_on = device(recipe.measured_on) if recipe.measured_on else part
    tables = {
        "linear": linear(files, recipe.collection, recipe.simumax, measured_on, ledger),
        "flash_attn": flash_attn(files, recipe.collection, recipe.simumax, recipe.kernels, measured_on, ledger),
        "memory_bound": memory_bound(files, recipe.collection, recipe.training, measured_on, ledger),
    }
    if recipe.simumax:
        tables["grouped_linear"] = grouped_linear(files, recipe.simumax, part, ledger)
    if recipe.collection:
        tables |= collectives(files, recipe.collection, part, ledger)
        tables["expert_exchange"] = expert_exchange(files, recipe.collection, part, ledger)
    if recipe.measured_on:
        tables = _with_other_memory(tables, measured_on, part, ledger)
    checked = {op: Table.from_columns(op, rows) for op, rows in tables.items() if rows and count(rows)}
    return Profile(name, part, checked, _meta(name, files, recipe, checked, network_fits))


def _with_other_memory(tables: dict[str, Columns], source: Device, part: Device, ledger: Ledger) -> dict[str, Columns]:
    """Return measurements of a part with the same chip but other memory, as far as they are valid for this part.

    GEMMs that the memory may limit are left out; times of memory-bound kernels are scaled by the ratio of bandwidths.
    """
    tables = dict(tables)
    if tables["linear"]:
        rows = tables["linear"]
        m, n, k = rows["m"], rows["n"], rows["k"]
        peak = np.array([part.peak_flops[str(d)] for d in rows["dtype"]])
        moved = 2.0 * (m * k + n * k + m * n)
        computes = 2.0 * m * n * k / peak >= moved / part.memory_bandwidth
        tables["linear"] = ledger.keep("linear", "the memory limits it: other on this part", rows, computes)
    if tables["memory_bound"]:
        tables["memory_bound"] = on_other_memory(tables["memory_bound"], source, part)
    return tables


def _meta(
    name: str, files: Collection, recipe: Recipe, tables: dict[str, Table], network_fits: dict[str, Any] | None
) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    if recipe.simumax:
        stated["intra_node"] = intra_node_constants(files, recipe.simumax)
        stated["memory_bound"] = memory_bound_constants(files, recipe.simumax)
    if network_fits:
        stated["inter_node"] = network_fits
    repositories = sorted({repository(str(s)) for table in tables.values() for s in np.unique(table["source"])})
    return {
        "backend": "nccl",
        "date": datetime.date.today().isoformat(),
        "command": "python -m profiler.published HARDWARE_DIR --output prof_data",
        "licences": {r: LICENCES[r] for r in repositories},
        "notes": list(PROFILE_NOTES[name]),
        "sustained": {"short_loop": True, "note": SUSTAINED},
        **({SUSTAINED_SCALE: SAME_CHIP_SCALE[name]} if name in SAME_CHIP_SCALE else {}),
        "laws": {kind: content for kind, content in stated.items() if content},
    }


def read_network_fits(folder: Path) -> dict[str, Any] | None:
    """Return the fit between nodes if an earlier command left one in ``folder``, else None."""
    path = folder / NETWORK_FITS
    if not path.exists():
        return None
    try:
        fit = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(fit, dict):
        raise InputError(f"{path}: must hold one JSON object")
    return fit


def import_all(folder: str | Path, output: str | Path, console: Console) -> None:
    """Write every profile and SOURCES.md into ``output``."""
    files, output = Collection(folder), Path(output)
    fit = read_network_fits(output)
    built: list[tuple[Profile, Ledger]] = []
    for name in track(RECIPES, description="Importing", console=console):
        ledger = Ledger()
        built.append((build(name, files, ledger, fit), ledger))
    if not any(profile.tables for profile, _ in built):
        raise InputError(f"{files.folder}: holds none of the expected files, such as {sorted(files.missing)[0]}")
    for profile, _ in built:
        write_profile(output / f"{profile.name}.pt", profile)
    write_text(output / "SOURCES.md", sources_page(built))
    for name in sorted(files.missing):
        console.print(f"[yellow]not found, left out:[/] {name}")
    for profile, _ in built:
        rows = ", ".join(f"{op} {len(table):,}" for op, table in profile.tables.items())
        console.print(f"{profile.name}.pt {(output / f'{profile.name}.pt').stat().st_size / 1e6:.2f} MB: {rows}")


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m profiler.published", description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="HARDWARE_DIR", help="folder of the collected parquet and csv files")
    parser.add_argument("--output", default="prof_data", help="folder to write the profiles to (default: prof_data)")
    options = parser.parse_args(arguments)
    try:
        import_all(options.folder, options.output, Console())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
