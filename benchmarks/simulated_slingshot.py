"""Calibrate the flow simulation on another network than the shipped one, and predict larger groups of it.

usage: python benchmarks/simulated_slingshot.py FILE    (a100_sxm_nccl.parquet, with nccl-tests of Polaris)

Nodes of 4 A100 have two NICs of 200 Gbit/s.

The two shares and the latency are fitted to all-reduce and all-gather on 8 nodes; all-to-all, and 2, 256 and 540 nodes, are
held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from predictor.network.flows.calibrate import OPERATIONS, Row, calibrate, errors, root_mean_square
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import make_options
from predictor.network.topology.types import Topology
from profiler.published.nccl_rows import OPS

NODE, FITTED = 4, 8  #: GPUs of a node; nodes that are fitted
TUNED, VERSION = "polaris-env5", "nccl_2_21"  #: the settings that its users found best, and the release that ran on most nodes
FLOWN = ("all_reduce", "all_gather", "alltoall")
LEAST, MOST, SIZES = 1 << 20, 1 << 30, 5


def slingshot(nodes: int) -> Topology:
    """Return the network: 100 Gbit/s of the NICs and 300 GB/s of NVLink for each GPU; one switch stands for the dragonfly."""
    stated = {
        "rail_optimized": True,
        "gpus": nodes * NODE,
        "gpus_per_server": NODE,
        "bandwidth": "100Gbps",
        "nvlink_bandwidth": "2400Gbps",
        "gpu_type": "A100",
        "gpus_per_asw": max(nodes * NODE, 64),
    }
    return generate(make_options(stated)[0])


def measured(path: Path) -> list[Row]:
    table = pd.read_parquet(path)
    table = table[(table["env"] == TUNED) & table["source"].str.contains(VERSION) & (table["op"].isin(FLOWN))]
    rows = []
    for (op, nodes), group in table[table["bytes"].between(LEAST, MOST)].groupby(["op", "nodes"]):
        times = group.groupby("bytes")["us"].median() * 1e-6
        chosen = times.iloc[:: max(len(times) // SIZES, 1)]
        rows += [Row(OPS[op], NODE, int(nodes), float(size), float(seconds)) for size, seconds in chosen.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("file", type=Path, metavar="FILE")
    rows = measured(parser.parse_args().file)
    fitted = [row for row in rows if row.nodes == FITTED and row.op != "all2all"]
    found = calibrate(fitted, slingshot)
    print(f"messages get {found.network:.0%} of the NICs' rate, {found.nvlink:.0%} of NVLink's, {found.latency * 1e6:.1f} us")
    print("| nodes | op | rows | RMS of log(simulated / measured) | mean |\n|---:|---|---:|---:|---:|")
    for nodes, op in sorted({(row.nodes, row.op) for row in rows}):
        off = errors([row for row in rows if (row.nodes, row.op) == (nodes, op)], found, slingshot)
        held = "" if nodes == FITTED and op != "all2all" else " (held out)"
        spread = f"{root_mean_square(off):.1%} | {off.mean():+.1%}"
        print(f"| {nodes}{held} | {OPERATIONS[op]} | {len(off)} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
