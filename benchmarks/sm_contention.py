"""Measure how much longer kernels take while another kernel holds some multiprocessors, as those of NCCL do.

    python benchmarks/sm_contention.py --output contention.jsonl          (one NVIDIA GPU, about two minutes)

The other kernel has a block for each multiprocessor that it holds, with more shared memory than a GEMM leaves free. It waits,
or it copies through memory as fast as it can. "burst": for some 30 ms after a pause; "sustained": the last third of seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_kernels import Kernel, attention, burst, event, gemm, timed
from gpu_sensors import Sensors

HELD = (4, 8, 16, 24, 32)  #: multiprocessors that are held
SQUARE = (8192, 8192, 8192)
GEMMS = (SQUARE, (8192, 28672, 8192), (8192, 8192, 28672), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 6144, 4096))
SUSTAINED, HELD_SUSTAINED = (SQUARE, (4096, 14336, 4096)), (8, 16, 24)
_BURST, _SECONDS, _BLOCK = 0.03, 3.0, 0.02  #: seconds of a burst, of a sustained run, and of its blocks
_CYCLES_PER_SECOND = 1.7e9
SOURCE = """
extern "C" __global__ void hold(const float4* from, float4* to, int words, int cycles, int copies, unsigned long long* moved)
{
    __shared__ float room[12000];
    long long start = clock64(), done = 0;
    long long share = (long long)words / gridDim.x, base = share * blockIdx.x, at = threadIdx.x;
    room[threadIdx.x] = 0.0f;
    while (clock64() - start < cycles) {
        for (int i = 0; copies && i < 16; i++, done++) {
            to[base + at] = from[base + at];
            at += blockDim.x;
            if (at >= share) at = threadIdx.x;
        }
    }
    atomicAdd(moved, (unsigned long long)done * 32);
}
"""


class Holder:
    """Holds multiprocessors on a stream of its own. moved: bytes, read plus written."""

    def __init__(self) -> None:
        self._kernel: Any = torch.cuda._compile_kernel(SOURCE, "hold")
        self.stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._from, self._to = (torch.ones(2**28, device="cuda") for _ in range(2))
        self.moved = torch.zeros(1, dtype=torch.int64, device="cuda")

    def hold(self, held: int, seconds: float, copies: bool) -> None:
        cycles, words = int(seconds * _CYCLES_PER_SECOND), self._from.numel() // 4
        given = (self._from, self._to, words, cycles, int(copies), self.moved)
        if held:
            self._kernel(grid=(held, 1, 1), block=(512, 1, 1), args=given, stream=self.stream)


def beside(kernel: Kernel, holder: Holder, held: int, copies: bool, alone: float) -> float:
    """Seconds of a call in a burst while ``held`` multiprocessors are held, the least of three tries."""
    number, found = max(int(_BURST / alone), 3), []
    for _ in range(3):
        torch.cuda.synchronize()
        time.sleep(0.1)
        holder.hold(held, 3.0 * number * alone + 0.01, copies)
        time.sleep(0.002)
        kernel.run(1)
        found.append(timed(kernel, number))
    return min(found)


def sustained(kernel: Kernel, holder: Holder, held: int, copies: bool, alone: float) -> float:
    """Mean seconds of a call in the last third of a run, all of which ``held`` multiprocessors are held."""
    number, marks = max(int(_BLOCK / alone), 1), []
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        holder.hold(held, 1.05 * _BLOCK, copies)
        pair = event(), event()
        pair[0].record()
        kernel.run(number)
        pair[1].record()
        marks.append(pair)
        if len(marks) > 5:
            marks[-5][1].synchronize()
    torch.cuda.synchronize()
    return float(np.mean([a.elapsed_time(b) for a, b in marks[len(marks) * 2 // 3 :]])) * 1e-3 / number


def slowdowns(holder: Holder) -> Iterator[dict[str, Any]]:
    """Yield the slowdown of every kernel beside every number of held multiprocessors."""
    for shape in GEMMS:
        kernel = gemm(*shape)
        alone = burst(kernel)
        for copies in (False, True):
            yield from (
                _row(kernel, "burst", held, copies, beside(kernel, holder, held, copies, alone), alone) for held in HELD
            )
        if shape in SUSTAINED:
            steady = sustained(kernel, holder, 0, False, alone)
            for held in HELD_SUSTAINED:
                yield _row(kernel, "sustained", held, True, sustained(kernel, holder, held, True, alone), steady)
    for backward in (False, True):
        kernel = attention(1, 32, 8192, 128, backward)
        alone = burst(kernel)
        yield from (_row(kernel, "burst", held, True, beside(kernel, holder, held, True, alone), alone) for held in HELD)


def _row(kernel: Kernel, how: str, held: int, copies: bool, seconds: float, alone: float) -> dict[str, Any]:
    return {"kernel": kernel.name, "how": how, "held": held, "copies": copies, "alone": alone, "slowdown": seconds / alone}


def copying(holder: Holder, held: int) -> dict[str, Any]:
    """The bytes per second that held multiprocessors move where nothing else runs, and the power [W] that it takes."""
    holder.moved.zero_()
    start, end = event(), event()
    with Sensors() as sensors:
        start.record(holder.stream)
        for _ in range(8):
            holder.hold(held, 0.25, True)
        end.record(holder.stream)
        torch.cuda.synchronize()
    rate = float(holder.moved.item()) / (start.elapsed_time(end) * 1e-3)
    return {"kernel": "", "how": "copies", "held": held, "bytes_per_second": rate, "power_w": sensors.power}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines")
    args = p.parse_args()
    holder = Holder()
    with args.output.open("w", encoding="utf-8") as file:
        for row in chain(slowdowns(holder), (copying(holder, held) for held in HELD)):
            print(json.dumps(row), file=file, flush=True)
            print(" ".join(f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
