"""The sustained-clock derating: how much longer kernels take in a training step than in the loops that a profile timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from predictor.kernels.sources import LabScale
from profiler.profile.profile import POWER_SLOWDOWN, SUSTAINED_SCALE, Profile


class Derating(NamedTuple):
    """How much longer kernels take in a training run than in short loops; relative_std: of the factor, between laboratories."""

    factor: float
    relative_std: float


@dataclass(frozen=True)
class Deratings:
    """The deratings of a machine's kernels; 1 means as profiled.

    linear, attention: of 16-bit GEMMs and attention. quantised: of GEMMs of less than 16 bits. power_slowdown: above 1 where
    what the power limit costs was measured: this is the derating, and beside other work less is left of it
    (solver.step.power).
    measured_on: of a derived device, that of GEMMs on the measured one, as its laboratory found it.
    """

    linear: float = 1.0
    attention: float = 1.0
    quantised: Derating = Derating(1.0, 0.0)
    power_slowdown: float = 1.0
    measured_on: float = 0.0


#: 16-bit GEMMs above 0.1 ms in a second laboratory over the main source at full clocks: A100 1.076 and H100 1.154 (Vidur), B200
#: 1.42 (SimuMax): their median, and 1.48 times the median of how far their logarithms are from its own (0.07, 0 and 0.21, which
#: stands apart).
OTHER_LABORATORY = Derating(1.154, 0.10)
#: The same over the loops of single GEMMs that the main source timed: 1.06, 1.12 and 1.34.
OVER_LOOPS = Derating(1.12, 0.08)


@dataclass(frozen=True)
class Laboratories:
    """What other laboratories timed on a device, by source: of GEMMs (``scales``) and of attention, from ``lab_scale`` of both
    models; kept with the fits, because computing it takes as long as the rest of a start."""

    scales: Mapping[str, LabScale]
    attention: Mapping[str, LabScale] = field(default_factory=dict)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat plain arrays, for an npz file."""
        both = (("gemm", self.scales), ("attention", self.attention))
        return {f"{of} {source}": np.array(found, dtype=float) for of, scales in both for source, found in scales.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Laboratories:
        found: dict[str, dict[str, LabScale]] = {"gemm": {}, "attention": {}}
        for name, (scale, rows) in arrays.items():
            of, _, source = name.partition(" ")
            found[of][source] = LabScale(float(scale), int(rows))
        return cls(found["gemm"], found["attention"])


def deratings_of(profile: Profile, laboratories: Laboratories) -> Deratings:
    """Return the deratings of a measured device."""
    return Deratings(
        derating_of(profile, laboratories),
        attention_derating_of(profile, laboratories),
        quantised_derating_of(profile, laboratories),
        power_slowdown_of(profile),
    )


def power_slowdown_of(profile: Profile) -> float:
    """How many times as long as in a burst the machine's GEMMs take where nothing else runs; 1 where nobody measured it.

    A profile that has it timed bursts, and its derating is that of GEMMs alone: solver.step.power says what is left of it.
    """
    return float(profile.meta.get(POWER_SLOWDOWN, 1.0))


def compared_at_full_clocks(profile: Profile, laboratories: Laboratories) -> frozenset[str]:
    """Return the arithmetics whose derating is over GEMMs at full clocks: where another laboratory, or one of the same chip,
    has found it, in 16 bits; fp8 on Hopper too, where GEMMs lose as much (docs/measured_gpus.md). A profile that measured its
    own timed bursts."""
    if POWER_SLOWDOWN in profile.meta or not (SUSTAINED_SCALE in profile.meta or laboratories.scales):
        return frozenset()
    return frozenset(("bf16", "fp8") if profile.device.is_hopper else ("bf16",))


def attention_derating_of(profile: Profile, laboratories: Laboratories) -> float:
    """The derating of 16-bit attention: what other laboratories found of it, where they timed it; else that of GEMMs.

    B200's second laboratory ran GEMMs 1.42 times as long as the first at full clocks and attention 1.07 times.
    """
    if _is_stated(profile) or not laboratories.attention:
        return derating_of(profile, laboratories)
    return _mean_scale(laboratories.attention)


def derating_of(profile: Profile, laboratories: Laboratories) -> float:
    """The derating that the profile measured or states; else how much slower other laboratories measured.

    The slowdown compares measurements of the same GEMMs; it is 1 where there is no other laboratory. The main source of a
    shipped profile times bursts of a few dozen kernels from CUDA graphs. Among kernel measurements, another laboratory that
    times the kernels of a framework is the closest to a training run.
    """
    if _is_stated(profile):
        return power_slowdown_of(profile) if POWER_SLOWDOWN in profile.meta else float(profile.meta[SUSTAINED_SCALE])
    return _mean_scale(laboratories.scales)


def _is_stated(profile: Profile) -> bool:
    return not {SUSTAINED_SCALE, POWER_SLOWDOWN}.isdisjoint(profile.meta)


def _mean_scale(scales: Mapping[str, LabScale]) -> float:
    """Return the geometric mean of laboratories' factors, by their measurements; 1 without any."""
    rows = sum(n for _, n in scales.values())
    return float(np.exp(sum(n * np.log(scale) for scale, n in scales.values()) / rows)) if rows else 1.0


def quantised_derating_of(profile: Profile, laboratories: Laboratories) -> Derating:
    """The derating of GEMMs with operands of less than 16 bits.

    No second laboratory timed these on a shipped device, and how much slower a laboratory's machine ran 16-bit GEMMs need not
    hold for them: such a profile gets the median of what laboratories found for 16 bits on other devices, with their spread:
    over full clocks, or over the loops that were timed where nobody knows what they lose at the power limit.
    """
    if _is_stated(profile) or "sustained" not in profile.meta:
        return Derating(derating_of(profile, laboratories), 0.0)
    return OTHER_LABORATORY if profile.device.is_hopper else OVER_LOOPS
