"""Grouped GEMMs, the experts of a mixture-of-experts layer: each group multiplies its own tokens by its own weights.

PyTorch's operator is timed, as training frameworks call it. On a CPU the operator runs its groups one after the other, and so
does training there. On CUDA it is one kernel from Hopper on; older GPUs, where it copies the sizes to the host and loops, are
not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from profiler.measure.arena import DTYPES, Arena
from profiler.measure.timing import Work
from profiler.profile.item import Item, Limits
from profiler.profile.plan import ModelDims, low_discrepancy

_OPERATOR: Callable[..., torch.Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_FUSED_ON = (9, 10)  # major numbers of the CUDA capabilities for which PyTorch has one kernel
_MOST_GROUPS, _FEWEST_TOKENS, _MOST_TOKENS, _SMALLEST, _LARGEST = 64, 16, 8192, 512, 8192
_SHORTER = 4  # times shorter than the longest call of other kernels: many must fit into a small share of the budget
_STEP = 16  # of tokens and dims: the kernels need rows that start at multiples of 16 bytes

#: (groups, tokens per group, n, k)
Shape = tuple[int, int, int, int]


def lacking(device: torch.device) -> str:
    """Return why no grouped GEMM is measured on ``device``; "" if it is measured."""
    if _OPERATOR is None:
        return f"torch {torch.__version__} has no grouped_mm; 2.10 and newer have"
    if device.type == "cuda" and (major := torch.cuda.get_device_capability(device)[0]) not in _FUSED_ON:
        return f"PyTorch has no grouped kernel for CUDA capability {major}.x and loops over the groups"
    return ""


def operator_name(device: torch.device) -> str:
    """Return the operator that a grouped GEMM was timed with, for its ``source``."""
    return "grouped_mm" if device.type == "cuda" else "grouped_mm that loops over groups"


def grouped_items(limits: Limits, models: Sequence[ModelDims], dtype: str) -> list[Item]:
    """Return grouped GEMMs in all three passes: experts of ``models``, then a log grid."""
    shapes = dict.fromkeys(chain(chain.from_iterable(_model_shapes(m) for m in models), _grid_shapes(limits)))
    items = [
        Item.of("grouped_linear", {"groups": g, "tokens_per_group": t, "n": n, "k": k, "pass": which, "dtype": dtype})
        for g, t, n, k in shapes
        for which in PASSES
    ]
    return list(filter(replace(limits, call_seconds=limits.call_seconds / _SHORTER).allows, items))


def _grid_shapes(limits: Limits) -> Iterator[Shape]:
    largest = min(_LARGEST, limits.largest)
    ranges = np.array(
        [
            (2, _MOST_GROUPS),
            (_FEWEST_TOKENS, min(_MOST_TOKENS, limits.longest_sequence)),
            *2 * [(min(_SMALLEST, largest // 4), largest)],
        ]
    )
    low, high = np.log2(ranges).T
    for groups, tokens, n, k in 2 ** (low + (high - low) * low_discrepancy(limits.grid_rows // 2, 4)):
        yield round(groups), _stepped(tokens), _stepped(n), _stepped(k)


def _stepped(size: float) -> int:
    """Round to an eighth of an octave, at least one step, as models' sizes are."""
    step = max(int(2 ** (int(np.log2(size)) - 3)), _STEP)
    return max(int(round(size / step)), 1) * step


def _model_shapes(model: ModelDims) -> Iterator[Shape]:
    """Yield both GEMMs of the experts that a rank holds, with the tokens that each expert gets under even routing."""
    if not model.num_experts:
        return
    up = model.moe_intermediate * (2 if model.gated else 1)
    for ranks, (n, k) in product((1, 2, 4, 8), ((up, model.hidden), (model.hidden, model.moe_intermediate))):
        if model.num_experts % ranks == 0:
            tokens = model.seq_len * model.top_k * ranks // model.num_experts
            yield model.num_experts // ranks, max(tokens // _STEP, 1) * _STEP, n, k


def _forward(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _grouped(x, weight.transpose(1, 2), ends)


def _input_grad(dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _grouped(dy, weight, ends)


def _weight_grad(dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _grouped(dy.t(), x, ends)


def _grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if _OPERATOR is None:
        raise NotImplementedError(lacking(left.device))
    return _OPERATOR(left, right, offs=ends)


#: pass -> its GEMM of x [tokens, k], dy [tokens, n] and weight [groups, n, k]; ends: int32, where each group's tokens end
PASSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward": _forward,
    "input_grad": _input_grad,
    "weight_grad": _weight_grad,
}


def grouped_work(item: Item, arena: Arena) -> Work:
    """Return the work of a grouped_linear item."""
    groups, each, n, k = (item.number(c) for c in ("groups", "tokens_per_group", "n", "k"))
    which, tokens = str(item.columns["pass"]), groups * each
    second = (tokens, k) if which == "weight_grad" else (groups, n, k)
    sets = arena.sets(DTYPES[str(item.columns["dtype"])], (tokens, k if which == "forward" else n), second)
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=arena.device) * each
    call = PASSES[which]

    def work(i: int) -> None:
        first, second = sets[i % len(sets)]
        call(first, second, ends)

    return work
