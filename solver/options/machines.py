"""A machine by one name, as sweeps and plans list them: a profile, a cluster, or a device file."""

from __future__ import annotations

from pathlib import Path

from profiler.errors import InputError
from profiler.profile.devices import device_named, is_datasheet, read_datasheet
from profiler.profile.profiles import derived_profiles, shipped_profiles
from solver.formats.config_file import load_cluster
from solver.formats.topology_cluster import is_topology

MACHINES = "profiles, clusters of configs/clusters, cluster files, or device files"  #: what a name may be, in words


def machine_options(name: str) -> dict[str, str | None]:
    """Return the options profile, cluster and as_device that mean the machine ``name``; all None for the empty name."""
    found: dict[str, str | None] = {"profile": None, "cluster": None, "as_device": None}
    if device_named(name) in (*shipped_profiles(), *derived_profiles()):
        return found | {"profile": device_named(name)}
    if name.endswith(".json") and is_datasheet(Path(name)):
        return found | {"as_device": name}
    return found | {"cluster": name or None}


def check_machine(name: str) -> None:
    """Raise InputError where a name is neither a profile's nor a cluster's nor a device file's."""
    options = machine_options(name)
    if file := options["as_device"]:
        read_datasheet(Path(file))
    try:
        if options["cluster"]:
            load_cluster(options["cluster"])
    except InputError as error:
        is_file = Path(name).suffix or is_topology(name)
        of = "" if is_file else f"; profiles are {', '.join((*shipped_profiles(), *derived_profiles()))}"
        raise InputError(f"{'' if is_file else 'no profile and '}{error}{of}") from None
