"""Options of ``python -m predictor.network`` that make, read and draw a topology."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from predictor.network.topology.file_format import read_topology, write_topology
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import NAMES, Options, make_options
from profiler.errors import InputError

#: (short flag, long flag, field of Options, type, what it is); flags are those of SimAI's generator.
FLAGS: tuple[tuple[str, str, str, type, str], ...] = (
    ("-topo", "--topology", "topology", str, f"template: {', '.join(NAMES)}; without one, --ro, --dt and --dp give the shape"),
    ("-g", "--gpu", "gpus", int, "GPUs"),
    ("-gps", "--gpu_per_server", "gpus_per_server", int, "GPUs of a server, or of an NVL rack: 36 or 72"),
    ("-gt", "--gpu_type", "gpu_type", str, "type of the GPUs, a word that is written to the file"),
    ("-nsps", "--nv_switch_per_server", "nvswitches_per_server", int, "NVSwitches of a server"),
    ("-nvbw", "--nvlink_bw", "nvlink_bandwidth", str, "bandwidth from a GPU to an NVSwitch, as in 2880Gbps"),
    ("-nl", "--nv_latency", "nvlink_latency", str, "latency of an NVLink link, as in 0.000025ms"),
    ("-l", "--latency", "latency", str, "latency of the other links, as in 0.0005ms"),
    ("-bw", "--bandwidth", "bandwidth", str, "bandwidth from a NIC to an ASW, as in 400Gbps"),
    ("-asn", "--asw_switch_num", "asws", int, "ASWs; follows from the other options, a warning says where it differs"),
    ("-npa", "--nics_per_aswitch", "gpus_per_asw", int, "NICs that one ASW takes"),
    ("-psn", "--psw_switch_num", "psws", int, "PSWs"),
    ("-apbw", "--ap_bandwidth", "asw_psw_bandwidth", str, "bandwidth from an ASW to a PSW"),
    ("-app", "--asw_per_psw", "asws_per_pod", int, "ASWs that one pod may hold"),
    ("-er", "--error_rate", "error_rate", str, "error rate of every link"),
)
SHAPES = (
    ("--ro", "rail_optimized", "rail-optimised: GPUs with the same number in their servers share ASWs"),
    ("--dt", "dual_tor", "every NIC is linked to two ASWs"),
    ("--dp", "dual_plane", "the two ASWs belong to separate planes of PSWs"),
)


def add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a topology."""
    group = parser.add_argument_group("topology", "written as SimAI reads it, to a file whose name says what it is")
    default = {field.name: field.default for field in fields(Options)}
    for short, long, name, kind, text in FLAGS:
        about = f"{text} (default {default[name]})" if default[name] is not None else text
        group.add_argument(short, long, dest=name, type=kind, metavar=name.upper(), help=about)
    for flag, name, text in SHAPES:
        group.add_argument(flag, dest=name, action="store_true", default=None, help=text)
    group.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder of the file (default: the current one)")
    group.add_argument("--file", type=Path, help="read this topology file instead of making one, and check it")
    group.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the topology; also .pdf and .svg")


def stated_options(args: argparse.Namespace) -> list[str]:
    """Return the flags of a made topology that the command line states."""
    named = [(long, name) for _, long, name, _, _ in FLAGS] + [(flag, name) for flag, name, _ in SHAPES]
    return [flag for flag, name in [*named, ("--output", "output")] if getattr(args, name) is not None]


def run_topology(args: argparse.Namespace) -> None:
    """Make or read a topology, print what it is, and write the files that are asked for."""
    if args.file:
        if stated := stated_options(args):
            raise InputError(f"{stated[0]} makes a topology and --file reads one; give one or the other")
        topology = read_topology(args.file)
    else:
        options, warnings = make_options({field.name: getattr(args, field.name) for field in fields(Options)})
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        topology = generate(options)
        path = (args.output or Path()) / topology.name
        write_topology(topology, path)
        print(f"wrote {path}")
    print(topology.summary())
    if args.picture:
        from predictor.network.topology.picture import draw_topology  # importing matplotlib takes a second

        draw_topology(topology, args.picture)
        print(f"wrote {args.picture}")
