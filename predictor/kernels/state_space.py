"""Time of Mamba-2's state-space duality (SSD): kernels that pass a state per head from chunk to chunk of the sequence.

    time = kernels * launch + FLOPs / (MATRIX_SHARE * peak) + bytes / (MEMORY_SHARE * bandwidth)

FLOPs and bytes are counted for the Triton kernels of mamba_ssm 2.2 that mamba_split_conv1d_scan_combined calls
(ops/triton/ssd_combined.py, as read; arXiv 2405.21060, section 6), which Megatron-Core and transformers train with.
MATRIX_SHARE is what one of them reaches as another compiler writes it: 126 to 136 TFLOP/s on H800 at six lengths
(tile-ai/tilelang, MIT licence, benchmark/mamba2/README.md). MEMORY_SHARE is assumed. No time of these
kernels on a known GPU was found in public; hence the wide uncertainty.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor.estimate import Estimate, roofline
from profiler.profile.profile import Device

MATRIX_SHARE, MEMORY_SHARE = 0.14, 0.7
#: Kernels of the forward and of the backward pass, which runs four of the former again; seconds that each adds.
KERNELS, LAUNCH = (5, 16), 4e-6
STD = 0.35  #: standard deviation of log(time), that of linear attention's kernels where nobody timed them
_FP32, _HALF = 4.0, 2.0


def state_space_flops(heads: Any, head_dim: Any, state_dim: Any, groups: Any, chunk: Any, backward: Any) -> Any:
    """Return the FLOPs per token. Products of values with the state: two forward and five backward (with the states that run
    again); products inside a chunk, of which half is causal: one and three; of queries with keys, a group's: one and three."""
    state, inside = 1.0 * heads * head_dim * state_dim, heads * head_dim * chunk / 2
    back, between = np.asarray(backward, dtype=bool), 1.0 * groups * chunk * state_dim
    return 2.0 * np.where(back, 5 * state + 3 * inside + 3 * between, 2 * state + inside + between)


def state_space_bytes(heads: Any, head_dim: Any, state_dim: Any, groups: Any, chunk: Any, backward: Any) -> Any:
    """Return the bytes per token that the kernels read and write.

    Forward: values twice, the gate, the output before and after it; keys and queries twice each; a chunk's state written and
    read in fp32, then in 16 bits; products of queries with keys written and read in fp32, decays three times. Backward: values
    and the output's gradient by five kernels each, the value's gradient, five tensors for the gate; keys and queries by four
    kernels each, their gradients in fp32 and once more; states and their gradients eleven times and products six in fp32.
    """
    values, keys = 1.0 * heads * head_dim, 1.0 * groups * state_dim
    state, between, decays = heads * head_dim * state_dim / np.asarray(chunk, dtype=float), 1.0 * groups * chunk, 1.0 * heads
    forward = _HALF * (5 * values + 4 * keys) + (2 * _FP32 + 2 * _HALF) * state + _FP32 * (2 * between + 3 * decays)
    back = _HALF * (16 * values + 8 * keys) + _FP32 * (4 * keys + 11 * state + 6 * between + 6 * decays)
    return np.where(np.asarray(backward, dtype=bool), back, forward)


def state_space(
    device: Device, batch: Any, seq: Any, heads: Any, head_dim: Any, state_dim: Any, groups: Any, chunk: Any, backward: Any
) -> Estimate:
    """Return the time of all kernels of one pass over ``batch`` sequences of ``seq`` tokens; arguments broadcast together.

    heads: of values, on one rank. groups: of heads that share keys and queries. chunk: tokens of a chunk; a part of one takes
    as long as a whole one.
    """
    tokens = 1.0 * np.asarray(batch) * np.ceil(np.asarray(seq) / np.asarray(chunk)) * chunk
    sizes = (heads, head_dim, state_dim, groups, chunk, backward)
    each = state_space_flops(*sizes) / (MATRIX_SHARE * device.half_peak)
    each = each + state_space_bytes(*sizes) / (MEMORY_SHARE * device.memory_bandwidth)
    launches = np.asarray(KERNELS)[np.asarray(backward, dtype=np.int64)] * LAUNCH
    seconds = launches + tokens * each
    return roofline(seconds, STD)
