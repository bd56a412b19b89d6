"""A measurement to take: its op and key columns, its work, and the sizes that a device allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from profiler.profile.profile import TABLE_COLUMNS, TEXT_COLUMNS

GRID_ROWS = 600  #: number of shapes of each low-discrepancy grid

#: Columns that identify a measurement: its shape and dtype, not its outcome.
KEY_COLUMNS: dict[str, tuple[str, ...]] = {
    op: tuple(c for c in columns if c not in ("seconds", "spread", "repeats", "source", "env") and "slowdown" not in c)
    for op, columns in TABLE_COLUMNS.items()
}


@dataclass(frozen=True)
class Item:
    """One measurement to take: its op, and its key columns in the table's order."""

    op: str
    values: tuple[int | str, ...]

    @classmethod
    def of(cls, op: str, columns: Mapping[str, int | str]) -> Item:
        """Make an item; columns not given are 0 or "" as in the table, and columns that are not keys are ignored."""
        return cls(op, tuple(columns.get(c, "" if c in TEXT_COLUMNS else 0) for c in KEY_COLUMNS[op]))

    @property
    def columns(self) -> dict[str, int | str]:
        return dict(zip(KEY_COLUMNS[self.op], self.values, strict=True))

    def number(self, column: str) -> int:
        return int(self.columns[column])

    @property
    def label(self) -> str:
        return f"{self.op} " + " ".join(f"{name}={value}" for name, value in self.columns.items())


def _linear_work(item: Item) -> tuple[float, float]:
    m, n, k = (item.number(c) for c in "mnk")
    return 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)


def _grouped_work(item: Item) -> tuple[float, float]:
    groups, tokens, n, k = (item.number(c) for c in ("groups", "tokens_per_group", "n", "k"))
    return 2.0 * groups * tokens * n * k, 4.0 * groups * (tokens * k + n * k + tokens * n)


def _attention_work(item: Item) -> tuple[float, float]:
    batch, seq, keys, heads, kv_heads, dim = (
        item.number(c) for c in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")
    )
    # two GEMMs of seq x keys x head_dim, half of them where causal; FlashAttention's backward does 2.5 times as much
    half, passes = (2.0 if item.number("causal") else 1.0), (2.5 if item.columns["pass"] == "backward" else 1.0)
    elements = batch * dim * 4 * (heads * seq + kv_heads * keys)  # q, k, v, output, and their gradients
    return 4.0 * batch * heads * seq * keys * dim / half * passes, 2.0 * elements


#: Table of kernels -> FLOPs of an item, and bytes of its operands.
WORK: dict[str, Callable[[Item], tuple[float, float]]] = {
    "linear": _linear_work,
    "grouped_linear": _grouped_work,
    "flash_attn": _attention_work,
    "memory_bound": lambda item: (0.0, item.number("bytes")),
}


@dataclass(frozen=True)
class Limits:
    """Sizes worth measuring on one device.

    smallest, largest: GEMM dims. longest_sequence: tokens. stream_bytes, message_bytes: largest sizes. memory_bytes: of one
    measurement's operands. call_seconds: the longest single call, at ``flops`` FLOP/s.
    """

    smallest: int
    largest: int
    longest_sequence: int
    stream_bytes: int
    message_bytes: int
    memory_bytes: float
    call_seconds: float
    flops: float
    attention_cost: float = 1.0  #: FLOP/s of a GEMM over those of a fused attention kernel
    grid_rows: int = GRID_ROWS

    def allows(self, item: Item) -> bool:
        """Return whether a kernel's call is short enough and its operands fit, and whether a message is small enough."""
        if item.op not in WORK:
            return item.number("bytes") <= self.message_bytes
        flops, operand_bytes = WORK[item.op](item)
        cost = self.attention_cost if item.op == "flash_attn" else 1.0
        return flops * cost <= self.flops * self.call_seconds and operand_bytes <= self.memory_bytes
