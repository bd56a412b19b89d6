"""Shapes that a layout runs and that the machine's tables do not have, as a system file would list them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from predictor.estimate import Basis
from predictor.kernels.dtypes import FAMILIES
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.grouped_linear import PASSES
from solver.layers.program import FLASH_ATTN, GROUPED_LINEAR, LINEAR, Op
from solver.simumax.pricing import Priced
from solver.simumax.shapes import STAGES


def missing_shapes(priced: Priced) -> dict[str, dict[str, float]]:
    """Return op of a system file -> shape, as such a file lists it -> seconds that are taken for it instead.

    A shape is missing where its time comes from a fit.
    """
    solutions, found = priced.solutions, dict[str, dict[str, float]]()
    key = int(solutions.terms.key[solutions.layouts.row[priced.index]])
    for part in (*solutions.table.layers, solutions.table.embedding, solutions.table.head):
        for number, op in enumerate(part.estimates.ops):
            if op.kind in _TEXTS and part.estimates.basis[number, key] != Basis.MEASURED:
                name, shape = _TEXTS[op.kind](op, _Sizes(op, key), solutions.problem.run.grad_dtype)
                found.setdefault(name, {})[shape] = float(part.estimates.seconds[number, key])
    return found


class _Sizes(Mapping[str, int]):
    """The dims of an op for one layer key, as whole numbers."""

    def __init__(self, op: Op, key: int) -> None:
        self._op, self._key = op, key

    def __getitem__(self, name: str) -> int:
        values = np.ravel(np.asarray(self._op.dims[name]))
        return int(values[self._key if len(values) > 1 else 0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._op.dims)

    def __len__(self) -> int:
        return len(self._op.dims)


def _gemm(op: Op, size: Mapping[str, int], gradients: str) -> tuple[str, str]:
    adds = bool(size.get("accumulate", 0))
    shape = (
        f"b={size.get('batch', 1)}, m={size['m']}, k={size['k']}, n={size['n']}, "
        f"layout={GemmLayout(size.get('layout', 0)).name}, accumulate={adds}, out_dtype={'fp32' if adds else 'bf16'}"
    )
    return _named("matmul", op), shape


def _attention(op: Op, size: Mapping[str, int], gradients: str) -> tuple[str, str]:
    shape = (
        f"batch={size['batch']}, seq_len={size['seq_q']}, head_num={size['heads']}, kv_head_num={size['kv_heads']}, "
        f"qk_head_dim={size['head_dim']}, v_head_dim={size['v_head_dim']}, qkv_contiguous=True"
    )
    return "sdp_bwd" if size.get("backward", 0) else "sdp_fwd", shape


def _experts(op: Op, size: Mapping[str, int], gradients: str) -> tuple[str, str]:
    stages = {name: stage for stage, name in STAGES.items()}
    adds, name = bool(size.get("accumulate", 0)), PASSES[size.get("passes", 0)]
    forward = name == PASSES[0]
    shape = (
        f"ng={size['groups']}, M={size['tokens_per_group']}, N={size['n']}, K={size['k']}, dtype=bf16, out_dtype=bf16, "
        f"main_grad_dtype={gradients}, stage={stages[name]}, grad={not forward}, accumulate={adds}, "
        f"use_split_accumulator={not forward}, single_output={forward}"
    )
    return _named("group_matmul", op), shape


def _named(name: str, op: Op) -> str:
    return f"fp8_{name}" if FAMILIES.get(op.dtype) == "fp8" else name


_TEXTS = {LINEAR: _gemm, GROUPED_LINEAR: _experts, FLASH_ATTN: _attention}
