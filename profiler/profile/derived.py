"""Profiles of devices that were not measured: whose measurements are rescaled, and by what beside the datasheets.

Power: a chip of ``units`` multiprocessors at frequency f takes idle power and, since voltage follows frequency, units * f^3
beside it; its rate is units * f. At its limit of power P the rate is therefore units^(2/3) * (P - idle)^(1/3). Long kernels run
there in training, so between two chips of one generation their rates differ by this and not by the peaks of the datasheets.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace

from profiler.errors import InputError
from profiler.profile.devices import DATASHEETS, Datasheet
from profiler.profile.profile import Derivation, Profile

#: Share of a chip's most power that it takes whatever its clock: leakage, memory and links (assumed; an H100 of 700 W idles at
#: 70 to 110 W).
IDLE_SHARE = 0.15


def derived_profile(name: str, sheet: Datasheet, kernels: Profile, links: Profile | None = None) -> Profile:
    """Return a profile of a device that was not measured, from measurements of ``kernels`` (and of ``links`` inside a node)."""
    links = links or kernels
    base = DATASHEETS.get(kernels.name)
    of_vendor = kernels.device.name.split()[0] == sheet.device.name.split()[0]
    same = base is not None and base.architecture == sheet.architecture
    similarity = "architecture" if same else "vendor" if of_vendor else ""
    slower = power_slowdown(base, sheet) if base is not None and same else dict.fromkeys(sheet.device.peak_flops, 1.0)
    derivation = Derivation(kernels, links, similarity, slower, sheet.kernel_scale)
    content = repr((asdict(sheet), kernels.digest, links.digest))
    meta = {key: kernels.meta[key] for key in ("laws", "sustained") if key in kernels.meta}
    # kernels stand for no newer attention than they were measured with
    device = replace(sheet.device, flash_version=min(sheet.device.flash_version, kernels.device.flash_version))
    return Profile(name, device, {}, meta, hashlib.sha256(content.encode()).hexdigest()[:20], derivation)


def power_slowdown(base: Datasheet, sheet: Datasheet) -> dict[str, float]:
    """Return, by number format, the time of a kernel at the limit of power of ``sheet`` over what the peaks alone make of it.

    A format that ``base`` does not have is as far from its peak as bf16, and none is further: where the peak of a narrower
    format grows alone, its units have changed (NVFP4 from B200 to GB300, of which runs in sight use all).
    """
    units = sheet.device.num_sms / base.device.num_sms
    idle = IDLE_SHARE * base.power
    power = (sheet.power - units * idle) / (base.power - idle)
    if power <= 0:
        raise InputError(f"{sheet.device.name}: power_watts {sheet.power:g} is less than its {sheet.device.num_sms} "
                         "multiprocessors take when idle")  # fmt: skip
    rate = units ** (2 / 3) * power ** (1 / 3)
    measured, peaks = base.device.peak_flops, sheet.device.peak_flops
    found = {dtype: peak / measured[dtype] / rate for dtype, peak in peaks.items() if dtype in measured}
    wide = found.get("bf16", 1.0)
    return {dtype: min(found.get(dtype, wide), wide) for dtype in peaks}
