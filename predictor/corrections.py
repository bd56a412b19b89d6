"""What estimates of one device get beside their fits: the uncertainty of derived kernels, and factors of own training runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.kernels.device_uncertainty import DeviceUncertainty
from predictor.learned import Learned


@dataclass(frozen=True)
class Corrections:
    """uncertainty: set where nothing was measured on the device. learned: from own training runs."""

    uncertainty: DeviceUncertainty | None = None
    learned: Learned | None = None

    def factor(self, name: str) -> float:
        """Return by how much longer times of one kind are than in the profile, as learned (predictor.learned.FACTORS)."""
        return self.learned.factor(name) if self.learned is not None else 1.0

    def scaled(self, estimate: Estimate, name: str) -> Estimate:
        """Return an estimate with the factor of its kind."""
        return estimate if self.learned is None else estimate._replace(seconds=estimate.seconds * self.factor(name))

    def less_certain(self, estimate: Estimate, kind: str) -> Estimate:
        """Return an estimate with the uncertainty of a device that was not measured; kind: a field of DeviceUncertainty."""
        if self.uncertainty is None:
            return estimate
        std = np.hypot(estimate.relative_std, getattr(self.uncertainty, kind))
        return estimate._replace(relative_std=std, basis=np.maximum(estimate.basis, np.int8(Basis.EXTRAPOLATED)))
