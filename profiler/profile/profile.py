"""Measurements of one machine: tables of rows (op, shape, seconds) and their sources.

Conventions for every reader and writer:

* SI units: seconds, bytes, FLOP/s, bytes/s.
* ``seconds`` is the median of a measurement's repeats, ``spread`` the relative half range around it
  ((max - min) / 2 / median; NaN where unknown), ``repeats`` the number of timings (0 where unknown).
* The size of a collective is always the *whole* buffer: the all_reduce buffer, the all_gather *output*,
  the reduce_scatter *input*, the whole send buffer of one rank for all2all, the message of broadcast and p2p.
* An overlap measurement is of GEMMs (m, n, k) and collectives (whole buffer) in flight at once. ``gemm_slowdown`` and
  ``collective_slowdown`` are each one's rate without overlap over its rate while both run (1: undisturbed); ``seconds`` is
  the time of one GEMM while a collective is in flight, so seconds / gemm_slowdown is its time without overlap.
* An expert exchange (op dispatch or combine) moves the rows of ``tokens`` tokens per rank, of ``row_bytes`` as sent, between
  the ranks and the ``top_k`` of ``experts`` of each token; ``sms``: multiprocessors of its kernel (0 where unknown).
* ``host``: what the host takes to launch the forward or backward pass of one layer of profiler.train.model, in plain PyTorch.
* A group of ranks is described by ``intra`` (its ranks inside one node) and ``inter`` (nodes it spans).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.errors import InputError, shown

SCHEMA_VERSION = 1

#: So many measurements between nodes, of two kinds of group or more, determine a network's constants; fewer only scale them.
NETWORK_ROWS = 20
#: In the source of a measurement: taken on a device with the same chip, and its time scaled by the ratio of their memories.
SCALED = " (time of the "
#: Key of the meta number: how many times as long as in a burst a GEMM takes where nothing else runs (profiler.measure.power).
POWER_SLOWDOWN = "power_slowdown"
#: Key of the meta number: a profile's stated factor on GEMMs and attention, where nobody measured what power costs.
SUSTAINED_SCALE = "sustained_scale"
#: Key of the meta flag: only the tiny sizes were measured that show that the harness runs.
QUICK = "quick"
#: Units of the numbers in a profile; written to its meta, to detect a foreign file with other units.
UNITS = {"time": "s", "size": "bytes", "rate": "1/s", "message": "whole buffer"}
HALF_DTYPES = ("half", "bf16", "bfloat16", "fp16", "float16")  #: as tables and nccl-tests name 16-bit elements
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all2all", "broadcast")

_COMMON = ("seconds", "spread", "repeats", "dtype", "source")
_MESSAGE = ("intra", "inter", "bytes", "env", *_COMMON)

#: Columns of every table, in file order. ``pass`` is forward, input_grad or weight_grad (attention: forward, backward).
TABLE_COLUMNS: dict[str, tuple[str, ...]] = {
    "linear": ("m", "n", "k", "batch", "layout", "out_dtype", "accumulate", *_COMMON),
    "grouped_linear": ("groups", "tokens_per_group", "n", "k", "pass", *_COMMON),
    "flash_attn": (
        "batch",
        "seq_q",
        "seq_kv",
        "heads",
        "kv_heads",
        "head_dim",
        "v_head_dim",
        "causal",
        "pass",
        "kernel",
        *_COMMON,
    ),
    **dict.fromkeys((*COLLECTIVES, "p2p"), _MESSAGE),
    "memory_bound": ("kind", "bytes", *_COMMON),
    "host": ("pass", *_COMMON),
    "expert_exchange": ("op", "dispatcher", "tokens", "row_bytes", "top_k", "experts", "intra", "inter", "sms", *_COMMON),
    "overlap": ("collective", "intra", "inter", "gemm_slowdown", "collective_slowdown", "bytes", "m", "n", "k", *_COMMON),
}

#: Columns that hold words; all others hold numbers.
TEXT_COLUMNS = frozenset(
    {"dtype", "source", "layout", "out_dtype", "pass", "kernel", "env", "kind", "collective", "op", "dispatcher"}
)


@dataclass(frozen=True)
class Table:
    """Rows of one op as columns of equal length: float64 or int64 arrays, and str arrays for words."""

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def where(self, mask: np.ndarray) -> Table:
        """Return the rows where ``mask`` (bool, shape [rows]) is true."""
        return Table({name: column[mask] for name, column in self.columns.items()})

    @classmethod
    def from_columns(cls, op: str, columns: Mapping[str, Any]) -> Table:
        """Return a checked table of ``op``: columns not given are NaN, 0 or "" by their type; scalars fill the column.

        Raises InputError for a column that the op does not have, unequal lengths, or values outside their bounds.
        """
        known = TABLE_COLUMNS.get(op)
        if known is None:
            raise InputError(f"a profile has no table {op!r}; its tables are {', '.join(TABLE_COLUMNS)}")
        unknown = sorted(set(columns) - set(known))
        if unknown:
            raise InputError(f"table {op} has no column {unknown[0]!r}; its columns are {', '.join(known)}")
        lengths = {len(c) for c in columns.values() if np.ndim(c)}
        if len(lengths) > 1:
            raise InputError(f"table {op} has columns of different lengths {sorted(lengths)}")
        rows = lengths.pop() if lengths else 0
        full = {name: _column(name, columns.get(name), rows) for name in known}
        seconds = full["seconds"]
        if not ((seconds > 0) & (seconds < _MOST_SECONDS)).all():
            raise InputError(f"table {op} holds times that are not positive and finite; drop those measurements")
        for name, column in full.items():
            least, most = _BOUNDS.get(name, (0, 1 << 50))
            if name in columns and column.dtype == np.int64 and not ((column >= least) & (column <= most)).all():
                raise InputError(f"table {op} holds {name} below {least} or above {most}; drop those measurements")
        return cls(full)


_MOST_SECONDS = 1e5
#: Least and most of the whole numbers of a measurement; of those not listed, 0 and 2^50.
_BOUNDS = {
    **dict.fromkeys(("m", "n", "k", "tokens_per_group", "seq_q", "tokens", "row_bytes"), (1, 1 << 28)),
    **dict.fromkeys(("groups", "heads", "intra", "inter", "top_k", "experts"), (1, 1 << 24)),
    **dict.fromkeys(("head_dim",), (1, 1 << 16)),
    **dict.fromkeys(("accumulate", "causal"), (0, 1)),
    "seq_kv": (0, 1 << 28),
    "kv_heads": (0, 1 << 24),
    "v_head_dim": (0, 1 << 16),
    "batch": (0, 1 << 24),  # 0: as the other
}


def _column(name: str, given: Any, rows: int) -> np.ndarray:
    empty: Any = 0
    dtype: Any = np.int64
    if name in TEXT_COLUMNS:
        empty, dtype = "", np.str_
    elif name in ("seconds", "spread", "gemm_slowdown", "collective_slowdown"):
        empty, dtype = np.nan, np.float64
    values = np.asarray(empty if given is None else given)
    whole = (np.abs(values) < 2.0**62) & (values == np.floor(values)) if values.dtype.kind == "f" else np.True_
    if dtype is np.int64 and not whole.all():
        raise InputError(f"column {name} holds values that are no whole numbers; drop those measurements")
    return np.broadcast_to(values.astype(dtype), (rows,)).copy()


def gemm_flops(gemms: Table) -> np.ndarray:
    """Return the FLOPs of every row of table ``linear``; shape [rows]. A batch of 0 is one matrix."""
    return 2.0 * gemms["m"] * gemms["n"] * gemms["k"] * np.maximum(gemms["batch"], 1)


_DEVICE_FIGURES = (
    "memory_bytes",
    "memory_bandwidth",
    "num_sms",
    "gpus_per_node",
    "link_bandwidth",
    "network_bandwidth",
    "exponentials",
)

#: Exponentials per clock of a multiprocessor of every NVIDIA chip from compute capability 7.0 to 10.0 (CUDA C++ Programming
#: Guide, table of instruction throughput, special functions).
USUAL_EXPONENTIALS = 16.0


@dataclass(frozen=True)
class Device:
    """Datasheet values (and, where measured, benchmark results) of one accelerator.

    peak_flops: dense FLOP/s by dtype, as in a device file. memory_bandwidth: bytes/s of HBM. link_bandwidth: bytes/s that
    one GPU can send to other GPUs of its node. network_bandwidth: default bytes/s per GPU between nodes.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    num_sms: int
    gpus_per_node: int
    link_bandwidth: float
    network_bandwidth: float
    link_kind: str = ""
    flash_version: int = 2  #: newest generation of FlashAttention that its attention measurements represent; 0: none runs on it
    nvlink_domain: int = 0  #: GPUs that share its fastest links, where that is more than a node; 0: those of a node
    host_link: float = 0.0  #: bytes/s between a GPU and its host, each way; 0: not stated
    host_memory: float = 0.0  #: bytes/s of the host's memory for each GPU; 0: not stated
    exponentials: float = USUAL_EXPONENTIALS  #: of the softmax, per clock of a multiprocessor
    link_peers: int = 0  #: GPUs among which the links of one are split (7 in a full mesh of 8); 0: a switch gives any all

    @property
    def half_peak(self) -> float:
        """FLOP/s of 16-bit formats."""
        return self.peak_flops.get("bf16") or self.peak_flops["fp16"]

    @property
    def transposes_fp8(self) -> bool:
        """Whether fp8 GEMMs read their operands in one order only, so that gradients need transposed copies.

        So until Hopper; the chips that brought block-scaled formats read both orders.
        """
        return not {"mxfp8", "nvfp4"} & set(self.peak_flops)

    @property
    def is_hopper(self) -> bool:
        """Whether tensor cores read operands of other than 16 bits along k only: chips with fp8 before block-scaled formats."""
        return "fp8" in self.peak_flops and self.transposes_fp8 and not self.link_kind.startswith("xGMI")

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.peak_flops, Mapping):
            raise InputError(f"device {shown(self.name)}: it needs a name and peak_flops by number format")
        figures = {name: getattr(self, name) for name in _DEVICE_FIGURES}
        figures |= {f"peak_flops of {dtype}": peak for dtype, peak in self.peak_flops.items()}
        for name, value in figures.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InputError(f"device {shown(self.name)}: {name} is {shown(value)}; it must be a positive number")
        if isinstance(self.flash_version, bool) or not isinstance(self.flash_version, int) or self.flash_version < 0:
            raise InputError(f"device {self.name}: flash_version is {shown(self.flash_version)}; it must be a whole number")
        if not self.peak_flops:
            raise InputError(f"device {self.name}: peak_flops is empty; it needs at least one dtype")


@dataclass(frozen=True)
class Derivation:
    """How the profile of a device that was not measured is derived: from whose measurements, and by which factors.

    kernels, links: profiles of the GEMMs, attention and memory-bound kernels, and of the collectives inside a node. similarity:
    what both chips share: "architecture" (one generation), "vendor", or "" for neither. power_slowdown: time of a kernel at the
    power limit, over what the peaks of the two datasheets alone would make of it, by number format. kernel_scale: measured
    time of GEMMs over the rescaled one, by number format. power_beside: the device of its generation beside which its limit of
    power counts, "" where none is known. power: watts at most. network_assumed: whether its network is, by its source.
    """

    kernels: Profile
    links: Profile
    similarity: str
    power_slowdown: Mapping[str, float]
    kernel_scale: Mapping[str, float]
    power_beside: str
    power: float
    network_assumed: bool = False


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    meta: plain words and numbers (device facts under ``device``, versions, date, command, licences, ``laws``: stated
    constants). digest: hash of the file's content, the key of everything derived from it.
    """

    name: str
    device: Device
    tables: Mapping[str, Table]
    meta: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    derivation: Derivation | None = None  #: where nothing was measured on the device itself

    @property
    def laws(self) -> Mapping[str, Any]:
        """Constants of laws that the profile states instead of having them fitted."""
        stated: Mapping[str, Any] = self.meta.get("laws") or {}
        return stated

    def table(self, op: str) -> Table:
        """Return the rows of ``op``; an empty table where nothing was measured."""
        return self.tables.get(op) or Table.from_columns(op, {})
