"""The mode ``--price``: what the options name, and the table that is printed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from predictor.cost_model import CostModel
from profiler.errors import InputError
from profiler.profile.profiles import profile_of
from profiler.units import GB, GIB
from solver.api import machine
from solver.formats.config_file import find_model, load_cluster, load_run_config
from solver.formats.topology_cluster import TOPOLOGY
from solver.simai.analytical import sizes_of
from solver.simai.collective_time import NVLINK_OF, Machine, Sizes
from solver.simai.given import check_table_options, machine_of, overlaps_of
from solver.simai.price import Prices, prices
from solver.simai.price_csv import group_sizes, table_prices
from solver.simai.workload_csv import COMPUTATION, read_workload_csv
from solver.simai.workload_text import read_workload_text
from solver.spec.cluster import Cluster
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import expert_parameters, parameters


def show_prices(args: argparse.Namespace, console: Console) -> None:
    """Print the step of ``--price`` on the profile beside SimAI-Analytical's, and why the two differ.

    ``--config`` or ``--model_size`` names the model of the workload: then its parameters are counted too.
    """
    for name in ("vpp", "ep"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    path = Path(args.price)
    if path.suffix.lower() == ".csv":
        _show_lines(args, path, console)
        return
    if args.ep is not None:
        raise InputError("--ep has no effect with a SIMAI_workload, whose first line states it; leave it out")
    workload = read_workload_text(path)
    sizes = sizes_of(workload.header, args.gpus)
    cost, cluster, profile_text = _machine(args, sizes.gpus)
    machine = machine_of(args, _simai_machine(cost, cluster))
    model = load_run_config(args.config or find_model(args.model_size)).model if args.config or args.model_size else None
    found = prices(
        workload,
        machine,
        cost,
        cluster.gpus_per_domain,
        sizes.gpus,
        overlaps=overlaps_of(args),
        vpp=args.vpp,
        true_parameters=true_parameters(model, sizes) if model else None,
    )
    groups = f"tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}, dp {sizes.dp}"
    theirs = f"{machine.gpus} GPUs and {machine.nics} NICs a server, -nv {machine.nvlink:g}, -nic {machine.nic:g}"
    console.print(f"{path.name} on {sizes.gpus} GPUs, {groups}, {profile_text}\nSimAI-Analytical: {theirs}", markup=False)
    console.print(_table(found))
    if model is None:
        console.print(
            "The file's parameters count as stated (AICB counts the embedding four times and no gate); --config or "
            "--model_size names the model, and its own are priced.",
            markup=False,
            style="dim",
        )


def _show_lines(args: argparse.Namespace, path: Path, console: Console) -> None:
    """Print the price of a CSV: by group and kind, without SimAI-Analytical, which reads no such file."""
    check_table_options(args)
    workload = read_workload_csv(path)
    sizes = group_sizes(workload, args.ep)
    world = sizes.tp * sizes.dp * sizes.pp
    cost, cluster, profile_text = _machine(args, world)
    lines = table_prices(workload, cost, cluster.gpus_per_domain, args.ep)
    table = Table()
    for name in ("group", "kind", "items", "GB", "us"):
        table.add_column(name, justify="left" if name in ("group", "kind") else "right", no_wrap=True)
    for line in lines:
        table.add_row(line.group, line.kind, f"{line.count:,.0f}", f"{line.size / GB:,.3f}", f"{line.seconds * 1e6:,.0f}")
    table.add_section()
    table.add_row("step", "", "", "", f"{sum(line.seconds for line in lines) * 1e6:,.0f}")
    console.print(f"{path.name} on {world} GPUs, tp {sizes.tp}, dp {sizes.dp}, pp {sizes.pp}, {profile_text}", markup=False)
    console.print(table)
    untimed = sum(item.kind == COMPUTATION and not item.elapsed for item in workload.items)
    if untimed:
        console.print(f"{untimed:,} computations have no time; --fill gives them one", markup=False, style="dim")
    if workload.others:
        console.print(f"of the first section; {len(workload.others)} more are of other ranks", markup=False, style="dim")


def _machine(args: argparse.Namespace, gpus: int) -> tuple[CostModel, Cluster, str]:
    """Return the cost model and the cluster that the options name, and the profile in words."""
    stated = load_cluster(args.cluster) if args.cluster else {}
    name = args.profile or (None if args.pre_profiling_data_path else stated.get("hardware"))
    profile, profile_text = profile_of(name, args.pre_profiling_data_path, args.as_device)
    cost, cluster = machine(profile, stated, gpus)
    if TOPOLOGY in stated:
        simulated: Any = cost.network.collectives
        profile_text = f"{profile_text}; {simulated.text()}"
    cluster = cluster.for_world(gpus)
    stated_busbw = (cluster.all_reduce_busbw, cluster.all_reduce_busbw_in_node)
    network = cost.network.with_leaf_switches(cluster.leaf_switches(gpus))
    network = network.with_stated_busbw(gpus, cluster.gpus_per_domain, *stated_busbw)
    return replace(cost, network=network), cluster, profile_text


def _simai_machine(cost: CostModel, cluster: Cluster) -> Machine:
    """Return SimAI-Analytical's figures of the device: its own for a type that it knows, else the datasheet's."""
    name = cost.device.name.upper()
    known = next((figure for kind, figure in NVLINK_OF.items() if kind in name), None)
    nvlink = cost.device.link_bandwidth / GIB if known is None else known
    return Machine(cluster.gpus_per_node, cluster.gpus_per_node, nvlink, cluster.network_bandwidth / GIB)


def true_parameters(model: ModelSpec, sizes: Sizes) -> tuple[float, float]:
    """Return the parameters of one rank of an average stage: without experts, and of experts, which ep ranks share."""
    found = layer_kinds(model)
    layers = sum(int(count) for count, kind in zip(found.counts, found.kinds, strict=True) if kind.experts)
    experts = float(layers * model.num_experts * expert_parameters(model)) if layers else 0.0
    shards = sizes.tp * sizes.pp
    return (parameters(model) - experts) / shards, experts / (shards * sizes.ep)


def _table(found: Prices) -> Table:
    table = Table()
    for name in ("part", "SimAI us", "here us", "difference"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    table.add_column("why")
    for term in found.terms:
        table.add_row(term.name, f"{term.simai:,.0f}", f"{term.ours:,.0f}", f"{term.ours - term.simai:+,.0f}", term.why)
    table.add_section()
    chunks = f"our bubble is of {found.vpp} chunk{'s' * (found.vpp != 1)} a stage" if found.vpp else ""
    table.add_row("step", f"{found.simai:,.0f}", f"{found.ours:,.0f}", f"{found.ours - found.simai:+,.0f}", chunks)
    return table
