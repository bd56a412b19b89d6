"""Measure how much longer a kernel takes in sustained work than in a burst, by its share of the time.

    python benchmarks/power_share.py --output power.jsonl          (one NVIDIA GPU, about four minutes)

A round is a few calls of the kernel, one thread that counts cycles for 30 us, which tells the clock, and a filler: an almost
idle GPU (one thread that counts on) or copies through memory. Rounds follow each other for seconds; the last third counts. A
burst is a few calls after a pause. Every line of the output is one combination of kernel, filler, share and period.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from gpu_kernels import Kernel, attention, burst, copies, event, gemm, timed
from gpu_sensors import Sensors

SECONDS = 4.0
PERIOD = 0.02  #: seconds of a round unless stated
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
PERIODS = (0.006, 0.06, 0.2, 0.6, 2.0)  #: tried at a share of half
#: rows, outputs, inner size: a square GEMM, and those of models of 70, 8 and 1 billion parameters
SQUARE = (8192, 8192, 8192)
GEMMS = (
    (8192, 28672, 8192),
    (8192, 8192, 28672),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (8192, 8192, 2048),
    (2048, 8192, 2048),
)
ATTENTIONS = ((1, 32, 8192, 128), (4, 32, 2048, 64))  #: batch, heads, sequence, size of a head
_SPIN_CYCLES, _CYCLES_PER_SECOND = 50_000, 1.75e9
_BEHIND = 0.2  #: seconds by which the host is ahead of the device

Try = tuple[str, float, float]  #: filler, share, period


def rounds(kernel: Kernel, filler: str, share: float, period: float, alone: float, seconds: float) -> dict[str, float]:
    """Run rounds for ``seconds``; return the mean seconds of a call in the last third, its share of the time and the clock."""
    number = max(round(share * period / alone), 1)
    waiting = number * alone * (1 / share - 1)
    copy = copies()
    fills = max(round(waiting / timed(copy, 10)), 1) if filler == "copies" else 0
    marks: list[tuple[torch.cuda.Event, ...]] = []
    end, behind = time.monotonic() + seconds, max(2, int(_BEHIND / (number * alone + waiting)))
    while time.monotonic() < end:
        events = tuple(event() for _ in range(4))
        events[0].record()
        kernel.run(number)
        events[1].record()
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        events[2].record()
        copy.run(fills)
        if not fills and waiting:
            torch.cuda._sleep(int(waiting * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        events[3].record()
        marks.append(events)
        if len(marks) > behind:
            marks[-behind][3].synchronize()
    torch.cuda.synchronize()
    last = marks[len(marks) * 2 // 3 :]
    ran, spun, filled = (np.array([m[i].elapsed_time(m[i + 1]) for m in last]) * 1e-3 for i in range(3))
    of_time = ran.sum() / (ran.sum() + spun.sum() + filled.sum())
    clock = _SPIN_CYCLES / np.median(spun) / 1e6
    return {"seconds": float(ran.mean() / number), "calls": number, "share": float(of_time), "clock_mhz": float(clock)}


def plan() -> Iterator[tuple[Callable[[], Kernel], list[Try]]]:
    """Kernels, and what to try of each."""
    alone, mostly = ("idle", 1.0, PERIOD), ("idle", 0.7, PERIOD)
    of_shares = [(filler, share, PERIOD) for filler in ("idle", "copies") for share in SHARES]
    yield lambda: gemm(*SQUARE), [alone, *of_shares, *(("idle", 0.5, period) for period in PERIODS)]
    for shape in GEMMS:
        yield lambda shape=shape: gemm(*shape), [alone, mostly]  # type: ignore[misc]
    eights: list[Try] = [("idle", 0.8, PERIOD), ("idle", 0.6, PERIOD), ("copies", 0.6, PERIOD), ("idle", 0.4, PERIOD)]
    yield lambda: gemm(*SQUARE, dtype="fp8"), [alone, *eights]
    yield lambda: gemm(*GEMMS[0], dtype="fp8"), [alone, mostly]
    for size in ATTENTIONS:
        for backward in (False, True):
            yield lambda size=size, backward=backward: attention(*size, backward), [alone, mostly]  # type: ignore[misc]
    yield copies, [alone, ("idle", 0.5, PERIOD)]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines")
    p.add_argument("--seconds", type=float, default=SECONDS, help="of each combination (%(default)g)")
    args = p.parse_args()
    with args.output.open("w", encoding="utf-8") as file:
        for make, tries in plan():
            kernel = make()
            alone = burst(kernel)
            for filler, share, period in tries:
                time.sleep(0.5)
                with Sensors() as sensors:
                    found = rounds(kernel, filler, share, period, alone, max(args.seconds, 3.5 * period))
                row = {
                    "kernel": kernel.name,
                    "filler": filler,
                    "period": period,
                    "burst": alone,
                    **found,
                    "slowdown": found["seconds"] / alone,
                    "power_w": sensors.power,
                    "temperature_c": sensors.temperature,
                }
                print(json.dumps(row), file=file, flush=True)
                where = f"{filler:7} period {period * 1e3:5.0f} ms share {found['share']:.2f}"
                what = f"{row['slowdown']:.3f} x burst, {found['clock_mhz']:.0f} MHz, {sensors.power:.0f} W"
                print(f"{kernel.name:32} {where}: {what}", flush=True)
            del kernel
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
