"""What the host of a machine takes: copies over its link and through its memory, launches of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from predictor.corrections import Corrections
from predictor.estimate import Estimate, roofline

#: Standard deviation of log(time) of what the host does: its bandwidths are stated, not measured.
HOST_STD = 0.3


@dataclass(frozen=True)
class HostCosts:
    """rates: bytes/s of the link to the host and of the host's memory, by name. plain_layer_launch: seconds in which the host
    launches both passes of one layer of plain PyTorch (0: not measured)."""

    rates: Mapping[str, float] = field(default_factory=dict)
    plain_layer_launch: float = 0.0
    corrections: Corrections = Corrections()

    @property
    def factor(self) -> float:
        """By how much longer the host's times are, as learned."""
        return self.corrections.factor("host")

    def transfer(self, what: str, size: Any) -> Estimate:
        """Bytes over the link to the host or through its memory (``rates``, stated by the cluster)."""
        seconds = np.asarray(size, dtype=float) / self.rates[what] * self.factor
        return roofline(seconds, HOST_STD)
