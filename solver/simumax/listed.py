"""Kernels at exactly the shapes that a system file lists: they take the listed time, all others that of the fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from predictor.cost_model import CostModel
from predictor.estimate import Estimate
from predictor.kernels.dtypes import FAMILIES
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.grouped_linear import PASSES, GroupedLinearModel
from predictor.kernels.linear import LinearModel
from predictor.kernels.measured_attention import MeasuredAttention
from predictor.kernels.measured_times import LEAST_UNCERTAINTY, MeasuredTimes
from predictor.kernels.shape_keys import shape_keys
from profiler.profile.profile import Profile, Table
from solver.simumax.shapes import LISTED

_Listed = Mapping[str, MeasuredAttention]  #: by arithmetic


@dataclass(frozen=True)
class ListedLinears(LinearModel):
    """A fit of GEMMs, and listed ones."""

    listed: _Listed = field(default_factory=dict)

    def predict(
        self,
        m: Any,
        n: Any,
        k: Any,
        batch: Any = 1,
        *,
        layout: Any = GemmLayout.TN,
        accumulate: Any = False,
        dtype: str = "bf16",
        buffer: bool = True,
    ) -> Estimate:
        fitted = super().predict(m, n, k, batch, layout=layout, accumulate=accumulate, dtype=dtype, buffer=buffer)
        listed = self.listed.get(FAMILIES.get(dtype, dtype))
        return _instead_of(fitted, listed, m, n, k, batch, layout, accumulate) if listed else fitted


@dataclass(frozen=True)
class ListedGrouped(GroupedLinearModel):
    """A fit of the GEMMs of experts, and listed ones."""

    listed: _Listed = field(default_factory=dict)

    def predict(
        self,
        groups: Any,
        tokens_per_group: Any,
        n: Any,
        k: Any,
        *,
        passes: Any = GemmLayout.TN,
        accumulate: Any = False,
        dtype: str = "bf16",
    ) -> Estimate:
        shape = groups, tokens_per_group, n, k
        fitted = super().predict(*shape, passes=passes, accumulate=accumulate, dtype=dtype)
        listed = self.listed.get(FAMILIES.get(dtype, dtype))
        return _instead_of(fitted, listed, *shape, passes) if listed else fitted

    def launch_seconds(self, groups: Any) -> np.ndarray:
        """0: listed times hold what the host needs."""
        return np.zeros(np.shape(groups))


def _instead_of(fitted: Estimate, listed: MeasuredAttention, *shape: Any) -> Estimate:
    """Return the listed times where there are any; also of single numbers."""
    found = listed.instead_of(Estimate(*(np.atleast_1d(part) for part in fitted)), *(np.atleast_1d(size) for size in shape))
    return Estimate(*(part.reshape(fitted.seconds.shape) for part in found))


def with_listed(cost: CostModel, profile: Profile) -> CostModel:
    """Return the cost model of a system file's profile with the listed shapes as listed."""
    linears, grouped, attention = (_listed(profile, op) for op in ("linear", "grouped_linear", "flash_attn"))
    gemms = _by_family(linears, lambda rows: _calls(rows, ("m", "n", "k", "batch"), _layouts(rows), rows["accumulate"]))
    experts = _by_family(grouped, lambda rows: _calls(rows, ("groups", "tokens_per_group", "n", "k"), _passes(rows)))
    calls = _calls(
        attention,
        ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "v_head_dim", "causal"),
        (attention["pass"] == "backward").astype(np.int64),
    )
    unknown = MeasuredTimes.none()  # shapes that only a fit is made of are not known
    parts = {name: replace(part, known=unknown) for name, part in cost.kernels.linears.parts.items()}
    kernels = replace(
        cost.kernels,
        linears=ListedLinears(parts, listed=gemms),
        attention=replace(cost.kernels.attention, known=unknown),
        grouped=ListedGrouped(**vars(cost.kernels.grouped), listed=experts),
        measured_attention=calls if len(attention) else None,
    )
    return replace(cost, kernels=kernels)


def _listed(profile: Profile, op: str) -> Table:
    table = profile.table(op)
    return table.where(np.char.startswith(table["source"], LISTED))


def _by_family(table: Table, calls: Any) -> _Listed:
    family = np.array([FAMILIES.get(str(dtype), str(dtype)) for dtype in table["dtype"]], dtype=np.str_)
    return {str(name): calls(table.where(family == name)) for name in np.unique(family)}


def _calls(rows: Table, sizes: tuple[str, ...], *codes: np.ndarray) -> MeasuredAttention:
    keys, first = np.unique(shape_keys(*(rows[name] for name in sizes), *codes), return_index=True)
    return MeasuredAttention(keys, rows["seconds"][first], np.full(len(keys), LEAST_UNCERTAINTY))


def _layouts(rows: Table) -> np.ndarray:
    return np.array([GemmLayout[name].value for name in rows["layout"]], dtype=np.int64)


def _passes(rows: Table) -> np.ndarray:
    return np.array([PASSES.index(name) for name in rows["pass"]], dtype=np.int64)
