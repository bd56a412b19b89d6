"""SimuMax's system file as a profile: what it states of one accelerator and its links, none of it measured here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from profiler.errors import InputError, closest, shown
from profiler.profile.devices import DATASHEETS
from profiler.profile.profile import SUSTAINED_SCALE, Device, Profile
from profiler.units import GIB
from solver.formats.simumax.configs import SystemConfig, check_value
from solver.formats.simumax.fields import Field
from solver.simumax.networks import between_nodes, intra_node, link_bandwidth, network_bandwidth
from solver.simumax.shapes import Op, op_rows, table_of

#: Op of the file -> (table and pass, number format).
OPS = {
    "matmul": ("linear", "bf16"),
    "fp8_matmul": ("linear", "fp8"),
    "sdp_fwd": ("flash_attn.forward", "bf16"),
    "sdp_bwd": ("flash_attn.backward", "bf16"),
    "group_matmul": ("grouped_linear", "bf16"),
    "fp8_group_matmul": ("grouped_linear", "fp8"),
}
BANDWIDTHS = ("default", "permute_fwd", "permute_bwd", "ce", "ce_fusion")
#: Class of the file -> (kind of kernel, launches that its latency counts for).
_OF_CLASS = {"ce_fusion": ("cross_entropy", 1), "permute_fwd": ("permute", 4), "permute_bwd": ("permute_grad", 4)}
#: Kernels that SimuMax prices by its default class, and those that it prices at nothing.
_PRICED = ("norm", "gated_act")
_UNPRICED = ("residual", "rope", "embedding", "copy", "quantize", "softmax", "adam", "transpose")
_LAUNCH = 3e-6  #: seconds of a launch for the latter; the file's latency is not meant for them
_MODE_WHY = "memory-bound work takes time here; it must be 'roofline'"
_ACCELERATOR = ("backend", "mem_gbs", "op", "bandwidth", "mode")
_NUMBER = Field("number")


def profile_of(config: SystemConfig) -> Profile:
    """Return the profile that a system file describes.

    Its ``op`` efficiencies become rows of GEMMs, attention and grouped GEMMs; its ``bandwidth`` classes and networks become
    stated constants. Peak FLOP/s are those of op ``default`` (fp8: of ``fp8_matmul``); the number of multiprocessors, which the
    file does not state, is that of the known device of the closest peak. Raises InputError for an unknown or missing field.
    """
    accelerator = _accelerator(config.accelerator)
    ops = {name: _op(accelerator["op"], name) for name in OPS if name in accelerator["op"] or not name.startswith("fp8")}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, op in ops.items():
        kind, dtype = OPS[name]
        rows.setdefault(kind.split(".")[0], []).extend(op_rows(op, kind, dtype, config.sys_name))
    rows |= between_nodes(config)
    classes = accelerator["bandwidth"]
    default = _bandwidth(classes, "default")
    laws = {"intra_node": intra_node(config), "memory_bound": _memory_bound(classes, default), "own_network": True}
    device = _device(config, ops, float(classes["default"]["gbps"]) * GIB)
    content = json.dumps([asdict(device), rows, laws], sort_keys=True)
    return Profile(
        name=config.sys_name,
        device=device,
        tables={name: table_of(name, found) for name, found in rows.items()},
        meta={"laws": laws, SUSTAINED_SCALE: 1.0},
        digest=hashlib.sha256(content.encode()).hexdigest()[:20],
    )


def _device(config: SystemConfig, ops: Mapping[str, Op], memory_bandwidth: float) -> Device:
    accelerator = config.accelerator
    peak = _op(accelerator["op"], "default").flops if "default" in accelerator["op"] else ops["matmul"].flops
    peaks = {"bf16": peak} | ({"fp8": ops["fp8_matmul"].flops} if "fp8_matmul" in ops else {})
    alike = min((sheet.device for sheet in DATASHEETS.values()), key=lambda one: abs(one.half_peak - peak))
    return Device(
        name=config.sys_name,
        peak_flops=peaks,
        memory_bytes=float(accelerator["mem_gbs"]) * GIB,
        memory_bandwidth=memory_bandwidth,
        num_sms=alike.num_sms,
        gpus_per_node=config.num_per_node,
        link_bandwidth=link_bandwidth(config),
        network_bandwidth=network_bandwidth(config),
        flash_version=alike.flash_version,
    )


def _accelerator(given: Any) -> dict[str, Any]:
    """Return the checked accelerator; of older files, whose bandwidth has no classes, it is the default class."""
    if not isinstance(given, Mapping):
        raise InputError("the system file lacks accelerator, an object with mem_gbs, op, bandwidth and mode")
    accelerator = dict(given)
    if isinstance(given.get("bandwidth"), Mapping) and "gbps" in given["bandwidth"]:
        accelerator["bandwidth"] = {"default": given["bandwidth"]}
    _check_accelerator(accelerator)
    return accelerator


def _check_accelerator(accelerator: Mapping[str, Any]) -> None:
    unknown = [name for name in accelerator if name not in _ACCELERATOR and not name.startswith("_")]
    if unknown:
        raise InputError(f"system field accelerator.{unknown[0]} is not known{closest(unknown[0], _ACCELERATOR)}")
    for name in ("op", "bandwidth"):
        if not isinstance(accelerator.get(name), Mapping) or not accelerator[name]:
            raise InputError(f"system field accelerator.{name} is {shown(accelerator.get(name))}; it must be an object")
    memory, mode = accelerator.get("mem_gbs"), accelerator.get("mode", "roofline")
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < 1e6:
        raise InputError(f"system field accelerator.mem_gbs is {shown(memory)}; it must be a positive number of GiB")
    if mode != "roofline":
        raise InputError(f"system field accelerator.mode is {shown(mode)}, which is not modelled: {_MODE_WHY}")
    known = {"op": (*OPS, "default"), "bandwidth": BANDWIDTHS}
    for part, names in known.items():
        wrong = [name for name in accelerator[part] if name not in names and not name.startswith("_")]
        if wrong:
            raise InputError(
                f"system field accelerator.{part}.{wrong[0]} is not known{closest(wrong[0], names)}; known: {', '.join(names)}"
            )


def _op(ops: Mapping[str, Any], name: str) -> Op:
    """Return an op of the file, the default where it is not stated."""
    given = ops.get(name) or ops.get("default")
    where = f"system field accelerator.op.{name}"
    if not isinstance(given, Mapping):
        raise InputError(f"{where} is missing, and so is default; state one with tflops and efficient_factor")
    unknown = sorted(set(given) - {"tflops", "efficient_factor", "accurate_efficient_factor"})
    if unknown:
        raise InputError(f"{where}.{unknown[0]} is not known; it has tflops, efficient_factor and accurate_efficient_factor")
    listed = given.get("accurate_efficient_factor") or {}
    if not isinstance(listed, Mapping):
        raise InputError(f"{where}.accurate_efficient_factor is {shown(listed)}; it must be an object, {{shape: efficiency}}")
    values = {f"{where}.tflops": given.get("tflops"), f"{where}.efficient_factor": given.get("efficient_factor")}
    values |= {f"{where}: efficiency of {shape}": value for shape, value in listed.items()}
    for what, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise InputError(f"{what} is {shown(value)}; it must be a positive number")
    return Op(name, float(given["tflops"]) * 1e12, float(given["efficient_factor"]), listed)


def _bandwidth(classes: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return (bytes/s, seconds of a launch) of a class of kernels."""
    given = classes.get(name)
    where = f"system field accelerator.bandwidth.{name}"
    if not isinstance(given, Mapping) or {"gbps", "efficient_factor", "latency_us"} - set(given):
        raise InputError(f"{where} is {shown(given)}; it must be an object with gbps, efficient_factor and latency_us")
    known = ("gbps", "efficient_factor", "latency_us")
    for key, value in given.items():
        if key not in known and not key.startswith("_"):
            raise InputError(f"{where}.{key} is not known{closest(key, known)}; known are {', '.join(known)}")
        if key in known and value is None:
            raise InputError(f"{where}.{key} is null; it must be a number")
        if key in known:
            check_value(f"{where}.{key}", value, _NUMBER)
    if not given["gbps"] or not given["efficient_factor"]:
        raise InputError(f"{where}: gbps and efficient_factor must be positive")
    return float(given["gbps"]) * GIB * float(given["efficient_factor"]), float(given["latency_us"]) * 1e-6


def _memory_bound(classes: Mapping[str, Any], default: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Return the constants of every kind of kernel that moves bytes, as a profile states them."""
    found = dict.fromkeys(_UNPRICED, (default[0], _LAUNCH)) | dict.fromkeys(_PRICED, default)
    for name in (name for name in classes if not name.startswith("_")):
        bandwidth, latency = _bandwidth(classes, name)
        if name in _OF_CLASS:
            kind, launches = _OF_CLASS[name]
            found[kind] = bandwidth, latency * launches
    return {kind: {"bandwidth": rate, "latency_s": seconds} for kind, (rate, seconds) in found.items()}
