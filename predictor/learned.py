"""What a machine's own training runs tell: factors on kinds of time, with what is still uncertain, kept beside the profile."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import InputError, printable
from profiler.files import write_text
from profiler.text_file import json_object, read_text
from profiler.units import GBIT

#: The factors: on the whole step (laboratory, framework), and on kinds of time beside it.
STEP = "step"
FACTORS = (STEP, "gemm", "attention", "memory_bound", "links", "network", "host")
#: Kind of a line of an explanation -> its factor; other kinds have that of the step alone.
FACTOR_OF = {
    "linear": "gemm",
    "grouped_linear": "gemm",
    "flash_attn": "attention",
    "chunk_scan": "attention",
    "state_space": "attention",
    "memory_bound": "memory_bound",
    "links": "links",
    "network": "network",
    "host": "host",
    "host_link": "host",
    "host_memory": "host",
}
_MOST_BYTES = 1 << 20
_MOST = 5.0  #: a factor beyond this, or its inverse, was not learned from a healthy machine
_CONDITIONS = ("device", "framework", "precision", "network_gbit_per_gpu")
_KEYS = (*_CONDITIONS, "runs", "log_factors", "covariance", "noise", "system_std", "held_out")


@dataclass(frozen=True)
class Learned:
    """Factors on kinds of time: t = exp(log_factors[step] + log_factors[kind]) x what the profile says.

    log_factors: in the order of FACTORS. covariance: of these, after the runs. noise: standard deviation of log(measured /
    predicted) that stays. system_std: how uncertain the step was before, of the runs learned from. conditions: what the
    runs had in common, by name; predictions of anything else may not use it. name: of the file.
    """

    log_factors: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    system_std: float
    runs: int = 0
    conditions: tuple[tuple[str, Any], ...] = ()
    name: str = ""

    def factor(self, name: str) -> float:
        """Return by how much longer times of one kind are (FACTORS)."""
        own = 0.0 if name == STEP else self.log_factors[FACTORS.index(name)]
        return math.exp(self.log_factors[0] + own)

    def relative_std(self, shares: Mapping[str, float], system_std: float) -> float:
        """Return the standard deviation of log(step time) of a layout.

        shares: of the step's time by kind of line. system_std: what a layout is uncertain by beside its kernels; what it is
        more than that of the runs (longer sequences, experts) they say nothing of.
        """
        weights = np.zeros(len(FACTORS))
        weights[0] = 1.0
        for kind, share in shares.items():
            if kind in FACTOR_OF:
                weights[FACTORS.index(FACTOR_OF[kind])] += share
        more = max(system_std**2 - self.system_std**2, 0.0)
        return math.sqrt(float(weights @ np.array(self.covariance) @ weights) + self.noise**2 + more)

    def check(self, conditions: Mapping[str, Any]) -> None:
        """Raise InputError where a prediction is of something else than was learned from."""
        for key, value in self.conditions:
            if conditions[key] != value:
                raise InputError(
                    f"{self.name} was learned from runs with {key.replace('_', ' ')} {printable(str(value))}; this is "
                    f"{printable(str(conditions[key]))}: leave out --learned"
                )

    def text(self) -> str:
        """Return the factors that were learned, in words."""
        stds = np.sqrt(np.diag(np.array(self.covariance)))
        named = [
            f"{name.replace('_', '-')} x {math.exp(value):.2f} +- {std:.0%}"
            for name, value, std in zip(FACTORS, self.log_factors, stds, strict=True)
        ]
        return f"learned from {self.runs} runs ({self.name}): {', '.join(named)}"


def write_learned(path: Path, learned: Learned, held_out: Mapping[str, Any]) -> None:
    """Write what was learned as JSON; held_out: its errors on runs that were left out, before and after."""
    plain = dict(learned.conditions) | {
        "runs": learned.runs,
        "log_factors": dict(zip(FACTORS, learned.log_factors, strict=True)),
        "covariance": [list(row) for row in learned.covariance],
        "noise": learned.noise,
        "system_std": learned.system_std,
        "held_out": dict(held_out),
    }
    write_text(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def read_learned(path: Path) -> Learned:
    """Read what ``write_learned`` wrote. Raises InputError for anything else."""
    plain = json_object(read_text(path, "a file of foretrain learn", _MOST_BYTES), path)
    try:
        runs = int(plain["runs"])
        factors, covariance = plain["log_factors"], np.array(plain["covariance"], dtype=float)
        if set(plain) != set(_KEYS) or tuple(factors) != FACTORS or covariance.shape != (len(FACTORS),) * 2:
            raise ValueError("its keys are not those of a file that foretrain learn writes")
        values = np.array([*factors.values(), plain["noise"], plain["system_std"], *covariance.ravel()], dtype=float)
        if not np.isfinite(values).all() or (abs(values[: len(FACTORS)]) > math.log(_MOST)).any():
            raise ValueError(f"its factors must lie between 1/{_MOST:g} and {_MOST:g}")
        if not plain["noise"] > 0 or (np.linalg.eigvalsh(covariance) < -1e-9).any():
            raise ValueError("its noise or its covariance is negative")
        if not 0 < runs < 1 << 40:
            raise ValueError("its number of runs is none")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: not what foretrain learn writes: {printable(str(error))}") from None
    return Learned(
        tuple(float(value) for value in factors.values()),
        tuple(tuple(row) for row in covariance.tolist()),
        float(plain["noise"]),
        float(plain["system_std"]),
        runs,
        tuple((key, plain[key]) for key in _CONDITIONS),
        path.name,
    )


def conditions_of(device: str, framework: str, precision: str, network_bandwidth: float) -> dict[str, Any]:
    """Return what runs must have in common with a prediction. network_bandwidth: bytes/s per GPU."""
    values = (device, framework, precision, round(network_bandwidth / GBIT, 3))
    return dict(zip(_CONDITIONS, values, strict=True))
