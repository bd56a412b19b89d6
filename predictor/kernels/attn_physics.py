"""Physical model of one attention kernel: a launch, then query blocks on SMs overlapped with memory traffic."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any, NamedTuple

import numpy as np

from predictor.kernels.gemm_physics import throttled
from predictor.kernels.known_constants import KnownConstants
from profiler.profile.profile import USUAL_EXPONENTIALS

QUERY_TILE = 128  #: queries per thread block, in every fused attention kernel of these devices


@dataclass(frozen=True)
class AttnPhysics:
    """Constants of one device; the defaults are the prior where nothing was measured.

    launch: seconds before the first block. efficiency: fraction of the peak FLOP/s in the limit of many heads and long
    sequences. softmax: score work outside the GEMMs, in columns of head dimension, at 16 exponentials per clock. bandwidth:
    fraction of the HBM bandwidth. prologue: cost of starting a block, in keys. sharpness: exponent of the p-norm that
    combines the limits. balance: fraction of the unfilled part of the last wave of blocks that still costs time. throttle,
    throttle_seconds: as for GEMMs. cache: kernels of serving frameworks also copy k and v into a paged cache; the time of
    that copy relative to the same bytes at full bandwidth. Training kernels do not copy, so predictions for training leave it
    out.
    """

    launch: float = 6e-6
    efficiency: float = 0.80
    softmax: float = 30.0
    bandwidth: float = 0.60
    prologue: float = 200.0
    sharpness: float = 3.0
    balance: float = 0.3
    throttle: float = 0.02
    throttle_seconds: float = 1e-3
    cache: float = 1e-9


#: Bounds in the order of the fields; the throttle stays small so that long sequences can be extrapolated.
LOWER = AttnPhysics(1e-6, 0.20, 0.1, 0.05, 1.0, 1.2, 0.001, 0.001, 1e-4, 1e-9)
UPPER = AttnPhysics(1e-4, 1.00, 300.0, 1.00, 2000.0, 8.0, 1.0, 0.12, 2e-2, 4.0)


def mean_keys(seq_q: Any, seq_kv: Any, causal: Any) -> np.ndarray:
    """Return how many keys a query attends to on average: seq_kv minus the half square that a causal mask hides; at least 1."""
    return np.maximum(seq_kv - np.asarray(causal) * (np.asarray(seq_q) - 1) / 2, 1.0)


class AttnShape(NamedTuple):
    """One attention call as float64 arrays of shape [rows]; ``causal`` is 0.0 or 1.0."""

    batch: np.ndarray
    seq_q: np.ndarray
    seq_kv: np.ndarray
    heads: np.ndarray
    kv_heads: np.ndarray
    head_dim: np.ndarray
    v_head_dim: np.ndarray
    causal: np.ndarray

    @property
    def keys_per_query(self) -> np.ndarray:
        """Mean number of keys that one query attends to."""
        return mean_keys(self.seq_q, self.seq_kv, self.causal)

    @property
    def flops(self) -> np.ndarray:
        """Useful forward FLOPs: two GEMMs of 2 * area * dim each."""
        pairs = self.batch * self.heads * self.seq_q * self.keys_per_query
        return 2 * pairs * (self.head_dim + self.v_head_dim)

    @property
    def elements(self) -> np.ndarray:
        """Minimum count of numbers read and written: q, k, v, output."""
        dims = self.head_dim + self.v_head_dim
        return self.batch * dims * (self.seq_q * self.heads + self.seq_kv * self.kv_heads)

    @property
    def blocks(self) -> np.ndarray:
        """Total number of query blocks."""
        return self.batch * self.heads * np.ceil(self.seq_q / QUERY_TILE)


class AttnMachine(NamedTuple):
    """peak: FLOP/s; bandwidth: bytes/s; sms: number of SMs; element: bytes per number; exponentials: per clock of an SM."""

    peak: float
    bandwidth: float
    sms: float
    element: float = 2.0
    exponentials: float = USUAL_EXPONENTIALS


class AttnTimes(NamedTuple):
    """Seconds of a training kernel and its limits, each of shape [rows].

    full_clocks: without the power limit. spread: all blocks spread over the SMs. longest: the longest block. memory: the
    memory traffic. cache: extra time of a serving kernel.
    """

    seconds: np.ndarray
    full_clocks: np.ndarray
    spread: np.ndarray
    longest: np.ndarray
    memory: np.ndarray
    cache: np.ndarray


def attn_times(physics: AttnPhysics, machine: AttnMachine, shape: AttnShape) -> AttnTimes:
    """Forward seconds: launch + p-norm(spread blocks, longest block, memory traffic) * throttle.

    The time never falls when batch, heads, sequence or dims grow (with seq_kv >= seq_q where causal).
    """
    dims = shape.head_dim + shape.v_head_dim
    softmax = physics.softmax * USUAL_EXPONENTIALS / machine.exponentials
    per_key = 2.0 * QUERY_TILE * (dims + softmax) / (physics.efficiency * machine.peak / machine.sms)
    waves = shape.blocks / machine.sms
    paid = waves + physics.balance * (np.ceil(waves) - waves)
    spread = paid * (shape.keys_per_query + physics.prologue) * per_key
    longest = (shape.seq_kv + physics.prologue) * per_key
    memory = machine.element * shape.elements / (physics.bandwidth * machine.bandwidth)
    high = np.maximum(np.maximum(spread, longest), memory)
    powers = sum((part / high) ** physics.sharpness for part in (spread, longest, memory))
    busy = high * powers ** (1 / physics.sharpness)
    looped = throttled(busy, physics.throttle, physics.throttle_seconds)
    copied = 2 * machine.element * shape.batch * shape.seq_kv * shape.kv_heads * dims  # bytes: read once, written once
    cache = physics.cache * copied / machine.bandwidth
    return AttnTimes(physics.launch + looped, physics.launch + busy, spread, longest, memory, cache)


def fit_attn_physics(
    machine: AttnMachine, shape: AttnShape, seconds: np.ndarray, serving: bool, known: KnownConstants | None = None
) -> AttnPhysics:
    """Fit by least squares (soft L1) on log time, over at most 3,000 rows spread over the table.

    serving: the rows are of serving kernels. The cost of the cache copy is identified by how the time depends on kv_heads, on
    which a training kernel hardly depends. known: constants that need no search.
    """
    rows = np.random.default_rng(0).permutation(len(seconds))[:3000]
    part = AttnShape(*(np.asarray(column, dtype=np.float64)[rows] for column in shape))
    target = np.log(seconds[rows])
    fitted = slice(None) if serving else slice(None, -1)
    low, high = np.log(astuple(LOWER)), np.log(astuple(UPPER))
    start = np.log(astuple(AttnPhysics(cache=0.5 if serving else LOWER.cache)))

    def physics(x: np.ndarray) -> AttnPhysics:
        values = start.copy()
        values[fitted] = x
        return AttnPhysics(*(float(v) for v in np.exp(values)))

    def error(x: np.ndarray) -> np.ndarray:
        times = attn_times(physics(x), machine, part)
        return np.log(times.seconds + times.cache) - target

    def search() -> dict[str, float]:
        from scipy.optimize import least_squares

        first = np.clip(start, low + 1e-6, high - 1e-6)[fitted]
        bounds = (low[fitted], high[fitted])
        found = least_squares(error, first, bounds=bounds, loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=60)
        return asdict(physics(found.x))

    given = (machine, *shape, seconds, serving)
    return AttnPhysics(**(known or KnownConstants()).of("attention", given, search))
