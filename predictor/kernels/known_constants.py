"""Constants of physical models that were fitted before, so that a shipped profile has the same fit on every CPU.

Logarithms and linear algebra differ between CPUs in their last bits. A least-squares search amplifies such a bit to 1e-3 of a
weakly determined constant, and boosted trees turn it into other splits: single shapes differed by percents, steps by up to half
a percent. So ``shipped_constants.json`` keeps what the search found for shipped profiles (``python -m predictor.fit_shipped``
writes it again), and what trees are fitted to is rounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

ROWS_FOR_PHYSICS = 30  #: measured kernels of one kind that determine the constants of its physical model
_DECIMALS = 9  # of logarithms of sizes and seconds; noise: 1e-12


def without_noise(values: np.ndarray) -> np.ndarray:
    """Round what trees are fitted to, or asked for; any shape."""
    return np.round(values, _DECIMALS)


@dataclass(frozen=True)
class KnownConstants:
    """Constants that were fitted before: by what was fitted and a hash of what it was fitted to, each by its name."""

    found: dict[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> KnownConstants:
        """Constants of a file that this module wrote."""
        return cls(json.loads(path.read_text(encoding="utf-8"))["constants"])

    def of(self, title: str, given: Iterable[Any], search: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Constants that were fitted to ``given``, numbers and arrays of numbers; else what ``search`` finds, which is kept."""
        digest = sha256()
        for values in given:
            digest.update(np.ascontiguousarray(values, dtype=np.float64).tobytes())
        key = f"{title}, {digest.hexdigest()[:16]}"
        if key not in self.found:
            self.found[key] = {name: float(f"{value:.6g}") for name, value in search().items()}
        return self.found[key]
