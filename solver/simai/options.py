"""Options of ``python -m solver.simai``: SimAI-Analytical's own, with its spellings, and those of the other modes."""

from __future__ import annotations

import argparse
from pathlib import Path

from profiler.argument_parser import ArgumentParser
from solver.options.arguments import StoreOnce, add_machine_arguments, add_world_size_argument
from solver.simai.collective_time import NIC_OF, NVLINK_OF

_EXAMPLES = """examples:
  python -m solver.simai --analytical workload.txt -g 128 -g_p_s 8 -n_p_s 8 -nv 360 -nic 48.5 -o out.csv
      the step of a SIMAI_workload as SimAI-Analytical computes it
  python -m solver.simai --price workload.txt --profile h100_sxm
      the same file with the collectives of a measured profile, and why the two differ
  python -m solver.simai --export workload.txt --config configs/7B_internlm2.py --world_size 64
      the layout of a config as SIMAI_workload text (.txt) or as AICB Workload (.csv), with predicted times
  python -m solver.simai --fill workload.txt --kernel_times aiob.txt -o filled.txt
      the compute columns of a workload from a kernel-time file of aiob
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all modes."""
    p = ArgumentParser(
        prog="python -m solver.simai",
        description="Files and arithmetic of SimAI and AICB (docs/simai.md).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.register("action", None, StoreOnce)
    mode = p.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--analytical", nargs="?", const="", metavar="WORKLOAD", help="price a SIMAI_workload as SimAI-Analytical does"
    )
    mode.add_argument("--price", metavar="WORKLOAD", help="price a SIMAI_workload or a Workload .csv on a profile")
    mode.add_argument(
        "--export", type=Path, metavar="OUT", help="write a layout: SIMAI_workload .txt, AICB Workload .csv, times .aiob"
    )
    mode.add_argument("--fill", type=Path, metavar="WORKLOAD", help="fill the compute columns of a .txt or .csv workload")
    p.add_argument("-o", "--output", type=Path, metavar="OUT", help="file to write")
    _add_simai_arguments(p.add_argument_group("of SimAI-Analytical (--analytical, --price)"))
    fill = p.add_argument_group("of --fill")
    fill.add_argument("--kernel_times", type=Path, metavar="FILE", help="kernel-time file of aiob, finished or raw")
    fill.add_argument("--as_aicb", action="store_true", help="fill as AICB does, with its errors")
    fill.add_argument("--recompute_activations", action="store_true", help="attention's forward runs twice (with --as_aicb)")
    other = p.add_argument_group("of --export and --price")
    other.add_argument("--stage", type=int, help="pipeline stage to export, from 0 (default: the slowest)")
    other.add_argument("--vpp", type=int, help="chunks of each stage (default: the file's vpp, where it is not AICB's layers)")
    other.add_argument("--ep", type=int, help="ranks that share the experts, for a .csv, in which AICB does not state them")
    add_machine_arguments(p)
    add_world_size_argument(p)
    return p


def _add_simai_arguments(p: argparse._ArgumentGroup) -> None:
    p.add_argument("-w", "--workload", metavar="FILE", help="the workload, where --analytical does not name it")
    p.add_argument("-g", "--gpus", type=int, help="GPUs (default: the workload's all_gpus)")
    p.add_argument("-g_p_s", "--gpus-per-server", type=int, dest="gpus_per_server", metavar="N")
    p.add_argument("-n_p_s", "--nic_per_server", type=int, dest="nics_per_server", metavar="N")
    p.add_argument("-nv", "--nvlink", type=float, metavar="GB/s", help="NVLink bus bandwidth of a GPU (2^30 bytes/s)")
    p.add_argument("-nic", "--nic_busbw", type=float, metavar="GB/s", help="bus bandwidth of a NIC (2^30 bytes/s)")
    p.add_argument("-g_type", "--gpu_type", metavar="TYPE", help=f"instead of -nv: {', '.join(NVLINK_OF)}")
    p.add_argument("-nic_t", "--nic_type", metavar="TYPE", help=f"instead of -nic: {', '.join(NIC_OF)} (default cx7)")
    for name, default in (("dp", 0), ("tp", 0), ("ep", 0), ("pp", 1)):
        p.add_argument(
            f"-{name}_o",
            f"--{name}_overlap",
            type=float,
            default=float(default),
            dest=f"{name}_o",
            metavar="SHARE",
            help=f"share of {name} communication that is hidden (default {default})",
        )
    p.add_argument("-r", "--result", metavar="PREFIX", help="of the file's name, which its first cell repeats")
    p.add_argument("-r_f", "--result_folder", type=Path, metavar="DIR", help="where no -o is given (default results)")
    p.add_argument("-v", "--visual", metavar="0|1", help="SimAI's HTML picture: not drawn here")
    p.add_argument("-l", "--language", metavar="en|ja", help="of SimAI's messages: those here are English")
    p.add_argument("-busbw", "--bus-bandwidth", dest="busbw", nargs="?", const="", help=argparse.SUPPRESS)
