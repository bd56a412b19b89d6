"""A profile becomes a cost model: every model is fitted to its tables, and the fits are kept for later starts.

They are kept as plain arrays, keyed by the profile's content and by this package's source. Deleting the cache changes nothing
but the time of the next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from predictor.cost_model import CostModel
from predictor.derived import derived_cost_model
from predictor.host_costs import HostCosts
from predictor.kernel_costs import KernelCosts
from predictor.kernels.derating import Laboratories, compared_at_full_clocks, deratings_of
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.grouped_linear import GroupedLinearModel
from predictor.kernels.known_constants import KnownConstants
from predictor.kernels.linear import LinearModel
from predictor.kernels.memory_bound import MemoryBoundModel
from predictor.network.collective import CollectiveModel
from predictor.network.expert_exchange import ExpertExchangeModel
from predictor.network.overlap import contention
from predictor.network.rank_skew import rank_skew_seconds
from predictor.network_costs import NetworkCosts
from profiler.errors import InputError, printable
from profiler.files import replacing, source_digest
from profiler.profile.profile import Profile, Table, gemm_flops

_MODELS: dict[str, Any] = {
    "linears": LinearModel,
    "grouped": GroupedLinearModel,
    "attention": FlashAttnModel,
    "memory": MemoryBoundModel,
    "collectives": CollectiveModel,
    "exchanges": ExpertExchangeModel,
    "laboratories": Laboratories,
}


_PACKAGE = Path(__file__).resolve().parent
SHIPPED_CONSTANTS = _PACKAGE / "kernels" / "shipped_constants.json"
_MOST_OVER_PEAK = 3.0  #: boost clocks, and formats whose peak is not stated, exceed a peak by less


def fit_all(profile: Profile) -> dict[str, Any]:
    """Fit every model to the profile's tables (takes seconds)."""
    constants = KnownConstants.read(SHIPPED_CONSTANTS)
    linears = LinearModel.fit(profile.table("linear"), profile.device, constants)
    attention = FlashAttnModel.fit(profile.table("flash_attn"), profile.device, constants)
    at_full_clocks = replace(linears, full_clocks=frozenset(linears.parts))
    laboratories = Laboratories(
        at_full_clocks.lab_scale(profile), replace(attention, full_clocks=True).lab_scale(profile.table("flash_attn"))
    )
    in_a_step = replace(linears, full_clocks=compared_at_full_clocks(profile, laboratories))
    return {
        "linears": linears,
        "grouped": GroupedLinearModel.fit(profile.table("grouped_linear"), in_a_step, laboratories.scales),
        "attention": attention,
        "memory": MemoryBoundModel.fit(profile.table("memory_bound"), profile.device, profile.laws.get("memory_bound")),
        "collectives": CollectiveModel.fit(profile),
        "exchanges": ExpertExchangeModel.fit(profile.table("expert_exchange"), profile.device),
        "laboratories": laboratories,
    }


def _checked_fit(profile: Profile) -> dict[str, Any]:
    """``fit_all``; raise InputError for a profile that cannot be what was measured."""
    gemms = profile.table("linear")
    peak = max(profile.device.peak_flops.values())
    if (gemm_flops(gemms) > _MOST_OVER_PEAK * peak * gemms["seconds"]).any():
        raise InputError(
            f"profile {printable(profile.name)}: GEMMs run at more than {_MOST_OVER_PEAK:g} times the device's peak of "
            f"{peak / 1e12:.3g} TFLOP/s; its peaks or its times are wrong"
        )
    try:
        return fit_all(profile)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"profile {printable(profile.name)}: its measurements or constants cannot be fitted "
            f"({type(error).__name__}: {printable(str(error))})"
        ) from error


def cost_model(
    profile: Profile,
    network_bandwidth: float | None = None,
    cache_dir: Path | None = None,
) -> CostModel:
    """The cost model of a profile; fits are read from ``cache_dir`` if they are there, and written to it otherwise.

    network_bandwidth: bytes/s per accelerator between nodes (default: the device's). The cost model of a device that was not
    measured is derived (predictor.derived).
    """
    if profile.derivation is not None:
        from_, of_links = profile.derivation.kernels, profile.derivation.links
        base = cost_model(from_, None, cache_dir)
        links = base if of_links is from_ else cost_model(of_links, None, cache_dir)
        return derived_cost_model(base, profile.device, profile.derivation, links).with_network(network_bandwidth)
    fits = _read_cache(profile, cache_dir) if cache_dir else None
    if fits is None:
        fits = _checked_fit(profile)
        if cache_dir:
            _write_cache(profile, fits, cache_dir)
    laboratories: Laboratories = fits.pop("laboratories")
    full_clocks = compared_at_full_clocks(profile, laboratories)
    linears = replace(fits["linears"], full_clocks=full_clocks)
    kernels = KernelCosts(
        device=profile.device,
        linears=linears,
        grouped=replace(fits["grouped"], linear=linears),
        attention=replace(fits["attention"], full_clocks=bool(full_clocks)),
        memory=fits["memory"],
        deratings=deratings_of(profile, laboratories),
    )
    network = NetworkCosts(
        device=profile.device,
        collectives=fits["collectives"],
        exchanges=fits["exchanges"],
        bandwidth=network_bandwidth or profile.device.network_bandwidth,
        contention=contention(profile.device, profile.table("overlap")),
        rank_skew=rank_skew_seconds(profile),
        shared_links=_shared_links(profile.laws.get("intra_node") or {}),
    )
    return CostModel(profile.device, kernels, network, HostCosts(plain_layer_launch=_plain_layer_launch(profile.table("host"))))


def _plain_layer_launch(table: Table) -> float:
    """Seconds of the host for both passes of a layer; 0 unless both were measured."""
    passes = [table["seconds"][table["pass"] == name] for name in ("forward", "backward")]
    return float(sum(map(np.median, passes))) if all(map(len, passes)) else 0.0


def _shared_links(intra_node: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Buffer bytes/s of strided groups, from the profile's ``bandwidth_all_groups`` (bytes sent per second)."""
    return {
        (op, int(ranks)): float(fit["bandwidth_all_groups"]) / float(fit["traffic"])
        for op, by_ranks in intra_node.items()
        for ranks, fit in by_ranks.items()
        if "bandwidth_all_groups" in fit and "traffic" in fit
    }


@cache
def code_version() -> str:
    """Hash of the sources that determine a fit: this package and the profile's readers."""
    return source_digest([_PACKAGE, _PACKAGE.parent / "profiler"])


def _cache_path(profile: Profile, cache_dir: Path) -> Path:
    return cache_dir / f"{profile.digest}-{code_version()}.npz"  # never profile.name: it comes from the file


def _read_cache(profile: Profile, cache_dir: Path) -> dict[str, Any] | None:
    path = _cache_path(profile, cache_dir)
    try:
        return dict(_fits_of(path, path.stat().st_mtime_ns))
    except Exception:  # missing or damaged, which can fail anywhere in zipfile, zlib or numpy
        return None  # the caller fits again and rewrites it


@lru_cache(maxsize=4)
def _fits_of(path: Path, changed: int) -> Mapping[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        split: dict[str, dict[str, np.ndarray]] = {fit: {} for fit in _MODELS}
        for name in arrays.files:
            fit, _, key = name.partition("/")
            split[fit][key] = arrays[name]
    return {fit: kind.from_arrays(split[fit]) for fit, kind in _MODELS.items()}


def _write_cache(profile: Profile, fits: Mapping[str, Any], cache_dir: Path) -> None:
    """Write the cache atomically; a read-only folder does not fail the job, the next start only fits again."""
    arrays = {f"{fit}/{key}": array for fit, fitted in fits.items() for key, array in fitted.to_arrays().items()}
    try:
        with replacing(_cache_path(profile, cache_dir)) as file:
            np.savez(file, **arrays)
    except InputError:
        return
    for old in set(cache_dir.glob(f"{profile.digest}-*.npz")) - {_cache_path(profile, cache_dir)}:
        old.unlink(missing_ok=True)
