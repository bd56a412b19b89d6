"""Kernels to measure: each is a small function that makes operands and returns the work to time.

Bytes of the memory-bound kinds are those of one ideal fused kernel, read plus written (ACCESSES per element): norm, rope, act,
softmax, copy, permute and embedding read one and write one; gated_act and residual read two and write one, as do the backward
passes norm_grad_torch, act_grad and softmax_grad; gated_act_grad reads three and writes two; cross_entropy reads and writes a
logit in forward and again in backward; adam reads weight, gradient and two moments in fp32 and writes all but the gradient.
These run as one kernel, compiled where necessary. Kinds with ``_eager`` in their name are the same work in plain PyTorch, a
chain of kernels, with the bytes of the fused kernel; ``_grad`` is a backward pass. The backward kernels of norms of Apex and
Transformer Engine (norm_grad) need these packages and are not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch._functorch import config as functorch

from profiler.measure.attention import fused_attention
from profiler.measure.timing import Work
from profiler.profile.plan import Item
from profiler.train.model import loss_of, rotary_table, rotated

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTH = 4096  #: columns of the tensors of memory-bound kernels
#: Reads and writes per element by one fused kernel of a kind; 2 for kinds not named.
ACCESSES = {
    "gated_act": 3,
    "residual": 3,
    "cross_entropy": 4,
    "adam": 7,
    "norm_grad_torch": 3,
    "act_grad": 3,
    "softmax_grad": 3,
    "gated_act_grad": 5,
    "norm_eager_grad": 3,
    "gated_act_eager": 3,
    "gated_act_eager_grad": 5,
}
_VOCABULARY, _HEAD_DIM, _MOST_SETS, _MOST_GRAPHS = 32768, 128, 256, 8
_BLOCK = 2**20  # random numbers, repeated to fill an arena: toggling bits costs power, as in training


class Arena:
    """Memory that operands are cut from, so that consecutive calls never find their operands in the cache."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self.device, self.cache_bytes = device, cache_bytes
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def sets(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[list[torch.Tensor]]:
        """Return sets of tensors of ``shapes``, together twice as large as the cache (but at most 256 sets)."""
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
            self._flat.pop(dtype, None)  # before the new one is allocated: both may not fit
            # allocate enough for every usual measurement at once, so that it is not reallocated for each
            blocks = -(-max(elements, 4 * self.cache_bytes // dtype.itemsize) // _BLOCK)
            random = torch.randn(_BLOCK, dtype=torch.float32, device=self.device).to(dtype)
            flat = self._flat[dtype] = random.repeat(blocks)
        return flat

    def release(self) -> None:
        self._flat.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def workload(item: Item, arena: Arena) -> Work:
    """Return the work of a linear, flash_attn or memory_bound item."""
    if item.op == "memory_bound":
        kind, dtype = str(item.columns["kind"]), DTYPES[str(item.columns["dtype"])]
        elements = item.number("bytes") // (ACCESSES.get(kind, 2) * dtype.itemsize)
        return STREAMS[kind](max(elements, 1), dtype, arena)
    return {"linear": _linear, "flash_attn": _attention}[item.op](item, arena)


def _linear(item: Item, arena: Arena) -> Work:
    m, n, k = (item.number(c) for c in "mnk")
    layout, dtype = item.columns["layout"], DTYPES[str(item.columns["dtype"])]
    left = (k, m) if layout == "NT" else (m, k)
    right = (n, k) if layout == "TN" else (k, n)
    sets = arena.sets(dtype, left, right)
    pairs = [(a.t() if layout == "NT" else a, b.t() if layout == "TN" else b) for a, b in sets]
    if item.number("accumulate"):
        return _accumulating(pairs, arena)
    return lambda i: _drop(torch.matmul(*pairs[i % len(pairs)]))


def _accumulating(pairs: list[tuple[torch.Tensor, torch.Tensor]], arena: Arena) -> Work:
    """Return GEMMs added to separate fp32 buffers: sums in the arena would grow beyond the range of its dtype."""
    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])
    count = min(max(arena.cache_bytes // (2 * math.prod(shape)), 1), len(pairs))  # twice the cache
    sums = torch.zeros((count, *shape), dtype=torch.float32, device=arena.device)

    def add(i: int) -> None:
        total, (left, right) = sums[i % count], pairs[i % len(pairs)]
        wider = () if left.dtype == total.dtype else (total.dtype,)
        torch.addmm(total, left, right, *wider, out=total)

    return add


def _attention(item: Item, arena: Arena) -> Work:
    """Return the work of a flash_attn item.

    Without a mask, there may be more or fewer keys than queries. A causal call has as many keys as queries (PyTorch aligns
    other masks at the first key, training at the last).
    """
    batch, seq, keys, heads, kv_heads, dim = (
        item.number(c) for c in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")
    )
    causal = bool(item.number("causal"))
    dtype = DTYPES[str(item.columns["dtype"])]
    shapes = [(batch, heads, seq, dim), *2 * [(batch, kv_heads, keys, dim)], (batch, heads, seq, dim)]
    forward = fused_attention(str(item.columns["kernel"]), causal)
    sets = arena.sets(dtype, *shapes)
    if item.columns["pass"] == "forward":
        return lambda i: _drop(forward(*sets[i % len(sets)][:3]))
    sets = sets[: max(2 if batch * seq * heads * dim < 2**24 else 1, 1)]  # their autograd graphs hold outputs
    inputs = [[t.detach().requires_grad_() for t in chosen[:3]] for chosen in sets]
    outputs = [forward(*chosen) for chosen in inputs]

    def backward(i: int) -> None:
        j = i % len(sets)
        torch.autograd.grad(outputs[j], inputs[j], sets[j][3], retain_graph=True)

    return backward


def _drop(_: Any) -> None:
    """Drop results: their memory returns to the allocator, as in training."""


#: (elements, dtype, arena) -> work
Stream = Callable[[int, torch.dtype, Arena], Work]


def _rows(elements: int, width: int = WIDTH) -> tuple[int, int]:
    width = min(width, elements)
    return max(elements // width, 1), width


def _plain(function: Callable[..., torch.Tensor], operands: int, chain: bool = False) -> Stream:
    """Return a stream over ``operands`` inputs [rows, WIDTH]; ``chain``: several eager kernels, compiled into one."""

    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        run = _compiled(function) if chain else function
        sets = arena.sets(dtype, *operands * [_rows(elements)])
        return lambda i: _drop(run(*sets[i % len(sets)]))

    return make


def _recorded(function: Callable[..., torch.Tensor], operands: int, gradient: bool, chain: bool = False) -> Stream:
    """Return a stream: a function's forward pass as autograd records it, or its backward pass; the inputs are [rows, WIDTH].

    chain: compiled, so that each pass is one kernel.
    """

    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        run = _compiled(function) if chain else function
        sets = arena.sets(dtype, *operands * [_rows(elements)])
        return recorded(run, [[t.detach().requires_grad_() for t in chosen] for chosen in sets], gradient)

    return make


def recorded(function: Callable[..., torch.Tensor], inputs: list[list[torch.Tensor]], gradient: bool) -> Work:
    """Return a chain's work on ``inputs`` in turn: forward with autograd on, or backward through graphs made before."""
    if not gradient:
        return lambda i: _drop(function(*inputs[i % len(inputs)]))
    inputs = inputs[:_MOST_GRAPHS]
    outputs = [function(*chosen) for chosen in inputs]
    upstream = [torch.ones_like(output) for output in outputs]

    def backward(i: int) -> None:
        j = i % len(inputs)
        torch.autograd.grad(outputs[j], inputs[j], upstream[j], retain_graph=True)

    return backward


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    if hasattr(functorch, "donated_buffer"):
        functorch.donated_buffer = False  # a backward pass is timed again and again on what one forward pass kept
    return torch.compile(function, dynamic=True)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight)


def _norm_of_kernels(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A norm as model code writes it (LlamaRMSNorm of transformers): torch's own is one kernel since its release 2.9."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _norm(gradient: bool, chain: bool = False) -> Stream:
    """Return a norm with a weight, as autograd records it, or its backward pass; chain: compiled."""

    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        run = _compiled(_rms_norm) if chain else _norm_of_kernels
        shape = _rows(elements)
        weight = torch.ones(shape[1], dtype=dtype, device=arena.device, requires_grad=True)
        inputs = [[x.detach().requires_grad_(), weight] for (x,) in arena.sets(dtype, shape)]
        return recorded(run, inputs, gradient)

    return make


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _rope(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
    """Return rotary embedding of [tokens, heads, 128]; the small tables of angles stay in the cache."""
    sets, rotary = _rope_operands(elements, dtype, arena)
    run = _compiled(rotated)
    return lambda i: _drop(run(sets[i % len(sets)], rotary))


def _rope_eager(gradient: bool) -> Stream:
    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        sets, rotary = _rope_operands(elements, dtype, arena)
        return recorded(lambda x: rotated(x, rotary), [[x.detach().requires_grad_()] for x in sets], gradient)

    return make


def _rope_operands(elements: int, dtype: torch.dtype, arena: Arena) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return queries [1, heads, tokens, 128] as a projection lays them out, token by token, and the rotary table."""
    heads = WIDTH // _HEAD_DIM
    tokens = max(elements // (heads * _HEAD_DIM), 1)
    sets = arena.sets(dtype, (1, tokens, heads, _HEAD_DIM))
    return [x.transpose(1, 2) for (x,) in sets], rotary_table(tokens, _HEAD_DIM).to(arena.device, dtype)


def _cross_entropy(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
    """Return forward and backward, compiled."""
    logits, target = _logits(elements, dtype, arena)
    run = _compiled(loss_of)
    return lambda i: _drop(torch.autograd.grad(run(logits[i % len(logits)], target), logits[i % len(logits)]))


def _cross_entropy_eager(gradient: bool) -> Stream:
    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        logits, target = _logits(elements, dtype, arena)
        return recorded(lambda x: loss_of(x, target), [[x] for x in logits], gradient)

    return make


def _logits(elements: int, dtype: torch.dtype, arena: Arena) -> tuple[list[torch.Tensor], torch.Tensor]:
    rows, vocabulary = _rows(elements, _VOCABULARY)
    target = torch.randint(vocabulary, (1, rows), device=arena.device)
    return [t.detach().requires_grad_() for (t,) in arena.sets(dtype, (1, rows, vocabulary))], target


def _adam(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
    """Return PyTorch's fused AdamW on one tensor; the moments are additional to the sets of weights and gradients."""
    optimizers = []
    for weight, gradient in arena.sets(dtype, (elements,), (elements,))[:64]:
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        optimizers.append(torch.optim.AdamW([parameter], fused=True))
    return lambda i: _drop(optimizers[i % len(optimizers)].step())


def _gather(rows_of_table: int) -> Stream:
    """Return a gather of table rows in random order: of a vocabulary's (embedding), or each row once (permute: 0)."""

    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        rows, width = _rows(elements)
        held = rows_of_table or rows
        sets = arena.sets(dtype, (held, width))
        if not rows_of_table:
            order = torch.randperm(rows, device=arena.device)
            return lambda i: _drop(sets[i % len(sets)][0].index_select(0, order))
        table = sets[0][0]  # every call takes other rows of it
        orders = torch.randint(held, (min(2 * held // rows + 1, _MOST_SETS), rows), device=arena.device).unbind()
        return lambda i: _drop(table.index_select(0, orders[i % len(orders)]))

    return make


STREAMS: dict[str, Stream] = {
    "norm": _plain(_rms_norm, 1, chain=True),
    "norm_grad_torch": _norm(gradient=True, chain=True),
    "norm_eager": _norm(gradient=False),
    "norm_eager_grad": _norm(gradient=True),
    "gated_act": _plain(_gated, 2, chain=True),
    "gated_act_grad": _recorded(_gated, 2, gradient=True, chain=True),
    "gated_act_eager": _recorded(_gated, 2, gradient=False),
    "gated_act_eager_grad": _recorded(_gated, 2, gradient=True),
    "act": _plain(F.gelu, 1),
    "act_grad": _recorded(F.gelu, 1, gradient=True),
    "residual": _plain(torch.add, 2),
    "softmax": _plain(_softmax, 1),
    "softmax_grad": _recorded(_softmax, 1, gradient=True),
    "copy": _plain(torch.clone, 1),
    "rope": _rope,
    "rope_eager": _rope_eager(gradient=False),
    "rope_eager_grad": _rope_eager(gradient=True),
    "cross_entropy": _cross_entropy,
    "cross_entropy_eager": _cross_entropy_eager(gradient=False),
    "cross_entropy_eager_grad": _cross_entropy_eager(gradient=True),
    "adam": _adam,
    "embedding": _gather(8192),
    "permute": _gather(0),
}
#: Kinds that are one kernel only when compiled; on a CPU only their eager forms are measured.
COMPILED_KINDS = ("norm", "norm_grad_torch", "gated_act", "gated_act_grad", "rope", "cross_entropy")
