"""Find a profile: a shipped one by name, the user's own measurements by theirs, or a file."""

from __future__ import annotations

from pathlib import Path

from profiler.errors import InputError, closest
from profiler.profile.profile import Profile
from profiler.profile.store import read_profile

PROF_DATA = Path(__file__).resolve().parents[2] / "prof_data"
DEFAULT_PROFILE = "h100_sxm"
OWN_PROFILE = "data.pt"
OWN_NAME = "data"  #: names the user's own measurements


def shipped_profiles(folder: Path = PROF_DATA) -> list[str]:
    """Return the names of the profiles in ``folder``, without the user's own."""
    return sorted(path.stem for path in folder.glob("*.pt") if path.name != OWN_PROFILE)


def find_profile(name: str | None = None, path: Path | None = None, folder: Path = PROF_DATA) -> tuple[Profile, str]:
    """Return (profile, a sentence that states which): ``path`` if given, else ``name``, else the shipped default.

    "data" names the user's own measurements; without a name they are mentioned, but not used, so that the same command has the
    same answer before and after measuring. Raises InputError for a name that is not known.
    """
    own = folder / OWN_PROFILE
    if path is not None:
        return read_profile(path), f"profile: {path}"
    if name == OWN_NAME:
        if not own.exists():
            raise InputError(f"no profile {OWN_NAME!r}: nothing was measured here yet (gen_profiler_data.py writes {own})")
        return read_profile(own), f"profile: {own}, measured on this machine"
    known = shipped_profiles(folder)
    if name is not None and name not in known:
        raise InputError(f"no profile is called {name!r}{closest(name, known)}; choose one of {', '.join([*known, OWN_NAME])}")
    exists = f"; your own measurements exist: --profile {OWN_NAME}" if name is None and own.exists() else ""
    chosen = name or DEFAULT_PROFILE
    return read_profile(folder / f"{chosen}.pt"), f"profile: {chosen} (shipped{'' if name else ' default'}){exists}"
