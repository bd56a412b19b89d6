"""What the given options of ``python -m solver.simai`` mean, and which say nothing to a mode."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from profiler.errors import InputError, shown
from solver.simai.analytical import Overlaps
from solver.simai.collective_time import Machine, nic_of, nvlink_of

#: Options of earlier releases, and why there is nothing for them to do.
_REMOVED = {
    "busbw": "-busbw was removed from SimAI-Analytical in July 2025; give -nv (or -g_type) and -nic (or -nic_t) instead",
}
_NIC = "cx7"  #: where neither -nic nor -nic_t is given
_SPELT = {
    "gpus": "-g",
    "gpus_per_server": "-g_p_s",
    "nics_per_server": "-n_p_s",
    "nvlink": "-nv",
    "nic_busbw": "-nic",
    "gpu_type": "-g_type",
    "nic_type": "-nic_t",
    "dp_o": "-dp_o",
    "tp_o": "-tp_o",
    "ep_o": "-ep_o",
    "pp_o": "-pp_o",
    "result": "-r",
    "result_folder": "-r_f",
    "visual": "-v",
    "language": "-l",
    "workload": "-w",
    "output": "-o",
    "as_device": "--as",
}
_OVERLAPS = ("dp_o", "tp_o", "ep_o", "pp_o")
_SERVERS = ("gpus", "gpus_per_server", "nics_per_server", "nvlink", "nic_busbw", "gpu_type", "nic_type", *_OVERLAPS)
_MODEL = ("config", "model_size")
_MACHINE = ("pre_profiling_data_path", "profile", "as_device", "cluster")
#: Options that say something to each mode.
_OF_MODE = {
    "analytical": {*_SERVERS, "workload", "result", "result_folder", "visual", "language", "output"},
    "price": {*_SERVERS, *_MODEL, *_MACHINE, "vpp", "ep"},
    "export": {
        *_MODEL,
        *_MACHINE,
        "stage",
        "global_batch_size",
        "round_batch",
        "seq_len",
        "framework",
        "set",
        "memory_limit_gib",
        "approximate",
        "world_size",
    },
    "fill": {"kernel_times", "as_aicb", "recompute_activations", "output"},
}
_SWITCHES = ("as_aicb", "recompute_activations", "round_batch", "approximate")


def mode_of(args: argparse.Namespace) -> str:
    """Return the mode. Raises InputError for a removed option, and for one that has no effect in the mode."""
    for name, sentence in _REMOVED.items():
        if getattr(args, name) is not None:
            raise InputError(sentence)
    mode = next(mode for mode in _OF_MODE if getattr(args, mode) is not None)
    given = {*args.given, *(name for name in _SWITCHES if getattr(args, name))} - {mode}
    for name in sorted(given - _OF_MODE[mode]):
        raise InputError(f"{_spelt(name)} has no effect with --{mode}; leave it out")
    return mode


def check_table_options(args: argparse.Namespace) -> None:
    """Raise InputError for options of ``--price`` that say nothing to a CSV, which has no analytical step."""
    for name in sorted(args.given & {*_SERVERS, *_MODEL, "vpp"}):
        raise InputError(f"{_spelt(name)} has no effect with the price of a .csv; leave it out")


def _spelt(name: str) -> str:
    return _SPELT.get(name, f"--{name}")


def check_output(output: Path, *inputs: Path) -> None:
    """Raise InputError where an output would overwrite what is read."""
    for path in inputs:
        if output.resolve() == path.resolve() and path.is_file():
            raise InputError(f"{output}: is read too; write to another file")


def overlaps_of(args: argparse.Namespace) -> Overlaps:
    """Return the overlap ratios. Raises InputError for what is no share."""
    for name in _OVERLAPS:
        if not 0 <= getattr(args, name) <= 1:
            raise InputError(f"-{name} is {getattr(args, name):g}; it is a share of communication, from 0 to 1")
    return Overlaps(*(getattr(args, name) for name in _OVERLAPS))


def machine_of(args: argparse.Namespace, defaults: Machine | None = None) -> Machine:
    """Return SimAI-Analytical's machine. defaults: for what is not given (without them the servers must be given).

    As there, -nv counts where -g_type is given too, and so does -nic beside -nic_t. Raises InputError for what is missing or
    cannot be.
    """
    for name in ("gpus_per_server", "nics_per_server", "gpus", "nvlink", "nic_busbw"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            raise InputError(f"{_spelt(name)} is {shown(value)}; it must be positive")
    gpus = args.gpus_per_server or (defaults.gpus if defaults else None)
    nics = args.nics_per_server or (defaults.nics if defaults else None)
    if gpus is None or nics is None:
        missing = "-g_p_s" if gpus is None else "-n_p_s"
        raise InputError(f"{missing} is missing; SimAI-Analytical needs the GPUs and the NICs of a server")
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
