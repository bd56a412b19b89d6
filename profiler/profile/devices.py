"""Datasheets of accelerators, read from configs/devices: those whose measurements are shipped, and those derived from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from profiler.errors import InputError, closest, shown
from profiler.profile.profile import USUAL_EXPONENTIALS, Device
from profiler.text_file import json_object, read_text
from profiler.units import GB, GBIT, GIB

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "devices"
_FIGURES = ("memory_gib", "memory_bandwidth_gb_s", "num_sms", "gpus_per_node", "link_gb_s", "network_gbit", "power_watts")
_COUNTS = ("num_sms", "gpus_per_node")
_WORDS = ("name", "architecture")
_SOURCE = "source"
_HOST = ("host_link_gb_s", "host_memory_gb_s")
_MOST_BYTES = 1 << 20
#: FlashAttention of a device that states none: newer than any, so that it is that of the kernels that it is derived from.
KERNELS_FLASH = 1000
_EXPONENTIALS = "exponentials_per_clock"
_OPTIONAL = (
    "nvlink_domain",
    "link_peers",
    "link_kind",
    "flash_version",
    _EXPONENTIALS,
    "derived_from",
    "links_from",
    "kernel_scale",
    "kernel_scale_of",
    "aliases",
    *_HOST,
)
#: Words of a device's name that tell no two apart.
_MAKERS = re.compile(r"nvidia|amd|instinct|tensor core|gpus?\b|\b(?:hgx|dgx|oam|sxm[56])\b")
#: What a narrower format is at least as fast as; these and fp32 are the formats that kernels are predicted in.
_NARROWER = {"fp8": "bf16", "mxfp8": "bf16", "nvfp4": "fp8", "bf16": "tf32", "fp16": "tf32", "tf32": "fp32"}
#: Between these lie the bytes per second of memory over the FLOP/s in 16 bits of every accelerator since 2017, with room: ten
#: times the H20's above.
_BALANCE = (5e-4, 0.3)
#: TFLOP/s of a multiprocessor in 16 bits: from a tenth of the least shipped device (V100) to ten times the most (GB200).
_PER_UNIT = (0.156, 164)
#: TFLOP of a joule in 16 bits at the power limit: from a tenth of the least (H20) to ten times the most (B200).
_PER_JOULE = (0.037, 22)
#: Least and most of a figure by its key; memory, network and host as in the bounds of cluster files.
_BOUNDS = {
    "memory_gib": (1e-3, 8192),
    "memory_bandwidth_gb_s": (1, 1e6),
    "link_gb_s": (1e-3, 1e5),
    "network_gbit": (1e-3, 1e6),
    "power_watts": (1, 1e5),
    "host_link_gb_s": (1e-3, 1e5),
    "host_memory_gb_s": (1e-3, 1e5),
    "peak_tflops": (1e-3, 1e6),
    "kernel_scale": (0.5, 5),
    "num_sms": (1, 1 << 16),
    "gpus_per_node": (1, 1 << 12),
    "nvlink_domain": (1, 1 << 12),
    "link_peers": (1, 1 << 12),
    "flash_version": (0, 4),
    _EXPONENTIALS: (1, 1024),
}
_ALIKE = 0.01  #: two peaks of 16 bits that differ by no more are one figure, rounded twice


@dataclass(frozen=True)
class Datasheet:
    """A device, and what is needed to derive it from another or another from it.

    architecture: generation of the chip, in small letters; kernels of one generation scale with clocks, units and bandwidths.
    power: watts at most. derived_from: the profile whose measurements are rescaled, "" where it has its own. links_from: the
    profile whose collectives are, where that is another one. sources: where each figure is from, by its key. kernel_scale: time
    of GEMMs that were measured on it over the rescaled one, by number format (bf16, fp8); on the device kernel_scale_of, where
    that is another one. aliases: other names that people write, in any spelling.
    """

    device: Device
    architecture: str
    power: float
    derived_from: str = ""
    links_from: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    kernel_scale: Mapping[str, float] = field(default_factory=dict)
    kernel_scale_of: str = ""
    aliases: tuple[str, ...] = ()


def read_datasheet(path: Path) -> Datasheet:
    """Read a device file. Raises InputError for a missing or unknown key, for figures that contradict each other, and for names
    of devices that were not measured."""
    sheet = _read(path)
    measured = [name for name, known in DATASHEETS.items() if not known.derived_from]
    for key, name in (("derived_from", sheet.derived_from), ("links_from", sheet.links_from)):
        if name and name not in measured:
            meant = closest(name, measured)
            raise InputError(f"{path}: {key} is {shown(name)}{meant}; it must name a measured device: {', '.join(measured)}")
    if (of := sheet.kernel_scale_of) and of not in DATASHEETS:
        raise InputError(f"{path}: kernel_scale_of is {shown(of)}{closest(of, [*DATASHEETS])}; it must name a known device")
    return sheet


def _read(path: Path) -> Datasheet:
    what = f"a device file, JSON with {', '.join((*_WORDS, 'peak_tflops', *_FIGURES, _SOURCE))}"
    values = json_object(read_text(path, what, _MOST_BYTES), path)
    try:
        return datasheet_of(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def is_datasheet(path: Path) -> bool:
    """Whether a file is a device's, which states its peaks. Raises InputError for a file that is not JSON."""
    return path.is_file() and "peak_tflops" in json_object(read_text(path, "a JSON file", _MOST_BYTES), path)


def datasheet_of(values: Mapping[str, Any]) -> Datasheet:
    """Return the datasheet that ``values`` (the content of a device file) states."""
    needed = (*_WORDS, "peak_tflops", *_FIGURES, _SOURCE)
    missing, unknown = [key for key in needed if key not in values], sorted(set(values) - {*needed, *_OPTIONAL})
    if missing or unknown:
        what = (
            f"{missing[0]} is missing" if missing else f"unknown key {unknown[0]!r}{closest(unknown[0], [*needed, *_OPTIONAL])}"
        )
        raise InputError(f"{what}; a device states {', '.join(needed)}, and may state {', '.join(_OPTIONAL)}")
    words = {key: _word(key, values[key]) for key in _WORDS}
    figures = {key: _number(key, values[key]) for key in _FIGURES if key not in _COUNTS}
    host_link, host_memory = (_number(key, values[key]) * GB if key in values else 0.0 for key in _HOST)
    device = Device(
        words["name"],
        _peaks(values["peak_tflops"]),
        figures["memory_gib"] * GIB,
        figures["memory_bandwidth_gb_s"] * GB,
        _whole("num_sms", values["num_sms"]),
        _whole("gpus_per_node", values["gpus_per_node"]),
        figures["link_gb_s"] * GB,
        figures["network_gbit"] * GBIT,
        str(values.get("link_kind", "")),
        _whole("flash_version", values["flash_version"]) if "flash_version" in values else KERNELS_FLASH,
        _whole("nvlink_domain", values["nvlink_domain"]) if "nvlink_domain" in values else 0,
        host_link,
        host_memory,
        exponentials=_number(_EXPONENTIALS, values[_EXPONENTIALS]) if _EXPONENTIALS in values else USUAL_EXPONENTIALS,
        link_peers=_whole("link_peers", values["link_peers"]) if "link_peers" in values else 0,
    )
    _check(device)
    _check_power(device, figures["power_watts"])
    names = ("derived_from", "links_from", "kernel_scale_of")
    derived_from, links_from, scale_of = (_word(key, values[key]) if key in values else "" for key in names)
    scale = _scale(values.get("kernel_scale", {}))
    if scale_of and not scale:
        raise InputError("kernel_scale_of changes nothing without kernel_scale; state both or none")
    aliases = _aliases(values.get("aliases", []))
    return Datasheet(
        device,
        words["architecture"].strip().lower(),
        figures["power_watts"],
        derived_from,
        links_from,
        _sources(values),
        scale,
        scale_of,
        aliases,
    )


def _check_power(device: Device, watts: float) -> None:
    """Refuse a power limit with which the peak is no chip's."""
    half, (least, most) = device.half_peak / 1e12, _PER_JOULE
    if not least <= half / watts <= most:
        raise InputError(
            f"peak_tflops of {half:g} in 16 bits at power_watts {watts:g} are {half / watts:.3g} TFLOP a joule, where chips do "
            f"{least:g} to {most:g}: one of the two is wrong"
        )


def _aliases(stated: Any) -> tuple[str, ...]:
    """Return the other names of a device."""
    if not isinstance(stated, list) or not all(isinstance(alias, str) and _spelling(alias) for alias in stated):
        raise InputError(f"aliases is {shown(stated)}; it must be a list of names")
    return tuple(stated)


def _peaks(stated: Any) -> dict[str, float]:
    """Return the dense FLOP/s of each number format, whole."""
    if not isinstance(stated, Mapping) or not stated:
        raise InputError(f"peak_tflops is {shown(stated)}; it must be an object, {{number format: dense TFLOP/s}}")
    formats = [*_NARROWER, "fp32"]
    if other := next((dtype for dtype in stated if dtype not in formats), ""):
        raise InputError(f"peak_tflops states {shown(other)}{closest(other, formats)}; formats are {', '.join(formats)}")
    return {dtype: float(round(_number("peak_tflops", peak, dtype) * 1e12)) for dtype, peak in stated.items()}


def _scale(stated: Any) -> dict[str, float]:
    """Return the factors of kernel_scale by number format."""
    if not isinstance(stated, Mapping) or set(stated) - {"bf16", "fp8"}:
        raise InputError(f"kernel_scale is {shown(stated)}; it must be factors by bf16 and fp8, which other formats follow")
    return {dtype: _number("kernel_scale", value, dtype) for dtype, value in stated.items()}


def _sources(values: Mapping[str, Any]) -> dict[str, str]:
    """Return where each stated figure is from, by its key: one text for all of them, or {text: keys}, each key once."""
    figures = [key for key in _BOUNDS if key in values]
    stated = values[_SOURCE]
    if not isinstance(stated, Mapping):
        return dict.fromkeys(figures, _word(_SOURCE, stated))
    found: dict[str, str] = {}
    for text, keys in stated.items():
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise InputError(f"source {shown(text)} is {shown(keys)}; it must be a list of the keys of what is from there")
        for key in keys:
            if key not in figures or key in found:
                why = "has two" if key in found else f"is no figure of this file{closest(key, figures)}"
                raise InputError(f"source names {shown(key)}, which {why}; each figure has one source: {', '.join(figures)}")
            found[key] = text
    if missing := [key for key in figures if key not in found]:
        raise InputError(f"source leaves out {missing[0]}; each figure has one source")
    return found


#: The most that chips multiply in a narrower format over 16 bits: twice in 8 bits and six times in 4 (GB300), with room.
MOST_OVER_HALF = {"fp8": 4.5, "mxfp8": 4.5, "nvfp4": 13.0}


def _check(device: Device) -> None:
    """Refuse figures that cannot all be true of one chip."""
    for narrow, wide in _NARROWER.items():
        known = wide if wide in device.peak_flops else _NARROWER.get(wide, wide)
        if narrow in device.peak_flops and device.peak_flops[narrow] < device.peak_flops.get(known, 0.0):
            raise InputError(f"peak_tflops of {narrow} is below that of {known}; narrower numbers are at least as fast")
    half = device.peak_flops.get("bf16") or device.peak_flops.get("fp16")
    if not half:
        raise InputError("peak_tflops states neither bf16 nor fp16, the formats that models are trained in")
    both = [device.peak_flops[dtype] for dtype in ("bf16", "fp16") if dtype in device.peak_flops]
    if max(both) > min(both) * (1 + _ALIKE):
        raise InputError(
            f"peak_tflops of bf16 is {both[0] / 1e12:g} and of fp16 {both[1] / 1e12:g}; rates in 16 bits are alike: state one"
        )
    for narrow, most in MOST_OVER_HALF.items():
        if (times := device.peak_flops.get(narrow, 0.0) / half) > most:
            raise InputError(
                f"peak_tflops of {narrow} is {times:.3g} times that in 16 bits, where chips do at most {most:g} times as much: "
                "one of the two is wrong, or stated with sparsity"
            )
    each, (least, most) = half / 1e12 / device.num_sms, _PER_UNIT
    if not least <= each <= most:
        raise InputError(
            f"peak_tflops of {half / 1e12:g} in 16 bits on num_sms {device.num_sms} are {each:.3g} TFLOP/s a multiprocessor, "
            f"where chips do {least:g} to {most:g}: one of the two is wrong, or a few large cores have several matrix units, "
            "which are then what to count"
        )
    balance = device.memory_bandwidth / half
    if not _BALANCE[0] <= balance <= _BALANCE[1]:
        raise InputError(
            f"memory_bandwidth_gb_s of {device.memory_bandwidth / GB:g} and {half / 1e12:g} TFLOP/s in 16 bits are no chip's: "
            "one of them is in another unit (GB/s; dense TFLOP/s)"
        )
    if device.nvlink_domain and device.nvlink_domain % device.gpus_per_node:
        raise InputError(f"nvlink_domain {device.nvlink_domain} is no multiple of gpus_per_node {device.gpus_per_node}")
    if device.link_peers and device.link_peers != device.gpus_per_node - 1:
        raise InputError(
            f"link_peers is {device.link_peers} of a node of {device.gpus_per_node}; in a full mesh it is one less than "
            "gpus_per_node, and where a switch connects the GPUs it is left out"
        )
    if device.link_peers and device.nvlink_domain:
        raise InputError("link_peers says that no switch connects the GPUs, and nvlink_domain that one does; state one")
    if device.link_bandwidth > device.memory_bandwidth:
        raise InputError("link_gb_s is above memory_bandwidth_gb_s; it is what one GPU sends, per direction")
    if device.network_bandwidth > device.link_bandwidth:
        raise InputError("network_gbit is more than link_gb_s; it is what one GPU sends to other nodes, in Gbit/s")


def _number(key: str, value: Any, dtype: str = "") -> float:
    """Return a figure, or that of one number format. Raises InputError where it is outside the bounds of its key."""
    least, most = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        what = f"{key} of {dtype}" if dtype else key
        raise InputError(f"{what} is {shown(value)}; it must be a positive number between {least:g} and {most:g}")
    return float(value)


def _whole(key: str, value: Any) -> int:
    least, most = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{key} is {shown(value)}; it must be a whole number from {least:g} to {most:g}")
    return value


def _word(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{key} is {shown(value)}; it must be a text that is not empty")
    return value


def _spelling(name: str) -> str:
    return re.sub(r"(\d)g$", r"\1gb", re.sub("[^a-z0-9]", "", _MAKERS.sub(" ", name.lower())))


#: Datasheets by profile name.
DATASHEETS: Mapping[str, Datasheet] = MappingProxyType({path.stem: _read(path) for path in sorted(FOLDER.glob("*.json"))})
#: Their devices. Dense peaks; memory is what a CUDA program can use (torch's total_memory), a little less than printed on the
#: part. Network: that of the usual node, per GPU.
DEVICES: Mapping[str, Device] = MappingProxyType({name: sheet.device for name, sheet in DATASHEETS.items()})


def datasheet_of_device(device: Device) -> str:
    """Return the name of the datasheet of a measured device, which every profile of it keeps; "" where there is none."""
    return next((name for name, sheet in DATASHEETS.items() if sheet.device.name == device.name), "")


def device_named(name: str) -> str:
    """Return the device of configs/devices that ``name`` means, in any spelling ("A100-SXM4-40GB"), or ``name`` as it is."""
    return name if name in DATASHEETS else _NAMES.get(_spelling(name), name)


#: Device by each of its names, in letters and digits.
_NAMES: Mapping[str, str] = MappingProxyType(
    {_spelling(word): name for name, sheet in DATASHEETS.items() for word in (*sheet.aliases, sheet.device.name, name)}
)


def device(name: str) -> Device:
    """Return the datasheet of profile ``name``; raise InputError for an unknown name."""
    if name not in DEVICES:
        raise InputError(f"no datasheet of a device {name!r}; known are {', '.join(DEVICES)}")
    return DEVICES[name]
