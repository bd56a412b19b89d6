"""What to measure, the most informative measurements first: every prefix of a plan spans the full range of sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product, zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from profiler.profile.item import Item, Limits

KIB = 2**10
_Shape = TypeVar("_Shape")
DEFAULT_MINUTES = 30.0  #: of a measuring run
LAYOUTS = ("TN", "NN", "NT")  #: x W^T (forward), dy W (input gradient), dy^T x (weight gradient)
ACCUMULATING = "NT, added to fp32"  #: a weight gradient as mixed-precision training accumulates it over micro batches
#: Kinds of memory-bound kernels, in the order in which they are measured.
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
        _attention(shape, direction, kernel, dtype)
        for i, shape in enumerate(shapes)
        for kernel, direction in product(kernels if i % 3 == 0 else kernels[:1], ("forward", "backward"))
    ]
    return list(filter(limits.allows, dict.fromkeys(items)))


class _AttentionShape(NamedTuple):
    """Causal attention of ``seq`` tokens to themselves."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int


def _attention(shape: _AttentionShape, direction: str, kernel: str, dtype: str) -> Item:
    columns: dict[str, int | str] = {
        "batch": shape.batch,
        "seq_q": shape.seq,
        "seq_kv": shape.seq,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "causal": 1,
        "pass": direction,
        "kernel": kernel,
        "dtype": dtype,
    }
    return Item.of("flash_attn", columns)


def _grid_attention(limits: Limits) -> Iterator[_AttentionShape]:
    octaves = np.log2(limits.longest_sequence / limits.smallest)
    for sequence, heads, batch, group, dim in low_discrepancy(limits.grid_rows // 2, 5):
        kv_heads = 2 ** int(6 * heads)  # 1 to 32
        tokens = int(limits.smallest * 2 ** np.floor((octaves + 1) * sequence))
        heads_of_group = 2 ** int(3 * group)
        yield _AttentionShape(2 ** int(3 * batch), tokens, kv_heads * heads_of_group, kv_heads, (128, 64)[int(1.4 * dim)])


def _model_attention(model: ModelDims) -> Iterator[_AttentionShape]:
    for tp, batch in product((1, 2, 4, 8), (1, 2)):
        if model.heads % tp == 0:
            yield _AttentionShape(batch, model.seq_len, model.heads // tp, max(model.kv_heads // tp, 1), model.head_dim)


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


def _interleave(*sequences: Iterable[_Shape]) -> Iterator[_Shape]:
    """Yield one item of each sequence in turn, until all are used up."""
    for together in zip_longest(*sequences):
        yield from (item for item in together if item is not None)
