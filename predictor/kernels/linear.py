"""Time of GEMMs: a physical model of tiles with a learnt correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.kernels.dtypes import ELEMENT_BYTES, FAMILIES, HALF_BYTES, UNMEASURED
from predictor.kernels.gemm_fit import FULL_ACCUMULATION, TRANSPOSED_TF32, GemmFit, fit_gemms, layouts_of, sizes_of
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.gemm_physics import (
    GemmMachine,
    GemmPhysics,
    adding_seconds,
    buffer_seconds,
    cast_seconds,
    gemm_times,
)
from predictor.kernels.known_constants import ROWS_FOR_PHYSICS, KnownConstants
from predictor.kernels.measured_times import MeasuredTimes
from predictor.kernels.residual import Residual
from predictor.kernels.shape_keys import shape_keys
from predictor.kernels.sources import LabScale, other_lab
from profiler.errors import InputError
from profiler.profile.profile import Device, Profile, Table

_LONG_KERNEL = 1e-4  #: seconds


@dataclass(frozen=True)
class LinearModel:
    """Time of GEMMs on one device; build with ``fit``, query with ``predict``.

    parts: fit of each arithmetic. full_clocks: arithmetics whose times are those at full clocks, without what long GEMMs lost
    to the power limit in loops of one shape. Clocks follow the mean power of a tenth of a second, so that in a training step or
    where a laboratory timed different shapes in turn, GEMMs of all sizes lose alike, which the derating covers.
    """

    parts: Mapping[str, GemmFit]
    full_clocks: frozenset[str] = frozenset()

    @classmethod
    def fit(cls, table: Table, device: Device, constants: KnownConstants | None = None) -> LinearModel:
        """Fit every arithmetic that the device has a peak for.

        Those without measurements get the prior of the physical model (roofline). constants: those that need no search.
        """
        table = _training_rows(table)
        family = np.array([FAMILIES.get(d, d) for d in table["dtype"]], dtype=np.str_)
        parts: dict[str, GemmFit] = {}
        for name, machine in _machines(device).items():
            launch = parts["bf16"].physics.launch if "bf16" in parts else None
            gradients = {"fp8": FULL_ACCUMULATION, "tf32": TRANSPOSED_TF32}.get(name) if device.is_hopper else None
            parts[name] = fit_gemms(table.where(family == name), machine, launch, gradients, constants)
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

        layout: codes of GemmLayout. accumulate: bool, the output is added to an fp32 buffer. buffer: the
        buffer's memory time is included; False where the caller counts its bytes.
        """
        name = FAMILIES.get(dtype, dtype)
        part = self.parts.get(name)
        if part is None:
            known = ", ".join(self.parts)
            raise InputError(f"this device does not multiply in {dtype}: no peak FLOP/s of it is known, only of {known}")
        arrays = np.broadcast_arrays(m, n, k, batch, layout, accumulate)
        shape, flat = arrays[0].shape, [a.ravel() for a in arrays]
        size = [np.maximum(a.astype(np.float64), 1.0) for a in flat[:4]]
        physical = gemm_times(part.physics, part.machine, *size)
        seconds, std, basis = part.forward(physical, *size)
        seconds = np.maximum(seconds, 2.0 * np.prod(size, axis=0) / part.machine.peak)  # a fit to few sizes may exceed the peak
        layouts, adds = flat[4].astype(np.int64), flat[5].astype(np.int64)
        seconds = seconds * part.layout_factor[layouts, adds]
        if buffer:
            gradient = adds & (layouts == GemmLayout.NT)
            seconds = seconds + gradient * part.adding * buffer_seconds(part.machine, size[0], size[1], size[3])
        std = np.hypot(std, part.layout_uncertainty[layouts, adds])
        estimate = part.known.combined_with(Estimate(seconds, std, basis), shape_keys(*size, layouts, adds))
        if dtype in UNMEASURED:
            estimate = estimate._replace(basis=np.maximum(estimate.basis, np.int8(Basis.EXTRAPOLATED)))
        if name in self.full_clocks:
            estimate = estimate._replace(seconds=estimate.seconds * physical.full_clocks / physical.seconds)
        if buffer and adds.any():  # with few tokens the buffer takes longer than the products
            least = adding_seconds(part.physics, part.machine, *size)
            estimate = estimate._replace(seconds=np.where(adds, np.maximum(estimate.seconds, least), estimate.seconds))
        return Estimate(*(values.reshape(shape) for values in estimate))

    def on(self, device: Device, throttled: Mapping[str, float]) -> LinearModel:
        """Return the model on another device: the same kernels on its units, peaks and memory.

        throttled: by arithmetic, the share of the slowdown at the power limit that long kernels keep there. An arithmetic that
        this device lacks gets the physical model of 16 bits.
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

    def lab_scale(self, profile: Profile) -> dict[str, LabScale]:
        """Map source -> scale, for what other laboratories timed on this device.

        Laboratories differ in clocks, power and timing loops, and a training run is like one more laboratory; this scale
        states by how much. Kernels shorter than 0.1 ms are left out where there are enough longer ones, because their times
        include the loop.
        """
        table = _training_rows(profile.table("linear"))
        scales = {}
        for source in np.unique(table["source"][other_lab(table["source"])]):
            rows = table.where(table["source"] == source)
            known = [str(d) for d in np.unique(rows["dtype"]) if FAMILIES.get(d) in self.parts]
            ratios = [_ratio(self, rows.where(rows["dtype"] == d), d) for d in known]
            if ratios:
                ratio, seconds = np.concatenate(ratios, axis=1)
                long = seconds >= _LONG_KERNEL if (seconds >= _LONG_KERNEL).sum() >= ROWS_FOR_PHYSICS else seconds > 0
                scales[str(source)] = LabScale(float(np.median(ratio[long])), int(long.sum()))
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
            parts[name] = GemmFit(
                GemmPhysics(*(float(v) for v in arrays[f"{name}/physics"])),
                GemmMachine._make(float(v) for v in arrays[f"{name}/machine"]),
                Residual.from_arrays(arrays, f"{name}/residual/") if fitted else None,
                MeasuredTimes.from_arrays(arrays, f"{name}/known/"),
                np.asarray(arrays[f"{name}/layout_factor"]),
                np.asarray(arrays[f"{name}/layout_uncertainty"]),
                float(arrays[f"{name}/adding"]),
            )
        return cls(parts)


def _training_rows(table: Table) -> Table:
    """Rows of GEMMs that a training step runs: without those that are added to a buffer of 16 bits."""
    return table.where((table["accumulate"] == 0) | (table["out_dtype"] == "fp32"))


def _machines(device: Device) -> dict[str, GemmMachine]:
    """Return the machine of every arithmetic that a device has a peak for, 16 bits first."""
    machines, peaks = {}, device.peak_flops
    for name in sorted({FAMILIES.get(name, name) for name in peaks}, key=lambda name: name != "bf16"):
        peak = peaks.get(name) or max(value for dtype, value in peaks.items() if FAMILIES.get(dtype, dtype) == name)
        element = ELEMENT_BYTES.get(name, HALF_BYTES)
        machines[name] = GemmMachine(peak, device.memory_bandwidth, device.num_sms, element, max(element, HALF_BYTES))
    return machines


def _ratio(fit: LinearModel, rows: Table, dtype: str) -> np.ndarray:
    """Measured over predicted, and measured seconds, for rows of one dtype; shape [2, rows]."""
    m, n, k, batch = sizes_of(rows)
    found = fit.predict(m, n, k, batch, layout=layouts_of(rows), accumulate=rows["accumulate"] > 0, dtype=dtype)
    return np.stack([rows["seconds"] / found.seconds, rows["seconds"]])
