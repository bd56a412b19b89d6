"""A cluster that is described by its network: a topology file, or the options of one, with the keys that follow from it."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from predictor.network.topology.command import FLAGS, SHAPES
from predictor.network.topology.file_format import read_topology
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import NAMES, Options, make_options
from predictor.network.topology.types import Topology
from profiler.errors import InputError, printable
from profiler.units import GBIT

#: Key of a cluster that holds its Topology.
TOPOLOGY = "topology"
ENDING = ".topo"
#: Types of GPUs as topology files name them -> the profile with their kernels, where none is stated.
_HARDWARE = {
    "A100": "a100_sxm_80gb",
    "A800": "a800_sxm",
    "H100": "h100_sxm",
    "H800": "h800_sxm",
    "H20": "h20",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
}
_MOST_IN_A_HOST = 8  #: GPUs of a server beyond which it is an NVLink domain of several hosts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"--cluster: {printable(message)}")


def is_topology(cluster: str) -> bool:
    """Whether ``--cluster`` names a topology: a .topo file, or options that begin with a template's name or a dash."""
    words = cluster.split()
    return Path(cluster).suffix == ENDING or (bool(words) and (words[0] in NAMES or words[0].startswith("-")))


def topology_cluster(cluster: str) -> dict[str, Any]:
    """Return the keys of the cluster: its Topology, GPUs of a node or NVLink domain, network bandwidth, the usual profile.

    cluster: the path of a file, or options of the generator, as in ``Spectrum-X -g 512 -bw 200Gbps``. Raises InputError for
    what is neither.
    """
    topology = read_topology(Path(cluster)) if Path(cluster).suffix == ENDING else _generated(cluster)
    per = topology.gpus_per_server
    near = topology.is_nvswitch()
    inside = near[topology.source] | near[topology.target]
    nics = ~inside & (topology.source == 0)
    rate = float(topology.rates()[nics].sum())
    if not rate and topology.servers > 1:
        raise InputError(f"{topology.name}: GPU 0 has no link to a switch of the network")
    # servers of hosts have no fast links beyond them, whatever the profile's device has
    domain = {"gpus_per_node": per, "nvlink_domain": per} if per <= _MOST_IN_A_HOST else {"nvlink_domain": per}
    hardware = _HARDWARE.get(topology.gpu_type)
    return {
        "name": topology.name,
        TOPOLOGY: topology,
        **domain,
        **({"inter_node_gbit_per_gpu": rate / GBIT} if rate else {}),
        **({"hardware": hardware} if hardware else {}),
    }


def _generated(text: str) -> Topology:
    words = shlex.split(text)
    parser = _Parser(prog="--cluster", add_help=False, allow_abbrev=False)
    for short, long, name, kind, _ in FLAGS:
        parser.add_argument(short, long, dest=name, type=kind)
    for flag, name, _ in SHAPES:
        parser.add_argument(flag, dest=name, action="store_true", default=None)
    if words and words[0] in NAMES:
        words = ["-topo", *words]
    args = parser.parse_args(words)
    options, warnings = make_options({field.name: getattr(args, field.name) for field in fields(Options)})
    if warnings:
        raise InputError(f"--cluster {text}: {warnings[0]}")
    return generate(options)
