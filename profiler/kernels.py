"""The kernels that are measured: each a small function that makes operands and returns the work to be timed.

Bytes of the memory-bound kinds are those of one ideal fused kernel, read plus written, of 16-bit values:
norm, rope, act, softmax, copy, permute, embedding 4 an element (read one, write one); gated_act and residual 6 (read two,
write one); cross_entropy 8 a logit (forward and backward each read and write once); adam 28 a parameter (weight,
gradient and two moments in fp32 read, all but the gradient written). On a GPU, chains of element-wise kernels are compiled
into one, as training frameworks have them; on a CPU they run as plain PyTorch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiler.plan import Item
from profiler.timing import Work

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTH = 4096  #: columns of the tensors of memory-bound kernels
BYTES_PER_ELEMENT = {"gated_act": 6, "residual": 6, "cross_entropy": 8, "adam": 28}  #: others 4
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_VOCABULARY, _HEAD_DIM, _MOST_SETS = 32768, 128, 256
_BLOCK = 2**20  # random numbers, repeated to fill an arena: switching bits cost power as they do in training


class Arena:
    """Memory that operands are cut from, so that consecutive calls never find theirs in the cache."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self.device, self.cache_bytes = device, cache_bytes
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def sets(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[list[torch.Tensor]]:
        """Sets of tensors of ``shapes``; together they are twice the cache (but no more than 256 sets)."""
        sizes = [-(-math.prod(shape) // 64) * 64 for shape in shapes]  # aligned to at least 128 bytes
        needed = sum(sizes)
        count = min(max(-(-2 * self.cache_bytes // (needed * dtype.itemsize)), 1), _MOST_SETS)
        flat = self._storage(dtype, count * needed)
        made: list[list[torch.Tensor]] = []
        at = 0
        for _ in range(count):
            made.append([])
            for shape, size in zip(shapes, sizes, strict=True):
                made[-1].append(flat[at : at + math.prod(shape)].view(*shape))
                at += size
        return made

    def _storage(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        flat = self._flat.get(dtype)
        if flat is None or len(flat) < elements:
            del flat
            self._flat.pop(dtype, None)  # before the new one is made: both may not fit
            # room at once for every usual row, so that it need not be made again for each
            blocks = -(-max(elements, 4 * self.cache_bytes // dtype.itemsize) // _BLOCK)
            random = torch.randn(_BLOCK, dtype=torch.float32, device=self.device).to(dtype)
            flat = self._flat[dtype] = random.repeat(blocks)
        return flat

    def release(self) -> None:
        self._flat.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def workload(item: Item, arena: Arena) -> Work:
    """The work of a linear, flash_attn or memory_bound row."""
    if item.op == "memory_bound":
        kind = str(item.columns["kind"])
        elements = item.number("bytes") // BYTES_PER_ELEMENT.get(kind, 4)
        return STREAMS[kind](max(elements, 1), arena)
    return {"linear": _linear, "flash_attn": _attention}[item.op](item, arena)


def _linear(item: Item, arena: Arena) -> Work:
    m, n, k = (item.number(c) for c in "mnk")
    layout, dtype = item.columns["layout"], DTYPES[str(item.columns["dtype"])]
    left = (k, m) if layout == "NT" else (m, k)
    right = (n, k) if layout == "TN" else (k, n)
    sets = arena.sets(dtype, left, right)
    pairs = [(a.t() if layout == "NT" else a, b.t() if layout == "TN" else b) for a, b in sets]
    return lambda i: _drop(torch.matmul(*pairs[i % len(pairs)]))


def _attention(item: Item, arena: Arena) -> Work:
    batch, seq, heads, kv_heads, dim = (item.number(c) for c in ("batch", "seq_q", "heads", "kv_heads", "head_dim"))
    dtype = DTYPES[str(item.columns["dtype"])]
    shapes = [(batch, heads, seq, dim), *2 * [(batch, kv_heads, seq, dim)], (batch, heads, seq, dim)]
    backend = BACKENDS[str(item.columns["kernel"]).split("_")[-1]]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    sets = arena.sets(dtype, *shapes)
    if item.columns["pass"] == "forward":
        return lambda i: _drop(forward(*sets[i % len(sets)][:3]))
    sets = sets[: max(2 if batch * seq * heads * dim < 2**24 else 1, 1)]  # their graphs hold outputs
    inputs = [[t.detach().requires_grad_() for t in chosen[:3]] for chosen in sets]
    outputs = [forward(*chosen) for chosen in inputs]

    def backward(i: int) -> None:
        j = i % len(sets)
        torch.autograd.grad(outputs[j], inputs[j], sets[j][3], retain_graph=True)

    return backward


def _drop(_: Any) -> None:
    """Results are not kept: their memory goes back to the allocator, as in training."""


def _rows(elements: int, width: int = WIDTH) -> tuple[int, int]:
    width = min(width, elements)
    return max(elements // width, 1), width


def _plain(function: Callable[..., torch.Tensor], operands: int, chain: bool = False) -> Callable[[int, Arena], Work]:
    """A stream over ``operands`` equal inputs [rows, WIDTH]; ``chain``: several eager kernels, one when compiled."""

    def make(elements: int, arena: Arena) -> Work:
        run = _compiled(function) if chain and arena.device.type == "cuda" else function
        sets = arena.sets(torch.bfloat16, *operands * [_rows(elements)])
        return lambda i: _drop(run(*sets[i % len(sets)]))

    return make


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=True)


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rope(elements: int, arena: Arena) -> Work:
    """Rotary embedding of [tokens, heads, 128]; the small tables of angles stay in the cache."""
    heads = WIDTH // _HEAD_DIM
    tokens = max(elements // (heads * _HEAD_DIM), 1)
    angles = torch.linspace(0, 3, tokens * _HEAD_DIM, device=arena.device).view(tokens, 1, _HEAD_DIM)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    sets = arena.sets(torch.bfloat16, (tokens, heads, _HEAD_DIM))
    run: Callable[..., torch.Tensor] = _compiled(_rotated) if arena.device.type == "cuda" else _rotated
    return lambda i: _drop(run(*sets[i % len(sets)], cos, sin))


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), target)


def _cross_entropy(elements: int, arena: Arena) -> Work:
    rows, vocabulary = _rows(elements, _VOCABULARY)
    target = torch.randint(vocabulary, (rows,), device=arena.device)
    run = _compiled(_loss) if arena.device.type == "cuda" else _loss
    logits = [t.detach().requires_grad_() for (t,) in arena.sets(torch.bfloat16, (rows, vocabulary))]
    return lambda i: _drop(torch.autograd.grad(run(logits[i % len(logits)], target), logits[i % len(logits)]))


def _adam(elements: int, arena: Arena) -> Work:
    """PyTorch's fused AdamW on one tensor; the moments come on top of the sets of weights and gradients."""
    optimizers = []
    for weight, gradient in arena.sets(torch.float32, (elements,), (elements,))[:64]:
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        optimizers.append(torch.optim.AdamW([parameter], fused=True))
    return lambda i: _drop(optimizers[i % len(optimizers)].step())


def _gather(rows_of_table: int) -> Callable[[int, Arena], Work]:
    """Rows of a table in random order: of a vocabulary's (embedding), or each row once (permute: 0)."""

    def make(elements: int, arena: Arena) -> Work:
        rows, width = _rows(elements)
        held = rows_of_table or rows
        sets = arena.sets(torch.bfloat16, (held, width))
        if not rows_of_table:
            order = torch.randperm(rows, device=arena.device)
            return lambda i: _drop(sets[i % len(sets)][0].index_select(0, order))
        table = sets[0][0]  # other rows of it in every call
        orders = torch.randint(held, (min(2 * held // rows + 1, _MOST_SETS), rows), device=arena.device).unbind()
        return lambda i: _drop(table.index_select(0, orders[i % len(orders)]))

    return make


#: kind -> (elements, arena) -> work
STREAMS: dict[str, Callable[[int, Arena], Work]] = {
    "norm": _plain(_rms_norm, 1, chain=True),
    "gated_act": _plain(_gated, 2, chain=True),
    "act": _plain(F.gelu, 1),
    "residual": _plain(torch.add, 2),
    "softmax": _plain(lambda x: torch.softmax(x, -1), 1),
    "copy": _plain(torch.clone, 1),
    "rope": _rope,
    "cross_entropy": _cross_entropy,
    "adam": _adam,
    "embedding": _gather(8192),
    "permute": _gather(0),
}
