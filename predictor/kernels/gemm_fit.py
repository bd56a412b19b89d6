"""The fit of GEMMs of one arithmetic: physical model, learnt correction, factors of the layouts of operands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.estimate import Estimate, roofline
from predictor.kernels.dtypes import HALF_BYTES
from predictor.kernels.features import gemm_coordinates, gemm_features
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.gemm_physics import (
    GemmMachine,
    GemmPhysics,
    GemmTimes,
    buffer_seconds,
    cast_seconds,
    fit_gemm_physics,
    gemm_times,
)
from predictor.kernels.known_constants import ROWS_FOR_PHYSICS, KnownConstants
from predictor.kernels.measured_times import MeasuredTimes
from predictor.kernels.residual import Residual, fit_residual
from predictor.kernels.shape_keys import shape_keys
from predictor.kernels.sources import other_lab, times_casts
from profiler.profile.profile import Table

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
#: Share of the fp32 buffer's memory time (read and write) by which accumulating a weight gradient lengthens its GEMM: 0.62 and
#: 0.79 in SimuMax's kernels on A100 PCIe and B200, 0.77 and 0.90 in this project's measurements on H100 and H200.
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


@dataclass(frozen=True)
class GemmFit:
    """The fit of one arithmetic: physical model, its machine, learnt correction (None: nothing measured), measured shapes."""

    physics: GemmPhysics
    machine: GemmMachine
    residual: Residual | None
    known: MeasuredTimes
    layout_factor: np.ndarray  # [3 layouts, 2 accumulate] relative to forward
    layout_uncertainty: np.ndarray
    adding: float = ADDING_PRIOR  # share of the fp32 buffer's memory time, as ADDING_PRIOR

    def forward(self, bare: GemmTimes, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray) -> Estimate:
        """Return the estimate of forward passes; bare: times of the physical model. All [rows]."""
        if self.residual is None:
            return roofline(bare.seconds, _ROOFLINE_UNCERTAINTY)
        features = gemm_features(self.physics, self.machine, m, n, k, batch)
        correction, std, basis = self.residual.correct(features, gemm_coordinates(m, n, k, batch), np.log(bare.seconds))
        return Estimate(bare.seconds * np.exp(correction), std, basis)


def fit_gemms(
    table: Table,
    machine: GemmMachine,
    launch: float | None = None,
    gradients: tuple[float, float] | None = None,
    constants: KnownConstants | None = None,
) -> GemmFit:
    """Fit physical model and correction to the rows of own_forward_rows, then the factors of the layouts.

    launch: seconds of a 16-bit GEMM's launch, for rows that also time a cast. gradients: (time of both gradients relative to a
    forward pass, beyond LAYOUT_PRIOR; its uncertainty). constants: those that need no search.
    """
    table = table.where((table["seconds"] > 0) & (table["m"] > 0) & (table["n"] > 0) & (table["k"] > 0))
    rows = own_forward_rows(table)
    prior = np.array([[LAYOUT_PRIOR[GemmLayout(i), bool(a)] for a in (0, 1)] for i in range(3)])
    if gradients:
        prior[1:, :, 0] *= gradients[0]
        prior[1:, :, 1] = np.hypot(prior[1:, :, 1], gradients[1])
    if not len(rows):
        return GemmFit(GemmPhysics(), machine, None, MeasuredTimes.none(), prior[..., 0], prior[..., 1])
    sizes, seconds = sizes_of(rows), rows["seconds"]
    enough = len(rows) >= ROWS_FOR_PHYSICS
    casts = times_casts(rows["source"]) & (machine.element < HALF_BYTES)
    physics = fit_gemm_physics(machine, sizes, seconds, casts, launch, constants) if enough else GemmPhysics()
    cast = np.where(casts, cast_seconds(physics, machine, sizes[0], sizes[2], sizes[3]), 0.0)
    log_bare = np.log(gemm_times(physics, machine, *sizes).seconds)
    groups = np.unique(np.stack(sizes[1:3]), axis=1, return_inverse=True)[1].ravel()
    features, off_bare = gemm_features(physics, machine, *sizes), np.log(seconds / (np.exp(log_bare) + cast))
    weights = np.where(is_training_like(*sizes[:3]), 2.0, 1.0)
    residual = fit_residual(features, gemm_coordinates(*sizes), log_bare, off_bare, groups, _TREES, weights)
    bare = GemmFit(physics, machine, residual, MeasuredTimes.none(), prior[..., 0], prior[..., 1])
    return GemmFit(physics, machine, residual, _measured_shapes(table, machine), *_layout_factors(table, bare))


def own_forward_rows(table: Table) -> Table:
    """Forward rows that the fit uses: without those of other laboratories, or all rows where too few remain."""
    forward = table.where((table["layout"] == "TN") | (table["layout"] == ""))
    own = forward.where(~other_lab(forward["source"]))
    return own if len(own) >= ROWS_FOR_PHYSICS else forward


def is_training_like(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return which GEMMs are of sizes that training has: tokens of a micro batch, widths of a model; shape [rows]."""
    return (m >= 1024) & (n >= 512) & (k >= 512)


def sizes_of(table: Table) -> list[np.ndarray]:
    """Return m, n, k and batch of every row, at least 1: float64 [rows] each."""
    return [np.maximum(table[name].astype(np.float64), 1.0) for name in ("m", "n", "k", "batch")]


def layouts_of(table: Table) -> np.ndarray:
    """Return the codes of GemmLayout of every row, TN where none is stated: int64 [rows]."""
    return np.array([GemmLayout[name].value if name else 0 for name in table["layout"]], dtype=np.int64)


def _measured_shapes(table: Table, machine: GemmMachine) -> MeasuredTimes:
    """Return the times of the shapes and layouts that this laboratory measured, without those whose operands it also cast."""
    casts = times_casts(table["source"]) & (machine.element < HALF_BYTES)
    rows = table.where(~other_lab(table["source"]) & ~casts)
    if not len(rows):
        return MeasuredTimes.none()
    return MeasuredTimes.of(shape_keys(*sizes_of(rows), layouts_of(rows), rows["accumulate"].astype(np.int64)), rows)


def _layout_factors(table: Table, forward_fit: GemmFit) -> tuple[np.ndarray, np.ndarray, float]:
    """Time of each (layout, accumulate) relative to forward and its uncertainty, shapes [3, 2], and the share ``adding``.

    The median over rows of log(measured / predicted) minus the forward median of the same source, so that a laboratory's own
    scale cancels; shrunk towards the prior where rows are few.
    """
    factor, uncertainty, adding = forward_fit.layout_factor.copy(), forward_fit.layout_uncertainty.copy(), forward_fit.adding
    if not len(table):
        return factor, uncertainty, adding
    sizes = sizes_of(table)
    forward_seconds = forward_fit.forward(gemm_times(forward_fit.physics, forward_fit.machine, *sizes), *sizes).seconds
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
                traffic = (buffer_seconds(forward_fit.machine, sizes[0], sizes[1], sizes[3]) / forward_seconds)[rows]
                factor[layout, add], adding = _fit_adding(np.exp(ratio[rows]), traffic, float(factor[layout, add]))
            else:
                factor[layout, add] *= np.exp(weight * (np.median(ratio[rows]) - np.log(factor[layout, add])))
    return factor, uncertainty, adding


def _fit_adding(ratio: np.ndarray, traffic: np.ndarray, prior_factor: float) -> tuple[float, float]:
    """Return (factor, share) of ratio = factor + share * traffic, each with a weak prior.

    Least squares of relative errors, repeated with less weight on those above _OUTLIER (soft L1). ratio: measured times over
    forward ones, both of the same laboratory. traffic: the buffer's memory time over fitted forward times; a laboratory that is
    slower than the fit lengthens the whole GEMM (the derating), so its share is smaller by as much.
    """
    priors = np.sqrt(_PRIOR_ROWS) * np.array([1.0, np.sqrt(np.mean(traffic**2))])
    rows, weight = np.stack([1 / ratio, traffic / ratio], axis=1), np.ones(len(ratio))
    for _ in range(_ROUNDS):
        solution = np.linalg.lstsq(
            np.concatenate([rows * weight[:, None], np.diag(priors)]), np.append(weight, priors * (prior_factor, ADDING_PRIOR))
        )[0]
        weight = (1 + ((rows @ solution - 1) / _OUTLIER) ** 2) ** -0.25
    return float(solution[0]), max(float(solution[1]), 0.0)
