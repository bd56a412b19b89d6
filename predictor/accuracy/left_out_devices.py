"""How far a device is off that was not measured: each measured device predicted from each other one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from predictor.accuracy.crossval import linear_rows, quantised_linear_rows
from predictor.accuracy.score import Score, score
from predictor.cost_model import CostModel
from predictor.derived import derived_cost_model
from predictor.estimate import Estimate
from predictor.fitted import cost_model
from predictor.kernels.attn_rows import main_rows, shape_of
from predictor.kernels.sources import mostly_serving
from predictor.network.collective_points import node_points
from profiler.profile.derived import derived_profile
from profiler.profile.devices import DATASHEETS
from profiler.profile.profile import COLLECTIVES, SCALED, Profile, Table

#: One profile of each chip; those that share a chip with one of them would test nothing.
CHIPS = ("a100_sxm_80gb", "h100_sxm", "h200_sxm", "b200_sxm")
#: Shapes of training: sides of GEMMs, tokens of attention, bytes of collectives and memory-bound kernels, from here on.
LEAST_SIDE, LEAST_TOKENS, LEAST_BYTES = 512, 1024, 2.0**16
OWN_POINTS = 10  #: measurements of the device itself after which the error is given again


def device_scores(profiles: Mapping[str, Profile], cache_dir: Path | None = None) -> list[Score]:
    """Return the scores of every profile predicted from every other, before and after OWN_POINTS measurements of its own.

    Their ``naive_mape`` is of the other device's times rescaled by one ratio of the datasheets: peaks, memory or links.
    """
    models = {name: _as_timed(cost_model(profile, cache_dir=cache_dir)) for name, profile in profiles.items()}
    scores: list[Score] = []
    for target, profile in profiles.items():
        for base, kernels in profiles.items():
            if base != target:
                derived = derived_profile(target, DATASHEETS[target], kernels)
                assert derived.derivation is not None
                found = derived_cost_model(models[base], profile.device, derived.derivation, models[base])
                for op, measured, estimate, naive in _predictions(profile, models[base], found):
                    scores += _before_and_after(op, f"{target} from {base}", measured, estimate, naive)
    return scores


def _as_timed(cost: CostModel) -> CostModel:
    """Return the model of kernels as they are timed, in loops of each."""
    linears = replace(cost.kernels.linears, full_clocks=frozenset())
    attention = replace(cost.kernels.attention, full_clocks=False)
    return replace(cost, kernels=replace(cost.kernels, linears=linears, attention=attention))


def _before_and_after(op: str, regime: str, measured: np.ndarray, estimate: Estimate, naive: np.ndarray) -> Sequence[Score]:
    """Return the scores of one op: as derived, and with the scale that some measurements of the device give."""
    std = estimate.relative_std
    before = score(op, regime, "nothing of its own", measured, estimate.seconds, std, naive)
    rng = np.random.default_rng(0)
    own = rng.permutation(len(measured))[:OWN_POINTS]
    rest = np.setdiff1d(np.arange(len(measured)), own)
    scale = np.exp(np.median(np.log(measured[own] / estimate.seconds[own])))
    after = score(
        op, regime, f"{OWN_POINTS} points of its own", measured[rest], scale * estimate.seconds[rest], std[rest], naive[rest]
    )
    return before, after


def _predictions(profile: Profile, base: CostModel, found: CostModel) -> Iterator[tuple[str, np.ndarray, Estimate, np.ndarray]]:
    """Yield (op, measured seconds, prediction, rescaled by one ratio) for the rows of training shapes. No derating: rows are
    of short loops, as the fits."""
    device, other = found.device, base.device
    for op, rows in (("linear", linear_rows(profile)), ("linear fp8", quantised_linear_rows(profile))):
        rows = rows.where((rows["m"] >= LEAST_SIDE) & (rows["n"] >= LEAST_SIDE) & (rows["k"] >= LEAST_SIDE))
        dtype = "fp8" if op == "linear fp8" else "bf16"
        if len(rows) > 2 * OWN_POINTS and dtype in base.device.peak_flops:
            peaks = other.peak_flops[dtype] / device.peak_flops[dtype]
            yield op, *_gemms(rows, dtype, base, found, peaks)
    rows = main_rows(profile.table("flash_attn"))
    rows = rows.where(rows["seq_q"] >= LEAST_TOKENS)
    if len(rows) > 2 * OWN_POINTS:
        serving = mostly_serving(rows)
        estimates = [model.kernels.attention.predict(*shape_of(rows), serving=serving) for model in (found, base)]
        peaks = other.peak_flops["bf16"] / device.peak_flops["bf16"]
        yield (
            "flash_attn",
            rows["seconds"],
            found.corrections.less_certain(estimates[0], "attention"),
            estimates[1].seconds * peaks,
        )
    yield from _memory_bound(profile.table("memory_bound"), base, found)
    yield from _collectives(profile, base, found)


def _gemms(rows: Table, dtype: str, base: CostModel, found: CostModel, peaks: float) -> tuple[np.ndarray, Estimate, np.ndarray]:
    """fp8 rows also time the cast of their first operand."""
    sizes = [np.maximum(rows[name].astype(float), 1.0) for name in ("m", "n", "k", "batch")]
    seconds = []
    for model in (found, base):
        m, n, k, batch = sizes
        estimate = model.kernels.linears.predict(m, n, k, batch, dtype=dtype)
        cast = model.kernels.linears.cast_seconds(sizes[0], sizes[2], sizes[3], dtype) if dtype == "fp8" else 0.0
        seconds.append(estimate._replace(seconds=estimate.seconds + cast))
    kind = "quantised" if dtype == "fp8" else "linear"
    return rows["seconds"], found.corrections.less_certain(seconds[0], kind), seconds[1].seconds * peaks


def _memory_bound(table: Table, base: CostModel, found: CostModel) -> Iterator[tuple[str, np.ndarray, Estimate, np.ndarray]]:
    own = np.char.find(table["source"], SCALED) < 0  # what another device measured tells nothing about this one
    rows = table.where(own & (table["bytes"] >= LEAST_BYTES) & np.isin(table["kind"], base.kernels.memory.kinds))
    if len(rows) <= 2 * OWN_POINTS:
        return
    ratio = base.device.memory_bandwidth / found.device.memory_bandwidth
    parts = [rows.where(rows["kind"] == kind) for kind in np.unique(rows["kind"])]
    measured = np.concatenate([part["seconds"] for part in parts])
    estimates = [
        [model.kernels.memory.predict(str(part["kind"][0]), part["bytes"]) for part in parts] for model in (found, base)
    ]
    joined = [Estimate(*(np.concatenate(columns) for columns in zip(*found_, strict=True))) for found_ in estimates]
    yield "memory_bound", measured, found.corrections.less_certain(joined[0], "memory_bound"), joined[1].seconds * ratio


def _collectives(profile: Profile, base: CostModel, found: CostModel) -> Iterator[tuple[str, np.ndarray, Estimate, np.ndarray]]:
    """Yield the ops together: the points of their curves in one node."""
    parts: list[tuple[np.ndarray, Estimate, np.ndarray]] = []
    for op in COLLECTIVES:
        table = profile.table(op)
        for ranks in np.unique(table["intra"][table["inter"] == 1]):
            size, seconds = node_points(table, int(ranks))
            large = size >= LEAST_BYTES
            if ranks > 1 and large.any():
                own = found.network.collectives.predict(op, size[large], int(ranks), 1)
                other = base.network.collectives.predict(op, size[large], int(ranks), 1)
                parts.append((seconds[large], own, other.seconds))
    if parts:
        measured, estimates, others = zip(*parts, strict=True)
        joined = Estimate(*(np.concatenate(columns) for columns in zip(*estimates, strict=True)))
        ratio = base.device.link_bandwidth / found.device.link_bandwidth
        own_times = found.corrections.less_certain(joined, "collective")
        yield "collectives", np.concatenate(measured), own_times, np.concatenate(others) * ratio
