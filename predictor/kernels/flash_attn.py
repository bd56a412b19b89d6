"""Time of fused attention, forward and backward: a physical model with a learnt correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate, roofline
from predictor.kernels.attn_physics import AttnMachine, AttnPhysics, AttnShape, attn_times, fit_attn_physics
from predictor.kernels.attn_rows import main_rows, shape_of, usable_dtypes, waits_for_host
from predictor.kernels.features import attn_coordinates, attn_features
from predictor.kernels.known_constants import ROWS_FOR_PHYSICS, KnownConstants
from predictor.kernels.measured_times import MeasuredTimes
from predictor.kernels.residual import Residual, fit_residual
from predictor.kernels.shape_keys import find, shape_keys
from predictor.kernels.sources import LabScale, mostly_serving, other_lab
from profiler.profile.profile import HALF_DTYPES, USUAL_EXPONENTIALS, Device, Table

#: Serving frameworks' kernel name -> name of the attention kernel that it calls.
SAME_KERNEL = {"sglang_flash_attention": "fa2", "sglang_fa3": "fa3"}
#: Backward over forward time where it was not measured: 2.5 by FLOPs; measured 2.9 from 4k tokens on (2.6-3.1 for
#: FlashAttention 2, 2.8-3.1 for 3), 3.2 at 1k and below, 3.5 (3.3-3.85) for the 192/128 head dims of MLA.
BACKWARD_LONG, BACKWARD_SHORT, BACKWARD_MLA, BACKWARD_UNCERTAINTY = 2.9, 3.2, 3.5, 0.10
_LONG_TOKENS, _SHORT_TOKENS = 4096.0, 1024.0
#: Serving tables say little about training kernels at short sequences: without the cache copy the fit is 0-5% off published
#: training kernels from 4k tokens on, 3-11% at 2k, 6-16% at 512; each octave below 2k adds this uncertainty.
SHORT_UNCERTAINTY = 0.06
_PRIOR_ROWS, _ROOFLINE_UNCERTAINTY = 10, 0.30
_TREES = {"max_iter": 250, "max_leaf_nodes": 31, "max_depth": 8, "learning_rate": 0.1, "min_samples_leaf": 10}


@dataclass(frozen=True)
class FlashAttnModel:
    """Time of 16-bit attention on one device; build with ``fit``, query with ``predict``.

    backward: learnt correction of the default ratio of backward to forward time; None where it was not measured.
    fitted_exponentials: exponentials per clock of the device that was measured. Backward kernels are bound by shared memory
    rather than by exponentials (FlashAttention-4, arXiv 2603.05451, section 2), so that their time is a ratio of the forward
    time at this rate. full_clocks: whether times are those at full clocks, as in LinearModel.
    """

    physics: AttnPhysics
    machine: AttnMachine
    residual: Residual | None
    backward: Residual | None
    known: MeasuredTimes
    fitted_exponentials: float = USUAL_EXPONENTIALS
    full_clocks: bool = False

    @classmethod
    def fit(cls, table: Table, device: Device, constants: KnownConstants | None = None) -> FlashAttnModel:
        """Fit the forward kernel measured most often, and its backward/forward ratio to the backward measurements.

        Only 16-bit measurements count, or fp32 ones for a device that was measured in fp32 only (a CPU). constants: those that
        need no search.
        """
        wide = not np.isin(table["dtype"], HALF_DTYPES).any() and len(table) > 0
        peak = device.peak_flops.get("fp32" if wide else "bf16") or device.peak_flops.get("fp16", 0.0)
        machine = AttnMachine(peak, device.memory_bandwidth, device.num_sms, exponentials=device.exponentials)
        table = table.where(usable_dtypes(table))
        rows = main_rows(table)
        if not len(rows):
            return cls(AttnPhysics(), machine, None, None, MeasuredTimes.none(), device.exponentials)
        shape, seconds = shape_of(rows), rows["seconds"]
        serving = mostly_serving(rows)
        enough = len(rows) >= ROWS_FOR_PHYSICS
        physics = fit_attn_physics(machine, shape, seconds, serving, constants) if enough else AttnPhysics()
        times = attn_times(physics, machine, shape)
        log_bare = np.log(times.seconds + times.cache)
        groups = np.unique(np.stack([shape.seq_q, shape.heads]), axis=1, return_inverse=True)[1].ravel()
        features = attn_features(physics, machine, shape)
        residual = fit_residual(features, attn_coordinates(shape), log_bare, np.log(seconds) - log_bare, groups, _TREES)
        fit = cls(physics, machine, residual, None, MeasuredTimes.none(), device.exponentials)
        known = MeasuredTimes.none() if serving else _measured_calls(table, str(rows["kernel"][0]))
        return cls(physics, machine, residual, _fit_backward(table, rows, fit), known, device.exponentials)

    def predict(
        self,
        batch: Any,
        seq_q: Any,
        seq_kv: Any,
        heads: Any,
        kv_heads: Any,
        head_dim: Any,
        v_head_dim: Any,
        causal: Any = True,
        backward: Any = False,
        serving: bool = False,
    ) -> Estimate:
        """Seconds of one attention call; array arguments broadcast, causal and backward are bool.

        A causal call scores seq_q * (seq_kv - (seq_q - 1) / 2) pairs: the queries are the last seq_q positions. backward: the
        backward kernels only. serving: forward including the copy into a paged cache, as serving tables time it (only for
        comparison with those).
        """
        arguments = (batch, seq_q, seq_kv, heads, kv_heads, head_dim, v_head_dim, causal, backward)
        arrays = np.broadcast_arrays(*arguments)
        flat = [np.asarray(a, dtype=np.float64).ravel() for a in arrays]
        shape = AttnShape._make([*(np.maximum(a, 1.0) for a in flat[:7]), flat[7]])
        seconds, std, basis = self._forward(shape, serving)
        is_backward = flat[8] > 0
        if is_backward.any():
            as_fitted = self._with_fitted_exponentials()
            ratio, ratio_std, ratio_basis = as_fitted._backward_ratio(shape)
            forward = seconds if as_fitted is self else as_fitted._forward(shape, serving).seconds
            seconds = np.where(is_backward, forward * ratio, seconds)
            std = np.where(is_backward, np.hypot(std, ratio_std), std)
            basis = np.where(is_backward, np.maximum(basis, ratio_basis), basis)
        estimate = self.known.combined_with(Estimate(seconds, std, basis.astype(np.int8)), shape_keys(*shape, flat[8]))
        if self.full_clocks:
            clocks, as_fitted = self._clocks(shape), self._with_fitted_exponentials()
            if as_fitted is not self:
                clocks = np.where(is_backward, as_fitted._clocks(shape), clocks)
            estimate = estimate._replace(seconds=estimate.seconds * clocks)
        return Estimate(*(values.reshape(arrays[0].shape) for values in estimate))

    def lab_scale(self, table: Table) -> dict[str, LabScale]:
        """Map source -> scale, as LinearModel.lab_scale does for GEMMs.

        Of forward calls that do not wait for the host; without sources of few such calls.
        """
        table = table.where(usable_dtypes(table) & (table["pass"] == "forward") & (table["seconds"] > 0))
        table = table.where(other_lab(table["source"]) & ~waits_for_host(table))
        scales = {}
        for source in np.unique(table["source"]):
            rows = table.where(table["source"] == source)
            if len(rows) >= _PRIOR_ROWS:
                ratio = rows["seconds"] / self.predict(*shape_of(rows)).seconds
                scales[str(source)] = LabScale(float(np.median(ratio)), len(rows))
        return scales

    def on(self, device: Device, throttled: float = 1.0) -> FlashAttnModel:
        """Return the model on another device: the same kernels on its units, peak and memory (LinearModel.on)."""
        physics = replace(self.physics, throttle=throttled * self.physics.throttle)
        machine = AttnMachine(device.half_peak, device.memory_bandwidth, device.num_sms, exponentials=device.exponentials)
        return replace(self, physics=physics, machine=machine, known=MeasuredTimes.none())

    def _clocks(self, shape: AttnShape) -> np.ndarray:
        """Return forward seconds at full clocks over those in loops of one kernel."""
        times = attn_times(self.physics, self.machine, shape)
        return times.full_clocks / times.seconds

    def _with_fitted_exponentials(self) -> FlashAttnModel:
        if self.machine.exponentials == self.fitted_exponentials:
            return self
        return replace(self, machine=self.machine._replace(exponentials=self.fitted_exponentials))

    def _forward(self, shape: AttnShape, serving: bool) -> Estimate:
        times = attn_times(self.physics, self.machine, shape)
        bare = times.seconds + times.cache * serving
        if self.residual is None:
            return roofline(bare, _ROOFLINE_UNCERTAINTY)
        features = attn_features(self.physics, self.machine, shape)
        log_bare = np.log(times.seconds + times.cache)
        correction, std, basis = self.residual.correct(features, attn_coordinates(shape), log_bare)
        if self.physics.cache > 0.01 and not serving:  # a training kernel inferred from serving measurements
            octaves = np.log2(np.maximum(2 * _SHORT_TOKENS / shape.seq_q, 1.0))
            std = np.hypot(std, SHORT_UNCERTAINTY * np.minimum(octaves, 6.0))
            basis = np.maximum(basis, np.int8(Basis.INTERPOLATED))
        return Estimate(bare * np.exp(correction), std, basis)

    def _backward_ratio(self, shape: AttnShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ratio = default_backward_ratio(shape)
        if self.backward is None:
            return ratio, np.full(ratio.shape, BACKWARD_UNCERTAINTY), np.full(ratio.shape, np.int8(Basis.INTERPOLATED))
        features = attn_features(self.physics, self.machine, shape)
        log_bare = np.log(attn_times(self.physics, self.machine, shape).seconds)
        correction, std, basis = self.backward.correct(features, attn_coordinates(shape), log_bare)
        if self.backward.trees is None:
            basis = np.full(ratio.shape, np.int8(Basis.INTERPOLATED))
        return ratio * np.exp(correction), std, basis

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat plain arrays, for an npz file."""
        out = {"physics": np.array(astuple(self.physics)), "machine": np.array(self.machine)}
        out["fitted_exponentials"] = np.array(self.fitted_exponentials)
        out |= self.known.to_arrays("known/")
        for name, part in (("residual", self.residual), ("backward", self.backward)):
            out.update(part.to_arrays(f"{name}/") if part is not None else {})
        return out

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> FlashAttnModel:
        """The inverse of ``to_arrays``, of a model as ``fit`` returns it (predictor.fitted sets full_clocks)."""
        residual, backward = (
            Residual.from_arrays(arrays, f"{name}/") if f"{name}/scalars" in arrays else None
            for name in ("residual", "backward")
        )
        physics = AttnPhysics(*(float(v) for v in arrays["physics"]))
        machine = AttnMachine._make(float(v) for v in arrays["machine"])
        known = MeasuredTimes.from_arrays(arrays, "known/")
        return cls(physics, machine, residual, backward, known, float(arrays["fitted_exponentials"]))


def default_backward_ratio(shape: AttnShape) -> np.ndarray:
    """Backward over forward time where nothing was measured; falls with log tokens from the short to the long value."""
    long = np.clip(np.log(shape.seq_q / _SHORT_TOKENS) / np.log(_LONG_TOKENS / _SHORT_TOKENS), 0, 1)
    equal_dims = BACKWARD_SHORT + (BACKWARD_LONG - BACKWARD_SHORT) * long
    return np.where(shape.head_dim > shape.v_head_dim, BACKWARD_MLA, equal_dims)


def _measured_calls(table: Table, kernel: str) -> MeasuredTimes:
    """Return the forward and backward calls that this laboratory timed with one kernel."""
    rows = table.where(
        ~other_lab(table["source"]) & (table["kernel"] == kernel) & np.isin(table["pass"], ("forward", "backward"))
    )
    return MeasuredTimes.of(shape_keys(*shape_of(rows), (rows["pass"] == "backward") * 1.0), rows)


def _fit_backward(table: Table, main: Table, fit: FlashAttnModel) -> Residual | None:
    """Fit the correction of the default ratio to backward measurements paired with forward times of the same kernel and shape.

    The forward time is subtracted from forward_backward measurements. Few measurements give one factor, shrunk towards the
    default.
    """
    rows, forward = (table.where(np.isin(table["pass"], which)) for which in (("backward", "forward_backward"), ("forward",)))
    reference = _forward_seconds(rows, forward.where(~waits_for_host(forward)), str(main["kernel"][0]), fit)
    seconds = rows["seconds"] - np.where(rows["pass"] == "forward_backward", reference, 0.0)
    usable = np.isfinite(reference) & (seconds > 0)
    rows, seconds, reference = rows.where(usable), seconds[usable], reference[usable]
    if not len(rows):
        return None
    shape = shape_of(rows)
    off_default = np.log(seconds / reference / default_backward_ratio(shape))
    log_bare = np.log(attn_times(fit.physics, fit.machine, shape).seconds)
    features = attn_features(fit.physics, fit.machine, shape)
    learnt = fit_residual(features, attn_coordinates(shape), log_bare, off_default, np.arange(len(rows)), _TREES)
    weight = len(rows) / (len(rows) + _PRIOR_ROWS)
    uncertainty = np.hypot(weight * learnt.size_uncertainty, (1 - weight) * BACKWARD_UNCERTAINTY)
    return learnt if learnt.trees is not None else replace(learnt, shift=weight * learnt.shift, size_uncertainty=uncertainty)


def _forward_seconds(rows: Table, forward: Table, main_kernel: str, fit: FlashAttnModel) -> np.ndarray:
    """Forward seconds for the shape of every row.

    Measured with the same kernel, else from ``fit`` if it is of that kernel, else NaN.
    """
    shape = shape_of(rows)
    same = np.array([k in (main_kernel, SAME_KERNEL.get(main_kernel)) for k in rows["kernel"]], dtype=bool)
    reference = np.where(same, fit.predict(*shape).seconds, np.nan)
    keys, forward_keys = shape_keys(*shape), shape_keys(*shape_of(forward))
    for kernel in np.unique(rows["kernel"]):
        mine, theirs = np.flatnonzero(rows["kernel"] == kernel), forward["kernel"] == kernel
        known, first = np.unique(forward_keys[theirs], return_index=True)
        at, hit = find(known, keys[mine])
        reference[mine[hit]] = forward["seconds"][theirs][first[at[hit]]]
    return reference
