"""Time against message size: monotone log-log curves through measured points, many of them in flat arrays.

Between points: a shape-preserving cubic (PCHIP) of log seconds over log bytes. Below the smallest size: constant latency.
Beyond the largest size: every further byte costs what the last bytes cost. Before the cubic, an isotonic fit removes places
where more bytes were measured to take less time, so no curve ever falls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from predictor.estimate import Z90, std_of_errors

_SPAN = 128.0  # larger than any log(bytes), so that keys of different curves never overlap
_OCTAVE = float(np.log(2.0))
#: Between releases and number types the same NCCL call differs by 3-5% (median over ops and shipped profiles), less within one.
_REPEAT_NOISE = 0.03
#: Bytes up to which every collective takes its latency. Where the smallest measured size is larger, the constant latency is
#: off by about ``_BELOW`` per halving between the two.
_LATENCY_BOUND = 4096.0
_BELOW = 0.1
_TAIL_OCTAVES = 2.0  # the cost of a further byte is taken from the last two doublings


@dataclass(frozen=True)
class Curves:
    """Flat arrays of all curves; knots of curve c are ``first[c]:first[c + 1]``.

    x: log bytes of the knots, [knots]. cubic: coefficients of (x - x_i)^3..0 for log seconds, [knots, 4]. tail: seconds per
    byte beyond the last knot, [curves]. per_octave: standard deviation of log time one octave from the nearest knot (it grows
    with the square root of the distance, as for a random walk), [curves]. tail_std: limit of the standard deviation far beyond
    the last knot, [curves].
    """

    first: np.ndarray
    x: np.ndarray
    cubic: np.ndarray
    tail: np.ndarray
    per_octave: np.ndarray
    tail_std: np.ndarray

    def seconds(self, curve: np.ndarray, log_bytes: np.ndarray) -> np.ndarray:
        """Seconds of ``curve`` (int, index) at ``log_bytes``; all three arrays have one shape."""
        low, high = self.x[self.first[curve]], self.x[self.first[curve + 1] - 1]
        at = np.clip(log_bytes, low, high)
        left = self._left(curve, at)
        d, c = at - self.x[left], self.cubic[left]
        inside = np.exp(((c[..., 0] * d + c[..., 1]) * d + c[..., 2]) * d + c[..., 3])
        return inside + self.tail[curve] * (np.exp(np.maximum(log_bytes, high)) - np.exp(high))

    def points(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (bytes, seconds) of the knots of every curve."""
        parts = [slice(*ends) for ends in zip(self.first, self.first[1:], strict=False)]
        return [(np.exp(self.x[part]), np.exp(self.cubic[part, 3])) for part in parts]

    def latency(self, curve: np.ndarray) -> np.ndarray:
        """Seconds of the smallest messages."""
        return np.exp(self.cubic[self.first[curve], 3])

    def uncertainty(self, curve: np.ndarray, log_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Standard deviation of log time, whether ``log_bytes`` is a measured size, and whether it is out of range."""
        low, high = self.x[self.first[curve]], self.x[self.first[curve + 1] - 1]
        at = np.clip(log_bytes, low, high)
        left = self._left(curve, at)
        right = np.minimum(left + 1, self.first[curve + 1] - 1)
        gap = np.minimum(at - self.x[left], np.abs(self.x[right] - at)) / _OCTAVE
        beyond = self.tail_std[curve] * -np.expm1(np.minimum(high - log_bytes, 0.0))
        below = _BELOW * np.maximum(low - np.maximum(log_bytes, np.log(_LATENCY_BOUND)), 0.0) / _OCTAVE
        std = np.sqrt(_REPEAT_NOISE**2 + self.per_octave[curve] ** 2 * gap + beyond**2 + below**2)
        outside = (log_bytes < low - 1e-9) | (log_bytes > high + 1e-9)
        return std, (gap < 1e-6) & ~outside, outside

    @cached_property
    def _keys(self) -> np.ndarray:
        """Knots of all curves in ascending order, [knots]: those of each curve _SPAN beyond those of the one before it."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first)) * _SPAN + self.x

    def _left(self, curve: np.ndarray, at: np.ndarray) -> np.ndarray:
        found = np.searchsorted(self._keys, curve * _SPAN + at, side="right") - 1
        return np.clip(found, self.first[curve], np.maximum(self.first[curve + 1] - 2, self.first[curve]))

    def to_arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        return {prefix + f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str = "") -> Curves:
        return cls(**{f.name: np.asarray(arrays[prefix + f.name]) for f in fields(cls)})

    @classmethod
    def fit(cls, points: Sequence[tuple[np.ndarray, np.ndarray]]) -> Curves:
        """Fit one curve to each (bytes, seconds) pair of arrays: bytes distinct and ascending, at least one point."""
        parts = [_fit_one(np.log(b), np.log(s)) for b, s in points]
        first = np.concatenate([[0], np.cumsum([len(p[0]) for p in parts])]).astype(np.int64)
        stack = [np.array([p[i] for p in parts], dtype=np.float64) for i in (2, 3, 4)]
        return cls(first, np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), *stack)


def _fit_one(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float, float]:
    from scipy.optimize import isotonic_regression

    rising = isotonic_regression(y).x if len(y) > 1 else y
    return x, _pchip(x, rising), marginal_cost(x, rising), _per_octave(x, rising), _tail_std(x, rising)


def _pchip(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coefficients [knots, 4]; the last row only holds the value at the last knot."""
    from scipy.interpolate import PchipInterpolator

    last = np.array([[0.0, 0.0, 0.0, y[-1]]])
    return last if len(x) < 2 else np.concatenate([PchipInterpolator(x, y).c.T, last])


def marginal_cost(x: np.ndarray, y: np.ndarray) -> float:
    """Seconds per byte beyond the largest size, from the last two doublings; ``x``: log bytes, ``y``: log seconds.

    At most the average cost at the largest size (a start-up time is never negative), and at least half of it: where two
    regimes meet, the measured difference can be near zero or negative.
    """
    average = float(np.exp(y[-1] - x[-1]))
    near = max(int(np.searchsorted(x, x[-1] - _TAIL_OCTAVES * _OCTAVE - 1e-9)), 0)
    if near >= len(x) - 1:
        return average
    cost = float((np.exp(y[-1]) - np.exp(y[near])) / (np.exp(x[-1]) - np.exp(x[near])))
    return float(np.clip(cost, 0.5 * average, average))


def _per_octave(x: np.ndarray, y: np.ndarray) -> float:
    """Leave-one-size-out error of log time at the 90th percentile, as a standard deviation at a distance of one octave."""
    if len(x) < 5:
        return 0.1
    from scipy.interpolate import PchipInterpolator

    errors = []
    for i in range(1, len(x) - 1):
        keep = np.arange(len(x)) != i
        gap = min(x[i] - x[i - 1], x[i + 1] - x[i]) / _OCTAVE
        errors.append(abs(float(PchipInterpolator(x[keep], y[keep])(x[i])) - y[i]) / np.sqrt(gap))
    return std_of_errors(np.array(errors))


def _tail_std(x: np.ndarray, y: np.ndarray) -> float:
    """Error of the extrapolation, computed as if the last three doublings had not been measured."""
    kept = int(np.searchsorted(x, x[-1] - 3 * _OCTAVE - 1e-9)) + 1
    if kept < 5 or kept >= len(x):
        return 0.25
    seen = slice(0, kept)
    beyond = np.exp(x[kept:]) - np.exp(x[kept - 1])
    predicted = np.exp(y[kept - 1]) + marginal_cost(x[seen], y[seen]) * beyond
    return float(max(np.abs(np.log(predicted) - y[kept:]).max() / Z90, 0.1))
