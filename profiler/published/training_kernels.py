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
    """One file of the collection.

    columns: those that its shape is made of. values: the product of these, divided by ``mp``, are the values of one tensor.
    passes: column of a time -> (kind of kernel, reads and writes of these values by one fused kernel). least: bytes under which
    the host takes longer to launch a chain of kernels than the device to run it.
    """

    columns: tuple[str, ...]
    values: tuple[str, ...]
    passes: dict[str, tuple[str, int]]
    least: float = 0.0


_TOKENS, _SCORES = ("b", "l", "dim"), ("b", "h", "l", "l")
#: Measured without tensor parallelism where there is no column mp. The norm is torch.nn.LayerNorm, rotary embedding GPT-NeoX's
#: chain of eager kernels on queries and keys, softmax Megatron's kernel of scale, causal mask and softmax.
_OPERATORS = {
    "layernorm": _Operator(_TOKENS, _TOKENS, {_FORWARD: ("norm", 2), _BACKWARD: ("norm_grad_torch", 3)}),
    "ScaledUpperTriangMaskedSoftmax": _Operator(
        ("mp", "b", "h", "l"), _SCORES, {_FORWARD: ("softmax", 2), _BACKWARD: ("softmax_grad", 3)}
    ),
    "gelu": _Operator(("mp", *_TOKENS), _TOKENS, {_FORWARD: ("act", 2), _BACKWARD: ("act_grad", 3)}),
    "res_add": _Operator(_TOKENS, _TOKENS, {_FORWARD: ("residual", 3)}),
    "RoPE": _Operator(
        ("mp", "b", "h", "l", "dim"), _TOKENS, {_FORWARD: ("rope_eager", 4), _BACKWARD: ("rope_eager_grad", 4)}, 2.5e8
    ),
}
#: The activation is of a projection four times as wide as ``dim``.
_WIDTH = {"gelu": 4}
#: Prefix of the collection -> (names of its files, those whose backward times are no measurements: no shorter than forward
#: ones where they would be, digit for digit).
_FILES = {
    "a100_sxm": ("Perlmutter__operator__NVIDIAA100-SXM4-80GB", ()),
    "gh200": ("Vista__operator__NVIDIAGH200120GB", ("layernorm",)),
}


#: Prefix -> the device that it was measured on.
MEASURED_ON = {"a100_sxm": "a100_sxm_80gb", "gh200": "gh200_96gb"}


def training_kernels(files: Collection, prefix: str) -> Columns:
    """Return memory-bound kernels of GPT blocks in fp16, by the bytes that one fused kernel reads and writes."""
    stem, forward_only = _FILES[prefix]
    return join([
        _operator(files, f"{stem}_{name}_fp16.csv", operator, _WIDTH.get(name, 1), name in forward_only)
        for name, operator in _OPERATORS.items()
    ])  # fmt: skip


def _operator(files: Collection, member: str, operator: _Operator, width: int, forward_only: bool) -> Columns:
    raw = files.rows(_ARCHIVE, (), (*operator.columns, *operator.passes), member=f"estimate_train_time/{member}")
    if not count(raw):
        return {}
    values = width * np.prod([raw[name] for name in operator.values], axis=0) / raw.get("mp", 1)
    whole = values == np.floor(values)
    parts = [
        constant(where({"bytes": _HALF * accesses * values, "seconds": raw[column] * 1e-6}, whole), kind=kind)
        for column, (kind, accesses) in operator.passes.items()
        if not (forward_only and column == _BACKWARD)
    ]
    rows = join(parts)
    rows = merge_repeats(where(rows, (rows["seconds"] > 0) & (rows["bytes"] >= operator.least)), ("kind", "bytes"))
    return constant(rows, dtype="fp16", source=f"{ESTIMATE_TRAIN_TIME}:{member}")
