"""Profiles of devices that were not measured: whose measurements are rescaled, and by what beside the datasheets.

Power: a chip of ``units`` multiprocessors at frequency f takes idle power and, since voltage follows frequency, units * f^3
beside it; its rate is units * f. At its power limit P the rate is therefore units^(2/3) * (P - idle)^(1/3). Long kernels run
there in training, so between two chips of one generation their rates differ by this and not by the peaks of the datasheets.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace

import numpy as np

from profiler.errors import InputError
from profiler.profile.devices import DATASHEETS, Datasheet, datasheet_of_device
from profiler.profile.profile import Derivation, Profile, gemm_flops

#: Share of a chip's most power that it takes whatever its clock: leakage, memory and links (assumed; an H100 of 700 W idles at
#: 70 to 110 W).
IDLE_SHARE = 0.15


def derived_profile(name: str, sheet: Datasheet, kernels: Profile, links: Profile | None = None, where: str = "") -> Profile:
    """Return a profile of a device that was not measured, from measurements of ``kernels`` (and of ``links`` inside a node).

    Raises InputError, which ``where`` (the device's file; its name) begins, where the figures cannot be those of a chip that
    runs these kernels.
    """
    links = links or kernels
    base = datasheet_of_device(kernels.device)
    of_vendor = _vendor(kernels) == sheet.device.name.split()[0]
    same = bool(base) and DATASHEETS[base].architecture == sheet.architecture
    similarity = "architecture" if same else "vendor" if of_vendor else ""
    stated = base if same else sheet.kernel_scale_of
    beside, power = (stated, sheet.power) if stated else power_reference(sheet)
    try:
        slower = dict.fromkeys(sheet.device.peak_flops, 1.0)
        if beside:
            slower = power_slowdown(DATASHEETS[beside], replace(sheet, power=power))
        _check_scale(sheet, kernels)
    except InputError as error:
        raise InputError(f"{where or name}: {error}") from None
    assumed = sheet.sources.get("network_gbit", "").lower().startswith("assumed")
    derivation = Derivation(kernels, links, similarity, slower, sheet.kernel_scale, beside, sheet.power, assumed)
    content = repr((asdict(sheet), kernels.digest, links.digest))
    meta = {key: kernels.meta[key] for key in ("laws", "sustained") if key in kernels.meta}
    # kernels stand for no newer attention than they were measured with
    device = replace(sheet.device, flash_version=min(sheet.device.flash_version, kernels.device.flash_version))
    return Profile(name, device, {}, meta, hashlib.sha256(content.encode()).hexdigest()[:20], derivation)


def power_reference(sheet: Datasheet) -> tuple[str, float]:
    """Return the known device of the architecture of ``sheet`` beside which its power limit counts, "" if none is known, and
    the power [W] at which ``sheet`` is beside it, where kernels of another architecture are rescaled.

    Of measured devices, or else of all known ones, the one with the highest 16-bit peak, whatever the figures of ``sheet``: a
    reference that changed with them would make a better chip slower. Of several with one peak each states it at its own power,
    so that between these more power is no gain; it never is a loss.
    """
    alike = {name: known for name, known in DATASHEETS.items() if known.architecture == sheet.architecture}
    alike = {name: known for name, known in alike.items() if not known.derived_from} or alike
    if not alike:
        return "", sheet.power
    most = max(known.device.half_peak for known in alike.values())
    highest = sorted((known.power, name) for name, known in alike.items() if known.device.half_peak == most)
    below = [one for one in highest if one[0] <= sheet.power] or highest[:1]
    power, name = below[-1]
    return name, power if highest[0][0] <= sheet.power < highest[-1][0] else sheet.power


def power_slowdown(base: Datasheet, sheet: Datasheet) -> dict[str, float]:
    """Return, by number format, the time of a kernel at the power limit of ``sheet`` over what the peaks alone make of it.

    A format that ``base`` does not have is as far from its peak as bf16. None is further, unless both are below it: where the
    peak of a narrower format grows alone, its units have changed (NVFP4 from B200 to GB300, of which runs in sight use all).
    """
    units = sheet.device.num_sms / base.device.num_sms
    idle = IDLE_SHARE * base.power
    power = (sheet.power - units * idle) / (base.power - idle)
    if power <= 0:
        raise InputError(
            f"power_watts {sheet.power:g} is less than the {units * idle:.0f} W that num_sms {sheet.device.num_sms} "
            "multiprocessors take when idle"
        )
    rate = units ** (2 / 3) * power ** (1 / 3)
    measured, peaks = base.device.peak_flops, sheet.device.peak_flops
    found = {dtype: peak / measured[dtype] / rate for dtype, peak in peaks.items() if dtype in measured}
    wide = found.get("bf16", 1.0)
    return {dtype: min(found.get(dtype, wide), max(wide, 1.0)) for dtype in peaks}


def _vendor(kernels: Profile) -> str:
    """Return the first word of a device's name; "" for one whose profile names it with none."""
    return next(iter(kernels.device.name.split()), "")


def _check_scale(sheet: Datasheet, kernels: Profile) -> None:
    """Raise InputError where the scale of the kernels would make the best of them exceed the device's peak."""
    if not sheet.kernel_scale:
        return
    gemms = kernels.table("linear")
    flops = gemm_flops(gemms)
    for dtype, scale in sheet.kernel_scale.items():
        rows, peak = gemms["dtype"] == dtype, kernels.device.peak_flops.get(dtype)
        share = float(np.max(flops[rows] / gemms["seconds"][rows], initial=0.0)) / peak if peak else 0.0
        if scale < share:
            raise InputError(
                f"kernel_scale of {dtype} is {scale:g}: GEMMs of {kernels.name} reach {share:.0%} of its peak, so that with "
                f"less than {share:.2f} they would exceed this one's"
            )
