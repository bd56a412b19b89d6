"""Time of grouped GEMMs (the experts of an MoE layer): the dense model times a measured overhead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.kernels.linear import FAMILIES, Layout, LinearModel
from profiler.profile.profile import Table

PASSES = ("forward", "input_grad", "weight_grad")  #: in the order of Layout codes
#: Time relative to a dense batched GEMM, and its uncertainty, where no grouped kernel was measured: between the
#: Transformer-Engine kernels of A100 (0.95, 0.93, 1.11) and B200 (1.08, 1.17, 1.45 after correction by that laboratory's dense
#: scale).
PRIOR_OVERHEAD, PRIOR_UNCERTAINTY = (1.02, 1.05, 1.25), 0.20
_PRIOR_ROWS, _LEAST_UNCERTAINTY = 3, 0.05


@dataclass(frozen=True)
class GroupedLinearModel:
    """overhead, uncertainty: per pass, shape [3]; measured: whether they come from measurements, shape [3]."""

    linear: LinearModel
    overhead: np.ndarray
    uncertainty: np.ndarray
    measured: np.ndarray

    @classmethod
    def fit(
        cls, table: Table, linear: LinearModel, lab_scale: Mapping[str, tuple[float, int]] | None = None
    ) -> GroupedLinearModel:
        """Fit one overhead per pass: the median of measured over dense time.

        With few measurements it is shrunk towards the prior. lab_scale: as returned by ``linear.lab_scale``; the grouped times
        of a source are divided by how much slower its dense GEMMs are.
        """
        overhead, uncertainty, measured = np.array(PRIOR_OVERHEAD), np.full(3, PRIOR_UNCERTAINTY), np.zeros(3, dtype=bool)
        scale = np.ones(len(table))
        for source, (factor, _) in (lab_scale or {}).items():
            scale[np.char.startswith(table["source"], source)] = factor
        for code, name in enumerate(PASSES):
            ratios = [
                _ratio(linear, rows, code, str(dtype)) - np.log(scale[chosen])
                for dtype in np.unique(table["dtype"])
                if FAMILIES.get(str(dtype)) in linear.parts
                and len(rows := table.where(chosen := (table["pass"] == name) & (table["dtype"] == dtype)))
            ]
            if ratios:
                every = np.concatenate(ratios)
                weight = len(every) / (len(every) + _PRIOR_ROWS)
                median = float(np.median(every))
                overhead[code] = np.exp(weight * median + (1 - weight) * np.log(overhead[code]))
                spread = float(np.quantile(np.abs(every - median), 0.9)) / 1.645
                uncertainty[code] = max(np.hypot(weight * spread, (1 - weight) * PRIOR_UNCERTAINTY), _LEAST_UNCERTAINTY)
                measured[code] = True
        return cls(linear, overhead, uncertainty, measured)

    def predict(
        self, groups: Any, tokens_per_group: Any, n: Any, k: Any, passes: Any = Layout.TN, dtype: str = "bf16",
        accumulate: Any = False,
    ) -> Estimate:  # fmt: skip
        """Seconds for ``groups`` GEMMs of [tokens_per_group, k] with weights [n, k]; array arguments broadcast.

        passes: 0 forward, 1 input gradient, 2 weight gradient (codes of Layout); n and k are those of the forward in every
        pass.
        """
        passes = np.asarray(passes, dtype=np.int64)
        dense = self.linear.predict(*_gemm(tokens_per_group, n, k, passes), groups, passes, dtype, accumulate)
        basis = np.where(self.measured[passes], dense.basis, np.maximum(dense.basis, np.int8(Basis.EXTRAPOLATED)))
        basis = np.maximum(basis, np.int8(Basis.INTERPOLATED)).astype(np.int8)
        return Estimate(dense.seconds * self.overhead[passes], np.hypot(dense.relative_std, self.uncertainty[passes]), basis)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat plain arrays, for an npz file, including the dense model."""
        dense = {f"linear/{key}": array for key, array in self.linear.to_arrays().items()}
        return {"overhead": self.overhead, "uncertainty": self.uncertainty, "measured": self.measured, **dense}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> GroupedLinearModel:
        """The inverse of ``to_arrays``."""
        dense = {key.removeprefix("linear/"): arrays[key] for key in arrays if key.startswith("linear/")}
        return cls(LinearModel.from_arrays(dense), *(np.asarray(arrays[n]) for n in ("overhead", "uncertainty", "measured")))


def _gemm(tokens: Any, n: Any, k: Any, passes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """m, n, k of the GEMM that a pass computes: [t, k] x [k, n], [t, n] x [n, k], [n, t] x [t, k]."""
    weight, inputs = passes == Layout.NT, passes == Layout.NN
    depth = np.where(weight, tokens, np.where(inputs, n, k))
    return np.where(weight, n, tokens), np.where(passes == Layout.TN, n, k), depth


def _ratio(linear: LinearModel, rows: Table, code: int, dtype: str) -> np.ndarray:
    passes = np.full(len(rows), code)
    shape = _gemm(rows["tokens_per_group"], rows["n"], rows["k"], passes)
    accumulate = np.char.find(rows["source"], "accumulating in fp32") >= 0
    dense = linear.predict(*shape, rows["groups"], passes, dtype, accumulate).seconds
    ratio: np.ndarray = np.log(rows["seconds"] / dense)
    return ratio
