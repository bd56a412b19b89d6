"""Generations of FlashAttention: how much slower an older one is than the one that a device's measurements are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: Generation of FlashAttention -> speed of the next generation relative to it, on hardware that runs both, for long sequences:
#: 2 over 1 from Dao 2023 (arXiv 2307.08691, figures 4 to 7, A100), 3 over 2 from Shah et al. 2024 (arXiv 2407.08608, figures 5
#: and 6, H100; the published bars shipped with the H100 profile have a median of 1.49 and reach 1.84 at 16k tokens), 4 over 3
#: derived, because the instructions of generation 2 take as many cycles on both: cuDNN 9.19 on GB200 over H200, for each
#: multiprocessor and clock, at 4k to 16k tokens, both passes (1.93 to 2.15; predictor.kernels.fp8_attention has its source).
FLASH_SPEEDUP = {1: 1.75, 2: 1.6, 3: 2.05}
#: The same of 3 over 2 by tokens of the sequence, for heads of (dims, causal): the bars of forward passes that ship with the
#: H100 profile. Both passes of generation 2 together (its own bars there) leave as much for backward ones, 1.77 at 8k and 16k.
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
THIRD_OVER_SECOND = {
    (64, False): (1.18, 1.28, 1.45, 1.48, 1.54, 1.53),
    (64, True): (1.09, 1.16, 1.42, 1.48, 1.56, 1.58),
    (128, False): (1.51, 1.61, 1.73, 1.73, 1.75, 1.75),
    (128, True): (1.53, 1.63, 1.75, 1.82, 1.81, 1.84),
}
_WIDE = 96  #: dims from which heads are taken as those of 128


@dataclass(frozen=True)
class AttentionKernel:
    """Which attention kernel a framework runs.

    measured: the FlashAttention that the fit stands for (0: the device's newest). behind: the generations whose successors it
    does without. own: FlashAttention itself, and not another kernel that is about as slow. backward_scale: how much slower its
    backward pass is beside that.
    """

    measured: int = 0
    behind: tuple[int, ...] = ()
    own: bool = True
    backward_scale: float = 1.0

    def scale(self, seq_q: Any, head_dim: Any, causal: Any) -> np.ndarray:
        """Return how much slower it is than the fit; arguments broadcast."""
        found = np.ones(np.broadcast_shapes(np.shape(seq_q), np.shape(head_dim), np.shape(causal)))
        for generation in self.behind:
            by_shape = self.own and generation == 2
            found = found * (third_over_second(seq_q, head_dim, causal) if by_shape else FLASH_SPEEDUP.get(generation, 1.0))
        return found


def third_over_second(seq_q: Any, head_dim: Any, causal: Any) -> np.ndarray:
    """Return how much faster FlashAttention 3 is than 2; arguments broadcast."""
    at, tokens = np.log2(np.maximum(seq_q, 1)), np.log2(TOKENS)
    of = {key: np.interp(at, tokens, values) for key, values in THIRD_OVER_SECOND.items()}
    wide, narrow = (np.where(causal, of[dims, True], of[dims, False]) for dims in (128, 64))
    return np.where(np.asarray(head_dim) >= _WIDE, wide, narrow)
