"""Published kernel measurements as profile tables: GEMMs, attention, memory-bound kernels."""

from __future__ import annotations

import numpy as np

from profiler.profile.devices import device as named_device
from profiler.profile.profile import SCALED, Device
from profiler.published.rows import (
    Collection,
    Columns,
    Ledger,
    constant,
    count,
    join,
    merge_repeats,
    renamed,
    spaced,
    thinned,
    where,
)
from profiler.published.training_kernels import MEASURED_ON, training_kernels

#: Largest share of the datasheet's peak or memory bandwidth that a kernel reaches; measurements above it are errors.
PEAK_LIMIT = 0.97

THINNED = "thinned by rule"

AICONFIGURATOR, VIDUR, SIMUMAX = "ai-dynamo/aiconfigurator", "microsoft/vidur", "MooreThreads/SimuMax"

_PASSES = {"fwd": "forward", "dgrad": "input_grad", "wgrad": "weight_grad"}
_ATTENTION_PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward_backward"}
_DTYPES = {"bfloat16": "bf16", "fp8_trtllm": "fp8"}
_SIMUMAX_FILES = {"a100_pcie": "configs/system/a100_pcie.json", "b200": "configs/system/b200_bf16_ceperm.json"}
_HALF = 2  # bytes of a bf16 or fp16 value


def simumax_source(prefix: str) -> str:
    return f"{SIMUMAX}:{_SIMUMAX_FILES.get(prefix, prefix)}"


def named_source(sources: np.ndarray) -> np.ndarray:
    """Return sources with the collection's short names written out as owner/repository:path."""
    return renamed(sources, {s: s.replace("aic:", f"{AICONFIGURATOR}:systems/data/") for s in map(str, set(sources))})


def _possible(flops: np.ndarray, rows: Columns, device: Device) -> np.ndarray:
    """Return a mask: times are positive and imply at most PEAK_LIMIT of the dtype's peak."""
    peak = np.array([device.peak_flops.get(str(d), 0.0) for d in rows["dtype"]])
    return (rows["seconds"] > 0) & (flops <= PEAK_LIMIT * peak * rows["seconds"])


def linear(files: Collection, prefix: str, simumax: str, device: Device, ledger: Ledger) -> Columns:
    """Return GEMMs, out[m, n] summed over k, of up to three laboratories, distinguished by ``source``."""
    parts = [_grid_linear(files, prefix, ledger), _model_linear(files, prefix, ledger)] if prefix else []
    parts += [_simumax_linear(files, simumax)] if simumax else []
    rows = join(parts)
    if not count(rows):
        return {}
    flops = 2.0 * rows["batch"] * rows["m"] * rows["n"] * rows["k"]
    return ledger.keep("linear", "faster than the peak allows", rows, _possible(flops, rows, device))


def _grid_linear(files: Collection, prefix: str, ledger: Ledger) -> Columns:
    """Return forward GEMMs on a grid of sizes. fp8 times include the quantisation of the activation."""
    numbers = ("m", "n", "k", "us", "us_min", "us_max", "n_src")
    raw = files.rows(f"{prefix}_gemm.parquet", ("dtype", "source"), numbers)
    known = np.isin(raw["dtype"], ("bf16", "fp8_trtllm"))
    raw = ledger.keep("linear", "block-scaled fp8: another kernel than the tensor-wise fp8 of training", raw, known)
    rows = {d: raw[d] for d in ("m", "n", "k")} | {
        "seconds": raw["us"] * 1e-6,
        "spread": np.where(raw["n_src"] > 1, (raw["us_max"] - raw["us_min"]) / 2 / np.maximum(raw["us"], 1e-9), np.nan),
        "repeats": raw["n_src"],
        "dtype": renamed(raw["dtype"], _DTYPES),
        "source": named_source(raw["source"]),
    }
    rows = constant(rows, batch=1, layout="TN", out_dtype="bf16", accumulate=0)
    large, fp8 = np.minimum(np.minimum(rows["m"], rows["n"]), rows["k"]) >= 512, rows["dtype"] == "fp8"
    mask = large & ~fp8
    for others, share in ((~large & ~fp8, 1 / 5), (large & fp8, 1 / 3), (~large & fp8, 1 / 30)):
        mask |= others & thinned(rows, ~others, share, ("m", "n", "k"))
    return ledger.keep("linear", THINNED, rows, mask)


def _model_linear(files: Collection, prefix: str, ledger: Ledger) -> Columns:
    """Return fp16 GEMMs of the layers of seven models (Vidur), with repeats of one shape merged."""
    raw = files.rows(f"vidur_{prefix}_gemm.parquet", (), ("m", "n", "k", "us")) if prefix in _VIDUR else {}
    if not count(raw):
        return {}
    rows = merge_repeats(raw | {"seconds": raw["us"] * 1e-6}, ("m", "n", "k"))
    rows = ledger.keep("linear", "fewer than 128 tokens: inference only", rows, rows["m"] >= 128)
    rows = ledger.keep("linear", THINNED, rows, spaced(rows, ("n", "k"), "m", 24))
    source = f"{VIDUR}:data/profiling/compute/{_VIDUR[prefix]}"
    return constant(rows, batch=1, layout="TN", out_dtype="fp16", accumulate=0, dtype="fp16", source=source)


_VIDUR = {"a100_sxm": "a100", "h100_sxm": "h100"}


def _simumax_linear(files: Collection, prefix: str) -> Columns:
    words, numbers = ("dtype", "out_dtype", "layout"), ("b", "m", "n", "k", "accumulate", "time_us")
    raw = files.rows(f"simumax_{prefix}_gemm.csv", words, numbers)
    rows = {name: raw[name] for name in (*words, "m", "n", "k", "accumulate")}
    rows |= {"batch": raw["b"], "seconds": raw["time_us"] * 1e-6}
    return constant(rows, spread=np.nan, repeats=0, source=simumax_source(prefix))


def grouped_linear(files: Collection, prefix: str, device: Device, ledger: Ledger) -> Columns:
    """Return grouped GEMMs of experts in all three passes; n and k are those of the forward pass."""
    numbers = ("num_groups", "tokens_per_group", "fwd_n", "fwd_k", "time_us")
    raw = files.rows(f"simumax_{prefix}_grouped_gemm.csv", ("stage", "dtype", "main_grad_dtype"), numbers)
    if not count(raw):
        return {}
    passes = renamed(raw["stage"], _PASSES)
    # Only the weight gradient is stored in the main gradient's dtype; the other passes do not depend on it.
    accumulates = np.where(passes == "weight_grad", np.char.add(" accumulating in ", raw["main_grad_dtype"]), "")
    rows = merge_repeats(
        {
            "groups": raw["num_groups"],
            "tokens_per_group": raw["tokens_per_group"],
            "n": raw["fwd_n"],
            "k": raw["fwd_k"],
            "pass": passes,
            "dtype": raw["dtype"],
            "source": np.char.add(simumax_source(prefix), accumulates),
            "seconds": raw["time_us"] * 1e-6,
        },
        ("groups", "tokens_per_group", "n", "k", "pass", "dtype", "source"),
    )
    flops = 2.0 * rows["groups"] * rows["tokens_per_group"] * rows["n"] * rows["k"]
    return ledger.keep("grouped_linear", "faster than the peak allows", rows, _possible(flops, rows, device))


#: (backend, version, kernel) of the serving collection
Kernels = tuple[tuple[str, str, str], ...]


def flash_attn(files: Collection, prefix: str, simumax: str, kernels: Kernels, device: Device, ledger: Ledger) -> Columns:
    """Return attention measurements; ``kernels``: those of the serving collection that training can use."""
    parts = []
    if prefix:
        parts += [_serving_attention(files, prefix, kernels, ledger), _figure_attention(files, prefix, ledger)]
    if simumax:
        parts += [_simumax_attention(files, simumax)]
    rows = join(parts)
    if not count(rows):
        return {}
    possible = _possible(attention_flops(rows), rows, device)
    return ledger.keep("flash_attn", "faster than the peak allows", rows, possible)


def attention_flops(rows: Columns) -> np.ndarray:
    """Return the FLOPs of attention rows; causal rows count half.

    Forward: QK^T (head_dim) and PV (v_head_dim). Backward: QK^T recomputed, dQ and dK (head_dim), dV and dP (v_head_dim).
    """
    pairs = 2.0 * rows["batch"] * rows["heads"] * rows["seq_q"] * rows["seq_kv"] / np.where(rows["causal"] != 0, 2, 1)
    forward = rows["head_dim"] + rows["v_head_dim"]
    backward = 3 * rows["head_dim"] + 2 * rows["v_head_dim"]
    passes = [rows["pass"] == "forward", rows["pass"] == "backward"]
    return pairs * np.select(passes, [forward, backward], forward + backward)


def _attention_columns(raw: Columns, seq: str, head_dim: str, us: str) -> Columns:
    rows = {name: raw[name] for name in ("batch", "heads", "kv_heads", "dtype", "causal", "source", "pass", "kernel")}
    rows |= {"seq_q": raw[seq], "seq_kv": raw[seq], "head_dim": raw[head_dim], "seconds": raw[us] * 1e-6}
    rows["v_head_dim"] = raw.get("v_head_dim", raw[head_dim])
    return constant(rows | {"dtype": renamed(rows["dtype"], _DTYPES)}, spread=np.nan, repeats=0)


def _serving_attention(files: Collection, prefix: str, kernels: Kernels, ledger: Ledger) -> Columns:
    words = ("dtype", "kv_dtype", "kernel", "backend", "ver", "source")
    numbers = ("batch", "seq", "heads", "kv_heads", "head_dim", "window", "causal", "us")
    raw = files.rows(f"{prefix}_attn_fwd.parquet", words, numbers)
    plain = (raw["dtype"] == "bfloat16") & (raw["kv_dtype"] == "bfloat16") & (raw["window"] == 0) & (raw["seq"] >= 128)
    raw = ledger.keep("flash_attn", "windowed, other dtype or under 128 tokens", raw, plain)
    chosen = np.zeros(count(raw), dtype=bool)
    for backend, version, kernel in kernels:
        chosen |= (raw["backend"] == backend) & (raw["ver"] == version) & (raw["kernel"] == kernel)
    raw = ledger.keep("flash_attn", "other serving backends, versions and kernels", raw, chosen)
    raw["kernel"] = np.char.add(np.char.add(raw["backend"], "_"), raw["kernel"])
    raw["source"] = named_source(raw["source"])
    rows = _attention_columns(constant(raw, **{"pass": "forward"}), "seq", "head_dim", "us")
    training = (rows["batch"] <= 8) & (rows["seq_q"] >= 1024)
    mask = thinned(rows, training, 1 / 3, ("seq_q", "heads", "kv_heads", "head_dim", "batch"))
    return ledger.keep("flash_attn", THINNED, rows, mask)


def _figure_attention(files: Collection, prefix: str, ledger: Ledger) -> Columns:
    """Return forward and backward kernels from the FlashAttention repository's own figures (bar labels read by eye)."""
    raw = files.rows(
        "attn_bwd_all.csv",
        ("gpu", "impl", "phase", "dtype", "source"),
        ("batch", "seq", "heads", "kv_heads", "head_dim", "causal", "us"),
    )
    # SimuMax's measurements come from its own files, which also state the layout of q, k and v.
    raw = where(raw, (raw["gpu"] == prefix) & ~np.char.startswith(raw["source"], "SimuMax:"))
    released = np.char.startswith(raw["source"], "Dao-AILab/flash-attention:")
    raw = ledger.keep("flash_attn", "from an issue or pull request: no licence stated", raw, released)
    raw |= {"kernel": np.char.lower(raw["impl"]), "pass": renamed(raw["phase"], _ATTENTION_PASSES)}
    return _attention_columns(raw, "seq", "head_dim", "us")


def _simumax_attention(files: Collection, prefix: str) -> Columns:
    shape = ("batch", "seq_len", "heads", "kv_heads", "qk_head_dim", "v_head_dim")
    numbers = (*shape, "qkv_contiguous", "causal_kernel", "time_us")
    raw = files.rows(f"simumax_{prefix}_attention.csv", ("stage", "dtype"), numbers)
    kernel = np.where(raw["qkv_contiguous"] != 0, "transformer_engine", "transformer_engine_strided")
    raw |= {"pass": renamed(raw["stage"], _ATTENTION_PASSES), "causal": raw["causal_kernel"], "kernel": kernel}
    return _attention_columns(constant(raw, source=simumax_source(prefix)), "seq_len", "qk_head_dim", "time_us")


def memory_bound(files: Collection, prefix: str, training: str, device: Device, ledger: Ledger) -> Columns:
    """Return memory-bound kernels by the bytes that an ideal fused kernel reads and writes.

    training: prefix of training_kernels, which ran on this device or one with the same chip, whose times are scaled by the
    ratio of the memories' bandwidths. A measurement faster than the memory (its data came from the cache) says nothing about a
    training step and is left out.
    """
    parts = [_layer_kernels(files, prefix), _quantize(files, prefix)] if prefix else []
    parts += [_of_memory(training_kernels(files, training), training, device)] if training else []
    rows = join(parts)
    if not count(rows):
        return {}
    possible = (rows["seconds"] > 0) & (rows["bytes"] <= PEAK_LIMIT * device.memory_bandwidth * rows["seconds"])
    rows = ledger.keep("memory_bound", "faster than the memory: from the cache", rows, possible)
    return ledger.keep("memory_bound", THINNED, rows, spaced(rows, ("kind", "source"), "bytes", 240))


def _of_memory(rows: Columns, prefix: str, part: Device) -> Columns:
    source = named_device(MEASURED_ON[prefix])
    return on_other_memory(rows, source, part) if count(rows) and source.memory_bandwidth != part.memory_bandwidth else rows


def on_other_memory(rows: Columns, source: Device, part: Device) -> Columns:
    """Return memory-bound measurements as a part with the same chip but other memory would make them."""
    ratio = source.memory_bandwidth / part.memory_bandwidth
    note = np.char.add(rows["source"], f"{SCALED}{source.name} x {ratio:.3f}, the ratio of their memories)")
    return rows | {"seconds": rows["seconds"] * ratio, "source": note}


def _layer_kernels(files: Collection, prefix: str) -> Columns:
    """Return fp16 kernels of Vidur's layers, without the GEMMs. ``tp`` shards rope and activation only."""
    numbers = ("tokens", "tp", "hidden", "heads", "kv_heads", "ffn", "us")
    raw = files.rows("membound_vidur.parquet", ("gpu", "op"), numbers)
    raw = where(raw, (raw["gpu"] == prefix) & (raw["us"] > 0))
    if not count(raw):
        return {}
    head_dim = raw["hidden"] / np.maximum(raw["heads"], 1)
    rotated = (raw["heads"] + np.maximum(raw["kv_heads"], raw["tp"])) / raw["tp"] * head_dim
    values = {  # values read and written per token; the norm is a serving engine's: training has others
        "row": 2 * raw["hidden"],
        "rope": 2 * rotated,
        "gated_act": 3 * raw["ffn"] / raw["tp"],
        "residual": 3 * raw["hidden"],
        "embedding": 2 * raw["hidden"],
    }
    kind = renamed(raw["op"], _KINDS)
    per_token = np.select([kind == name for name in values], list(values.values()), 0.0)
    rows = {"kind": kind, "bytes": np.rint(_HALF * raw["tokens"] * per_token), "seconds": raw["us"] * 1e-6}
    rows = where(rows, per_token > 0)
    source = f"{VIDUR}:data/profiling/compute/{_VIDUR.get(prefix, prefix)}"
    return constant(merge_repeats(rows, ("kind", "bytes")), dtype="fp16", source=source)


_KINDS = {
    "input_layernorm": "row",
    "post_attention_layernorm": "row",
    "attn_rope": "rope",
    "mlp_act": "gated_act",
    "add": "residual",
    "emb": "embedding",
}

_QUANTIZE_KERNEL = "static_scaled_fp8_quant"


def _quantize(files: Collection, prefix: str) -> Columns:
    """Return quantisation from bf16 to fp8 with a known scale: two bytes read and one written per value."""
    raw = files.rows("membound_quantize.parquet", ("gpu", "op", "kernel", "source"), ("m", "k", "us"))
    raw = where(raw, (raw["gpu"] == prefix) & (raw["op"] == "scale_matrix") & (raw["kernel"] == _QUANTIZE_KERNEL))
    raw = where(raw, raw["us"] > 0)
    rows = {"bytes": 3 * raw["m"] * raw["k"], "seconds": raw["us"] * 1e-6, "source": named_source(raw["source"])}
    rows = merge_repeats(constant(rows, kind="quantize"), ("kind", "bytes", "source"))
    return constant(rows, dtype="fp8")
