"""The peak memory of layouts: its parts, and the verdict whether they fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

#: Parts of the peak, in the order of the rows of Memory.parts.
MEMORY_PARTS = ("weights", "gradients", "optimizer", "workspaces", "activations", "backward_buffers", "loss", "gather_buffers")
#: The upper bound adds BOUND_SHARE of the allocated bytes, by which measured peaks of known frameworks exceed the estimate, and
#: BOUND_GAPS of those that come and go, because allocator gaps differ between runs.
BOUND_SHARE, BOUND_GAPS = 0.03, 0.15
#: The upper bound fits; the estimate fits, but not the bound; the estimate does not fit.
FITS, AT_RISK, OUT_OF_MEMORY = VERDICTS = ("FITS", "AT RISK", "OUT OF MEMORY")


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest stage, arrays over layouts (or on every stage of one layout).

    allocated: the framework's peak counter. reserved: with the slack of the caching allocator. device: with the runtime outside
    the allocator, most on the fullest stage. A layout fits if this does, and surely if ``bound``, of any stage the largest.
    """

    allocated: np.ndarray
    reserved: np.ndarray
    device: np.ndarray
    bound: np.ndarray
    stage: np.ndarray  #: number of that stage, 0 is the first
    on_last_stage: np.ndarray  #: whether it is the last of several
    assemble: Callable[[], np.ndarray]  #: makes ``parts``, which searches do not look at

    @cached_property
    def parts(self) -> np.ndarray:
        """Bytes that add up to ``allocated``: [parts, layouts]."""
        return self.assemble()

    def verdict(self, index: int, limit: float) -> str:
        """Return whether a layout fits in ``limit`` bytes: one of VERDICTS."""
        return VERDICTS[int(self.device[index] > limit) + int(self.bound[index] > limit)]

    def take(self, index: np.ndarray) -> Memory:
        """Return that of the chosen layouts."""
        sizes = self.allocated[index], self.reserved[index], self.device[index], self.bound[index]
        return Memory(*sizes, self.stage[index], self.on_last_stage[index], lambda: self.parts[:, index])
