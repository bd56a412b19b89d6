"""Time of grouped GEMMs (the experts of an MoE layer).

    time = max(overhead * dense + output, least)

dense is the time of the same GEMMs as one dense batch, with a measured overhead per pass. output is what a weight gradient
moves to and from memory beyond that, a share of its bytes over the memory bandwidth: with few tokens per expert every weight's
gradient is read and written for little arithmetic (on B200 with 128 tokens, three quarters of the time where it accumulates in
fp32). least is what the memory's whole bandwidth needs to write these gradients, and to read what they are added to: those of
all experts fill more than any cache.

Transformer Engine starts a GEMM for each expert, on four streams, so that nothing is faster than groups * launch, what the host
needs for these (launch_seconds); kernels that hold all experts are not bound by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate, std_of_errors
from predictor.kernels.dtypes import FAMILIES
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.linear import LinearModel
from predictor.kernels.sources import LabScale
from profiler.profile.profile import Table

PASSES = ("forward", "input_grad", "weight_grad")  #: in the order of GemmLayout codes
#: Time relative to a dense batched GEMM, and its uncertainty, where no grouped kernel was measured: between the
#: Transformer-Engine kernels of A100 (0.94, 0.93, 0.9) and B200 (1.06, 1.14, 1.15 after correction by that laboratory's dense
#: scale).
PRIOR_OVERHEAD, PRIOR_UNCERTAINTY = (1.02, 1.05, 1.05), 0.20
#: Share of a weight gradient's bytes that take time of their own, and the bytes of a gradient that is read and written, in fp32
#: where it accumulates so, else in bf16.
PRIOR_OUTPUT, _FP32, _BF16 = 0.5, 8.0, 4.0
#: Most seconds of the host for each expert: the least time per expert on B200, 8.7 us at any number of tokens up to 308, over
#: that laboratory's dense scale. A profile with a shorter time per expert lowers it.
MOST_LAUNCH = 6.6e-6
_PRIOR_ROWS, _LEAST_UNCERTAINTY = 3, 0.05
_SHARES = np.linspace(0.0, 1.0, 41)
_SHARE_STRENGTH = 0.5  # summed error of log times for which the share may differ by 1 from its prior


@dataclass(frozen=True)
class GroupedLinearModel:
    """overhead, uncertainty: per pass, shape [3]; measured: whether they come from measurements, shape [3].

    families: the arithmetics of these measurements (predictor.kernels.linear.FAMILIES). output_share: of the bytes of a weight
    gradient. launch: seconds per group.
    """

    linear: LinearModel
    overhead: np.ndarray
    uncertainty: np.ndarray
    measured: np.ndarray
    families: tuple[str, ...] = ()
    output_share: float = PRIOR_OUTPUT
    launch: float = MOST_LAUNCH

    @classmethod
    def fit(cls, table: Table, linear: LinearModel, lab_scale: Mapping[str, LabScale] | None = None) -> GroupedLinearModel:
        """Fit one overhead per pass: the median of measured over dense time, without the output's own time.

        With few measurements it is shrunk towards the prior. lab_scale: as returned by ``linear.lab_scale``; the grouped times
        of a source are divided by how much slower its dense GEMMs are.
        """
        overhead, uncertainty, measured = np.array(PRIOR_OVERHEAD), np.full(3, PRIOR_UNCERTAINTY), np.zeros(3, dtype=bool)
        known = table.where(np.array([FAMILIES.get(str(dtype)) in linear.parts for dtype in table["dtype"]], dtype=bool))
        scale = np.ones(len(known))
        for source, (factor, _) in (lab_scale or {}).items():
            scale[np.char.startswith(known["source"], source)] = factor
        seconds = known["seconds"] / scale
        launch = min(MOST_LAUNCH, float(np.min(seconds / known["groups"], initial=np.inf)))
        dense, output = _parts(linear, known)
        share = _output_share(seconds, dense, output)
        for code, name in enumerate(PASSES):
            of_pass = known["pass"] == name
            if of_pass.any():
                times = seconds[of_pass], dense[of_pass], share * output[of_pass]
                median = _overhead(*times)
                error = np.log(times[0] / np.maximum(median * times[1] + times[2], launch * known["groups"][of_pass]))
                weight = len(error) / (len(error) + _PRIOR_ROWS)
                overhead[code] = median**weight * overhead[code] ** (1 - weight)
                uncertainty[code] = max(
                    np.hypot(weight * std_of_errors(error), (1 - weight) * PRIOR_UNCERTAINTY), _LEAST_UNCERTAINTY
                )
                measured[code] = True
        families = tuple(sorted({FAMILIES[str(dtype)] for dtype in known["dtype"]}))
        return cls(linear, overhead, uncertainty, measured, families, share, launch)

    def predict(
        self,
        groups: Any,
        tokens_per_group: Any,
        n: Any,
        k: Any,
        *,
        passes: Any = GemmLayout.TN,
        accumulate: Any = False,
        dtype: str = "bf16",
    ) -> Estimate:
        """Seconds of the device for ``groups`` GEMMs of [tokens_per_group, k] with weights [n, k]; array arguments broadcast.

        passes: 0 forward, 1 input gradient, 2 weight gradient (codes of GemmLayout); n and k are those of the forward in every
        pass. dtype: of the operands; where none of its kernels was measured (fp8, mxfp8), the dense GEMM of that dtype with the
        overhead of the others, extrapolated.
        """
        passes = np.asarray(passes, dtype=np.int64)
        shape = (*_gemm(tokens_per_group, n, k, passes), groups)
        dense = self.linear.predict(*shape, layout=passes, accumulate=accumulate, dtype=dtype, buffer=False)
        bandwidth = self.linear.parts[FAMILIES[dtype]].machine.bandwidth
        moved = _output_bytes(groups, n, k, passes, accumulate)
        least = np.where(accumulate, moved, moved / 2) / bandwidth  # what is not accumulated is not read
        seconds = dense.seconds * self.overhead[passes] + self.output_share * moved / bandwidth
        seconds = np.maximum(seconds, least)
        known = self.measured[passes] & (FAMILIES[dtype] in self.families)
        basis = np.where(known, dense.basis, np.maximum(dense.basis, np.int8(Basis.EXTRAPOLATED)))
        basis = np.maximum(basis, np.int8(Basis.INTERPOLATED)).astype(np.int8)
        std = np.hypot(dense.relative_std, np.where(known, self.uncertainty[passes], PRIOR_UNCERTAINTY))
        return Estimate(seconds, std, basis)

    def launch_seconds(self, groups: Any) -> np.ndarray:
        """Seconds of the host to launch a GEMM for each group."""
        return np.asarray(groups) * self.launch

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat plain arrays, for an npz file, including the dense model."""
        dense = {f"linear/{key}": array for key, array in self.linear.to_arrays().items()}
        constants = np.array([self.output_share, self.launch])
        own = {"overhead": self.overhead, "uncertainty": self.uncertainty, "measured": self.measured}
        return {**own, "families": np.array(self.families, dtype=np.str_), "constants": constants, **dense}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> GroupedLinearModel:
        """The inverse of ``to_arrays``."""
        dense = {key.removeprefix("linear/"): arrays[key] for key in arrays if key.startswith("linear/")}
        overhead, uncertainty, measured = (np.asarray(arrays[name]) for name in ("overhead", "uncertainty", "measured"))
        share, launch = (float(value) for value in arrays["constants"])
        families = tuple(str(name) for name in arrays["families"])
        return cls(LinearModel.from_arrays(dense), overhead, uncertainty, measured, families, share, launch)


def _gemm(tokens: Any, n: Any, k: Any, passes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """m, n, k of the GEMM that a pass computes: [t, k] x [k, n], [t, n] x [n, k], [n, t] x [t, k]."""
    weight, inputs = passes == GemmLayout.NT, passes == GemmLayout.NN
    depth = np.where(weight, tokens, np.where(inputs, n, k))
    return np.where(weight, n, tokens), np.where(passes == GemmLayout.TN, n, k), depth


def _output_bytes(groups: Any, n: Any, k: Any, passes: Any, accumulate: Any) -> np.ndarray:
    """Bytes of the weights' gradients that a weight gradient reads and writes; 0 in the other passes."""
    width = np.where(np.asarray(accumulate, dtype=bool), _FP32, _BF16)
    weights = np.asarray(groups, dtype=np.float64) * n * k
    return np.where(np.asarray(passes) == GemmLayout.NT, weights * width, 0.0)


def _parts(linear: LinearModel, rows: Table) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the dense GEMMs of ``rows`` and of all of their output bytes, shape [rows]."""
    dense, output = np.empty(len(rows)), np.empty(len(rows))
    accumulate = np.char.find(rows["source"], "accumulating in fp32") >= 0
    passes = np.array([PASSES.index(str(name)) for name in rows["pass"]], dtype=np.int64)
    for dtype in np.unique(rows["dtype"]):
        at = rows["dtype"] == dtype
        part, codes, adds = rows.where(at), passes[at], accumulate[at]
        shape = _gemm(part["tokens_per_group"], part["n"], part["k"], codes)
        dense[at] = linear.predict(
            *shape, part["groups"], layout=codes, accumulate=adds, dtype=str(dtype), buffer=False
        ).seconds
        bandwidth = linear.parts[FAMILIES[str(dtype)]].machine.bandwidth
        output[at] = _output_bytes(part["groups"], part["n"], part["k"], codes, adds) / bandwidth
    return dense, output


def _overhead(seconds: np.ndarray, dense: np.ndarray, output: np.ndarray) -> float:
    """The median of what is left of the time over the dense time; at least a tenth of the time is left."""
    return float(np.median(np.maximum(seconds - output, 0.1 * seconds) / dense))


def _output_share(seconds: np.ndarray, dense: np.ndarray, output: np.ndarray) -> float:
    """The share of the output's time that leaves the smallest errors; the prior where nothing tells."""
    moves = output > 0
    if not moves.any():
        return PRIOR_OUTPUT
    times = seconds[moves], dense[moves], output[moves]

    def error(share: float) -> float:
        found = _overhead(times[0], times[1], share * times[2]) * times[1] + share * times[2]
        return float(np.abs(np.log(found / times[0])).sum()) + _SHARE_STRENGTH * abs(share - PRIOR_OUTPUT)

    return float(min(_SHARES, key=error))
