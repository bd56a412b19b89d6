"""How far estimates may be off on a device that was not measured, by what it shares with the one that was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceUncertainty:
    """Standard deviations of log time by kind of kernel on a device whose kernels are derived from another's."""

    linear: float
    quantised: float
    attention: float
    memory_bound: float
    collective: float


#: What leaving measured devices out shows (``python -m predictor.accuracy --leave-device-out``; docs/fits.md): H100 and H200,
#: whose chip is one; A100, H100 and B200, which are three generations.
#: Of another vendor: GEMMs of MI355X (ROCm/aiter) about the median of their errors; the rest is assumed.
DEVICE_UNCERTAINTIES = {
    "architecture": DeviceUncertainty(0.05, 0.08, 0.07, 0.10, 0.10),
    "vendor": DeviceUncertainty(0.16, 0.18, 0.20, 0.20, 0.30),
    "": DeviceUncertainty(0.26, 0.26, 0.35, 0.30, 0.40),
}
