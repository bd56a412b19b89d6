"""Attention that multiplies in 8 bits: its time over that of the same call in 16 bits.

Products take half as long, the softmax between them as long as before: half as many exponentials per clock, smaller heads and
fewer keys leave less of the gain, and backward passes of short sequences lose. Measured: cuDNN's training kernels, as NVIDIA
publishes them with cudnn-frontend (MIT), benchmark/sdpa_benchmark_training/results: GB200 and GB300 with cuDNN 9.23
(llama3.1, dsv3 and gpt_oss of 2026-05-29), H200 with 9.19 (h200_919_only_cudnn/llama3.1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from profiler.profile.profile import USUAL_EXPONENTIALS, Device

KEYS = (1024, 2048, 4096, 8192, 16384)  #: that a query meets on average in the calls below, which are causal
DIMS = (128, 256, 320)  #: of q and k plus those of v in the calls below

#: Standard deviation of log(ratio): 1.48 times the median of how far that of cuDNN 9.19 lies from it (fp8 on GB200 and GB300).
RATIO_STD = 0.10


class Times(NamedTuple):
    """Milliseconds of one call in each format at each of KEYS."""

    half: tuple[float, ...]
    fp8: tuple[float, ...]
    mxfp8: tuple[float, ...] = ()

    def ratio(self, dtype: str) -> np.ndarray:
        return np.array(self.mxfp8 if dtype == "mxfp8" else self.fp8) / np.array(self.half)


#: One sequence, 64 heads of 128 and 8 of keys. The backward pass of fp8 computes ever more of the square that the mask hides.
HOPPER = {
    False: Times((0.142, 0.465, 1.708, 6.531, 25.566), (0.098, 0.322, 1.141, 4.357, 16.884)),
    True: Times((0.464, 1.450, 5.083, 19.002, 75.688), (0.437, 1.459, 6.392, 29.422, 118.729)),
}
#: Backward of fp8 over 16 bits where no mask hides anything, on H200: 0.85 to 0.95.
HOPPER_WHOLE_BACKWARD = 0.93

#: (exponentials per clock, backward) -> times by DIMS: two sequences, 128 heads of 64 with a window of 128 (forward: the ratio
#: is the same at any length); 64 heads of 128 and 8 of keys; 128 heads of 192 and 128.
BLACKWELL = {
    (16, False): (
        Times((0.109, 0.210, 0.413, 0.821, 1.636), (0.098, 0.189, 0.372, 0.739, 1.474), (0.112, 0.217, 0.426, 0.843, 1.690)),
        Times((0.129, 0.407, 1.429, 5.423, 22.772), (0.098, 0.310, 1.095, 4.144, 16.205), (0.105, 0.328, 1.160, 4.373, 17.288)),
        Times(
            (0.310, 0.982, 3.355, 12.320, 49.763), (0.202, 0.641, 2.241, 8.459, 34.927), (0.219, 0.688, 2.407, 9.028, 37.233)
        ),
    ),
    (16, True): (
        Times(
            (0.393, 1.205, 4.228, 17.074, 75.694), (0.421, 1.187, 3.834, 13.613, 54.359), (0.467, 1.331, 4.308, 16.157, 62.482)
        ),
        Times(
            (1.026, 3.317, 12.343, 49.496, 206.905),
            (0.685, 2.127, 7.341, 28.280, 117.501),
            (0.837, 2.518, 8.696, 34.096, 137.313),
        ),
    ),
    (32, False): (
        Times((0.101, 0.194, 0.381, 0.756, 1.506), (0.087, 0.168, 0.329, 0.651, 1.296), (0.092, 0.176, 0.342, 0.676, 1.344)),
        Times((0.094, 0.302, 1.094, 4.229, 17.397), (0.071, 0.220, 0.768, 2.872, 11.310), (0.080, 0.247, 0.858, 3.188, 12.466)),
        Times(
            (0.254, 0.813, 2.886, 10.755, 44.409), (0.149, 0.487, 1.736, 6.590, 26.497), (0.169, 0.548, 1.929, 7.295, 28.908)
        ),
    ),
    (32, True): (
        Times(
            (0.356, 1.089, 3.785, 14.614, 59.098), (0.367, 0.993, 3.102, 10.798, 41.499), (0.428, 1.216, 3.949, 14.160, 54.905)
        ),
        Times(
            (0.974, 3.115, 11.062, 43.648, 176.050),
            (0.592, 1.787, 6.114, 22.755, 90.627),
            (0.782, 2.328, 7.827, 29.858, 115.889),
        ),
    ),
}


def fp8_attention_ratio(device: Device, dtype: str, keys: Any, dims: Any, causal: Any, backward: Any) -> np.ndarray:
    """Return the time of attention in ``dtype`` ("fp8" or "mxfp8") over that in 16 bits; the arguments broadcast.

    keys: that a query meets on average. dims: head dimensions of q and k plus those of v. Outside the measured sizes it is that
    of the nearest one. Devices other than Hopper take that of Blackwell, by their exponentials per clock.
    """
    keys, dims, causal, backward = np.broadcast_arrays(keys, dims, causal, backward)
    at = np.log2(np.maximum(keys, 1.0))
    if device.is_hopper:
        return np.where(backward, _hopper(True, at, causal), _hopper(False, at, causal))
    return np.where(backward, _blackwell(device, dtype, True, at, dims), _blackwell(device, dtype, False, at, dims))


def _hopper(backward: bool, at: np.ndarray, causal: np.ndarray) -> np.ndarray:
    ratio = np.interp(at, np.log2(KEYS), HOPPER[backward].ratio("fp8"))
    return np.where(causal, ratio, HOPPER_WHOLE_BACKWARD) if backward else ratio


def _blackwell(device: Device, dtype: str, backward: bool, at: np.ndarray, dims: np.ndarray) -> np.ndarray:
    few, many = (_by_dims(BLACKWELL[exponentials, backward], dtype, at, dims) for exponentials in (16, 32))
    share = np.clip(2.0 * (1.0 - USUAL_EXPONENTIALS / device.exponentials), 0.0, 1.0)  # of the time that exponentials wait
    return few + share * (many - few)


def _by_dims(measured: tuple[Times, ...], dtype: str, at: np.ndarray, dims: np.ndarray) -> np.ndarray:
    """Interpolate between the measured head dimensions; backward passes were measured from 256 on."""
    known = DIMS[-len(measured) :]
    ratios = [np.interp(at, np.log2(KEYS), times.ratio(dtype)) for times in measured]
    found = ratios[0]
    for low, high, ratio, before in zip(known, known[1:], ratios[1:], ratios, strict=False):
        share = np.clip((dims - low) / (high - low), 0.0, 1.0)
        found = np.where(dims > low, before + share * (ratio - before), found)
    return found
