"""Published times of expert-parallel dispatch and combine kernels as a profile table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from profiler.profile.profile import Device
from profiler.profile.routing import expected_groups
from profiler.published.rows import Collection, Columns, Ledger, constant, count, join, merge_repeats
from profiler.published.tables import named_source
from profiler.units import GB

DEEPEP = "deepseek-ai/DeepEP"
FP8_ROW = 1 + 4 / 128  #: bytes per value of a row in fp8 with one fp32 scale for 128 values
_BF16 = 2
#: Multiprocessors that training gives these kernels: DeepEP's default is 20; its own tests and frameworks use 24.
TRAINING_SMS = (20, 24)
_FEWEST_TOKENS = 64
_MOST_NODES = 4
#: The file of an older collection on H200: some rows name an H100, and all times equal those in the H100's file.
_COPIES = ("aic:h200_sxm/comm/sglang/0.5.6.post2/wideep_deepep_normal_perf.parquet",)

#: Rates (GB/s) of docs/README_Hybrid-EP.md at commit 41cad94, "Kernel Only": ranks, multiprocessors, dispatch in fp8, dispatch
#: in bf16, combine. 4,096 tokens of 7,168 values, top 8, 8 experts per rank. "Algorithm bandwidth": bytes sent to other ranks
#: (or, between nodes, other nodes) and to the own one; only then do rates of two nodes, up to 77 GB/s, fit a link of 50 GB/s.
#: Whole calls ("Torch API") take 0.1 to 0.2 ms more on GB200 and 0.3 to 1.3 on H100: they gather and read who goes where, and
#: copy rows out of the buffers and into them, which a training step's permutation does (both in solver.layers).
HYBRID_EP: Mapping[str, tuple[tuple[int, int, float, float, float], ...]] = {
    "H100": (
        (16, 4, 34.00, 44.40, 52.00),
        (16, 8, 62.00, 76.80, 68.00),
        (16, 16, 68.48, 71.71, 62.95),
        (32, 4, 38.50, 52.60, 51.00),
        (32, 8, 51.30, 54.50, 56.40),
        (32, 16, 55.35, 57.69, 57.46),
        (64, 4, 37.50, 48.00, 46.00),
        (64, 8, 46.63, 50.55, 51.03),
        (64, 16, 46.52, 49.97, 49.77),
    ),
    "B200": ((8, 16, 599.27, 734.95, 673.84),),
    "GB200": (
        (8, 16, 620.98, 750.15, 684.27),
        (8, 32, 713.98, 764.03, 737.13),
        (16, 16, 577.17, 661.93, 600.75),
        (16, 32, 650.48, 706.95, 666.26),
        (24, 16, 360.12, 637.80, 565.53),
        (24, 32, 577.96, 665.97, 639.80),
        (32, 16, 286.93, 629.79, 547.25),
        (32, 32, 538.86, 642.23, 605.15),
        (36, 16, 260.53, 612.85, 543.27),
        (36, 32, 489.27, 632.31, 596.99),
    ),
}
#: Platforms of HYBRID_EP whose GPU and links are those of a profile.
_PLATFORMS = {"h100_sxm": ("H100",), "b200_sxm": ("B200", "GB200")}
_NODE = {"H100": 8, "B200": 8, "GB200": 72}  # ranks behind one NVSwitch


def expert_exchange(files: Collection, prefix: str, device: Device, ledger: Ledger) -> Columns:
    """Return dispatch and combine of DeepEP's kernels (normal, not low-latency) and of Hybrid-EP.

    No time may be less than the links need: per rank, bytes to other ranks of the node, and to other nodes.
    """
    measured = _deepep(files, prefix, ledger)
    if not count(measured):
        return {}
    rows = join([measured, *(_hybrid_ep(platform) for platform in _PLATFORMS.get(prefix, ()))])
    ranks, nodes, experts, top_k = (rows[name] for name in ("intra", "inter", "experts", "top_k"))
    near = expected_groups(ranks * nodes, experts, top_k) / nodes * (ranks - 1) / ranks
    far = expected_groups(nodes, experts, top_k) * (nodes - 1) / nodes
    sent = rows["tokens"] * rows["row_bytes"]
    least = sent * np.maximum(near / device.link_bandwidth, far / device.network_bandwidth)
    return ledger.keep("expert_exchange", "faster than the links", rows, rows["seconds"] >= least)


def _deepep(files: Collection, prefix: str, ledger: Ledger) -> Columns:
    """Return DeepEP's kernels as measured by its own tests: transmit plus notify, the kernel that exchanges the counts.

    Dispatch sends fp8 rows with scales, combine bf16 rows: the tests time only these, and so the rates say (4,096 tokens on 8
    H100: 326 and 316 GB/s per rank; were the dispatch in bf16, 632 GB/s over links of 450).
    """
    numbers = ("node_num", "hidden_size", "num_token", "num_topk", "num_experts")
    timed = tuple(f"{op}_{what}" for op in ("dispatch", "combine") for what in ("sms", "transmit_us", "notify_us"))
    raw = files.rows("deepep_normal_dispatch_combine.parquet", ("gpu", "device", "source"), (*numbers, *timed))
    raw = {name: column[raw["gpu"] == prefix] for name, column in raw.items()}
    if not count(raw):
        return {}
    raw = _kept(raw, ledger, "the times of another GPU, digit for digit", ~np.isin(raw["source"], _COPIES))
    raw = _kept(raw, ledger, f"fewer than {_FEWEST_TOKENS} tokens: inference only", raw["num_token"] >= _FEWEST_TOKENS)
    usual = np.isin(raw["dispatch_sms"], TRAINING_SMS)
    raw = _kept(raw, ledger, "other numbers of multiprocessors than training uses", usual)
    few_nodes = raw["node_num"] <= _MOST_NODES
    raw = _kept(raw, ledger, "8 nodes: 17 GB/s per GPU whatever the multiprocessors, a congested network", few_nodes)
    return join([_deepep_op(raw, op) for op in ("dispatch", "combine")])


def _kept(raw: Columns, ledger: Ledger, reason: str, mask: np.ndarray) -> Columns:
    return ledger.keep("expert_exchange", reason, raw, mask)


def _deepep_op(raw: Columns, op: str) -> Columns:
    dispatch = op == "dispatch"
    rows = {
        "tokens": raw["num_token"],
        "row_bytes": np.rint(raw["hidden_size"] * (FP8_ROW if dispatch else _BF16)),
        "top_k": raw["num_topk"],
        "experts": raw["num_experts"],
        "inter": raw["node_num"],
        "sms": raw[f"{op}_sms"],
        "source": named_source(raw["source"]),
        "seconds": 1e-6 * (raw[f"{op}_transmit_us"] + raw[f"{op}_notify_us"]),
    }
    rows = constant(rows, op=op, dispatcher="deepep", intra=8, dtype="fp8" if dispatch else "bf16")
    return merge_repeats(rows, [name for name in rows if name != "seconds"])


def _hybrid_ep(platform: str) -> Columns:
    """Return the table of one platform as times: bytes to all ranks (or nodes), the own one included, over the rate."""
    tokens, hidden, top_k, experts_per_rank = 4096, 7168, 8, 8
    table = np.array(HYBRID_EP[platform])
    ranks, sms = table[:, 0], table[:, 1]
    intra = np.minimum(ranks, _NODE[platform])
    inter = ranks / intra
    experts = ranks * experts_per_rank
    places = np.where(inter > 1, expected_groups(inter, experts, top_k), expected_groups(ranks, experts, top_k))
    parts = []
    columns = ("dispatch", "fp8", FP8_ROW), ("dispatch", "bf16", _BF16), ("combine", "bf16", _BF16)
    for column, (op, dtype, width) in enumerate(columns, start=2):
        row = np.rint(hidden * width)
        part = {"experts": experts, "intra": intra, "inter": inter, "sms": sms}
        part["seconds"] = tokens * places * row / (table[:, column] * GB)
        part = constant(part, op=op, dtype=dtype, row_bytes=row, tokens=tokens, top_k=top_k, dispatcher="hybridep")
        parts.append(constant(part, spread=np.nan, repeats=0, source=f"{DEEPEP}:docs/README_Hybrid-EP.md ({platform})"))
    return join(parts)
