"""Time of fused attention, forward and backward: a physical model with a learnt correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.kernels.attn_physics import AttnMachine, AttnPhysics, AttnShape, attn_times, fit_attn_physics
from predictor.kernels.known_constants import ROWS_FOR_PHYSICS, KnownConstants
from predictor.kernels.measured_times import MeasuredTimes
from predictor.kernels.residual import Residual, fit_residual
from predictor.kernels.shape_keys import find, shape_keys
from predictor.kernels.sources import is_serving, mostly_serving, other_lab
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
#: Calls are equally long within this factor, and of other work from this ratio of FLOPs on.
_EQUALLY_LONG, _OTHER_WORK = 1.2, 3.0
_PRIOR_ROWS, _ROOFLINE_UNCERTAINTY = 10, 0.30
_TREES = {"max_iter": 250, "max_leaf_nodes": 31, "max_depth": 8, "learning_rate": 0.1, "min_samples_leaf": 10}


@dataclass(frozen=True)
class FlashAttnModel:
    """Time of 16-bit attention on one device; build with ``fit``, query with ``predict``.

    backward: learnt correction of the default ratio of backward to forward time; None where it was not measured.
    fitted_exponentials: of the device that was measured. The backward kernels, which wait for shared memory rather than for
    exponentials (FlashAttention-4, arXiv 2603.05451, section 2), take the ratio of what the forward would take with these.
    full_clocks: as of GEMMs (LinearModel).
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
        table = table.where(_measured_dtype(table))
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
        features = _features(physics, machine, shape)
        residual = fit_residual(features, _coordinates(shape), log_bare, np.log(seconds) - log_bare, groups, _TREES)
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
        given = (batch, seq_q, seq_kv, heads, kv_heads, head_dim, v_head_dim, causal, backward)
        arrays = np.broadcast_arrays(*given)
        flat = [np.asarray(a, dtype=np.float64).ravel() for a in arrays]
        shape = AttnShape._make([*(np.maximum(a, 1.0) for a in flat[:7]), flat[7]])
        seconds, std, basis = self._forward(shape, serving)
        is_backward = flat[8] > 0
        if is_backward.any():
            waits_alike = self._at_fitted_exponentials()
            ratio, ratio_std, ratio_basis = waits_alike._backward_ratio(shape)
            forward = seconds if waits_alike is self else waits_alike._forward(shape, serving)[0]
            seconds = np.where(is_backward, forward * ratio, seconds)
            std = np.where(is_backward, np.hypot(std, ratio_std), std)
            basis = np.where(is_backward, np.maximum(basis, ratio_basis), basis)
        found = self.known.beside(Estimate(seconds, std, basis.astype(np.int8)), shape_keys(*shape, flat[8]))
        if self.full_clocks:
            clocks, waits_alike = self._clocks(shape), self._at_fitted_exponentials()
            if waits_alike is not self:
                clocks = np.where(is_backward, waits_alike._clocks(shape), clocks)
            found = found._replace(seconds=found.seconds * clocks)
        return Estimate(*(values.reshape(arrays[0].shape) for values in found))

    def lab_scale(self, table: Table) -> dict[str, tuple[float, int]]:
        """Map source -> (median of measured / predicted, calls), as LinearModel.lab_scale does for GEMMs.

        Of forward calls that do not wait for the host; without sources of few such calls.
        """
        table = table.where(_measured_dtype(table) & (table["pass"] == "forward") & (table["seconds"] > 0))
        table = table.where(other_lab(table["source"]) & ~waits_for_host(table))
        scales = {}
        for source in np.unique(table["source"]):
            rows = table.where(table["source"] == source)
            if len(rows) >= _PRIOR_ROWS:
                scales[str(source)] = (float(np.median(rows["seconds"] / self.predict(*shape_of(rows)).seconds)), len(rows))
        return scales

    def on(self, device: Device, throttled: float = 1.0) -> FlashAttnModel:
        """Return the model on another device: the same kernels on its units, peak and memory; throttled as of GEMMs."""
        physics = replace(self.physics, throttle=throttled * self.physics.throttle)
        machine = AttnMachine(device.half_peak, device.memory_bandwidth, device.num_sms, exponentials=device.exponentials)
        return replace(self, physics=physics, machine=machine, known=MeasuredTimes.none())

    def _clocks(self, shape: AttnShape) -> np.ndarray:
        """Return forward seconds at full clocks over those in loops of one kernel."""
        times = attn_times(self.physics, self.machine, shape)
        return times.full_clocks / times.seconds

    def _at_fitted_exponentials(self) -> FlashAttnModel:
        if self.machine.exponentials == self.fitted_exponentials:
            return self
        return replace(self, machine=self.machine._replace(exponentials=self.fitted_exponentials))

    def _forward(self, shape: AttnShape, serving: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        times = attn_times(self.physics, self.machine, shape)
        bare = times.seconds + times.cache * serving
        if self.residual is None:
            return bare, np.full(bare.shape, _ROOFLINE_UNCERTAINTY), np.full(bare.shape, np.int8(Basis.ROOFLINE))
        features = _features(self.physics, self.machine, shape)
        log_bare = np.log(times.seconds + times.cache)
        correction, std, basis = self.residual.correct(features, _coordinates(shape), log_bare)
        if self.physics.cache > 0.01 and not serving:  # a training kernel inferred from serving measurements
            octaves = np.log2(np.maximum(2 * _SHORT_TOKENS / shape.seq_q, 1.0))
            std = np.hypot(std, SHORT_UNCERTAINTY * np.minimum(octaves, 6.0))
            basis = np.maximum(basis, np.int8(Basis.INTERPOLATED))
        return bare * np.exp(correction), std, basis

    def _backward_ratio(self, shape: AttnShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ratio = default_backward_ratio(shape)
        if self.backward is None:
            return ratio, np.full(ratio.shape, BACKWARD_UNCERTAINTY), np.full(ratio.shape, np.int8(Basis.INTERPOLATED))
        features = _features(self.physics, self.machine, shape)
        log_bare = np.log(attn_times(self.physics, self.machine, shape).seconds)
        correction, std, basis = self.backward.correct(features, _coordinates(shape), log_bare)
        if self.backward.trees is None:
            basis = np.full(ratio.shape, np.int8(Basis.INTERPOLATED))
        return ratio * np.exp(correction), std, basis

    def kernel_scale(self, table: Table) -> dict[str, tuple[float, int]]:
        """Map kernel -> (median of measured / predicted, measurements), for training kernels timed forward on this device.

        Frameworks choose different kernels (FlashAttention 2 takes 1.5 times as long as 3 on Hopper).
        """
        forward = table.where((table["pass"] == "forward") & ~is_serving(table["source"]))
        ratio = forward["seconds"] / self.predict(*shape_of(forward)).seconds
        kernels = np.unique(forward["kernel"])
        chosen = {str(name): ratio[forward["kernel"] == name] for name in kernels}
        return {name: (float(np.median(r)), len(r)) for name, r in chosen.items()}

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


def shape_of(table: Table) -> AttnShape:
    """The shapes of a flash_attn table; a zero v_head_dim means head_dim, a zero kv_heads means heads."""
    column = {name: table[name].astype(np.float64) for name in AttnShape._fields}
    column["v_head_dim"] = np.where(column["v_head_dim"] > 0, column["v_head_dim"], column["head_dim"])
    column["kv_heads"] = np.where(column["kv_heads"] > 0, column["kv_heads"], column["heads"])
    return AttnShape(**column)


def main_rows(table: Table) -> Table:
    """Forward rows of the kernel timed most often.

    16-bit rows where there are any; without the rows of other laboratories if enough remain.
    """
    table = table.where(_measured_dtype(table))
    forward = table.where((table["pass"] == "forward") & (table["seconds"] > 0))
    own = forward.where(~other_lab(forward["source"]))
    rows = own if len(own) >= ROWS_FOR_PHYSICS else forward
    kernels, counts = np.unique(rows["kernel"], return_counts=True)
    return rows.where(rows["kernel"] == kernels[counts.argmax()]) if len(rows) else rows


def _measured_dtype(table: Table) -> np.ndarray:
    half = np.isin(table["dtype"], HALF_DTYPES)
    return half if half.any() else np.isin(table["dtype"], ("fp32", "float32"))


def _measured_calls(table: Table, kernel: str) -> MeasuredTimes:
    """Return the forward and backward calls that this laboratory timed with one kernel."""
    rows = table.where(
        ~other_lab(table["source"]) & (table["kernel"] == kernel) & np.isin(table["pass"], ("forward", "backward"))
    )
    return MeasuredTimes.of(shape_keys(*shape_of(rows), (rows["pass"] == "backward") * 1.0), rows)


def _coordinates(shape: AttnShape) -> np.ndarray:
    """Position of a call among the measured ones, in octaves.

    Keys per query (which the mask and context parallelism change) and the group size count half, since the physical model
    covers them well.
    """
    columns = (
        np.log2(shape.seq_q),
        0.5 * np.log2(shape.keys_per_query / shape.seq_q),
        np.log2(shape.batch * shape.heads),
        0.5 * np.log2(np.maximum(shape.heads / shape.kv_heads, 1)),
        np.log2(shape.head_dim + shape.v_head_dim),
    )
    return np.stack(columns, axis=1)


def _features(physics: AttnPhysics, machine: AttnMachine, shape: AttnShape) -> np.ndarray:
    """Inputs of the correction, shape [rows, features]: sizes, the regime of the physical model, waves."""
    times = attn_times(physics, machine, shape)
    waves = shape.blocks / machine.sms
    columns = (
        np.log2(shape.batch),
        np.log2(shape.seq_q),
        np.log2(shape.keys_per_query),
        np.log2(shape.heads),
        np.log2(shape.kv_heads),
        np.log2(shape.heads / shape.kv_heads),
        shape.head_dim,
        shape.v_head_dim,
        np.log2(shape.batch * shape.heads),
        np.log2(shape.batch * shape.kv_heads),
        np.log2(shape.batch * shape.seq_q),
        np.log2(shape.flops),
        np.log(waves),
        waves / np.ceil(waves),
        np.log((times.seconds + times.cache) / physics.launch),
        np.log(times.spread / times.longest),
        np.log(times.spread / times.memory),
        np.log(times.seconds / (times.cache + 1e-3 * times.seconds)),
    )
    return np.stack(columns, axis=1)


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
    features = _features(fit.physics, fit.machine, shape)
    learnt = fit_residual(features, _coordinates(shape), log_bare, off_default, np.arange(len(rows)), _TREES)
    weight = len(rows) / (len(rows) + _PRIOR_ROWS)
    uncertainty = np.hypot(weight * learnt.size_uncertainty, (1 - weight) * BACKWARD_UNCERTAINTY)
    return learnt if learnt.trees is not None else replace(learnt, shift=weight * learnt.shift, size_uncertainty=uncertainty)


def waits_for_host(rows: Table) -> np.ndarray:
    """True for calls that take as long as the host needs to start them; shape [rows].

    Seen where the shortest calls of a source and pass take equally long for work that differs: of these, and of up to twice
    their time, it is not known how long the device works.
    """
    found = np.zeros(len(rows), dtype=bool)
    for source in np.unique(rows["source"]):
        for which in np.unique(rows["pass"]):
            mine = np.flatnonzero((rows["source"] == source) & (rows["pass"] == which) & (rows["seconds"] > 0))
            if len(mine):
                seconds, work = rows["seconds"][mine], shape_of(rows.where(mine)).flops
                shortest = seconds < _EQUALLY_LONG * seconds.min()
                if work[shortest].max() >= _OTHER_WORK * work[shortest].min():
                    found[mine] = seconds < 2.0 * seconds.min()
    return found


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
