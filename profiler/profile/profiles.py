"""Find a profile: the requested one, else the user's own measurements if there are any, else the shipped default."""

from __future__ import annotations

from pathlib import Path

from profiler.errors import InputError
from profiler.profile.profile import Profile
from profiler.profile.store import read_profile

PROF_DATA = Path(__file__).resolve().parents[2] / "prof_data"
DEFAULT_PROFILE = "h100_sxm"
OWN_PROFILE = "data.pt"


def shipped_profiles(folder: Path = PROF_DATA) -> list[str]:
    """Return the names of the profiles in ``folder``, without the user's own."""
    return sorted(path.stem for path in folder.glob("*.pt") if path.name != OWN_PROFILE)


def find_profile(name: str | None = None, path: Path | None = None, folder: Path = PROF_DATA) -> tuple[Profile, str]:
    """Return (profile, a sentence stating which and why): ``path`` if given, else ``name``, else data.pt, else the default."""
    if path is not None:
        return read_profile(path), f"profile: {path}"
    if name is not None:
        known = shipped_profiles(folder)
        if name not in known:
            raise InputError(f"no profile is called {name!r}; choose one of {', '.join(known)}")
        return read_profile(folder / f"{name}.pt"), f"profile: {name} (shipped)"
    own = folder / OWN_PROFILE
    if own.exists():
        return read_profile(own), f"profile: {own}, measured on this machine"
    profile = read_profile(folder / f"{DEFAULT_PROFILE}.pt")
    return profile, f"profile: {DEFAULT_PROFILE} (shipped default: nothing was measured on this machine yet)"
