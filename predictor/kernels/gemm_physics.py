"""Physical model of one GEMM: a launch, then tiles on SMs overlapped with memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from predictor.kernels.known_constants import KnownConstants

#: Output tiles that GEMM libraries choose from, and the numbers of parts they split the reduction into when tiles are too few.
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128), (256, 256))
SPLITS = (1, 2, 4, 8)
ADDED_BYTES = 8.0  #: of an fp32 number that is read and written again


@dataclass(frozen=True)
class GemmPhysics:
    """Constants of one (device, dtype); the defaults are the prior where nothing was measured.

    launch: seconds before the first tile. efficiency: fraction of the peak FLOP/s in the limit of a large tile and a long k
    loop. intensity_half: tile side (tm*tn/(tm+tn)) at which half of that is reached. bandwidth: fraction of the HBM bandwidth.
    prologue: cost of starting a tile, in columns of k. sharpness: exponent of the p-norm that combines compute and memory.
    wave: 0 = waves of tiles overlap freely, 1 = every started wave costs its full time. throttle, throttle_seconds: a kernel
    much longer than throttle_seconds is slower by this fraction (power limit). cast, cast_launch: bytes
    moved per element of the first operand, and launch, of the kernels that quantise it before the GEMM, where the measurements
    time that too (``gemm_times`` leaves it out).
    """

    launch: float = 3e-6
    efficiency: float = 0.80
    intensity_half: float = 5.0
    bandwidth: float = 0.75
    prologue: float = 100.0
    sharpness: float = 4.0
    wave: float = 0.3
    throttle: float = 0.02
    throttle_seconds: float = 1e-3
    cast: float = 0.0
    cast_launch: float = 0.0


#: Bounds in the order of the fields: they keep a fit to few measurements physical, and the throttle small in extrapolation.
LOWER = GemmPhysics(5e-7, 0.20, 0.1, 0.20, 1.0, 1.5, 0.001, 0.001, 1e-4, 1.0, 5e-7)
UPPER = GemmPhysics(3e-5, 1.00, 60.0, 1.00, 1000.0, 8.0, 1.0, 0.12, 2e-2, 20.0, 3e-5)
#: Where a fit starts: bytes of a read for the largest value, a read and a write; the launches of two kernels.
_FIRST_CAST = {"cast": 5.0, "cast_launch": 5e-6}


class GemmMachine(NamedTuple):
    """peak: FLOP/s of the dtype; bandwidth: bytes/s; sms: number of SMs; element, out: bytes per number in and out."""

    peak: float
    bandwidth: float
    sms: float
    element: float
    out: float


class GemmTimes(NamedTuple):
    """Total seconds and their parts, shape [rows]; full_clocks: without the power limit; tile: the fastest."""

    seconds: np.ndarray
    full_clocks: np.ndarray
    compute: np.ndarray
    memory: np.ndarray
    tile: np.ndarray


def gemm_times(
    physics: GemmPhysics, machine: GemmMachine, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray
) -> GemmTimes:
    """Time of ``batch`` GEMMs [m, k] x [k, n]; m, n, k and batch are float64 of shape [rows].

    launch + ((compute^p + memory^p)^(1/p)) * throttle, where compute is the minimum over tile shapes and k-splits of waves *
    tile time. The time never falls when m, n, k or batch grow.
    """
    compute, tile = _compute_seconds(physics, machine, m, n, k, batch)
    memory = batch * (machine.element * (m + n) * k + machine.out * m * n) / (physics.bandwidth * machine.bandwidth)
    high, low = np.maximum(compute, memory), np.minimum(compute, memory)
    busy = high * (1 + (low / high) ** physics.sharpness) ** (1 / physics.sharpness)
    seconds = physics.launch + throttled(busy, physics.throttle, physics.throttle_seconds)
    return GemmTimes(seconds, physics.launch + busy, compute, memory, tile)


def throttled(busy: np.ndarray, throttle: float, seconds: float) -> np.ndarray:
    """Return the time of work that takes ``busy`` seconds at full clocks: in what lasts much longer than ``seconds`` the clocks
    fall, and it takes 1 + ``throttle`` times as long."""
    return busy * (1 + throttle * busy / (busy + seconds))


def _compute_seconds(
    physics: GemmPhysics, machine: GemmMachine, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    best, chosen = np.full(len(m), np.inf), np.zeros(len(m), dtype=np.int8)
    for index, (tm, tn) in enumerate(TILES):
        intensity = tm * tn / (tm + tn)
        rate = physics.efficiency * machine.peak / machine.sms * intensity / (intensity + physics.intensity_half)
        tiles = batch * np.ceil(m / tm) * np.ceil(n / tn)
        for split in SPLITS:
            waves = tiles * split / machine.sms
            paid = np.maximum(1.0, waves + physics.wave * (np.ceil(waves) - waves))
            seconds = paid * (2.0 * tm * tn * (k / split + physics.prologue * (1 + 0.5 * (split > 1)))) / rate
            chosen = np.where(seconds < best, np.int8(index), chosen)
            best = np.minimum(best, seconds)
    return best, chosen


def buffer_seconds(machine: GemmMachine, m: np.ndarray, n: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Return the seconds in which the memory reads and writes an fp32 buffer of the GEMMs' outputs, shape [rows]."""
    return ADDED_BYTES * batch * m * n / machine.bandwidth


def adding_seconds(
    physics: GemmPhysics, machine: GemmMachine, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray
) -> np.ndarray:
    """Return the least seconds of GEMMs that are added to an fp32 buffer, shape [rows]: it is read and written."""
    moved = batch * (machine.element * (m + n) * k + ADDED_BYTES * m * n)
    return physics.launch + moved / (physics.bandwidth * machine.bandwidth)


def cast_seconds(physics: GemmPhysics, machine: GemmMachine, m: np.ndarray, k: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Return the seconds of quantising the first operand, shape [rows]."""
    return physics.cast_launch + physics.cast * batch * m * k / machine.bandwidth


def fit_gemm_physics(
    machine: GemmMachine,
    shapes: Sequence[np.ndarray],
    seconds: np.ndarray,
    casts: np.ndarray,
    launch: float | None = None,
    known: KnownConstants | None = None,
) -> GemmPhysics:
    """Fit by least squares (soft L1) on log time over at most 3,000 rows of the table; ``shapes`` = m, n, k, batch.

    casts: whether a row also times the quantisation of its first operand, bool [rows]; ``launch`` of the GEMM alone is then
    given, because such rows only tell the sum. known: constants that need no search.
    """
    rows = np.random.default_rng(0).permutation(len(seconds))[:3000]
    parts = [np.asarray(s, dtype=np.float64)[rows] for s in shapes]
    target, quantises = np.log(seconds[rows]), casts[rows]
    m, _, k, batch = parts
    start = GemmPhysics()
    if quantises.any():
        start = replace(start, **_FIRST_CAST, launch=start.launch if launch is None else launch)
    free = [f.name for f in fields(start) if getattr(start, f.name) > 0 and (f.name != "launch" or not quantises.any())]

    def vector(constants: GemmPhysics) -> np.ndarray:
        return np.log([getattr(constants, name) for name in free])

    def constants(x: np.ndarray) -> GemmPhysics:
        return replace(start, **dict(zip(free, (float(v) for v in np.exp(x)), strict=True)))

    low, high = vector(LOWER), vector(UPPER)

    def error(x: np.ndarray) -> np.ndarray:
        physics = constants(x)
        cast = np.where(quantises, cast_seconds(physics, machine, m, k, batch), 0.0)
        return np.log(gemm_times(physics, machine, *parts).seconds + cast) - target

    def search() -> dict[str, float]:
        from scipy.optimize import least_squares

        first = np.clip(vector(start), low + 1e-6, high - 1e-6)
        found = least_squares(error, first, bounds=(low, high), loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=60)
        return dict(zip(free, (float(v) for v in np.exp(found.x)), strict=True))

    given = (machine, *shapes, seconds, casts, start.launch)
    return replace(start, **(known or KnownConstants()).of("GEMM", given, search))
