"""Options of a generated network: what each template forces and the defaults that it changes.

The templates Spectrum-X, AlibabaHPN and DCN+, their options and defaults are those of SimAI's generator, so that the same
options give the same file. NVL is this project's own: racks whose GPUs form one NVLink domain, as GB200 NVL72.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from predictor.network.topology.types import LinkKind
from profiler.errors import InputError, closest, shown

#: Sizes of an NVL rack: NVL36 and NVL72.
NVL_RACKS = (36, 72)


@dataclass(frozen=True)
class Options:
    """A network of one pod; rates and latencies as a topology file writes them.

    rails: groups of GPUs with the same number in a server that share ASWs, 1 where the network is not rail-optimised.
    gpus_per_asw: GPUs that one ASW takes. asws: switches that were asked for, None where they follow from the GPUs.
    asws_per_pod: what a pod can hold.
    """

    topology: str | None = None
    rail_optimized: bool = False
    dual_tor: bool = False
    dual_plane: bool = False
    gpus: int = 32
    gpus_per_server: int = 8
    gpu_type: str = "H100"
    nvswitches_per_server: int = 1
    nvlink_bandwidth: str = "2880Gbps"
    nvlink_latency: str = "0.000025ms"
    latency: str = "0.0005ms"
    bandwidth: str = "400Gbps"
    asws: int | None = None
    gpus_per_asw: int = 64
    psws: int = 64
    asw_psw_bandwidth: str = "400Gbps"
    asws_per_pod: int = 64
    error_rate: str = "0"

    @property
    def rails(self) -> int:
        if self.topology == "NVL":
            return TRAY
        return self.gpus_per_server if self.rail_optimized else 1

    @property
    def planes(self) -> int:
        """Links of a GPU's NIC, each to another ASW."""
        return 2 if self.dual_tor else 1

    @property
    def segments(self) -> int:
        """Groups of ASWs that take the same GPUs."""
        return -(-self.gpus // (self.gpus_per_asw * self.rails))

    @property
    def total_asws(self) -> int:
        return self.segments * self.rails * self.planes


#: GPUs of a compute tray of an NVL rack; each has its own NIC, so they are as many rails.
TRAY = 4
_SHAPE = ("rail_optimized", "dual_tor", "dual_plane")


@dataclass(frozen=True)
class Template:
    """shape: the values that a template forces on rail_optimized, dual_tor and dual_plane; defaults: what it changes."""

    shape: tuple[bool, bool, bool]
    defaults: Mapping[str, Any]


_HPN = {"gpus": 15360, "bandwidth": "200Gbps", "gpus_per_asw": 128, "psws": 120, "asws_per_pod": 240}
_DCN = {"gpus": 512, "asws_per_pod": 8, "psws": 8}
_NVL = {
    "gpus": 576,
    "gpus_per_server": 72,
    "gpu_type": "GB200",
    "nvlink_bandwidth": "7200Gbps",
    "gpus_per_asw": 72,
    "psws": 72,
}
#: Templates by (name, the variant that --dp or --dt chooses). NVL: 1.8 TB/s of NVLink in both directions together, eight
#: racks of 72, a 400 Gbit/s NIC per GPU; the four GPUs of a tray are four rails, whose switches have 72 ports down and 72 up.
TEMPLATES: Mapping[tuple[str, bool], Template] = {
    ("Spectrum-X", False): Template((True, False, False), {"gpus": 4096}),
    ("AlibabaHPN", False): Template((True, True, False), _HPN),
    ("AlibabaHPN", True): Template((True, True, True), {**_HPN, "asws_per_pod": 120}),
    ("DCN+", False): Template((False, False, False), _DCN),
    ("DCN+", True): Template((False, True, False), {**_DCN, "bandwidth": "200Gbps", "gpus_per_asw": 128}),
    ("NVL", False): Template((True, False, False), _NVL),
}
NAMES = tuple(dict.fromkeys(name for name, _ in TEMPLATES))
#: Which of --dt and --dp chooses a variant of the template.
_VARIANT = {"AlibabaHPN": "dual_plane", "DCN+": "dual_tor"}
_FLAGS = {"rail_optimized": "--ro", "dual_tor": "--dt", "dual_plane": "--dp"}


def make_options(stated: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return the options that ``stated`` (fields of Options; None: not stated) leads to, and a warning for each overridden one.

    Raises InputError for an unknown template, values out of range, and shapes that do not exist.
    """
    known = {field.name for field in fields(Options)}
    given = {name: value for name, value in stated.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        raise InputError(f"no option of a topology is called {shown(unknown[0])}{closest(unknown[0], known)}")
    name = given.get("topology")
    warnings = []
    if name is None:
        options = Options(**given)
    else:
        if name not in NAMES:
            raise InputError(f"no topology is called {shown(name)}{closest(name, NAMES)}; the templates are {', '.join(NAMES)}")
        template = TEMPLATES[name, bool(given.get(_VARIANT.get(name, ""), False))]
        forced = dict(zip(_SHAPE, template.shape, strict=True))
        warnings = [f"{_FLAGS[part]} is ignored: {name} is never so" for part in _SHAPE if given.get(part) and not forced[part]]
        options = Options(**{**template.defaults, **given, **forced})
    _check(options)
    if options.asws is not None and options.asws != options.total_asws:
        warnings.append(f"-asn {options.asws} is overridden: {options.gpus} GPUs need {options.total_asws} ASWs here")
    return replace(options, asws=options.total_asws), warnings


def _check(options: Options) -> None:
    _check_numbers(options)
    for bandwidth, latency in (
        (options.nvlink_bandwidth, options.nvlink_latency),
        (options.bandwidth, options.latency),
        (options.asw_psw_bandwidth, options.latency),
    ):
        LinkKind(bandwidth, latency, options.error_rate)
    if not re.fullmatch(r"[^\s/\\]+", options.gpu_type):
        raise InputError(f"the GPU type is {shown(options.gpu_type)}; it must be one word, as in H100")
    if options.topology == "NVL" and options.gpus_per_server not in NVL_RACKS:
        raise InputError(f"an NVL rack has 36 or 72 GPUs, not {options.gpus_per_server}; give -gps 36 or -gps 72")
    if options.gpus % options.gpus_per_server:
        raise InputError(
            f"{options.gpus} GPUs do not fill servers of {options.gpus_per_server}; choose -g as a multiple of -gps"
        )
    if options.dual_plane and not (options.rail_optimized and options.dual_tor):
        raise InputError("--dp needs a rail-optimised network with two ToRs: add --ro and --dt, or take -topo AlibabaHPN")
    _check_capacity(options)


def _check_numbers(options: Options) -> None:
    least = {"gpus": 1, "gpus_per_server": 1, "nvswitches_per_server": 0, "gpus_per_asw": 1, "psws": 0, "asws_per_pod": 1}
    for name, low in least.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 10**6:
            raise InputError(f"{name.replace('_', ' ')} is {shown(value)}; it must be a whole number from {low} to 1000000")
    most_links = options.total_asws * options.psws + options.gpus * (options.planes + options.nvswitches_per_server)
    if most_links > 50_000_000:
        raise InputError(f"these options give {most_links} links; at most 50000000 are made")


def _check_capacity(options: Options) -> None:
    share = options.rails if options.rail_optimized else options.planes
    most = options.asws_per_pod // share
    if options.segments > most:
        raise InputError(
            f"{options.gpus} GPUs need {options.segments} segments, and one pod of {options.asws_per_pod} ASWs holds {most}; "
            f"use fewer GPUs (-g), or raise -app or -npa"
        )


def file_name(options: Options) -> str:
    """Return the name that SimAI's generator gives the file; NVL36 or NVL72 and the same parts for NVL."""
    size = f"{options.gpus}g_{options.gpus_per_server}gps"
    end = f"{options.bandwidth}_{options.gpu_type}".replace("/", "p")
    plane = "DualPlane" if options.dual_plane else "SinglePlane"
    tor = "DualToR" if options.dual_tor else "SingleToR"
    if options.topology == "NVL":
        return f"NVL{options.gpus_per_server}_{size}_{end}"
    if options.topology == "DCN+":
        return f"DCN+{tor}_{size}_{end}"
    if not options.rail_optimized:
        return f"No_Rail_Opti_{size}_{tor}_{end}"
    if options.dual_tor:
        return f"{options.topology or 'Rail_Opti'}_{size}_{tor}_{plane}_{end}"
    return f"Spectrum-X_{size}_{end}" if options.topology == "Spectrum-X" else f"Rail_Opti_SingleToR_{size}_{end}"
