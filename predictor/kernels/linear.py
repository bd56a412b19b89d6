"""Time of GEMMs: a physical model of tiles with a learnt correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.kernels.dtypes import ELEMENT_BYTES, FAMILIES, HALF_BYTES, UNMEASURED
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.gemm_physics import (
    GemmPhysics,
    GemmTimes,
    Machine,
    adding_seconds,
    buffer_seconds,
    cast_seconds,
    fit_gemm_physics,
    gemm_times,
)
from predictor.kernels.known_constants import ROWS_FOR_PHYSICS, KnownConstants
from predictor.kernels.linear_features import coordinates, features_of
from predictor.kernels.measured_times import MeasuredTimes
from predictor.kernels.residual import Residual, fit_residual
from predictor.kernels.shape_keys import shape_keys
from profiler.errors import InputError
from profiler.profile.profile import Device, Profile, Table

#: Rows whose source starts with one of these were timed by a different laboratory than the tables that the fits use.
OTHER_LABS = ("microsoft/vidur", "simumax", "MooreThreads/SimuMax")

#: Rows of these sources, where their operands are narrower than 16 bits, also time the quantisation of the first operand.
CASTING_SOURCES = ("ai-dynamo/aiconfigurator",)

#: (layout, fp32 accumulate) -> time relative to forward, and its uncertainty: medians of SimuMax's Transformer-Engine kernels
#: on A100 and B200 (input gradient 0.97-1.05; weight gradient with fp32 accumulation 0.98, beside ADDING_PRIOR).
LAYOUT_PRIOR = {
    (GemmLayout.TN, False): (1.0, 0.0),
    (GemmLayout.TN, True): (1.02, 0.05),
    (GemmLayout.NN, False): (1.005, 0.04),
    (GemmLayout.NN, True): (1.02, 0.05),
    (GemmLayout.NT, False): (1.03, 0.05),
    (GemmLayout.NT, True): (0.98, 0.05),
}
#: Share of the time that reading and writing the fp32 buffer takes which a weight gradient that is added to it shows beside its
#: products: 0.62 and 0.79 in SimuMax's kernels on A100 PCIe and B200, 0.77 and 0.90 in own ones on H100 and H200.
ADDING_PRIOR = 0.77
#: Time of an fp8 gradient relative to a forward pass, and its uncertainty, where fp8 GEMMs can sum in less than fp32 (until
#: Hopper): Transformer Engine and torchao let only the forward pass do so, which is 1.1 to 1.2 times as fast (pytorch/ao#2377).
FULL_ACCUMULATION = (1.15, 0.04)
#: Time of a TF32 GEMM whose operands are not both read along k, relative to one whose are, and its uncertainty (judged), on
#: Hopper: its warpgroup instruction transposes operands of 16 bits only (PTX ISA, wgmma.mma_async), and the older instruction
#: that runs instead reaches 62.9% of its rate on average (arXiv 2402.13499).
TRANSPOSED_TF32 = (1 / 0.629, 0.1)
_PRIOR_ROWS = 10  # a prior weighs as much as this many measurements
_OUTLIER, _ROUNDS = 0.05, 30  # relative error; rounds of least squares
_ROOFLINE_UNCERTAINTY = 0.25
_TREES = {"max_iter": 300, "max_leaf_nodes": 31, "max_depth": 8, "learning_rate": 0.13, "min_samples_leaf": 10}
_LONG_KERNEL = 1e-4  #: seconds


@dataclass(frozen=True)
class _Part:
    """The fit of one arithmetic: physical model, its machine, learnt correction (None: nothing measured), measured shapes."""

    physics: GemmPhysics
    machine: Machine
    residual: Residual | None
    known: MeasuredTimes
    layout_factor: np.ndarray  # [3 layouts, 2 accumulate] relative to forward
    layout_uncertainty: np.ndarray
    adding: float = ADDING_PRIOR  # share of the fp32 buffer's traffic that a weight gradient added to it shows


@dataclass(frozen=True)
class LinearModel:
    """Time of GEMMs on one device; build with ``fit``, query with ``predict``.

    full_clocks: arithmetics of which is taken out what long GEMMs lost to the power limit in loops of each. Clocks follow
    the power of a tenth of a second, so that in a step, and where another laboratory timed one after the other, GEMMs of all
    sizes lose alike: that is the derating's.
    """

    parts: Mapping[str, _Part]
    full_clocks: frozenset[str] = frozenset()

    @classmethod
    def fit(cls, table: Table, device: Device, constants: KnownConstants | None = None) -> LinearModel:
        """Fit every arithmetic that the device has a peak for.

        Those without measurements get the prior of the physical model (roofline). constants: those that need no search.
        """
        table = _asked_for(table)
        family = np.array([FAMILIES.get(d, d) for d in table["dtype"]], dtype=np.str_)
        parts: dict[str, _Part] = {}
        for name, machine in _machines(device).items():
            launch = parts["bf16"].physics.launch if "bf16" in parts else None
            gradients = {"fp8": FULL_ACCUMULATION, "tf32": TRANSPOSED_TF32}.get(name) if is_hopper(device) else None
            parts[name] = _fit_part(table.where(family == name), machine, launch, gradients, constants)
        return cls(parts)

    def predict(
        self,
        m: Any,
        n: Any,
        k: Any,
        batch: Any = 1,
        *,
        layout: Any = GemmLayout.TN,
        accumulate: Any = False,
        dtype: str = "bf16",
        buffer: bool = True,
    ) -> Estimate:
        """Seconds of ``batch`` GEMMs [m, k] x [k, n] -> [m, n] of one dtype; array arguments broadcast.

        layout: codes of GemmLayout. accumulate: bool, the output is added to an fp32 buffer. buffer: which then takes no
        less than its bytes; False where the caller counts them.
        """
        name = FAMILIES.get(dtype, dtype)
        part = self.parts.get(name)
        if part is None:
            known = ", ".join(self.parts)
            raise InputError(f"this device does not multiply in {dtype}: no peak FLOP/s of it is known, only of {known}")
        arrays = np.broadcast_arrays(m, n, k, batch, layout, accumulate)
        shape, flat = arrays[0].shape, [a.ravel() for a in arrays]
        size = [np.maximum(a.astype(np.float64), 1.0) for a in flat[:4]]
        looped = gemm_times(part.physics, part.machine, *size)
        seconds, std, basis = _predict_forward(part, looped, *size)
        seconds = np.maximum(seconds, 2.0 * np.prod(size, axis=0) / part.machine.peak)  # of few sizes a fit says what cannot be
        layouts, adds = flat[4].astype(np.int64), flat[5].astype(np.int64)
        seconds = seconds * part.layout_factor[layouts, adds]
        if buffer:
            gradient = adds & (layouts == GemmLayout.NT)
            seconds = seconds + gradient * part.adding * buffer_seconds(part.machine, size[0], size[1], size[3])
        layout_uncertainty = part.layout_uncertainty[layouts, adds]
        std = np.hypot(std, layout_uncertainty)
        found = part.known.beside(Estimate(seconds, std, basis), shape_keys(*size, layouts, adds))
        if dtype in UNMEASURED:
            found = found._replace(basis=np.maximum(found.basis, np.int8(Basis.EXTRAPOLATED)))
        if name in self.full_clocks:
            found = found._replace(seconds=found.seconds * looped.full_clocks / looped.seconds)
        if buffer and adds.any():  # of few tokens the buffer takes longer than the products
            least = adding_seconds(part.physics, part.machine, *size)
            found = found._replace(seconds=np.where(adds, np.maximum(found.seconds, least), found.seconds))
        return Estimate(*(values.reshape(shape) for values in found))

    def on(self, device: Device, throttled: Mapping[str, float]) -> LinearModel:
        """Return the model on another device: the same kernels on its units, peaks and memory.

        throttled: by arithmetic, the share of what long kernels lose to the power limit that they lose there too.
        An arithmetic that this one lacks gets the physical model of 16 bits.
        """
        half = replace(self.parts["bf16"], residual=None)
        parts = {}
        for name, machine in _machines(device).items():
            part = self.parts.get(name, half)
            physics = replace(part.physics, throttle=throttled.get(name, 1.0) * part.physics.throttle)
            parts[name] = replace(part, physics=physics, machine=machine, known=MeasuredTimes.none())
        return replace(self, parts=parts)

    def cast_seconds(self, m: Any, k: Any, batch: Any = 1, dtype: str = "fp8") -> np.ndarray:
        """Seconds of the cast of the first operand that a fit's source timed with its GEMMs; 0 where it timed none."""
        part = self.parts[FAMILIES.get(dtype, dtype)]
        sizes = (np.asarray(a, dtype=np.float64) for a in (m, k, batch))
        return cast_seconds(part.physics, part.machine, *sizes)

    def lab_scale(self, profile: Profile) -> dict[str, tuple[float, int]]:
        """Map source -> (median of measured / predicted, measurements), for what other laboratories timed on this device.

        Laboratories differ in clocks, power and timing loops, and a training run is like one more laboratory; this scale
        states by how much. Kernels shorter than 0.1 ms are left out where there are enough longer ones, because their times
        include the loop.
        """
        table = _asked_for(profile.table("linear"))
        scales = {}
        for source in np.unique(table["source"][other_lab(table["source"])]):
            rows = table.where(table["source"] == source)
            known = [str(d) for d in np.unique(rows["dtype"]) if FAMILIES.get(d) in self.parts]
            ratios = [_ratio(self, rows.where(rows["dtype"] == d), d) for d in known]
            if ratios:
                ratio, seconds = np.concatenate(ratios, axis=1)
                long = seconds >= _LONG_KERNEL if (seconds >= _LONG_KERNEL).sum() >= ROWS_FOR_PHYSICS else seconds > 0
                scales[str(source)] = (float(np.median(ratio[long])), int(long.sum()))
        return scales

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat plain arrays, for an npz file."""
        out: dict[str, np.ndarray] = {}
        for name, part in self.parts.items():
            out[f"{name}/physics"] = np.array(astuple(part.physics))
            out[f"{name}/machine"] = np.array(part.machine)
            out.update(part.known.to_arrays(f"{name}/known/"))
            out[f"{name}/layout_factor"], out[f"{name}/layout_uncertainty"] = part.layout_factor, part.layout_uncertainty
            out[f"{name}/adding"] = np.array(part.adding)
            out.update(part.residual.to_arrays(f"{name}/residual/") if part.residual is not None else {})
        return out

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> LinearModel:
        """The inverse of ``to_arrays``, of a model as ``fit`` returns it (predictor.fitted sets full_clocks)."""
        parts = {}
        for name in [key.split("/")[0] for key in arrays if key.endswith("/physics")]:
            fitted = f"{name}/residual/scalars" in arrays
            parts[name] = _Part(
                GemmPhysics(*(float(v) for v in arrays[f"{name}/physics"])),
                Machine._make(float(v) for v in arrays[f"{name}/machine"]),
                Residual.from_arrays(arrays, f"{name}/residual/") if fitted else None,
                MeasuredTimes.from_arrays(arrays, f"{name}/known/"),
                np.asarray(arrays[f"{name}/layout_factor"]),
                np.asarray(arrays[f"{name}/layout_uncertainty"]),
                float(arrays[f"{name}/adding"]),
            )
        return cls(parts)


def other_lab(source: np.ndarray) -> np.ndarray:
    """True for rows of another laboratory (see OTHER_LABS); shape [rows]."""
    return starts_with(source, OTHER_LABS)


def starts_with(source: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """True where an entry of ``source`` starts with one of ``names``, ignoring case; shape [rows]."""
    lower = np.char.lower(np.asarray(source, dtype=np.str_))
    return np.any([np.char.startswith(lower, name.lower()) for name in names], axis=0)


def own_forward_rows(table: Table) -> Table:
    """Forward rows that the fit uses: without those of other laboratories, or all rows where too few remain."""
    forward = table.where((table["layout"] == "TN") | (table["layout"] == ""))
    own = forward.where(~other_lab(forward["source"]))
    return own if len(own) >= ROWS_FOR_PHYSICS else forward


def _asked_for(table: Table) -> Table:
    """Rows of GEMMs that a training step runs: without those that are added to a buffer of 16 bits."""
    return table.where((table["accumulate"] == 0) | (table["out_dtype"] == "fp32"))


def _machines(device: Device) -> dict[str, Machine]:
    """Return the machine of every arithmetic that a device has a peak for, 16 bits first."""
    machines, peaks = {}, device.peak_flops
    for name in sorted({FAMILIES.get(name, name) for name in peaks}, key=lambda name: name != "bf16"):
        peak = peaks.get(name) or max(value for dtype, value in peaks.items() if FAMILIES.get(dtype, dtype) == name)
        element = ELEMENT_BYTES.get(name, HALF_BYTES)
        machines[name] = Machine(peak, device.memory_bandwidth, device.num_sms, element, max(element, HALF_BYTES))
    return machines


def _predict_forward(
    part: _Part, bare: GemmTimes, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if part.residual is None:
        shape = bare.seconds.shape
        return bare.seconds, np.full(shape, _ROOFLINE_UNCERTAINTY), np.full(shape, np.int8(Basis.ROOFLINE))
    log_bare = np.log(bare.seconds)
    features = features_of(part.physics, part.machine, m, n, k, batch)
    correction, std, basis = part.residual.correct(features, coordinates(m, n, k, batch), log_bare)
    return bare.seconds * np.exp(correction), std, basis


def _sizes(table: Table) -> list[np.ndarray]:
    return [np.maximum(table[name].astype(np.float64), 1.0) for name in ("m", "n", "k", "batch")]


def is_training_like(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return which GEMMs are of sizes that training has: tokens of a micro batch, widths of a model; shape [rows]."""
    return (m >= 1024) & (n >= 512) & (k >= 512)


def is_hopper(device: Device) -> bool:
    """Whether tensor cores read operands of other than 16 bits along k only: chips with fp8 before the block-scaled formats."""
    return "fp8" in device.peak_flops and device.transposes_fp8 and not device.link_kind.startswith("xGMI")


def _fit_part(
    table: Table,
    machine: Machine,
    launch: float | None = None,
    gradients: tuple[float, float] | None = None,
    constants: KnownConstants | None = None,
) -> _Part:
    """Fit physical model and correction to the rows of own_forward_rows, then the factors of the layouts.

    launch: of a GEMM of 16 bits, for rows that also time a cast. gradients: time of both gradients relative to
    a forward pass beyond LAYOUT_PRIOR, and its uncertainty.
    """
    table = table.where((table["seconds"] > 0) & (table["m"] > 0) & (table["n"] > 0) & (table["k"] > 0))
    rows = own_forward_rows(table)
    prior = np.array([[LAYOUT_PRIOR[GemmLayout(i), bool(a)] for a in (0, 1)] for i in range(3)])
    if gradients:
        prior[1:, :, 0] *= gradients[0]
        prior[1:, :, 1] = np.hypot(prior[1:, :, 1], gradients[1])
    if not len(rows):
        return _Part(GemmPhysics(), machine, None, MeasuredTimes.none(), prior[..., 0], prior[..., 1])
    sizes, seconds = _sizes(rows), rows["seconds"]
    enough = len(rows) >= ROWS_FOR_PHYSICS
    casts = starts_with(rows["source"], CASTING_SOURCES) & (machine.element < HALF_BYTES)
    physics = fit_gemm_physics(machine, sizes, seconds, casts, launch, constants) if enough else GemmPhysics()
    cast = np.where(casts, cast_seconds(physics, machine, sizes[0], sizes[2], sizes[3]), 0.0)
    log_bare = np.log(gemm_times(physics, machine, *sizes).seconds)
    groups = np.unique(np.stack(sizes[1:3]), axis=1, return_inverse=True)[1].ravel()
    features, off_bare = features_of(physics, machine, *sizes), np.log(seconds / (np.exp(log_bare) + cast))
    weights = np.where(is_training_like(*sizes[:3]), 2.0, 1.0)
    residual = fit_residual(features, coordinates(*sizes), log_bare, off_bare, groups, _TREES, weights)
    bare = _Part(physics, machine, residual, MeasuredTimes.none(), prior[..., 0], prior[..., 1])
    return _Part(physics, machine, residual, _measured_shapes(table, machine), *_layout_factors(table, bare))


def _measured_shapes(table: Table, machine: Machine) -> MeasuredTimes:
    """Return the times of the shapes and layouts that this laboratory measured, without those whose operands it also cast."""
    casts = starts_with(table["source"], CASTING_SOURCES) & (machine.element < HALF_BYTES)
    rows = table.where(~other_lab(table["source"]) & ~casts)
    if not len(rows):
        return MeasuredTimes.none()
    layout = np.array([GemmLayout[name].value if name else 0 for name in rows["layout"]], dtype=np.int64)
    return MeasuredTimes.of(shape_keys(*_sizes(rows), layout, rows["accumulate"].astype(np.int64)), rows)


def _layout_factors(table: Table, part: _Part) -> tuple[np.ndarray, np.ndarray, float]:
    """Time of each (layout, accumulate) relative to forward and its uncertainty, shapes [3, 2], and the share ``adding``.

    The median over rows of log(measured / predicted) minus the forward median of the same source, so that a laboratory's own
    scale cancels; shrunk towards the prior where rows are few.
    """
    factor, uncertainty, adding = part.layout_factor.copy(), part.layout_uncertainty.copy(), part.adding
    if not len(table):
        return factor, uncertainty, adding
    sizes = _sizes(table)
    forward_seconds = _predict_forward(part, gemm_times(part.physics, part.machine, *sizes), *sizes)[0]
    ratio = np.log(table["seconds"] / forward_seconds)
    for source in np.unique(table["source"]):
        rows = table["source"] == source
        forward = rows & np.isin(table["layout"], ("TN", ""))
        ratio[rows] -= np.median(ratio[forward]) if forward.any() else np.nan
    for layout in (GemmLayout.NN, GemmLayout.NT):
        for add in (0, 1):
            rows = (table["layout"] == layout.name) & (table["accumulate"].astype(bool) == add) & np.isfinite(ratio)
            if not rows.any():
                continue
            weight = rows.sum() / (rows.sum() + _PRIOR_ROWS)
            uncertainty[layout, add] *= 1 - weight
            if add and layout == GemmLayout.NT:
                traffic = (buffer_seconds(part.machine, sizes[0], sizes[1], sizes[3]) / forward_seconds)[rows]
                factor[layout, add], adding = _adding(np.exp(ratio[rows]), traffic, float(factor[layout, add]))
            else:
                factor[layout, add] *= np.exp(weight * (np.median(ratio[rows]) - np.log(factor[layout, add])))
    return factor, uncertainty, adding


def _adding(ratio: np.ndarray, traffic: np.ndarray, usual: float) -> tuple[float, float]:
    """Return (factor, share) of ratio = factor + share * traffic, each held to its prior.

    Least squares of relative errors, repeated with less weight on those above _OUTLIER (soft L1). ratio: measured times over
    forward ones, both of the same laboratory. traffic: the buffer's time over forward times as fitted; where that laboratory is
    slower than the fit, so is all of a step's GEMM (the derating), and the share is smaller by as much.
    """
    held = np.sqrt(_PRIOR_ROWS) * np.array([1.0, np.sqrt(np.mean(traffic**2))])
    rows, weight = np.stack([1 / ratio, traffic / ratio], axis=1), np.ones(len(ratio))
    for _ in range(_ROUNDS):
        found = np.linalg.lstsq(
            np.concatenate([rows * weight[:, None], np.diag(held)]), np.append(weight, held * (usual, ADDING_PRIOR))
        )[0]
        weight = (1 + ((rows @ found - 1) / _OUTLIER) ** 2) ** -0.25
    return float(found[0]), max(float(found[1]), 0.0)


def _ratio(fit: LinearModel, rows: Table, dtype: str) -> np.ndarray:
    """Measured over predicted, and measured seconds, for rows of one dtype; shape [2, rows]."""
    layout = np.array([GemmLayout[name].value if name else 0 for name in rows["layout"]], dtype=np.int8)
    m, n, k, batch = _sizes(rows)
    found = fit.predict(m, n, k, batch, layout=layout, accumulate=rows["accumulate"] > 0, dtype=dtype)
    return np.stack([rows["seconds"] / found.seconds, rows["seconds"]])
