"""``python -m predictor.network.fit_published HARDWARE_DIR --output FITS.json``: fit the constants of published networks.

HARDWARE_DIR holds ``<device>_nccl.parquet`` files: op, gpus_per_node, nodes, bytes (whole buffer), us, dtype, env, source.
Some of the logs may be used but not redistributed, so the repository ships the fitted parameters without the measurements.

A network is a machine with one software stack: Polaris reaches 36 GB/s per node with its network plugin and 9 or 3 without,
and no single fit holds for both. Each stack below is one network; logs of untuned stacks are listed, not fitted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predictor.network.collective_points import OPS
from predictor.network.fit import NetworkRows, fit_network, held_out_std, leave_one_scale_out, network_rows
from predictor.network.one_node import OneNodeCollectives
from predictor.network.physics import NetworkParameters
from predictor.network.stated_busbw import bus_bandwidth
from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError
from profiler.files import write_text
from profiler.profile.devices import device
from profiler.profile.profile import Profile, Table
from profiler.published.nccl_rows import OPS as NCCL_TESTS
from profiler.published.rows import renamed
from profiler.units import MIB

_SMALLEST = 1024  # bytes; all smaller sizes take the same time
# Ten nodes that all send at once reach 25 GB/s each, where a single pair reaches 40 (xxrjun's logs).
_LEAST_UNCERTAINTY = {"p2p": 0.25}
_OTHER_CLUSTER = 0.1  # difference of two clusters of the same parts, which held-out errors of one do not show


@dataclass(frozen=True)
class Network:
    """One published network.

    files: prefix of its parquet file. rows: pattern of "source | env" of its logs. bandwidth: nominal bytes/s per GPU.
    in_switch: NVSwitch reduces (Hopper and later), so that two nodes exchange each byte once. prior: the network whose
    parameters are the prior of its fit, "" for the defaults.
    """

    name: str
    device: str
    files: str
    rows: str
    bandwidth: float
    in_switch: bool
    prior: str = ""


INFINIBAND = "H100, 8 x 400 Gbit/s InfiniBand"
NETWORKS = (
    Network(INFINIBAND, "h100_sxm", "h100_sxm", r"nccl-tests#3|nccl-benchmark-results|h100_dgx/send_recv", 50e9, True),
    Network(
        "A100, 8 x 200 Gbit/s InfiniBand (Sophia)", "a100_sxm_40gb", "a100_sxm", r"results_sophia", 25e9, False, INFINIBAND
    ),
    Network(
        "A100, 2 x 200 Gbit/s Slingshot for 4 GPUs (Polaris, environment 5, NCCL 2.21)",
        "a100_sxm_40gb",
        "a100_sxm",
        r"results_(polaris|sirius)/nccl_2_21/.*\| .*env5$",
        12.5e9,
        False,
    ),
    Network(
        "A100, 2 x 200 Gbit/s Slingshot for 4 GPUs (Polaris, environment 5, NCCL 2.18)",
        "a100_sxm_40gb",
        "a100_sxm",
        r"results_(polaris|sirius)/nccl_2_18/.*\| .*env5$",
        12.5e9,
        False,
    ),
    Network("B200, 8 x 400 Gbit/s EFA", "b200_sxm", "b200_sxm", r"\| AWS P6-B200 EFA", 50e9, True),
)

#: Network that represents a profile's cluster, unless the profile states another.
DEFAULTS = {"a100_sxm_40gb": NETWORKS[1].name, "a100_sxm_80gb": NETWORKS[1].name, "a100_pcie_80gb": NETWORKS[1].name}


def read_rows(folder: Path, network: Network) -> tuple[NetworkRows, list[str]]:
    """The rows of ``network`` in the files of ``folder``, and their sources."""
    table = _read(folder / f"{network.files}_nccl.parquet")
    own = np.array([re.search(network.rows, label) is not None for label in table["label"]], dtype=bool)
    many = (table["inter"] > 1) & (table["bytes"] >= _SMALLEST)
    # nccl-tests' sendrecv sends around a ring: with several ranks in a node, only one of them crosses the network
    crossing = (table["op"] != "p2p") | ((table["intra"] == 1) & (table["inter"] == 2))
    chosen = _median({name: column[own & many & crossing] for name, column in table.items()})
    if not len(chosen["op"]):
        raise InputError(f"{network.files}_nccl.parquet holds no measurements of {network.name}")
    node = OneNodeCollectives.fit(_one_node(network, table))
    sources = sorted({re.sub(r"/(runs/|n\d+\.g\d).*", "", str(s)) for s in table["source"][own & many & crossing]})
    return network_rows(node, chosen, network.bandwidth), sources


def _read(path: Path) -> dict[str, np.ndarray]:
    import pandas

    if not path.exists():
        raise InputError(f"{path}: no such file; give the folder of the collected <device>_nccl.parquet files")
    frame = pandas.read_parquet(path)
    words = {name: frame[name].fillna("").astype(str).to_numpy().astype(np.str_) for name in ("source", "env", "dtype")}
    op = renamed(frame["op"].to_numpy(dtype=np.str_), NCCL_TESTS)
    label = np.array([f"{s} | {e}" for s, e in zip(words["source"], words["env"], strict=True)], dtype=np.str_)
    ring = np.array([re.search(r"\bRING\b", str(e)) is not None for e in words["env"]], dtype=bool)
    return {
        **words,
        "op": op,
        "label": label,
        "ring_only": ring,
        "bytes": frame["bytes"].to_numpy(),
        "intra": frame["gpus_per_node"].to_numpy(),
        "inter": frame["nodes"].to_numpy(),
        "seconds": frame["us"].to_numpy() * 1e-6,
    }


def _median(table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One row per (op, group, size, ring_only): the median of repeated logs."""
    keys = ("op", "intra", "inter", "bytes", "ring_only")
    ids = np.stack([np.unique(table[key], return_inverse=True)[1] for key in keys])
    _, first, inverse = np.unique(ids, axis=1, return_index=True, return_inverse=True)
    inverse = np.ravel(inverse)
    medians = np.array([np.median(table["seconds"][inverse == i]) for i in range(len(first))])
    return {**{key: table[key][first] for key in keys}, "seconds": medians}


def _one_node(network: Network, table: Mapping[str, np.ndarray]) -> Profile:
    """The one-node rows of a file as a profile, with the names that profiles use (half precision is fp16)."""
    tables = {}
    dtype = np.where(table["dtype"] == "half", "fp16", table["dtype"])
    for op in OPS:
        rows = (table["op"] == op) & (table["inter"] == 1) & (table["seconds"] > 0)
        if rows.any():
            names = ("intra", "inter", "bytes", "env", "seconds", "source")
            tables[op] = Table.from_columns(op, {**{n: table[n][rows] for n in names}, "dtype": dtype[rows]})
    return Profile(network.device, device(network.device), tables)


def fixed_parameters(network: Network) -> dict[str, float]:
    """Parameters that the hardware determines: where NVSwitch reduces in a node, two nodes exchange every byte once."""
    return {"two_node_share": 1.0} if network.in_switch else {}


def fit_one(rows: NetworkRows, network: Network, prior: NetworkParameters) -> dict[str, Any]:
    """One entry of the file: parameters, and their errors on scales that were left out."""
    fixed = fixed_parameters(network)
    fit = fit_network(rows, prior, fixed)
    held_out = leave_one_scale_out(rows, prior, fixed)
    error = np.abs(held_out / rows.seconds - 1)
    large = (rows.op == "all_reduce") & (rows.at.size >= MIB)
    scales = {int(n): _round(error[large & (rows.at.inter == n)].mean()) for n in np.unique(rows.at.inter[large])}
    return {
        "parameters": {name: _round(value) for name, value in fit.to_dict().items()},
        "network_bandwidth": network.bandwidth,
        "rows": len(rows),
        "most_nodes": int(rows.at.inter.max()),
        "relative_std": {
            op: _round(max(std, _LEAST_UNCERTAINTY.get(op, _OTHER_CLUSTER))) for op, std in held_out_std(rows, held_out).items()
        },
        "left_out_scale_error": {"all_reduce, 1 MiB up, by nodes": scales},
    }


def _round(value: float) -> float:
    return float(f"{float(value):.4g}")


def _untuned(folder: Path) -> list[dict[str, Any]]:
    """Multi-node logs that belong to no network above, with the highest bus bandwidth that their messages reach."""
    listed: dict[tuple[str, str, int, int], float] = {}
    for files in sorted({network.files for network in NETWORKS}):
        table = _read(folder / f"{files}_nccl.parquet")
        patterns = [network.rows for network in NETWORKS if network.files == files]
        other = np.array([not any(re.search(p, label) for p in patterns) for label in table["label"]], dtype=bool)
        for i in np.flatnonzero(other & (table["inter"] > 1) & (table["op"] == "all_reduce")):
            ranks = table["intra"][i] * table["inter"][i]
            source = re.sub(r"/(runs/|n\d+\.g\d).*", "", str(table["source"][i]))
            key = (source, str(table["env"][i]), int(table["inter"][i]), int(table["intra"][i]))
            busbw = bus_bandwidth(table["seconds"][i], table["bytes"][i], ranks)
            listed[key] = max(listed.get(key, 0.0), _round(busbw))
    names = ("source", "env", "nodes", "gpus_per_node", "all_reduce_busbw")
    return [dict(zip(names, (*key, value), strict=True)) for key, value in sorted(listed.items())]


def fit_all(folder: Path) -> dict[str, Any]:
    """The content of the file: networks {name: entry}, devices {profile: name}, default (a name), not_fitted."""
    networks: dict[str, Any] = {}
    for network in NETWORKS:
        prior = NetworkParameters.from_dict(networks[network.prior]["parameters"] if network.prior else {})
        rows, sources = read_rows(folder, network)
        entry = fit_one(rows, network, prior)
        if network.prior and len(np.unique(rows.at.inter)) == 1:  # one scale: growth and uncertainty are the prior's
            entry |= {key: networks[network.prior][key] for key in ("most_nodes", "relative_std")}
        networks[network.name] = {**entry, "device": network.device, "sources": sources}
    return {
        "about": "Constants of predictor/network/physics.py fitted by python -m predictor.network.fit_published; "
        "seconds, bytes/s, shares",
        "networks": networks,
        "devices": DEFAULTS,
        "default": INFINIBAND,
        "not_fitted": _untuned(folder),
    }


def main() -> None:
    parser = ArgumentParser(prog="python -m predictor.network.fit_published", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of <device>_nccl.parquet files")
    parser.add_argument("--output", type=Path, default=Path("prof_data/network_fits.json"))
    arguments = parser.parse_args()
    try:
        fit = fit_all(arguments.folder)
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    write_text(arguments.output, json.dumps(fit, indent=1) + "\n")
    for name, entry in fit["networks"].items():
        print(f"{name}: {entry['rows']} measurements; left-out scales {entry['left_out_scale_error']}")


if __name__ == "__main__":
    main()
