"""Memory-bound kernels to measure, by kind: each makes operands and returns the work to time.

The bytes of a kind are those of one ideal fused kernel, read plus written (ACCESSES per element): norm, rope, act,
softmax, copy, permute and embedding read one and write one; gated_act and residual read two and write one, as do the backward
passes norm_grad_torch, act_grad and softmax_grad; gated_act_grad reads three and writes two; cross_entropy reads and writes a
logit in forward and again in backward; adam reads weight, gradient and two moments in fp32 and writes all but the gradient.
These run as one kernel, compiled where necessary. Kinds with ``_eager`` in their name are the same work in plain PyTorch, a
chain of kernels, with the bytes of the fused kernel; ``_grad`` is a backward pass. The backward kernels of norms of Apex and
Transformer Engine (norm_grad) need these packages and are not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch._functorch import config as functorch

from profiler.measure.arena import MOST_SETS, Arena, drop
from profiler.measure.timing import Work
from profiler.train.model import loss_of, rotary_table, rotated

WIDTH = 4096  #: columns of the tensors of memory-bound kernels
_VOCABULARY, _HEAD_DIM, _MOST_GRAPHS = 32768, 128, 8
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

#: Makes the work of a kind: (elements, dtype, arena) -> work.
Maker = Callable[[int, torch.dtype, Arena], Work]


def _rows(elements: int, width: int = WIDTH) -> tuple[int, int]:
    width = min(width, elements)
    return max(elements // width, 1), width


def _plain(function: Callable[..., torch.Tensor], operands: int, chain: bool = False) -> Maker:
    """Return the maker of a function of ``operands`` inputs [rows, WIDTH]; chain: several eager kernels, compiled into one."""

    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        run = _compiled(function) if chain else function
        sets = arena.sets(dtype, *operands * [_rows(elements)])
        return lambda i: drop(run(*sets[i % len(sets)]))

    return make


def _recorded(function: Callable[..., torch.Tensor], operands: int, gradient: bool, chain: bool = False) -> Maker:
    """Return the maker of a function's forward pass as autograd records it, or of its backward pass; inputs are [rows, WIDTH].

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
        return lambda i: drop(function(*inputs[i % len(inputs)]))
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


def _norm(gradient: bool, chain: bool = False) -> Maker:
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
    return lambda i: drop(run(sets[i % len(sets)], rotary))


def _rope_eager(gradient: bool) -> Maker:
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
    return lambda i: drop(torch.autograd.grad(run(logits[i % len(logits)], target), logits[i % len(logits)]))


def _cross_entropy_eager(gradient: bool) -> Maker:
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
    return lambda i: drop(optimizers[i % len(optimizers)].step())


def _gather(rows_of_table: int) -> Maker:
    """Return a gather of table rows in random order: of a vocabulary's (embedding), or each row once (permute: 0)."""

    def make(elements: int, dtype: torch.dtype, arena: Arena) -> Work:
        rows, width = _rows(elements)
        held = rows_of_table or rows
        sets = arena.sets(dtype, (held, width))
        if not rows_of_table:
            order = torch.randperm(rows, device=arena.device)
            return lambda i: drop(sets[i % len(sets)][0].index_select(0, order))
        table = sets[0][0]  # every call takes other rows of it
        orders = torch.randint(held, (min(2 * held // rows + 1, MOST_SETS), rows), device=arena.device).unbind()
        return lambda i: drop(table.index_select(0, orders[i % len(orders)]))

    return make


#: Maker of every kind.
MAKERS: dict[str, Maker] = {
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
