"""GEMMs in fp8 with scales for blocks of 128 values on Hopper, whose tensor cores take none: kernels scale the sums themselves.

They add up in fp32 in every pass, so that no pass is faster than another for that reason, and in a weight gradient both
operands have scales along the sum.
"""

from __future__ import annotations

import numpy as np

from predictor.estimate import Estimate
from predictor.kernels.gemm_fit import FULL_ACCUMULATION, LAYOUT_PRIOR
from predictor.kernels.gemm_layout import GemmLayout
from profiler.profile.profile import Device

#: Time of a forward pass over that with one scale for each tensor, and the standard deviation of its logarithm: the median of
#: 7,784 shapes (m, n, k from 1,024 on) each on H100 (1.097) and H200 (1.097) of which ai-dynamo/aiconfigurator has both
#: (TensorRT-LLM 1.3, with the quantisation of the activation); from 4,096 rows on 1.07 to 1.11.
FORWARD = (1.097, 0.13)
#: Time of a weight gradient over that of a forward pass of as many products, and the standard deviation of its logarithm: 2.70
#: for grouped GEMMs of H100 (pytorch/ao, benchmarks/prototype/blockwise_fp8_training/README.md: 457 and 1,234 TFLOP/s), 1.55
#: for all linears of a traced training step on H800 (deepseek-ai/profile-data 4496024), 1.33 for the same groups in DeepGEMM's
#: own tables of H800 (pull requests 73 and 95: 1,262 to 1,381 and 900 to 1,044 TFLOP/s); their geometric mean.
WEIGHT_GRADIENT = (1.77, 0.30)
#: Of an input gradient: 1.00 in the first of these.
INPUT_GRADIENT = (1.0, 0.05)


def block_scaled(estimate: Estimate, layout: np.ndarray, device: Device) -> Estimate:
    """Return times of fp8 GEMMs with one scale for each tensor as those of blockwise scales; layout: codes of GemmLayout."""
    if not device.is_hopper:
        return estimate
    usual = [LAYOUT_PRIOR[code, False][0] * FULL_ACCUMULATION[0] for code in (GemmLayout.NN, GemmLayout.NT)]
    factors = FORWARD[0] * np.array([1.0, INPUT_GRADIENT[0] / usual[0], WEIGHT_GRADIENT[0] / usual[1]])
    uncertainties = np.hypot(FORWARD[1], np.array([0.0, INPUT_GRADIENT[1], WEIGHT_GRADIENT[1]]))
    codes = np.broadcast_to(np.asarray(layout, dtype=np.int64), estimate.seconds.shape)
    return estimate._replace(
        seconds=estimate.seconds * factors[codes], relative_std=np.hypot(estimate.relative_std, uncertainties[codes])
    )
