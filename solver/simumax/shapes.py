"""Rows of a profile from the efficiencies of a SimuMax system file: seconds = FLOPs / (tflops * efficiency).

Where an op lists no shape, shapes typical of training stand for its flat efficiency. FLOPs are counted as
SimuMax counts them: of attention the whole square, though its kernels are causal, and 2.5 times as many backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from profiler.errors import InputError, printable, shown
from profiler.profile.profile import Table

Row = dict[str, Any]  #: column -> value
LISTED, FLAT = "stated by", "flat efficiency of"  #: beginnings of the sources of rows
_SIZES = (2048, 4096, 8192, 16384)
#: SimuMax's names of the passes of experts' GEMMs.
STAGES = {"fwd": "forward", "bwd_grad_act": "input_grad", "bwd_grad_w": "weight_grad"}
_BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Op:
    """One op of the file. flops: FLOP/s at most. flat: share of them at shapes that are not listed."""

    name: str
    flops: float
    flat: float
    listed: Mapping[str, float]


def op_rows(op: Op, kind: str, dtype: str, system: str) -> list[Row]:
    """Return rows of ``op``; kind: a table of the profile, and for attention its pass, as in flash_attn.forward.

    Of a shape that is listed twice, with contiguous and with strided inputs, the first stands.
    """
    read, flops, usual = _KINDS[kind]
    shapes = [(read(_words(op.name, text)), efficiency) for text, efficiency in op.listed.items()]
    source = f"{LISTED if shapes else FLAT} {system}"
    shapes = shapes or [(shape, op.flat) for shape in usual()]
    common = {"dtype": dtype, "source": source}
    rows: list[Row] = [{**shape, **common, "seconds": flops(shape) / (op.flops * efficiency)} for shape, efficiency in shapes]
    for row in rows:
        if row.pop("accumulates", False):
            row["source"] = f"{source} accumulating in fp32"
    return rows


def table_of(op: str, rows: list[Row]) -> Table:
    """Return the profile's table ``op`` with these rows."""
    return Table.from_columns(op, {name: [row[name] for row in rows] for name in (rows[0] if rows else {})})


def _words(op: str, text: str) -> dict[str, str]:
    found = dict(re.findall(r"(\w+)\s*=\s*(\w+)", text))
    if not found:
        raise InputError(f"system op {op}: {shown(text)} is no shape; it must be like 'b=1, m=4096, k=5120, n=1536, layout=TN'")
    return found


def _sizes(words: Mapping[str, str], names: Mapping[str, str]) -> Row:
    for theirs in names:
        given = words.get(theirs)
        if given is None:
            raise InputError(f"a shape of the system file lacks {theirs}; it has {', '.join(words)}")
        if not re.fullmatch(r"[1-9]\d{0,8}", given):
            raise InputError(f"a shape of the system file has {theirs}={printable(given)}; it must be a size below 10^9")
    return {ours: int(words[theirs]) for theirs, ours in names.items()}


def _gemm(words: Mapping[str, str]) -> Row:
    row = _sizes({"b": "1", **words}, {"b": "batch", "m": "m", "n": "n", "k": "k"})
    layout = words.get("layout", "TN")
    if layout not in ("TN", "NN", "NT"):
        raise InputError(f"a shape of the system file has layout {shown(layout)}; it must be TN, NN or NT")
    adds = words.get("accumulate", "False") == "True"
    return {**row, "layout": layout, "accumulate": int(adds), "out_dtype": words.get("out_dtype", "bf16")}


def _gemm_flops(row: Row) -> float:
    return 2.0 * row["batch"] * row["m"] * row["n"] * row["k"]


def _usual_gemms() -> list[Row]:
    passes = ((0, 1, 2, "TN", 0, "bf16"), (0, 2, 1, "NN", 0, "bf16"), (1, 2, 0, "NT", 1, "fp32"))
    found = []
    for m, n, k in product((4096, 8192), _SIZES, _SIZES):
        for i, j, depth, layout, adds, out in passes:
            size = (m, n, k)
            found.append(
                {
                    "batch": 1,
                    "m": size[i],
                    "n": size[j],
                    "k": size[depth],
                    "layout": layout,
                    "accumulate": adds,
                    "out_dtype": out,
                }
            )
    return found


def _attention(words: Mapping[str, str]) -> Row:
    names = {
        "batch": "batch",
        "seq_len": "seq_q",
        "head_num": "heads",
        "kv_head_num": "kv_heads",
        "qk_head_dim": "head_dim",
        "v_head_dim": "v_head_dim",
    }
    row = _sizes(words, names)
    kernel = "transformer_engine" if words.get("qkv_contiguous", "True") == "True" else "transformer_engine_strided"
    return {**row, "seq_kv": row["seq_q"], "causal": 1, "kernel": kernel}


def _square_flops(row: Row) -> float:
    return float(2.0 * row["batch"] * row["heads"] * row["seq_q"] ** 2 * (row["head_dim"] + row["v_head_dim"]))


def _usual_attention() -> list[Row]:
    dims = ((128, 128), (64, 64), (192, 128))
    return [
        {
            "batch": 1,
            "seq_q": seq,
            "heads": heads,
            "kv_heads": heads,
            "head_dim": qk,
            "v_head_dim": v,
            "seq_kv": seq,
            "causal": 1,
            "kernel": "transformer_engine",
        }
        for seq, heads, (qk, v) in product((2048, 4096, 8192, 16384), (16, 32, 64), dims)
    ]


def _grouped(words: Mapping[str, str]) -> Row:
    row = _sizes(words, {"ng": "groups", "M": "tokens_per_group", "N": "n", "K": "k"})
    stage = words.get("stage", "fwd")
    if stage not in STAGES:
        raise InputError(f"a shape of the system file has stage {shown(stage)}; it must be one of {', '.join(STAGES)}")
    adds = stage == "bwd_grad_w" and words.get("accumulate") == "True" and words.get("main_grad_dtype", "fp32") == "fp32"
    return {**row, "pass": STAGES[stage], "accumulates": adds}


def _grouped_flops(row: Row) -> float:
    return 2.0 * row["groups"] * row["tokens_per_group"] * row["n"] * row["k"]


def _usual_grouped() -> list[Row]:
    return [
        {"groups": groups, "tokens_per_group": tokens, "n": n, "k": k, "pass": name, "accumulates": name == "weight_grad"}
        for groups, tokens, (n, k), name in product((8, 32), (1024, 4096), ((4096, 4096), (4096, 2048)), STAGES.values())
    ]


_Kind = tuple[Callable[[Mapping[str, str]], Row], Callable[[Row], float], Callable[[], list[Row]]]
_KINDS: Mapping[str, _Kind] = {
    "linear": (_gemm, _gemm_flops, _usual_gemms),
    "flash_attn.forward": (
        lambda words: {**_attention(words), "pass": "forward"},
        _square_flops,
        lambda: [{**row, "pass": "forward"} for row in _usual_attention()],
    ),
    "flash_attn.backward": (
        lambda words: {**_attention(words), "pass": "backward"},
        lambda row: _BACKWARD_FLOPS * _square_flops(row),
        lambda: [{**row, "pass": "backward"} for row in _usual_attention()],
    ),
    "grouped_linear": (_grouped, _grouped_flops, _usual_grouped),
}
