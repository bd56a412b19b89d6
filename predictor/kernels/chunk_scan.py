"""Time of the gated delta rule: kernels that carry a state per head along the sequence, chunk by chunk.

    time = launch + batch * seq * heads * (work / num_sms + flops / peak) + seq / CHUNK * step

The chunks of one sequence wait for each other only in the kernels that pass the state on; a step of theirs takes as long on
every device, and with few heads it is what one waits for. All else is spread over the multiprocessors. Constants: fitted to
142 times of flash-linear-attention 0.5.1 (its Triton kernels, which Megatron-Core and transformers call) on H200 and GB200 at
head dims of 128, published by the authors of FlashQLA (QwenLM/FlashQLA, MIT licence, benchmark/benchmark_results_H200.txt and
_GB200.txt, sequences of equal length): median error 8%, 90th percentile 17%, largest 21%. FlashQLA's own kernels take a half of
these times; frameworks do not call them unless told to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from profiler.profile.profile import Device

CHUNK = 64  #: tokens of a chunk
#: By pass (forward, backward): launch seconds; multiprocessor-seconds per token and head of both dims 128, beside the FLOPs'
#: own time; seconds of a step from chunk to chunk.
LAUNCH, WORK, STEP = (24e-6, 35e-6), (1.81e-7, 4.31e-7), (0.91e-6, 3.88e-6)
DIMS = 256  #: both head dims of the measured shapes, over which other dims are taken to scale the work
BACKWARD_FLOPS = 3.0  #: over those of the forward pass, counted from its kernels, which also run w, u and the states again
#: Standard deviation of log(time) on the generations that were measured, those of FlashAttention 3 and later, and assumed for
#: others, whose kernels nobody timed.
MEASURED_STD, OTHER_STD, MEASURED_GENERATION = 0.1, 0.35, 3


def chunk_flops(key_dim: Any, value_dim: Any) -> Any:
    """Return the FLOPs per token and head of the forward pass: inside a chunk three products over keys and two over values, and
    three of keys with values for the state (Gated DeltaNet, arXiv 2412.06464, section 3.3)."""
    return 2.0 * (CHUNK * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim)


def chunk_scan(device: Device, batch: Any, seq: Any, heads: Any, key_dim: Any, value_dim: Any, backward: Any) -> Estimate:
    """Return the time of all kernels of one pass over ``batch`` sequences; arguments broadcast together.

    heads: of values; keys are repeated to as many.
    """
    back = np.asarray(backward, dtype=np.int64)
    launch, work, step = (np.asarray(constants)[back] for constants in (LAUNCH, WORK, STEP))
    flops = chunk_flops(key_dim, value_dim) * np.where(back, BACKWARD_FLOPS, 1.0)
    share = (np.asarray(key_dim) + value_dim) / DIMS
    each = work * share / device.num_sms + flops / device.half_peak
    seconds = launch + 1.0 * np.asarray(batch) * seq * heads * each + np.ceil(np.asarray(seq) / CHUNK) * step * share
    known = device.flash_version >= MEASURED_GENERATION
    return Estimate(
        seconds,
        np.full(seconds.shape, MEASURED_STD if known else OTHER_STD),
        np.full(seconds.shape, np.int8(Basis.EXTRAPOLATED if known else Basis.ROOFLINE)),
    )
