"""Held-out tests of the laws of dispatch and combine: row sizes, numbers of tokens and of nodes that were not fitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from predictor.accuracy.crossval import naive_seconds
from predictor.accuracy.score import Score, score
from predictor.estimate import Estimate
from predictor.network.exchange_law import PRIORS, SHAPE
from predictor.network.expert_exchange import DISPATCHERS, OPS, ExpertExchangeModel, fitted_rows
from profiler.profile.profile import Profile, Table

LEAST_EXCHANGES = 12  #: errors on fewer held-out rows tell nothing
_LARGE = 1024  # tokens: what training sends
#: The priors of exchanges between nodes come from measurements that the tests hold out, so the tests start from others.
_NEUTRAL = {key: replace(law, node_start=3e-5, slowdown=1.0, efficiency=0.8) for key, law in PRIORS.items()}


def exchange_scores(profile: Profile) -> list[Score]:
    """Scores of dispatch and combine.

    In one node each row size is left out, between nodes each second number of tokens, and each number of nodes.
    """
    scores = []
    for dispatcher in DISPATCHERS:
        for op in OPS:
            rows = fitted_rows(profile.table("expert_exchange"), dispatcher, op)
            for regime, split, scored, group in _splits(rows):
                if scored.sum() >= LEAST_EXCHANGES and len(np.unique(group[scored])) > 1:
                    scores.append(_score(profile, rows, regime, split, scored, group))
    return scores


def _splits(rows: Table) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Regime, split, the scored rows, and labels of all rows: those of one label are left out together."""
    near, large = rows["inter"] == 1, rows["tokens"] >= _LARGE
    if not large.all():
        yield "1 node", "each row size left out", near, rows["row_bytes"]
    yield f"1 node, {_LARGE:,} tokens and more", "each row size left out", near & large, rows["row_bytes"]
    between, second = f"nodes, {_LARGE:,} tokens and more", np.unique(rows["tokens"], return_inverse=True)[1] % 2
    yield between, "every second number of tokens", ~near & large, second
    yield between, "each number of nodes left out", ~near & large, rows["inter"]


def _score(profile: Profile, rows: Table, regime: str, split: str, scored: np.ndarray, group: np.ndarray) -> Score:
    size = rows["tokens"] * rows["row_bytes"].astype(np.float64)
    seconds, std, naive = np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows))
    for label in np.unique(group[scored]):
        out = group == label
        fit = ExpertExchangeModel.fit(rows.where(~out), profile.device, _NEUTRAL)
        found = predicted(fit, rows.where(out), profile.device.network_bandwidth)
        seconds[out], std[out] = found.seconds, found.relative_std
        seen = scored & ~out
        naive[out] = naive_seconds(size[seen], rows["seconds"][seen], size[out])
    op = f"{rows['dispatcher'][0]} {rows['op'][0]}"
    return score(op, regime, split, rows["seconds"][scored], seconds[scored], std[scored], naive[scored])


def predicted(fit: ExpertExchangeModel, rows: Table, network_bandwidth: float) -> Estimate:
    """Estimates of ``fit`` for rows of one dispatcher and op."""
    op, dispatcher = str(rows["op"][0]), str(rows["dispatcher"][0])
    shape = {name: rows[name] for name in SHAPE}
    return fit.predict(op, **shape, network_bandwidth=network_bandwidth, dispatcher=dispatcher)
