"""Kernels of training steps that others published: norms, softmax, activations, rotary embedding, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler.published.rows import Collection, Columns, constant, count, join, merge_repeats, where

ESTIMATE_TRAIN_TIME = "DebarghaG/estimate-train-time"
_ARCHIVE = "more/estimate_train_time.tar.gz"
_HALF = 2  # bytes of an fp16 value
_FORWARD, _BACKWARD = "F_dur(us)", "B_dur(us)"


@dataclass(frozen=True)
class _Operator:
    """Kernels of the collection that run one after the other, each in a file of its own.

    files: their names. columns: those that a shape is made of. values: the product of these, times ``width`` and divided by
    ``mp``, are the values of one tensor. passes: column of a time -> (kind of kernel, reads and writes of these values by one
    fused kernel). least: bytes under which the host takes longer to launch a chain of kernels than the device to run it. most:
    bytes beyond which GH200's masked_fill takes no longer, whatever their number.
    """

    files: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[str, ...]
    passes: dict[str, tuple[str, int]]
    width: int = 1
    least: float = 0.0
    most: float = np.inf


_TOKENS, _SCORES = ("b", "l", "dim"), ("b", "h", "l", "l")
#: Measured without tensor parallelism where there is no column mp.
_OPERATORS = (
    # torch.nn.LayerNorm
    _Operator(("layernorm",), _TOKENS, _TOKENS, {_FORWARD: ("norm", 2), _BACKWARD: ("norm_grad_torch", 3)}),
    # Megatron's kernel of scale, causal mask and softmax; and torch's masked_fill and softmax
    _Operator(
        ("ScaledUpperTriangMaskedSoftmax",),
        ("mp", "b", "h", "l"),
        _SCORES,
        {_FORWARD: ("softmax", 2), _BACKWARD: ("softmax_grad", 3)},
    ),
    _Operator(
        ("fillmask", "softmax"),
        ("mp", "b", "h", "l"),
        _SCORES,
        {_FORWARD: ("softmax_eager", 2), _BACKWARD: ("softmax_eager_grad", 3)},
        least=5e7,
        most=4e9,
    ),
    # of a projection four times as wide as ``dim``
    _Operator(("gelu",), ("mp", *_TOKENS), _TOKENS, {_FORWARD: ("act", 2), _BACKWARD: ("act_grad", 3)}, width=4),
    _Operator(("res_add",), _TOKENS, _TOKENS, {_FORWARD: ("residual", 3)}),
    # GPT-NeoX's chain of eager kernels, on queries and keys
    _Operator(
        ("RoPE",),
        ("mp", "b", "h", "l", "dim"),
        _TOKENS,
        {_FORWARD: ("rope_eager", 4), _BACKWARD: ("rope_eager_grad", 4)},
        least=2.5e8,
    ),
)
#: Prefix of the collection -> (begin of its files' names, those whose backward times are no measurements: no shorter than the
#: forward ones where they would be, digit for digit).
_FILES = {
    "a100_sxm": ("Perlmutter__operator__NVIDIAA100-SXM4-80GB", ()),
    "gh200": ("Vista__operator__NVIDIAGH200120GB", ("layernorm",)),
}
#: Prefix -> the device that it was measured on.
MEASURED_ON = {"a100_sxm": "a100_sxm_80gb", "gh200": "gh200_96gb"}


def training_kernels(files: Collection, prefix: str) -> Columns:
    """Return memory-bound kernels of GPT blocks in fp16, by the bytes that one fused kernel reads and writes."""
    return join([_rows(files, prefix, operator) for operator in _OPERATORS])


def _rows(files: Collection, prefix: str, operator: _Operator) -> Columns:
    """Return rows by kind and bytes; of several kernels those sizes at which each was measured, with the sum of their times."""
    stem, forward_only = _FILES[prefix]
    kernels = [_kernel(files, f"{stem}_{name}_fp16.csv", operator, name in forward_only) for name in operator.files]
    if not all(count(rows) for rows in kernels):
        return {}
    found, *others = kernels
    for rows in others:
        times = dict(zip(zip(rows["kind"].tolist(), rows["bytes"].tolist(), strict=True), rows["seconds"], strict=True))
        added = np.array([times.get(key, np.nan) for key in zip(found["kind"].tolist(), found["bytes"].tolist(), strict=True)])
        found = where(found | {"seconds": found["seconds"] + added}, np.isfinite(added))
    return constant(found, dtype="fp16", source=f"{ESTIMATE_TRAIN_TIME}:{stem}_{'+'.join(operator.files)}")


def _kernel(files: Collection, member: str, operator: _Operator, forward_only: bool) -> Columns:
    raw = files.rows(_ARCHIVE, (), (*operator.columns, *operator.passes), member=f"estimate_train_time/{member}")
    if not count(raw):
        return {}
    values = operator.width * np.prod([raw[name] for name in operator.values], axis=0) / raw.get("mp", 1)
    rows = join(
        [
            constant({"bytes": _HALF * accesses * values, "seconds": raw[column] * 1e-6, "whole": values % 1 == 0}, kind=kind)
            for column, (kind, accesses) in operator.passes.items()
            if not (forward_only and column == _BACKWARD)
        ]
    )
    usable = rows["whole"] & (rows["seconds"] > 0) & (rows["bytes"] >= operator.least) & (rows["bytes"] <= operator.most)
    return merge_repeats(where(rows, usable), ("kind", "bytes"))
