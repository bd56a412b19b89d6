"""Operands of kernels to measure, cut from one memory, so that no call finds them in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_SETS = 256  #: of operands
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
        count = min(max(-(-2 * self.cache_bytes // (needed * dtype.itemsize)), 1), MOST_SETS)
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


def drop(_: Any) -> None:
    """Drop results: their memory returns to the allocator, as in training."""
