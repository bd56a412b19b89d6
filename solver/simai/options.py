"""Options of ``python -m solver.simai``: SimAI-Analytical's own, with its spellings, and those of the other modes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from profiler.errors import InputError, shown
from solver.arguments import add_machine_arguments, add_world_size_argument
from solver.simai.analytical import Overlaps
from solver.simai.collective_time import NIC_OF, NVLINK_OF, Machine, nic_of, nvlink_of

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
#: Options of earlier releases, and why there is nothing for them to do.
_REMOVED = {
    "busbw": "-busbw was removed from SimAI-Analytical in July 2025; give -nv (or -g_type) and -nic (or -nic_t) instead",
}
_NIC = "cx7"  #: where neither -nic nor -nic_t is given


def parser() -> argparse.ArgumentParser:
    """Return the parser of all modes."""
    p = argparse.ArgumentParser(
        prog="python -m solver.simai", description="Files and arithmetic of SimAI and AICB (docs/simai.md).", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    mode = p.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--analytical", nargs="?", const="", metavar="WORKLOAD", help="price a SIMAI_workload as SimAI-Analytical does"
    )
    mode.add_argument("--price", metavar="WORKLOAD", help="price a SIMAI_workload on a profile")
    mode.add_argument(
        "--export", type=Path, metavar="OUT", help="write a layout as SIMAI_workload (.txt) or AICB Workload (.csv)"
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
        p.add_argument(f"-{name}_o", f"--{name}_overlap", type=float, default=float(default), dest=f"{name}_o", metavar="SHARE",
                       help=f"share of {name} communication that is hidden (default {default})")  # fmt: skip
    p.add_argument("-r", "--result", metavar="PREFIX", help="of the file's name, which its first cell repeats")
    p.add_argument("-r_f", "--result_folder", type=Path, metavar="DIR", help="where no -o is given (default results)")
    p.add_argument("-v", "--visual", metavar="0|1", help="SimAI's HTML picture: not drawn here")
    p.add_argument("-l", "--language", metavar="en|ja", help="of SimAI's messages: those here are English")
    p.add_argument("-busbw", "--bus-bandwidth", dest="busbw", nargs="?", const="", help=argparse.SUPPRESS)


def check_removed(args: argparse.Namespace) -> None:
    """Raise InputError for options that SimAI-Analytical had once."""
    for name, sentence in _REMOVED.items():
        if getattr(args, name) is not None:
            raise InputError(sentence)


def overlaps_of(args: argparse.Namespace) -> Overlaps:
    """Return the overlap ratios. Raises InputError for what is no share."""
    for name in ("dp_o", "tp_o", "ep_o", "pp_o"):
        if not 0 <= getattr(args, name) <= 1:
            raise InputError(f"-{name} is {getattr(args, name):g}; it is a share of communication, from 0 to 1")
    return Overlaps(args.dp_o, args.tp_o, args.ep_o, args.pp_o)


def machine_of(args: argparse.Namespace, defaults: Machine | None = None) -> Machine:
    """Return SimAI-Analytical's machine. defaults: for what is not given (without them the servers must be given).

    As there, -nv counts where -g_type is given too, and so does -nic beside -nic_t. Raises InputError for what is missing or
    cannot be.
    """
    for name, option in (
        ("gpus_per_server", "-g_p_s"),
        ("nics_per_server", "-n_p_s"),
        ("gpus", "-g"),
        ("nvlink", "-nv"),
        ("nic_busbw", "-nic"),
    ):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            raise InputError(f"{option} is {shown(value)}; it must be positive")
    gpus = args.gpus_per_server or (defaults.gpus if defaults else None)
    nics = args.nics_per_server or (defaults.nics if defaults else None)
    if gpus is None or nics is None:
        raise InputError(
            f"{'-g_p_s' if gpus is None else '-n_p_s'} is missing; SimAI-Analytical needs the GPUs and the NICs of a server"
        )
    nvlink = args.nvlink or (nvlink_of(args.gpu_type) if args.gpu_type else defaults.nvlink if defaults else None)
    if nvlink is None:
        raise InputError("-nv or -g_type is missing; SimAI-Analytical needs the bandwidth of NVLink or the type of the GPU")
    nic = args.nic_busbw or (defaults.nic if defaults and not args.nic_type else nic_of(args.nic_type or _NIC))
    return Machine(gpus, nics, nvlink, nic)


_NUMBERS = re.compile(r"(world_size|tp|pp|ep|gbs|mbs|seq)(\d+)")


def default_prefix(args: argparse.Namespace, workload: Path, machine: Machine) -> str:
    """Return the prefix of the output's name: SimAI's, where the workload's name has AICB's sizes, else the workload's."""
    if args.result is not None:
        return str(args.result)
    name = workload.name
    sizes = {key: int(number) for key, number in _NUMBERS.findall(name)}
    tp, pp, mbs = (sizes.get(key, 0) for key in ("tp", "pp", "mbs"))
    dp = sizes.get("world_size", 0) // (tp * pp) if tp * pp else 0
    if not dp * mbs:
        return f"{workload.stem}-"
    model = name[: max(name.index("world_size") - 1, 0)]
    ga = sizes.get("gbs", 0) // (dp * mbs)
    nic = -1.0 if args.nic_busbw is None else machine.nic
    return f"{model}-tp{tp}-pp{pp}-dp{dp}-ga{ga}-ep{sizes.get('ep', 0)}-NVL{machine.gpus}-{nic * 8:.1f}G-DP{args.dp_o:.1f}-"
