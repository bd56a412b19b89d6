"""What to measure, the most informative measurements first: every prefix of a plan spans the full range of sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product, zip_longest

import numpy as np

from profiler.profile.profile import TABLE_COLUMNS, TEXT_COLUMNS

KIB = 2**10
DEFAULT_MINUTES = 30.0  #: of a measuring run
LAYOUTS = ("TN", "NN", "NT")  #: x W^T (forward), dy W (input gradient), dy^T x (weight gradient)
ACCUMULATING = "NT, added to fp32"  #: a weight gradient as mixed-precision training accumulates it over micro batches
GRID_ROWS = 600  #: number of shapes of each low-discrepancy grid
KINDS = (
    "norm",
    "gated_act",
    "residual",
    "rope",
    "adam",
    "cross_entropy",
    "copy",
    "embedding",
    "act",
    "softmax",
    "permute",
    "norm_grad_torch",
    "gated_act_grad",
    "act_grad",
    "softmax_grad",
    "norm_eager",
    "norm_eager_grad",
    "gated_act_eager",
    "gated_act_eager_grad",
    "rope_eager",
    "rope_eager_grad",
    "cross_entropy_eager",
    "cross_entropy_eager_grad",
)

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


@dataclass(frozen=True)
class ModelDims:
    """Sizes of a transformer whose exact shapes are measured. num_experts: 0 where it has none."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    seq_len: int = 4096
    num_experts: int = 0
    moe_intermediate: int = 0
    top_k: int = 0


def low_discrepancy(count: int, dims: int) -> np.ndarray:
    """Return points inside the unit cube, shape [count, dims]: the first 2^i have one in every 2^i-th part of every axis.

    Sobol's sequence (Sobol 1967; direction numbers of Joe and Kuo 2008), moved off the cube's faces by half a step.
    """
    import torch
    from torch.quasirandom import SobolEngine

    engine = SobolEngine(dims, scramble=False)  # type: ignore[no-untyped-call]
    drawn: np.ndarray = engine.draw(count, dtype=torch.float64).numpy()
    return drawn + 0.5 / 2 ** max(count - 1, 1).bit_length()


def spread_order(count: int) -> list[int]:
    """Return 0..count-1 in an order whose every prefix is spread out: both ends, the middle, the quarters, ..."""
    order = [0, count - 1]
    step = count - 1
    while step > 1:
        step = (step + 1) // 2
        order += range(0, count, step)
    return [i for i in dict.fromkeys(order) if 0 <= i < count]


def linear_items(limits: Limits, models: Sequence[ModelDims], dtypes: Sequence[str]) -> list[Item]:
    """Return GEMMs: shapes of ``models`` and of a log grid in turn; other dtypes than the first at every fourth shape.

    Model shapes and every fourth grid shape are measured in all three layouts, the remaining grid shapes forward only. Weight
    gradients that are added to an fp32 buffer are measured at every eighth grid shape.
    """
    grid = _grid_gemms(limits)
    shapes = _interleave(dict.fromkeys(chain.from_iterable(_model_gemms(m) for m in models)), grid)
    items = [
        _gemm(m, n, k, layout, dtype)
        for i, (m, n, k, layout) in enumerate(shapes)
        # the second dtype is the rarer one in training
        for dtype in (dtypes[0], *(d for d in dtypes[1:] if i % 4 == 0 and layout != ACCUMULATING))
    ]
    return list(filter(limits.allows, dict.fromkeys(items)))


def _gemm(m: int, n: int, k: int, layout: str, dtype: str) -> Item:
    columns: dict[str, int | str] = {"m": m, "n": n, "k": k, "layout": layout, "out_dtype": dtype, "dtype": dtype}
    if layout == ACCUMULATING:
        columns |= {"layout": "NT", "out_dtype": "fp32", "accumulate": 1}
    columns["batch"] = 1
    return Item.of("linear", columns)


def _grid_gemms(limits: Limits) -> Iterator[tuple[int, int, int, str]]:
    low, high = np.log2([limits.smallest, limits.largest])
    for i, point in enumerate(2 ** (low + (high - low) * low_discrepancy(limits.grid_rows, 3))):
        m, n, k = (_rounded(size, limits.smallest) for size in point)
        # forward gives the fit, the other layouts a factor on it: they are measured at every fourth shape
        for layout in LAYOUTS if i % 4 == 0 else LAYOUTS[:1]:
            yield m, n, k, layout
        if i % 8 == 0:
            yield m, n, k, ACCUMULATING


def _rounded(size: float, smallest: int) -> int:
    """Round to a multiple of an eighth of its octave, as models' sizes are, at least of 16 (or ``smallest``)."""
    step = max(2 ** (int(np.log2(size)) - 3), min(16, smallest))
    return int(round(size / step) * step)


def _model_gemms(model: ModelDims) -> Iterator[tuple[int, int, int, str]]:
    """Yield every linear of a layer and the head, over tensor-parallel sizes, forward and both gradients.

    For Y[t, n] = X[t, k] W[n, k]^T these are t x n over k, t x k over n and n x k over t.
    """
    query, context = (model.heads + 2 * model.kv_heads) * model.head_dim, model.heads * model.head_dim
    up = model.intermediate * (2 if model.gated else 1)
    for tp in (1, 2, 4, 8):
        pairs = [
            (query // tp, model.hidden),
            (model.hidden, context // tp),
            (up // tp, model.hidden),
            (model.hidden, model.intermediate // tp),
            (-(-model.vocab // (128 * tp)) * 128, model.hidden),
        ]
        for (n, k), t in product(pairs, (model.seq_len, 2 * model.seq_len, model.seq_len // 4)):
            if min(n, k, t) > 0:
                yield from ((t, n, k, "TN"), (t, k, n, "NN"), (n, k, t, "NT"))


def attention_items(limits: Limits, models: Sequence[ModelDims], dtype: str, kernels: Sequence[str]) -> list[Item]:
    """Return causal attention, forward and backward: shapes of ``models`` and of a grid in turn.

    kernels: the device's kernels, best first; the best is measured at every shape, the rest at every third.
    """
    shapes = _interleave(dict.fromkeys(chain.from_iterable(_model_attention(m) for m in models)), _grid_attention(limits))
    items = [
        _attention(batch, seq, heads, kv_heads, dim, backward, kernel, dtype)
        for i, (batch, seq, heads, kv_heads, dim) in enumerate(shapes)
        for kernel, backward in product(kernels if i % 3 == 0 else kernels[:1], (False, True))
    ]
    return list(filter(limits.allows, dict.fromkeys(items)))


def _attention(batch: int, seq: int, heads: int, kv_heads: int, dim: int, backward: bool, kernel: str, dtype: str) -> Item:
    columns: dict[str, int | str] = {
        "batch": batch,
        "seq_q": seq,
        "seq_kv": seq,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "v_head_dim": dim,
        "causal": 1,
        "pass": "backward" if backward else "forward",
        "kernel": kernel,
        "dtype": dtype,
    }
    return Item.of("flash_attn", columns)


def _grid_attention(limits: Limits) -> Iterator[tuple[int, int, int, int, int]]:
    octaves = np.log2(limits.longest_sequence / limits.smallest)
    for sequence, heads, batch, group, dim in low_discrepancy(limits.grid_rows // 2, 5):
        kv_heads = 2 ** int(6 * heads)  # 1 to 32
        tokens = int(limits.smallest * 2 ** np.floor((octaves + 1) * sequence))
        yield 2 ** int(3 * batch), tokens, kv_heads * 2 ** int(3 * group), kv_heads, (128, 64)[int(1.4 * dim)]


def _model_attention(model: ModelDims) -> Iterator[tuple[int, int, int, int, int]]:
    for tp, batch in product((1, 2, 4, 8), (1, 2)):
        if model.heads % tp == 0:
            yield batch, model.seq_len, model.heads // tp, max(model.kv_heads // tp, 1), model.head_dim


def memory_bound_items(limits: Limits, smallest: int, kinds: Sequence[str], dtype: str) -> list[Item]:
    """Return every kind at every octave of bytes, all kinds at one size before the next. Adam's states are always fp32."""
    sizes = [smallest << i for i in range(int(np.log2(limits.stream_bytes / smallest)) + 1)]
    return [
        Item.of("memory_bound", {"kind": kind, "bytes": sizes[i], "dtype": "fp32" if kind == "adam" else dtype})
        for i in spread_order(len(sizes))
        for kind in kinds
    ]


def group_shapes(ranks_per_node: int, nodes: int) -> list[tuple[int, int]]:
    """Return (intra, inter) of every group worth measuring: full world and full node first, then the largest first.

    intra: divisors of a node's ranks. inter: powers of two, and all nodes.
    """
    intra = [k for k in range(1, ranks_per_node + 1) if ranks_per_node % k == 0]
    inter = sorted({2**i for i in range(nodes.bit_length()) if 2**i <= nodes} | {nodes})
    shapes = sorted((s for s in product(intra, inter) if s[0] * s[1] > 1), key=lambda s: (-s[0] * s[1], s[1]))
    first = [s for s in ((ranks_per_node, nodes), (ranks_per_node, 1)) if s in shapes]
    return list(dict.fromkeys([*first, *shapes]))


def whole_buffer(size: int, intra: int, inter: int) -> int:
    """Return ``size`` rounded up to what divides into equal parts of whole elements of any dtype, one for each rank."""
    whole = 4 * intra * inter
    return -(-size // whole) * whole


def collective_items(intra: int, inter: int, limits: Limits, dtype: str) -> list[Item]:
    """Return all collectives of one group shape, from 1 KiB by factors of four in spread order; p2p for groups of two."""
    # p2p exists for pairs only, so it comes before what every other group has too
    ops = [*(["p2p"] if intra * inter == 2 else []), "all_reduce", "all_gather", "reduce_scatter", "all2all", "broadcast"]
    sizes = [KIB << (2 * i) for i in range(int(np.log2(limits.message_bytes / KIB)) // 2 + 1)]
    return [
        Item.of(op, {"intra": intra, "inter": inter, "bytes": whole_buffer(sizes[i], intra, inter), "dtype": dtype})
        for i in spread_order(len(sizes))
        for op in ops
    ]


def _interleave(*sequences: Iterable[tuple[int | str, ...]]) -> Iterator[tuple]:  # type: ignore[type-arg]
    """Yield one item of each sequence in turn, until all are used up."""
    for together in zip_longest(*sequences):
        yield from (item for item in together if item is not None)
