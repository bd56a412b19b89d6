"""Kernels of a training step as benchmarks of one NVIDIA GPU run them, and how long they take in a burst."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

Call = Callable[[], object]
PAUSE, TRIES, BURST_CALLS = 0.5, 3, 8  #: seconds before a burst, bursts of which the best counts, calls of a burst


@dataclass(frozen=True)
class Kernel:
    """name: its words in the output. calls: what is called in turn, with operands that the cache does not hold."""

    name: str
    calls: tuple[Call, ...]

    def run(self, number: int) -> None:
        for i in range(number):
            self.calls[i % len(self.calls)]()


def gemm(m: int, n: int, k: int, dtype: str = "bf16") -> Kernel:
    """A GEMM of normal operands, which take more power than zeros; in fp8 as torch._scaled_mm has it, one scale a tensor."""

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)

    def one() -> Call:
        a, b = normal(m), normal(n)
        if dtype == "bf16":
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            return lambda: torch.mm(a, b.t(), out=out)
        scale, x, y = torch.ones((), device="cuda"), a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return lambda: torch._scaled_mm(x, y.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    large = max(m * k, n * k, m * n) > 2**24
    return Kernel(f"gemm {dtype} {m}x{n}x{k}", tuple(one() for _ in range(2 if large else 8)))


def attention(batch: int, heads: int, seq: int, dim: int, backward: bool) -> Kernel:
    """Causal attention, torch's default kernel."""
    q, k, v = (
        torch.randn(batch, heads, seq, dim, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    gradient = torch.randn_like(out)

    def gradients() -> object:
        return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    name = f"attention {'backward' if backward else 'forward'} {batch}x{heads}x{seq}x{dim}"
    return Kernel(name, (gradients if backward else forward,))


def copies() -> Kernel:
    source = torch.ones(2**26, device="cuda")
    target = torch.empty_like(source)
    return Kernel("copies of 256 MiB", (lambda: target.copy_(source),))


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def timed(kernel: Kernel, number: int) -> float:
    """Seconds of a call among ``number`` in a row."""
    start, end = event(), event()
    start.record()
    kernel.run(number)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / number


def burst(kernel: Kernel) -> float:
    """Seconds of a call among a few after a pause: clocks are at their highest, and power is not limited yet."""
    found = []
    for _ in range(TRIES):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        timed(kernel, 2)
        found.append(timed(kernel, BURST_CALLS))
    return min(found)
