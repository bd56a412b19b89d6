"""Time of the dispatch and the combine of a mixture of experts whose experts are spread over ranks.

The laws are in predictor.network.exchange_law: one for each op (dispatch, combine) and dispatcher (the library of the kernels).
Dispatch copies the row of a token to the ranks that hold its experts; combine sends back one row from each of them and adds
them up. The backward pass of a dispatch is a combine, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.network.collective_points import link_share
from predictor.network.exchange_law import PRIORS, SHAPE, Exchange, ExchangeLaw, fit_law
from profiler.errors import InputError
from profiler.profile.profile import Device, Table

OPS = ("dispatch", "combine")
DISPATCHERS = ("deepep", "hybridep")  #: kernels of their own, which send tokens between ranks: a group of one rank has none
#: Multiprocessors of the kernels whose rows are fitted: the defaults of DeepEP's Buffer and of Megatron-Core.
DEFAULT_SMS = {"deepep": 20, "hybridep": 16}
#: Ranks in a node beyond which Hybrid-EP's fp8 rows are not fitted: with 24 to 36 ranks of GB200 and 16 multiprocessors they
#: take as long as bf16 rows, twice as wide, so that neither bytes nor rows limit them. Training sends bf16 rows.
FP8_RANKS = 16
#: Seconds of a training step's call beside its kernel, by dispatcher. Hybrid-EP: combine's whole calls less kernel and a copy
#: of what it sends, at the default multiprocessors: 32 to 110 us on 8 to 36 GB200, 34 on B200, 52 to 119 on 16 to 64 H100
#: (profiler.published.expert_exchange); their median. DeepEP's published times leave nothing out.
CALL_SECONDS = {"deepep": 0.0, "hybridep": 7e-5}
_KEYS = tuple((dispatcher, op) for dispatcher in DISPATCHERS for op in OPS)


@dataclass(frozen=True)
class ExpertExchangeModel:
    """link_bandwidth: bytes/s of one GPU to the others of its node. laws: by (dispatcher, op). measured: shapes that were
    measured, float64 [rows, 7]: index in _KEYS, then SHAPE. link_peers: as a collective's (CollectiveModel).
    """

    link_bandwidth: float = np.inf
    laws: Mapping[tuple[str, str], ExchangeLaw] = field(default_factory=lambda: dict(PRIORS))
    measured: np.ndarray = field(default_factory=lambda: np.empty((0, 1 + len(SHAPE))))
    link_peers: float = 0.0

    @classmethod
    def fit(
        cls, table: Table, device: Device, priors: Mapping[tuple[str, str], ExchangeLaw] | None = None
    ) -> ExpertExchangeModel:
        """Fit a law to the rows of each dispatcher and op; without rows the prior stays, with its larger uncertainty."""
        laws, shapes = dict(priors or PRIORS), []
        for index, (dispatcher, op) in enumerate(_KEYS):
            rows = fitted_rows(table, dispatcher, op)
            if len(rows):
                laws[dispatcher, op] = fit_law(rows, device.link_bandwidth, device.network_bandwidth, laws[dispatcher, op])
                shapes.append(_shapes(index, [rows[name] for name in SHAPE]))
        model = cls(device.link_bandwidth, laws)
        return replace(model, measured=np.concatenate(shapes)) if shapes else model

    def on(self, device: Device) -> ExpertExchangeModel:
        """Return the model on another device: its links; the kernels' own constants stay."""
        on = replace(self, link_bandwidth=device.link_bandwidth, measured=np.empty((0, 1 + len(SHAPE))))
        return on.with_link_peers(device.link_peers)

    def with_link_peers(self, peers: int) -> ExpertExchangeModel:
        """The same links, split among ``peers`` other GPUs (0: behind a switch)."""
        return replace(self, link_peers=float(peers))

    def with_slower_links(self, slowdown: float) -> ExpertExchangeModel:
        """The same exchanges over links that take ``slowdown`` times as long; of less than 1 nothing, as kernels limit them."""
        return replace(self, link_bandwidth=self.link_bandwidth / max(slowdown, 1.0))

    def predict(
        self,
        op: str,
        tokens: Any,
        row_bytes: Any,
        top_k: Any,
        experts: Any,
        intra: Any,
        inter: Any,
        network_bandwidth: Any,
        dispatcher: str = "deepep",
        groups: Any = 0,
        chosen: Any = 0,
    ) -> Estimate:
        """Estimate ``op``; array arguments broadcast.

        tokens: per rank. row_bytes: bytes of a token's row as sent. intra, inter: ranks of the expert group in a node (or other
        NVLink domain), nodes. network_bandwidth: bytes/s per GPU. groups, chosen: of a router that first chooses groups of
        experts (profiler.profile.routing.expected_places). A group of one rank and an exchange of nothing take no time.
        """
        key = (dispatcher, op)
        if key not in self.laws:
            raise InputError(f"no {op!r} of {dispatcher!r}; ops are {', '.join(OPS)}, dispatchers {', '.join(DISPATCHERS)}")
        given = (tokens, row_bytes, top_k, experts, intra, inter, network_bandwidth, groups, chosen)
        shape = np.broadcast_shapes(*(np.shape(a) for a in given))
        flat = [np.ravel(np.broadcast_to(np.asarray(a, dtype=np.float64), shape)) for a in given]
        _check(*flat)
        at = Exchange(**dict(zip(SHAPE, flat, strict=False)), bandwidth=flat[6], groups=flat[7], chosen=flat[8])
        law = self.laws[key]
        seconds = law.seconds(at, self.link_bandwidth * link_share(at.intra, self.link_peers))
        std, basis = law.uncertainty(at)
        exact = _among(_shapes(_KEYS.index(key), flat[:6]), self.measured) & (at.chosen >= at.groups)
        basis[exact] = Basis.MEASURED
        nothing = (at.intra * at.inter <= 1) | (at.tokens <= 0) | (at.row_bytes <= 0)
        seconds[nothing], std[nothing], basis[nothing] = 0.0, 0.0, Basis.MEASURED
        return Estimate(seconds.reshape(shape), std.reshape(shape), basis.reshape(shape))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything as numeric arrays, for an npz file."""
        laws = np.stack([self.laws[key].to_array() for key in _KEYS])
        links = {"link_bandwidth": np.array(self.link_bandwidth), "link_peers": np.array(self.link_peers)}
        return {**links, "laws": laws, "measured": self.measured}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ExpertExchangeModel:
        """The inverse of ``to_arrays``."""
        laws = {key: ExchangeLaw(*map(float, row)) for key, row in zip(_KEYS, arrays["laws"], strict=True)}
        return cls(float(arrays["link_bandwidth"]), laws, np.asarray(arrays["measured"]), float(arrays["link_peers"]))


def fitted_rows(table: Table, dispatcher: str, op: str) -> Table:
    """The rows of a dispatcher and op with the usual number of multiprocessors, or an unknown one; see FP8_RANKS."""
    usual = (table["sms"] == DEFAULT_SMS[dispatcher]) | (table["sms"] == 0)
    odd = (table["dispatcher"] == "hybridep") & (table["dtype"] == "fp8") & (table["intra"] > FP8_RANKS)
    return table.where((table["dispatcher"] == dispatcher) & (table["op"] == op) & usual & ~odd)


def _shapes(index: int, columns: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.full(len(columns[0]), index), *columns], axis=1).astype(np.float64)


def _among(asked: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which rows of ``asked`` are rows of ``known``."""
    if not len(known):
        return np.zeros(len(asked), dtype=bool)
    row = np.dtype((np.void, asked.shape[1] * asked.itemsize))
    words, known_words = (np.ascontiguousarray(a + 0.0).view(row).ravel() for a in (asked, known))  # + 0.0: no negative zero
    return np.isin(words, known_words)


def _check(
    tokens: np.ndarray,
    row_bytes: np.ndarray,
    top_k: np.ndarray,
    experts: np.ndarray,
    intra: np.ndarray,
    inter: np.ndarray,
    bandwidth: np.ndarray,
    groups: np.ndarray,
    chosen: np.ndarray,
) -> None:
    if not (np.isfinite(tokens * row_bytes) & (tokens >= 0) & (row_bytes >= 0)).all():
        raise InputError("tokens and the bytes of their rows must be finite, not negative")
    if not ((top_k >= 1) & (experts >= top_k) & np.isfinite(experts)).all():
        raise InputError("a token needs at least one expert, and at most as many as there are")
    if not ((intra >= 1) & (inter >= 1) & np.isfinite(intra * inter)).all():
        raise InputError("a group needs at least one rank in at least one node")
    if not ((bandwidth > 0) & np.isfinite(bandwidth)).all():
        raise InputError("the network bandwidth must be positive bytes/s per GPU")
    if not ((groups >= 0) & np.isfinite(groups) & (chosen >= 0) & ((chosen > 0) | (groups == 0))).all():
        raise InputError("groups of experts must not be negative, and a router that has some chooses at least one")
