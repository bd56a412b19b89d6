"""Time of kernels that only move bytes: a launch, then the bytes at a fraction of the memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate, roofline, std_of_errors
from profiler.profile.profile import Device, Table

#: Assumed where a kind was never measured: launch seconds, fraction of HBM bandwidth, standard deviation of log time. The
#: fraction is what copy-like kernels reach (quantise 0.84 and add 0.88 of HBM where measured, less for fused work).
DEFAULT = (3e-6, 0.75, 0.30)
#: Uncertainty of constants stated as a published efficiency instead of measurements.
GIVEN_UNCERTAINTY = 0.25
#: Fractions of HBM bandwidth for devices where the kind was not measured: medians of A100 and Hopper in the shipped profiles.
#: norm_grad: Apex's and Transformer Engine's backward kernels, whose inputs stay in registers: 1,163 GB/s on A100
#: (NVIDIA/apex pull request 1037), 1.8 TB/s at 7,168 columns on H800 (the same kernel in DeepSeek-V3's trace), Liger's 1.8 on
#: H100 NVL (linkedin/Liger-Kernel, benchmark/data/h100_all_benchmark_data.csv). norm_grad_torch: torch's own and compiled ones,
#: which read their inputs again: 0.24 measured on A100, 0.18 (compiled RMSNorm in 16 bits) to 0.36 (LayerNorm in fp32) of H100
#: NVL in the same file. norm_grad_apex: Apex's kernel for any width, 572 GB/s (the same pull request; A100 of 40 or 80 GB).
#: cross_entropy: one Triton kernel, gradients in place: 0.30 of B200's bandwidth (SimuMax, Transformer Engine's), 0.38 of
#: H100's (Liger's under Megatron-Core, the CSV of solver.layers.head).
#: permute: 0.54 of B200's (SimuMax), 0.79 of H800's in DeepSeek-V3's trace, each copy on its own: their geometric mean.
#: hadamard_quantize: largest value and both copies of NVFP4 operands, rotated along one axis (pytorch/ao 36027d8,
#: benchmarks/prototype/nvfp4_training/README.md, its CuTe kernels on B200: at 2,048 x 28,672 3.1 TB/s for the first and 2.7 for
#: the second; the slopes between its shapes are 3.4 and 2.8 TB/s of 8).
#: swizzle: scales of block-scaled operands, one kernel each. On GB200 padding and swizzle take 11.1 us of 16,384 x 4,128 values
#: in MXFP8, a fused kernel 4.3 (Transformer Engine's pull request 3519); in NVFP4 two swizzles take about 25 us (its pull
#: request 3011; of 51M values, as of Llama's): 0.07 to 0.13 of the bandwidth beside the assumed launch.
KIND_SHARE = {
    "norm": 0.54,
    "norm_grad": 0.52,
    "norm_grad_torch": 0.25,
    "norm_grad_apex": 0.33,
    "row": 0.40,
    "gated_act": 0.55,
    "act": 0.67,
    "act_grad": 0.75,
    "softmax": 0.78,
    "softmax_grad": 0.75,
    "rope": 0.48,
    "residual": 0.90,
    "embedding": 0.17,
    "quantize": 0.85,
    "swizzle": 0.10,
    "hadamard_quantize": 0.38,
    "cross_entropy": 0.35,
    "mixed": 0.69,
    "cast": 0.69,
    "strided": 0.90,
    "permute": 0.65,
}
#: For kernel chains of an eager framework that were not measured: kind -> {kind whose constants the chain's kernels use: bytes
#: that they move relative to the one fused kernel}. Counted from eager code on 16-bit values, in bytes per element:
#: rope: multiply by cosine 4, negate and join the halves 6, multiply by sine 4, add 6 = 20, fused 4; backward:
#: one more sum, 24, fused 4. Both products and the half that is negated are ``strided``.
#: gated_act: activation 4, product 6 = 10, fused 6; backward two products 12, activation 6 = 18, fused 10.
#: gated_act_split: the same where gate and up are halves of one tensor, views that are not contiguous: activation and product
#: take one value after the other, and backward the product with up and the activation; that with the activated gate does not.
#: mixed: a 16-bit value is added to one in fp32; cast: to fp32: kernels of torch that cast as they load read no vectors; a cast
#: alone reaches 1.41 of 2.04 TB/s on H100 PCIe (pytorch's pull request 137053, before it vectorised casts).
#: norm: to fp32 6, square 8, mean 4, scale 8, to 16 bits 6, multiply by weight 4 = 36, fused 4; backward: weight 12, casts 12,
#: scale 8 and 16, mean 8, square 20, the sum of both paths 12 = 88, fused 6. Kernels that reduce a row or broadcast along it
#: (16 of the 36, 44 of the 88) run at the rate of ``row``, that of vLLM's RMSNorm. Liger's benchmark of Hugging Face's chain at
#: 2,048 x 32,768 on H100 says 0.067 and 0.039 of the bandwidth for the fused bytes; this gives 0.059 and 0.036.
#: cross_entropy: fp32 copy, max, subtract, exp, sum, divide = 38 per logit, backward 16; fused 4 each.
#: expert_bias: product with the probabilities in fp32 4, sum 10 (mixed), join 8, to 16 bits 6 = 28 a value, fused 4; backward:
#: to fp32 6 (cast), to 16 bits 6, split 4, and for bias and probabilities a product 8 and its sum 4 each = 40, fused 2.
#: expert_bias_half, the same with probabilities in 16 bits: product 2, sum 6, join 4 = 12; backward: split 4, for bias and
#: probabilities a product 4 and its sum 2 each = 16. Products with what is broadcast are strided, one value of 4 bytes each;
#: those in fp32, whose sums follow, are priced as rows, which takes longer.
#: softmax: the mask in place 4, to fp32 6, softmax 8, to 16 bits 6 = 24 per score, fused 4 (the scale is in the GEMM); the
#: gradients of each 28, fused 6.
EAGER_BYTES = {
    "rope_eager": {"residual": 10 / 4, "strided": 10 / 4},
    "rope_eager_grad": {"residual": 14 / 4, "strided": 10 / 4},
    "gated_act_eager": {"residual": 10 / 6},
    "gated_act_eager_grad": {"residual": 18 / 10},
    "gated_act_split": {"strided": 8 / 6},
    "gated_act_split_grad": {"residual": 6 / 10, "strided": 8 / 10},
    "norm_eager": {"residual": 20 / 4, "row": 16 / 4},
    "norm_eager_grad": {"residual": 44 / 6, "row": 44 / 6},
    "expert_bias_eager": {"residual": 14 / 4, "mixed": 10 / 4, "row": 4 / 4},
    "expert_bias_eager_grad": {"residual": 10 / 2, "cast": 6 / 2, "row": 24 / 2},
    "expert_bias_half_eager": {"residual": 10 / 4, "strided": 4 / 4},
    "expert_bias_half_eager_grad": {"residual": 4 / 2, "row": 4 / 2, "strided": 8 / 2},
    "cross_entropy_eager": {"residual": 38 / 4},
    "cross_entropy_eager_grad": {"residual": 16 / 4},
    "softmax_eager": {"softmax": 24 / 4},
    "softmax_eager_grad": {"softmax": 28 / 6},
}
#: torch's kernels for tensors that are not contiguous (views, what is broadcast) and those that cast as they load take one
#: value after the other, without vectors (gpu_kernel_impl_nocast in aten/src/ATen/native/cuda/CUDALoops.cuh): more bandwidth
#: does not help them. Values a second of each multiprocessor: the geometric mean of what GH200's rope_eager in the shipped
#: profiles takes without its contiguous passes (3.3e9 forward, 1.9e9 backward), prelu of H200 (2.4e9: tile-ai/TileOPs pull
#: request 500), and casts to fp32 of H100 PCIe (2.1e9: pytorch pull request 137053) and of a device of 8 TB/s (2.6e9, if it is
#: B200: PaddlePaddle/Paddle pull request 76988). A100, at a fourth less clock, casts 1.7e9 (pytorch pull request 195542).
SCALAR_RATE = 2.4e9
#: Bytes of a value in each of these kinds.
_SCALAR = {"strided": 4.0, "cast": 6.0, "mixed": 10.0}
#: A kernel's share of the bandwidth falls as a power of the bandwidth of a multiprocessor, which issues its instructions:
#: torch's reach 8% less of GH200's (30 GB/s for each) than of A100's (19), in the median of ten kinds; vLLM's quantisation 10%
#: less of B200's (54) than of H100's (25). KIND_SHARE is of the mean of A100 and GH200, but for _ON_BLACKWELL.
ISSUE_EXPONENT, USUAL_PER_SM = 0.16, 24e9
_ON_BLACKWELL = ("hadamard_quantize", "cross_entropy", "permute", "swizzle")  #: measured on B200, too
#: Kinds that take a measured one's constants where they were not measured: reductions and broadcasts those of norms.
_MEASURED_LIKE = {"row": "norm", "strided": "residual"}
_GRADIENT = "_grad"  #: ends the name of a backward kernel; one that was not measured is as fast as the forward one
#: Plain streams: kinds whose median fraction replaces that of a kind never measured on this device.
COPY_LIKE = ("residual", "quantize", "copy")
_LEAST_UNCERTAINTY, _ROWS_FOR_FIT, _UNCERTAINTY_PER_OCTAVE = 0.03, 8, 0.05
#: Times of more bytes than this do not show how long a launch takes: it is at most the assumed one.
_LAUNCH_SEEN = 1e8
#: A launch shorter than 0.5 us or longer than 50 us is an error in the table; no stream from HBM exceeds 0.93 of the peak.
_LOW, _HIGH = np.log([5e-7, 0.02]), np.log([5e-5, 0.93])


@dataclass(frozen=True)
class MemoryBoundModel:
    """One entry per kind, arrays of shape [kinds].

    num_sms: of the device. launch: seconds. fraction: of ``bandwidth`` [bytes/s]. uncertainty: standard deviation of log time.
    smallest, largest: range of the fitted bytes.
    """

    bandwidth: float
    num_sms: float
    kinds: tuple[str, ...]
    launch: np.ndarray
    fraction: np.ndarray
    uncertainty: np.ndarray
    smallest: np.ndarray
    largest: np.ndarray

    @classmethod
    def fit(cls, table: Table, device: Device, stated: Mapping[str, Any] | None = None) -> MemoryBoundModel:
        """Fit each kind with at least eight measurements.

        stated: kind -> {"latency_s": seconds, "bandwidth": bytes/s} for kinds known only from a published efficiency (a
        profile's ``meta["laws"]["memory_bound"]``); measurements of the same kind take precedence.
        """
        fits: dict[str, tuple[float, ...]] = {}
        for kind, constants in (stated or {}).items():
            fraction = min(float(constants["bandwidth"]) / device.memory_bandwidth, 1.0)
            fits[kind] = (float(constants["latency_s"]), fraction, GIVEN_UNCERTAINTY, 0.0, 0.0)
        for kind in np.unique(table["kind"]):
            rows = table.where((table["kind"] == kind) & (table["bytes"] > 0))
            if len(rows) >= _ROWS_FOR_FIT:
                fits[str(kind)] = _fit_kind(rows["bytes"].astype(np.float64), rows["seconds"], device.memory_bandwidth)
        columns = np.array(list(fits.values()), dtype=np.float64).reshape(-1, 5).T
        return cls(device.memory_bandwidth, device.num_sms, tuple(fits), *columns)

    def on(self, device: Device) -> MemoryBoundModel:
        """Return the model on another device: the same kernels on its memory and multiprocessors."""
        share = _issued(device.memory_bandwidth / device.num_sms, self.bandwidth / self.num_sms)
        return replace(self, bandwidth=device.memory_bandwidth, num_sms=device.num_sms, fraction=self.fraction * share)

    def predict(self, kind: str, size: Any) -> Estimate:
        """Seconds of a kernel of one ``kind`` on ``size`` bytes (read plus written, any shape).

        For the eager kinds, ``size`` is that of the fused kernel that would do the same work.
        """
        if kind not in self.kinds and kind in EAGER_BYTES:
            parts = [
                self.predict(like, np.asarray(size, dtype=np.float64) * times) for like, times in EAGER_BYTES[kind].items()
            ]
            longest = max(parts, key=lambda part: float(np.max(part.seconds, initial=0.0)))
            return longest._replace(seconds=sum((part.seconds for part in parts), np.zeros(np.shape(size))))
        size = np.maximum(np.asarray(size, dtype=np.float64), 1.0)
        launch, fraction, uncertainty, low, high = self._constants(kind)
        seconds = launch + size / (fraction * self.bandwidth)
        if high == 0:
            return roofline(seconds, uncertainty)
        octaves = np.log2(np.maximum(size / high, 1.0)) + np.log2(np.maximum(low / size, 1.0))
        std = np.hypot(uncertainty, np.minimum(_UNCERTAINTY_PER_OCTAVE * octaves, 0.3))
        basis = np.where(octaves > 0, np.int8(Basis.EXTRAPOLATED), np.int8(Basis.INTERPOLATED))
        return Estimate(seconds, std, basis)

    def _constants(self, kind: str) -> tuple[float, ...]:
        if kind in self.kinds:
            i = self.kinds.index(kind)
            return tuple(float(c[i]) for c in (self.launch, self.fraction, self.uncertainty, self.smallest, self.largest))
        if kind in _SCALAR:
            launch, fraction, *_ = self._vectors(kind)
            return launch, min(fraction, _SCALAR[kind] * SCALAR_RATE * self.num_sms / self.bandwidth), DEFAULT[2], 0.0, 0.0
        return self._vectors(kind)

    def _vectors(self, kind: str) -> tuple[float, ...]:
        """Return the constants of a kind that was not measured, as far as memory limits it."""
        like = _MEASURED_LIKE.get(kind, "")
        if like in self.kinds:
            return self._constants(like)
        if kind in KIND_SHARE:
            usual = 1.0 if kind in _ON_BLACKWELL else _issued(self.bandwidth / self.num_sms, USUAL_PER_SM)
            return DEFAULT[0], KIND_SHARE[kind] * usual, DEFAULT[2], 0.0, 0.0
        if kind.endswith(_GRADIENT):
            return self._constants(kind.removesuffix(_GRADIENT))
        streams = [i for i, name in enumerate(self.kinds) if name in COPY_LIKE]
        if not streams:
            return (*DEFAULT, 0.0, 0.0)
        return float(np.median(self.launch[streams])), float(np.median(self.fraction[streams])), DEFAULT[2], 0.0, 0.0

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat plain arrays, for an npz file."""
        return {
            "bandwidth": np.array(self.bandwidth),
            "num_sms": np.array(self.num_sms),
            "kinds": np.array(self.kinds, dtype=np.str_),
            "launch": self.launch,
            "fraction": self.fraction,
            "uncertainty": self.uncertainty,
            "smallest": self.smallest,
            "largest": self.largest,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> MemoryBoundModel:
        """The inverse of ``to_arrays``."""
        columns = (np.asarray(arrays[n]) for n in ("launch", "fraction", "uncertainty", "smallest", "largest"))
        kinds = tuple(str(k) for k in arrays["kinds"])
        return cls(float(arrays["bandwidth"]), float(arrays["num_sms"]), kinds, *columns)


def _issued(per_sm: float, measured: float) -> float:
    """Return the share of a device's bandwidth that a kernel reaches over that of the one where it was measured, by the bytes/s
    for each multiprocessor of both: at most 1."""
    return float(min((measured / per_sm) ** ISSUE_EXPONENT, 1.0))


def _fit_kind(size: np.ndarray, seconds: np.ndarray, bandwidth: float) -> tuple[float, ...]:
    """Fit launch, fraction, uncertainty, smallest and largest bytes, by least squares on log time (soft L1).

    The fraction stays below the peak: measurements that look faster than memory hit the L2 cache; a training step does not.
    """
    from scipy.optimize import least_squares

    def error(x: np.ndarray) -> np.ndarray:
        return np.log((np.exp(x[0]) + size / (np.exp(x[1]) * bandwidth)) / seconds)

    start = np.clip(np.log([DEFAULT[0], DEFAULT[1]]), _LOW, _HIGH)
    high = _HIGH if size.min() < _LAUNCH_SEEN else np.array([np.log(DEFAULT[0]), _HIGH[1]])
    x = least_squares(error, np.minimum(start, high - 1e-6), bounds=(_LOW, high), loss="soft_l1", f_scale=0.1).x
    uncertainty = max(std_of_errors(error(x)), _LEAST_UNCERTAINTY)
    return float(np.exp(x[0])), float(np.exp(x[1])), uncertainty, float(size.min()), float(size.max())
