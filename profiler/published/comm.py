"""Published collective measurements as profile tables, and constants that were published without their measurements."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from profiler.errors import InputError
from profiler.profile.profile import COLLECTIVES, Device
from profiler.published.nccl_rows import DTYPES, OPS, least_sent
from profiler.published.rows import (
    Collection,
    Columns,
    Ledger,
    constant,
    count,
    groups,
    join,
    merge_repeats,
    renamed,
    spaced,
)
from profiler.published.tables import SIMUMAX, THINNED, named_source
from profiler.units import GIB

#: Licence by owner/repository; measurements of any other source are not shipped.
LICENCES = {
    "ai-dynamo/aiconfigurator": "Apache-2.0",
    "microsoft/vidur": "MIT",
    "MooreThreads/SimuMax": "Apache-2.0",
    "VIA-Research/vTrain": "MIT",
    "xxrjun/nccl-tests-cluster": "Apache-2.0",
    "Dao-AILab/flash-attention": "BSD-3-Clause",
    "deepseek-ai/DeepEP": "MIT",
    "DebarghaG/estimate-train-time": "MIT",
}

#: Required start of ``bytes_is`` in the files, by op: ``bytes`` must be the whole buffer, as in the profile.
_WHOLE_BUFFER = {
    "all_reduce": "per-rank buffer",
    "all_gather": "per-rank OUTPUT",
    "reduce_scatter": "per-rank INPUT",
    "all2all": "per-rank send buffer",
    "p2p": "per-rank message",
}
_SIZES_PER_CURVE = 40


def repository(source: str) -> str:
    """Return the owner/repository part of a source."""
    return source.partition(":")[0]


def collectives(files: Collection, prefix: str, device: Device, ledger: Ledger) -> dict[str, Columns]:
    """Return tables by op. A p2p measurement is one message to a neighbour while all ranks of the group send."""
    parts = [_nccl_rows(files, prefix, ledger)]
    parts += [_simumax_rows(files)] if prefix == "h100_sxm" else []
    rows = join(parts)
    if not count(rows):
        return {}
    rows = ledger.keep("collectives", "another operation", rows, np.isin(rows["op"], (*COLLECTIVES, "p2p")))
    curve = ("op", "intra", "inter", "dtype", "env", "source")
    faster = "of a curve that outruns the links: copies inside one GPU"
    rows = ledger.keep("collectives", faster, rows, _possible(rows, curve, device))
    merged = merge_repeats(rows, (*curve, "bytes"))
    merged = ledger.keep("collectives", THINNED, merged, spaced(merged, curve, "bytes", _SIZES_PER_CURVE))
    columns = [name for name in merged if name != "op"]
    return {
        op: {name: merged[name][merged["op"] == op] for name in columns}
        for op in (*COLLECTIVES, "p2p")
        if (merged["op"] == op).any()
    }


def _possible(rows: Columns, curve: tuple[str, ...], device: Device) -> np.ndarray:
    """Return a mask: False on all rows of a curve if on any of them a GPU would have to send more than its links carry."""
    sent = least_sent(rows["op"], rows["intra"] * rows["inter"]) * rows["bytes"]
    possible = (rows["seconds"] > 0) & (sent <= device.link_bandwidth * rows["seconds"])
    ids = groups(rows, curve)
    return ~np.isin(ids, ids[~possible])


def _nccl_rows(files: Collection, prefix: str, ledger: Ledger) -> Columns:
    words, numbers = ("op", "dtype", "env", "source", "bytes_is"), ("gpus", "nodes", "gpus_per_node", "bytes", "us")
    raw = files.rows(f"{prefix}_nccl.parquet", words, numbers)
    sources = named_source(raw["source"])
    licensed = np.array([repository(str(s)) in LICENCES for s in sources], dtype=bool)
    rows = {
        "op": renamed(raw["op"], OPS),
        "intra": raw["gpus_per_node"],
        "inter": raw["nodes"],
        "bytes": raw["bytes"],
        "seconds": raw["us"] * 1e-6,
        "dtype": renamed(raw["dtype"], DTYPES),
        "env": raw["env"],
        "source": renamed(sources, {s: _without_run(s) for s in set(sources)}),
    }
    _check_bytes(rows["op"], raw["bytes_is"])
    if (raw["gpus"] != raw["gpus_per_node"] * raw["nodes"]).any():
        raise InputError(f"{prefix}_nccl.parquet: a group's GPUs are not nodes x GPUs per node")
    return ledger.keep("collectives", "no licence stated, or share-alike", rows, licensed)


def _without_run(source: str) -> str:
    """Drop the run from a source, so that logs of many equal runs (nodes, node pairs) are merged as repeats."""
    return re.sub(r"/runs/.*", "", source)


def _check_bytes(ops: np.ndarray, meaning: np.ndarray) -> None:
    for op, whole in _WHOLE_BUFFER.items():
        other = [m for m in set(meaning[ops == op]) if not m.startswith(whole)]
        if other:
            raise InputError(f"{op} sizes mean {other[0]!r}, not the whole buffer ({whole})")


def _simumax_rows(files: Collection) -> Columns:
    """Read an nccl-tests log of an H100 node; its group size is inferred from bus over algorithm bandwidth."""
    raw = files.rows(
        "simumax_h100_nccl_tests_raw.csv", ("op", "dtype"), ("ranks_assumed", "size_bytes", "time_us_out_of_place")
    )
    rows = {
        "op": renamed(raw["op"], OPS),
        "intra": raw["ranks_assumed"],
        "bytes": raw["size_bytes"],
        "seconds": raw["time_us_out_of_place"] * 1e-6,
        "dtype": renamed(raw["dtype"], DTYPES),
    }
    return constant(rows, inter=1, env="nccl-tests", source=f"{SIMUMAX}:nccl-tests log of an H100 node")


def intra_node_constants(files: Collection, prefix: str) -> dict[str, dict[int, dict[str, float]]]:
    """Return SimuMax's fitted constants of one node: {op: {ranks: {bandwidth, traffic, latency}}}.

    seconds = latency + traffic * bytes / bandwidth, with bytes by the profile's convention. In SimuMax's terms
    traffic is scale * (n - 1) / n and latency is SimuMax's latency * scale * (n - 1) + fixed latency; scale is 2 for
    all_reduce, else 1. bandwidth_all_groups, where given: bandwidth when all groups of this size in the node communicate
    at once across PCIe. Left out: constants that SimuMax's authors took from a template, and p2p (a copy inside one GPU).
    """
    words = ("network", "op", "fixed_latency_us_by_n", "dp_fixed_bw_gib_per_s_by_n")
    sizes = ("nominal_gib_per_s", "efficiency", "size_scale", "size_offset")
    numbers = (*sizes, "latency_us", "fixed_latency_us", "op_value_given")
    raw = files.rows(f"simumax_{prefix}_network.csv", words, numbers)
    constants: dict[str, dict[int, dict[str, float]]] = {}
    for i in range(count(raw)):
        row = {name: column[i] for name, column in raw.items()}
        for ranks in _ranks(str(row["network"])) if row["op_value_given"] and row["op"] != "p2p" else ():
            constants.setdefault(str(row["op"]), {})[ranks] = _constants(row, ranks)
    _add_crowded(raw, constants)
    return constants


def _ranks(network: str) -> tuple[int, ...]:
    """Return the group sizes that a network entry of SimuMax represents."""
    pcie = {f"intra_node_pcie_{ranks}x": (ranks,) for ranks in (2, 4, 8)}
    return ({"high_intra_node": (2, 4, 8)} | pcie).get(network, ())


def _constants(row: dict[str, Any], ranks: int) -> dict[str, float]:
    scale = float(row["size_scale"])
    fixed = _by_ranks(row["fixed_latency_us_by_n"]).get(ranks, row["fixed_latency_us"])
    return {
        "bandwidth": float(row["nominal_gib_per_s"] * row["efficiency"]) * GIB,
        "traffic": scale * (ranks + float(row["size_offset"])) / ranks,
        "latency": 1e-6 * (float(row["latency_us"]) * scale * (ranks - 1) + float(fixed)),
    }


def _add_crowded(raw: Columns, constants: dict[str, dict[int, dict[str, float]]]) -> None:
    for op, text in zip(raw["op"], raw["dp_fixed_bw_gib_per_s_by_n"], strict=True):
        for ranks, gib in _by_ranks(text).items():
            constants.setdefault(str(op), {}).setdefault(ranks, {})["bandwidth_all_groups"] = gib * GIB


def _by_ranks(cell: str) -> dict[int, float]:
    """Parse a cell such as '{"2": 4, "4": 7.65}'; an empty cell has no entries."""
    try:
        return {int(ranks): float(value) for ranks, value in json.loads(str(cell) or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        raise InputError(f"a network file holds {str(cell)!r} where numbers by rank count should be") from None


#: By SimuMax kernel: its kind, how many launch latencies its bandwidth excludes, and how its bytes are counted.
_COUNTED: dict[str, tuple[str, int, str]] = {
    "ce_fusion": ("cross_entropy", 1, "per logit of 2 bytes: 4 forward, 4 backward"),
    "ce": ("cross_entropy_unfused", 1, "per logit of 2 bytes: 38 forward, 14 backward"),
    "permute_fwd": ("permute", 4, "permute and unpermute together: 4 * hidden_size * (tokens + 3 * permuted tokens)"),
    "permute_bwd": ("permute_grad", 4, "permute and unpermute together, as forward"),
}


def memory_bound_constants(files: Collection, prefix: str) -> dict[str, dict[str, float | str]]:
    """Return SimuMax's effective bandwidths: {kind: {bandwidth, latency_s, bytes}}.

    seconds = latency_s + bytes / bandwidth. ``bytes`` states in words how bytes are counted, which is not always the ideal
    fused count of the tables.
    """
    numbers = ("nominal_gib_per_s", "efficiency", "latency_us_added_per_call")
    raw = files.rows(f"simumax_{prefix}_membound.csv", ("op",), numbers)
    constants: dict[str, dict[str, float | str]] = {}
    for i, op in enumerate(raw["op"]):
        if str(op) in _COUNTED:
            kind, launches, counted = _COUNTED[str(op)]
            constants[kind] = {
                "bandwidth": float(raw["nominal_gib_per_s"][i] * raw["efficiency"][i]) * GIB,
                "latency_s": float(raw["latency_us_added_per_call"][i]) * 1e-6 * launches,
                "bytes": counted,
            }
    return constants
