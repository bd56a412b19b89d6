"""Cases of collectives as SimAI's simulator runs them: a JSON object a line, with topology, parallelism and op."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predictor.network.flows.collective import collective
from predictor.network.flows.groups import training_groups
from predictor.network.flows.simulate import DRAWS, simulate
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import Options, make_options
from predictor.network.topology.types import Topology
from profiler.errors import InputError, closest, shown
from profiler.text_file import read_text

_OPS = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "REDUCESCATTER": "reduce_scatter", "ALLTOALL": "all_to_all"}
_SLOTS = {"fwd": "tensor", "ig": "tensor", "wg": "data"}
_SUFFIXES = {"": None, "_EP": "expert", "_DP_EP": "expert_data"}
_RESULTS = ("comm_us", "flows", "wall_s", "rc", "spread_us")
_KEYS = ("name", "topo", "topo_args", "tp", "ep", "gpus", "op", "slot", "bytes", "send_lat_us", "env", *_RESULTS)
_SWITCHES = ("AS_NVLS_ENABLE", "AS_PXN_ENABLE", "AS_SEND_LAT")
_TOPOLOGY = {
    "name": "topology",
    "topo": "topology",
    "topology": "topology",
    "ro": "rail_optimized",
    "dt": "dual_tor",
    "dp": "dual_plane",
    "g": "gpus",
    "gpu": "gpus",
    "gps": "gpus_per_server",
    "gpu_per_server": "gpus_per_server",
    "gt": "gpu_type",
    "gpu_type": "gpu_type",
    "nsps": "nvswitches_per_server",
    "nv_switch_per_server": "nvswitches_per_server",
    "nvbw": "nvlink_bandwidth",
    "nvlink_bw": "nvlink_bandwidth",
    "nl": "nvlink_latency",
    "nv_latency": "nvlink_latency",
    "l": "latency",
    "latency": "latency",
    "bw": "bandwidth",
    "bandwidth": "bandwidth",
    "asn": "asws",
    "asw_switch_num": "asws",
    "npa": "gpus_per_asw",
    "nics_per_aswitch": "gpus_per_asw",
    "psn": "psws",
    "psw_switch_num": "psws",
    "apbw": "asw_psw_bandwidth",
    "ap_bandwidth": "asw_psw_bandwidth",
    "app": "asws_per_pod",
    "asw_per_psw": "asws_per_pod",
    "er": "error_rate",
    "error_rate": "error_rate",
}
_MOST_BYTES, _MOST_US = 1 << 28, 1e12
#: GPUs whose NVSwitches add numbers up, as SimAI knows them, and the smallest group that uses that.
_NVLS_GPUS, _NVLS_LEAST = ("H100", "H800"), 8


@dataclass(frozen=True)
class Case:
    """One collective of a training run, which all groups of its kind run at once.

    latency: seconds. reported: the time that the input states for it [us], None where it states none.
    """

    name: str
    options: Options
    kind: str
    op: str
    tensor: int
    expert: int
    gpus: int
    bytes: int
    latency: float
    nvls: bool
    pxn: bool
    reported: float | None


@dataclass(frozen=True)
class CaseResult:
    """comm_us: time of one group; spread_us: its standard deviation over groups and hashes; wall_s: of the simulation.

    share: part of the flows that was simulated.
    """

    name: str
    comm_us: float
    spread_us: float
    wall_s: float
    share: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        numbers = {"comm_us": round(self.comm_us, 3), "spread_us": round(self.spread_us, 3), "wall_s": round(self.wall_s, 4)}
        return {"name": self.name, **numbers}


def read_flow_cases(path: Path) -> tuple[list[Case], list[str]]:
    """Return the cases of a JSON-lines file, and warnings; raise InputError with the line and the key where one is wrong."""
    lines = read_text(path, "cases, one JSON object a line", _MOST_BYTES).splitlines()
    cases, warnings = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                case, said = parse_case(json.loads(line))
            except RecursionError:
                raise InputError(f"{path}, line {number}: nested too deeply; a case is one flat JSON object") from None
            except InputError as error:
                raise InputError(f"{path}, line {number}: {error}") from None
            except ValueError:  # JSONDecodeError, or an integer of thousands of digits
                raise InputError(f"{path}, line {number}: not a JSON object") from None
            cases.append(case)
            warnings += [f"{case.name}: {one}" for one in said]
    if not cases:
        raise InputError(f"{path}: no cases; write one JSON object a line")
    return cases, warnings


def parse_case(row: Any) -> tuple[Case, list[str]]:
    """Return the case of a JSON object, and warnings; raise InputError for keys and values that are not understood."""
    if not isinstance(row, dict):
        raise InputError(f"{shown(row)} is not a case; write a JSON object")
    _only(row, _KEYS, "a case")
    name, slot = _text(row, "name"), _text(row, "slot", "fwd")
    op, _, suffix = _text(row, "op").partition("_")
    suffix = f"_{suffix}" if suffix else ""
    if op not in _OPS or suffix not in _SUFFIXES:
        raise InputError(f"op is {shown(row['op'])}; it must be one of {', '.join(_OPS)}, which _EP or _DP_EP may follow")
    if slot not in _SLOTS:
        raise InputError(f"slot is {shown(slot)}; it must be one of {', '.join(_SLOTS)}")
    options, warnings = _options(row.get("topo_args", {}))
    env = row.get("env", {})
    if not isinstance(env, dict):
        raise InputError(f"env is {shown(env)}; it must be a JSON object of SimAI's switches")
    _only(env, _SWITCHES, "env")
    latency = env.get("AS_SEND_LAT", row.get("send_lat_us", 2))
    made = generate(options).name
    if row.get("topo") not in (None, made):
        warnings.append(f"topo is {shown(row['topo'])}, and topo_args give {made}, which is used")
    case = Case(
        name=name,
        options=options,
        kind=_SUFFIXES[suffix] or _SLOTS[slot],
        op=_OPS[op],
        tensor=_whole(row, "tp", 1),
        expert=_whole(row, "ep", 1),
        gpus=_whole(row, "gpus", options.gpus),
        bytes=_whole(row, "bytes"),
        latency=_microseconds(latency),
        nvls=_switch(env, "AS_NVLS_ENABLE"),
        pxn=_switch(env, "AS_PXN_ENABLE"),
        reported=_reported(row.get("comm_us")),
    )
    if case.gpus > options.gpus:
        raise InputError(f"gpus is {case.gpus}; the topology has {options.gpus}")
    return case, warnings


def run_case(case: Case, seed: int = 0, draws: int = DRAWS) -> CaseResult:
    """Simulate a case; a group of one GPU has nothing to send and takes no time."""
    begin = time.perf_counter()
    topology = generate(case.options)
    groups = training_groups(case.kind, case.gpus, case.tensor, case.expert)
    if groups.shape[1] == 1:
        return CaseResult(case.name, 0.0, 0.0, time.perf_counter() - begin)
    algorithm = "nvls" if _uses_nvls(case, topology, groups) else None
    pxn = case.pxn and algorithm is None and case.op in ("all_reduce", "reduce_scatter")  # SimAI's all_gather has none
    result = simulate(topology, collective(case.op, groups, case.bytes, algorithm, pxn), case.latency, seed, draws)
    wall = time.perf_counter() - begin
    return CaseResult(case.name, result.group_seconds * 1e6, result.group_spread * 1e6, wall, result.share)


def _uses_nvls(case: Case, topology: Topology, groups: np.ndarray) -> bool:
    wanted = case.nvls and case.op == "all_reduce" and case.kind == "tensor" and groups.shape[1] >= _NVLS_LEAST
    one_server = groups.shape[1] <= topology.gpus_per_server and topology.gpus_per_server % groups.shape[1] == 0
    return wanted and one_server and topology.gpu_type in _NVLS_GPUS and len(topology.nvswitches) > 0


def _options(stated: Any) -> tuple[Options, list[str]]:
    if not isinstance(stated, dict):
        raise InputError(f"topo_args is {shown(stated)}; it must be a JSON object of the generator's options")
    _only(stated, tuple(_TOPOLOGY), "topo_args")
    values: dict[str, Any] = {}
    for key, value in stated.items():
        field = _TOPOLOGY[key]
        if field in ("rail_optimized", "dual_tor", "dual_plane"):
            values[field] = _switch(stated, key)
        elif field in ("topology", "gpu_type", "error_rate") or field.endswith(("bandwidth", "latency")):
            values[field] = value if value is None else str(value)
        else:
            values[field] = None if value is None else _whole(stated, key)
    return make_options(values)


def _only(row: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in row:
        if key not in known:
            raise InputError(f"{where} has no key {shown(key)}{closest(key, known)}; its keys are {', '.join(known)}")


def _text(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str) or not value:
        raise InputError(f"{key} is {shown(value)}; it must be a text")
    return value


def _whole(row: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = row.get(key, default)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**18:
        raise InputError(f"{key} is {shown(value)}; it must be a whole number, not negative")
    return value


def _switch(row: Mapping[str, Any], key: str) -> bool:
    value = row.get(key, False)
    if value in (True, "1", "true"):
        return True
    if value in (False, None, "0", "false", ""):
        return False
    raise InputError(f"{key} is {shown(value)}; it must be 0 or 1")


def _reported(value: Any) -> float | None:
    """Return the microseconds that a case reports; None for none, or for what is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_US:
        return None
    return float(value)


def _microseconds(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < 1e6:
        raise InputError(f"send_lat_us is {shown(value)}; it must be microseconds, from 0 to below a million")
    return number * 1e-6
