"""Find a profile: a shipped one by name, one derived from it, the user's own measurements by theirs, or a file."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from pathlib import Path

from profiler.errors import InputError, closest
from profiler.profile.derived import derived_profile
from profiler.profile.devices import DATASHEETS, FOLDER, MOST_OVER_HALF, Datasheet, device_named, read_datasheet
from profiler.profile.profile import Device, Profile
from profiler.profile.store import read_profile

PROF_DATA = Path(__file__).resolve().parents[2] / "prof_data"
DEFAULT_PROFILE = "h100_sxm"
OWN_PROFILE = "data.pt"
OWN_NAME = "data"  #: names the user's own measurements


def shipped_profiles(folder: Path = PROF_DATA) -> list[str]:
    """Return the names of the measured profiles in ``folder``, without the user's own."""
    return sorted(path.stem for path in folder.glob("*.pt") if path.name != OWN_PROFILE)


def _shipped(folder: Path, name: str) -> Profile:
    path = folder / f"{name}.pt"
    return _read(path, path.stat().st_mtime_ns) if path.exists() else read_profile(path)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Profile:
    return read_profile(path)


def derived_profiles() -> list[str]:
    """Return the names of the devices of configs/devices that are derived from a measured one."""
    return sorted(name for name, sheet in DATASHEETS.items() if sheet.derived_from)


def known_profiles() -> list[str]:
    """Return the names of all profiles but the user's own."""
    return [*shipped_profiles(), *derived_profiles()]


def find_profile(name: str | None = None, path: Path | None = None, folder: Path = PROF_DATA) -> tuple[Profile, str]:
    """Return (profile, a sentence that states which): ``path`` if given, else ``name``, else the shipped default.

    A device's name may be spelt as people write it ("H100 PCIe"). "data" names the user's own measurements; without a name they
    are mentioned, but not used, so that the same command has the same answer before and after measuring. Raises InputError for
    a name that is not known.
    """
    own = folder / OWN_PROFILE
    if path is not None:
        return read_profile(path), f"profile: {path}"
    if name == OWN_NAME:
        if not own.exists():
            raise InputError(f"no profile {OWN_NAME!r}: nothing was measured here yet (gen_profiler_data.py writes {own})")
        profile = read_profile(own)
        joined = " and ".join(str(part).split(",")[0] for part in profile.meta.get("merged") or ())
        return profile, f"profile: {own}, {'joined from ' + joined if joined else 'measured on this machine'}"
    known, derived = shipped_profiles(folder), derived_profiles()
    name = device_named(name) if name is not None and name not in known else name
    if name in derived and name not in known:
        return as_device(None, name, folder)
    if name is not None and name not in known:
        if name.endswith(".json"):
            raise InputError(
                f"no profile is called {name!r}: that is a device's file; give it with --as (as= in a side of compare)"
            )
        others = [*known, OWN_NAME, *derived]
        raise InputError(f"no profile is called {name!r}{closest(name, others)}; choose one of {', '.join(others)}")
    exists = f"; your own measurements exist: --profile {OWN_NAME}" if name is None and own.exists() else ""
    chosen = name or DEFAULT_PROFILE
    return _shipped(folder, chosen), f"profile: {chosen} (shipped{'' if name else ' default'}){exists}"


def as_device(profile: Profile | None, name_or_path: str, folder: Path = PROF_DATA) -> tuple[Profile, str]:
    """Return (the profile rescaled to another device, a sentence that says so).

    profile: whose kernels are rescaled; None: those that the device's file names (derived_from), or of a measured device of
    its architecture, or the shipped default.
    name_or_path: a device of configs/devices, or a device file. Collectives are those of its links_from, where it names one.
    Raises InputError for a name that is not known.
    """
    if profile is not None and profile.derivation:
        raise InputError(f"profile {profile.name} is itself derived; name a measured one")
    name = device_named(name_or_path)
    where = str(FOLDER / f"{name}.json")
    if name in DATASHEETS:
        sheet = DATASHEETS[name]
    elif name_or_path.endswith(".json"):
        where, name, sheet = name_or_path, Path(name_or_path).stem, read_datasheet(Path(name_or_path))
    else:
        known = list(DATASHEETS)
        raise InputError(
            f"no device is called {name_or_path!r}{closest(name_or_path, known)}; choose one of {', '.join(known)}, or give a "
            "device file (.json)"
        )
    kernels = profile or _shipped(folder, sheet.derived_from or _measured_like(sheet))
    links = _shipped(folder, sheet.links_from) if sheet.links_from else None
    found = derived_profile(name, sheet, kernels, links, where)
    return found, _said(found)


def _measured_like(sheet: Datasheet) -> str:
    """Return the measured device of a device's architecture with the same kind of link, or where it states none the nearest
    rate, and of several the one that most known devices are derived from; the default where there is none.

    No other figure decides, so that a better one does not change whose kernels are rescaled.
    """
    alike = [name for name, known in DATASHEETS.items() if not known.derived_from and known.architecture == sheet.architecture]
    bases = Counter(known.derived_from for known in DATASHEETS.values())

    def apart(name: str) -> tuple[float, int]:
        known, own = DATASHEETS[name].device, sheet.device
        kind = own.link_kind.split()[:1]
        links = kind != known.link_kind.split()[:1] if kind else abs(math.log(known.link_bandwidth / own.link_bandwidth))
        return float(links), -bases[name]

    return min(alike, key=apart, default=DEFAULT_PROFILE)


def profile_of(name: str | None, path: Path | None, device: str | None) -> tuple[Profile, str]:
    """Return (profile, a sentence that states which): that of find_profile, rescaled to ``device`` where one is named.

    Without a name and a path it is the one that the device's own file names. Raises InputError as both do.
    """
    if device is None:
        return find_profile(name, path)
    return as_device(find_profile(name, path)[0] if name or path else None, device)


#: A 16-bit peak of a multiprocessor over the highest known of its architecture. With sparsity datasheets state twice as much,
#: of which the clocks of smaller boards (H100 PCIe) leave 1.7; the known ones of one architecture differ by up to 1.3.
_SPARSE = 1.5


def _alike(beside: str) -> list[Device]:
    """Return the known devices of the architecture of a known one."""
    return [sheet.device for sheet in DATASHEETS.values() if sheet.architecture == DATASHEETS[beside].architecture]


def _sparse_peak(own: Device, beside: str) -> float:
    """Return the 16-bit peak of a multiprocessor over the highest known of its architecture; 0 where it is a plausible one.

    beside: a known device of the architecture, or "".
    """
    if not beside:
        return 0.0
    ratio = own.half_peak / own.num_sms / max(device.half_peak / device.num_sms for device in _alike(beside))
    return ratio if ratio >= _SPARSE else 0.0


_ALONE = 1.02  #: a factor beyond which figures have not grown alike


def _grown_alone(own: Device, base: Device) -> str:
    """Return in words what of a chip has grown beside its 16-bit peak, and what that is taken to say of its power; ""."""
    wide, units = own.half_peak / base.half_peak, own.num_sms / base.num_sms
    apart = {
        dtype: own.peak_flops[dtype] / base.peak_flops[dtype] / wide
        for dtype in MOST_OVER_HALF
        if dtype in own.peak_flops and dtype in base.peak_flops
    }
    grown = ", ".join(f"{dtype} {ratio:.2f}" for dtype, ratio in apart.items() if ratio > _ALONE)
    said = f"; units of narrower formats whose peak grew alone draw as much less power: {grown} times" if grown else ""
    if units > _ALONE * wide:
        said += f"; {units:.2f} times the multiprocessors at {wide:.2f} times the peak clock lower, which draws less power"
    return said


def _two_way_links(own: Device, beside: str) -> str:
    """Return the known device of the architecture whose links, the fastest of it, carry half as much; "" without one."""
    if not beside:
        return ""
    fastest = max(_alike(beside), key=lambda device: device.link_bandwidth)
    return fastest.name if abs(own.link_bandwidth / fastest.link_bandwidth / 2 - 1) < 0.1 else ""


#: Words for Derivation.similarity.
_SHARED = {"architecture": "of the same generation", "vendor": "of another generation", "": "of another vendor"}


def _said(profile: Profile) -> str:
    """Return in words what a derived profile is made of, and by which ratios."""
    made, own = profile.derivation, profile.device
    assert made is not None
    base, links = made.kernels.device, made.links.device
    slower = made.power_slowdown.get("bf16", 1.0)
    ratios = {
        "16-bit peak": own.half_peak / base.half_peak,
        "memory": own.memory_bandwidth / base.memory_bandwidth,
        "links": own.link_bandwidth / links.link_bandwidth,
    }
    limit, limited = "16-bit compute time at its power limit over that of its peak", ""
    if made.similarity == "architecture":
        if slower >= 1:
            ratios[limit] = slower
            limited = "; long kernels in 16 bits run at its power limit, where a higher peak makes none faster"
        else:
            limited = "; its power limit leaves long kernels their peak"
        limited += _grown_alone(own, base)
    elif not made.power_beside:
        limited = "; its power limit is not used: no other device of its architecture is known"
    elif slower != 1:
        ratios[f"{limit}, beside {made.power_beside}"] = slower
    elif made.power != DATASHEETS[made.power_beside].power:
        limited = f"; its power limit counts as that of {made.power_beside}"
    known = "only GEMMs of it were compared" if made.kernel_scale else "nothing was measured on it"
    if ratio := _sparse_peak(own, made.power_beside):
        limited += f"; its 16-bit peak is {ratio:.1f} times the highest of its architecture: is it without sparsity?"
    if two_way := _two_way_links(own, made.power_beside):
        limited += f"; its link_gb_s is twice that of {two_way}: is it one direction's?"
    if profile.name in shipped_profiles():
        limited += f"; what was measured on it is --profile {profile.name}, with its own sustained clocks"
    of_links = f", collectives inside a node of {made.links.name}" if made.links is not made.kernels else ""
    by = ", ".join(f"{what} x {ratio:.2f}" for what, ratio in ratios.items())
    return (
        f"profile: {profile.name}, derived: {known}; kernels of {made.kernels.name}, {_SHARED[made.similarity]}, rescaled by "
        f"the datasheets ({by}){of_links}{limited}"
    )
