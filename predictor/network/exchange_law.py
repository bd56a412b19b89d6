"""Law of one dispatch or combine kernel: its constants, its time, its fit.

With T tokens per rank, rows of b bytes, C copies of a row (one per rank that holds one of the token's experts, the own rank
included) and F other nodes to which it goes:

* kernel = T (token + b read + C (copy + b send)): what the kernel's multiprocessors need for the rows;
* links = the bytes to other ranks of the node over LINK_SHARE of the nominal link;
* in one node: start + max(kernel, links);
* between nodes: start + nodes * node_start + max(slowdown * kernel, links, network), where the kernel also handles the F rows
  for other nodes, and network = T F b over efficiency times the bandwidth per GPU.

A maximum, because the parts are pipelined: on four nodes of H100 12 to 24 multiprocessors take the same time, on two nodes the
time is inverse to their number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from predictor.estimate import Basis, std_of_errors
from profiler.profile.profile import Table
from profiler.profile.routing import expected_places

#: Share of the network's rate that remains on twice as many nodes as were measured, and its uncertainty. Rates to others on 8
#: nodes of 8 Hopper GPUs with 400 Gbit/s each, in GB/s: 17 (ai-dynamo/aiconfigurator, left out of the profile), 28
#: (deepseek-ai/profile-data, a training step with two micro batches at once), 31 to 41 (Hybrid-EP), 44 (DeepEP's own table).
#: Their geometric mean is 31; on 4 nodes it is 44. Between these it falls with the nodes' logarithm, and no further beyond.
FAR_SHARE, FAR_STD = 0.7, 0.4
#: Share of a link's rate that the kernels reach: the most of 266 combines of H100, where the kernel's own work leaves little
#: less; Hybrid-EP's reach 0.74 on GB200. DeepEP's table states 0.70 and 0.72 on H800, whose links are slower than the kernels.
LINK_SHARE = 0.73
_OTHER_RANKS = 0.1  # uncertainty for each doubling or halving of the measured ranks in a node
_OUTSIDE = 0.1  # uncertainty of numbers of tokens or row sizes outside the measured ones
_LEAST_STD = 0.05
_PRIOR_WEIGHT = 0.05  # of each prior constant, against 1 of a measurement
_USUAL_ERROR = 0.05  # residuals above it count less
SHAPE = ("tokens", "row_bytes", "top_k", "experts", "intra", "inter")  #: columns of a profile that describe an exchange
_KERNEL = ("start", "token", "read", "copy", "send")


@dataclass(frozen=True)
class Exchange:
    """Exchanges as float64 arrays of one shape.

    tokens: per rank. row_bytes: of a token's row as sent. intra, inter: ranks of the expert group in a node, nodes.
    bandwidth: bytes/s per GPU between nodes. groups, chosen: of a router that first chooses groups (expected_places).
    """

    tokens: np.ndarray
    row_bytes: np.ndarray
    top_k: np.ndarray
    experts: np.ndarray
    intra: np.ndarray
    inter: np.ndarray
    bandwidth: np.ndarray
    groups: np.ndarray
    chosen: np.ndarray

    @classmethod
    def of(cls, rows: Table, bandwidth: float) -> Exchange:
        """The shapes of rows of a profile, routed without a limit."""
        shape = {name: rows[name].astype(np.float64) for name in SHAPE}
        none = np.zeros(len(rows))
        return cls(**shape, bandwidth=np.full(len(rows), bandwidth), groups=none, chosen=none)

    @property
    def copies(self) -> np.ndarray:
        """Expected copies of a row, one per rank."""
        return expected_places(self.inter * self.intra, self.experts, self.top_k, self.groups, self.chosen)

    @property
    def other_nodes(self) -> np.ndarray:
        """Expected number of other nodes to which a row goes."""
        reached = expected_places(self.inter, self.experts, self.top_k, self.groups, self.chosen)
        return reached * (self.inter - 1) / self.inter


@dataclass(frozen=True)
class ExchangeLaw:
    """Constants in seconds and seconds per byte, as in the module's text.

    kernel_std, network_std: standard deviation of log(time) in a node and between nodes. kernel_rows, network_rows: how many
    measurements they come from (0: the prior). The rest: the range of these measurements.
    """

    start: float
    token: float
    read: float
    copy: float
    send: float
    node_start: float
    slowdown: float
    efficiency: float
    kernel_std: float = 0.35
    network_std: float = 0.4
    kernel_rows: float = 0.0
    network_rows: float = 0.0
    least_tokens: float = 64.0
    most_tokens: float = 131072.0
    least_row: float = 2048.0
    most_row: float = 14336.0
    least_ranks: float = 8.0
    most_ranks: float = 8.0
    most_nodes: float = 4.0

    def seconds(self, at: Exchange, link_bandwidth: np.ndarray | float) -> np.ndarray:
        """Seconds of each exchange; link_bandwidth: bytes/s of one GPU to the others of its node."""
        copies, other = at.copies, at.other_nodes
        sent = at.tokens * at.row_bytes
        links = sent * copies * (at.intra - 1) / at.intra / (LINK_SHARE * link_bandwidth)
        far = at.inter > 1
        share = FAR_SHARE ** np.clip(np.log2(at.inter / self.most_nodes), 0.0, 1.0)
        network = sent * other / (at.bandwidth * self.efficiency * share)
        kernel = kernel_parts(at, copies + other)[:, 1:] @ self.kernel_constants()[1:]
        start = self.start + np.where(far, at.inter * self.node_start, 0.0)
        slowest = np.maximum(kernel * np.where(far, self.slowdown, 1.0), np.maximum(links, network))
        return start + slowest

    def kernel_constants(self) -> np.ndarray:
        return np.array([getattr(self, name) for name in _KERNEL])

    def uncertainty(self, at: Exchange) -> tuple[np.ndarray, np.ndarray]:
        """Standard deviation of log(time), and basis, of each exchange."""
        far = at.inter > 1
        outside = (at.tokens < self.least_tokens) | (at.tokens > self.most_tokens)
        outside |= (at.row_bytes < self.least_row) | (at.row_bytes > self.most_row)
        ranks = np.abs(np.log2(at.intra / np.clip(at.intra, self.least_ranks, self.most_ranks)))
        beyond = far & (at.inter > self.most_nodes)
        std = np.hypot(np.hypot(self.kernel_std, np.where(far, self.network_std, 0.0)), np.where(outside, _OUTSIDE, 0.0))
        std = np.hypot(np.hypot(std, _OTHER_RANKS * ranks), np.where(beyond, FAR_STD, 0.0))
        fitted = np.where(far, self.network_rows, self.kernel_rows) > 0
        known = np.where(outside | (ranks > 0) | beyond, Basis.EXTRAPOLATED, Basis.INTERPOLATED)
        return std, np.where(fitted, known, Basis.ROOFLINE).astype(np.int8)

    def to_array(self) -> np.ndarray:
        return np.array(list(asdict(self).values()), dtype=np.float64)


def kernel_parts(at: Exchange, copies: np.ndarray) -> np.ndarray:
    """What the constants of _KERNEL are multiplied by, shape [exchanges, 5]."""
    t, b = at.tokens, at.row_bytes
    return np.stack([np.ones_like(t), t, t * b, t * copies, t * copies * b], axis=1)


#: Where nothing was measured: DeepEP's kernels on H100 with 20 multiprocessors; Hybrid-EP's on B200 and GB200 in one node, on
#: H100 between nodes.
PRIORS = {
    ("deepep", "dispatch"): ExchangeLaw(30e-6, 1.5e-8, 7e-13, 2.8e-9, 2.1e-12, 20e-6, 1.25, 0.93),
    ("deepep", "combine"): ExchangeLaw(40e-6, 1e-9, 5.5e-12, 1.0e-9, 1.9e-12, 33e-6, 1.7, 0.93),
    ("hybridep", "dispatch"): ExchangeLaw(30e-6, 1e-9, 1e-13, 7e-9, 1.5e-12, 40e-6, 1.4, 0.90, most_nodes=8.0),
    ("hybridep", "combine"): ExchangeLaw(30e-6, 1e-9, 1e-13, 3e-9, 1.8e-12, 20e-6, 2.0, 0.89, most_nodes=8.0),
}


def fit_law(rows: Table, link_bandwidth: float, network_bandwidth: float, prior: ExchangeLaw) -> ExchangeLaw:
    """Fit the constants of one kernel to its rows, first those of one node, then those between nodes.

    Few rows leave them close to ``prior``. network_bandwidth: of the machine that was measured.
    """
    law, near = prior, rows["inter"] == 1
    if near.any():
        law = _fit_kernel(rows.where(near), law)
    if not near.all():
        law = _fit_network(rows.where(~near), link_bandwidth, network_bandwidth, law)
    tokens, row, ranks = rows["tokens"], rows["row_bytes"], rows["intra"]
    return replace(
        law,
        least_tokens=float(tokens.min()),
        most_tokens=float(tokens.max()),
        least_row=float(row.min()),
        most_row=float(row.max()),
        least_ranks=float(ranks.min()),
        most_ranks=float(ranks.max()),
    )


def _fit_kernel(rows: Table, prior: ExchangeLaw) -> ExchangeLaw:
    at = Exchange.of(rows, np.inf)
    parts, seconds = kernel_parts(at, at.copies), rows["seconds"]
    constants = _relative_nnls(parts, seconds, prior.kernel_constants())
    error = np.log(parts @ constants / seconds)
    sizes = np.unique(rows["row_bytes"])
    if len(sizes) > 1:  # the error on row sizes that the fit has not seen
        for size in sizes:
            out = rows["row_bytes"] == size
            fitted = _relative_nnls(parts[~out], seconds[~out], prior.kernel_constants())
            error[out] = np.log(parts[out] @ fitted / seconds[out])
    law = replace(prior, **dict(zip(_KERNEL, map(float, constants), strict=True)))
    return replace(law, kernel_rows=float(len(rows)), kernel_std=_spread(error))


def _fit_network(rows: Table, link_bandwidth: float, network_bandwidth: float, prior: ExchangeLaw) -> ExchangeLaw:
    from scipy.optimize import least_squares

    at, names = Exchange.of(rows, network_bandwidth), ("node_start", "slowdown", "efficiency")
    prior = replace(prior, most_nodes=float(rows["inter"].max()))
    start = np.array([getattr(prior, name) for name in names])

    def law(log_factors: np.ndarray) -> ExchangeLaw:
        return replace(prior, **dict(zip(names, map(float, start * np.exp(log_factors)), strict=True)))

    def residuals(log_factors: np.ndarray) -> np.ndarray:
        error = np.log(law(log_factors).seconds(at, link_bandwidth) / rows["seconds"])
        return np.concatenate([error, _PRIOR_WEIGHT * log_factors])

    # A maximum has several local optima: whether the kernel or the network limits an exchange is tried both ways.
    starts = [(0.0, np.log(slower), np.log(faster)) for slower in (1.0, 1.6) for faster in (1.0, 0.7)]
    tries = [least_squares(residuals, x, loss="soft_l1", f_scale=_USUAL_ERROR) for x in starts]
    found = min(tries, key=lambda tried: float(tried.cost))
    error = found.fun[: len(rows)]
    return replace(law(found.x), network_rows=float(len(rows)), network_std=max(_spread(error), 2 * _LEAST_STD))


def _spread(error: np.ndarray) -> float:
    return max(std_of_errors(error), _LEAST_STD)


def _relative_nnls(parts: np.ndarray, seconds: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Constants >= 0 with the least relative errors (large ones count less), drawn to ``prior`` with _PRIOR_WEIGHT each."""
    from scipy.optimize import nnls

    weight = np.ones(len(seconds))
    anchor = _PRIOR_WEIGHT * np.eye(len(prior))
    relative = parts * prior / seconds[:, None]
    for _ in range(20):
        factors, _ = nnls(np.vstack([relative * weight[:, None], anchor]), np.append(weight, anchor.sum(axis=0)))
        weight = (1 + ((relative @ factors - 1) / _USUAL_ERROR) ** 2) ** -0.25
    return factors * prior
