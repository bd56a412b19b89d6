"""What a power limit costs: how much longer a GEMM takes where nothing else runs than in a burst."""

from __future__ import annotations

import time

import torch

from profiler.measure.session import Session
from profiler.measure.timing import Work, time_block

_SIZE = 8192  # of a square GEMM in bf16, which takes an accelerator's units about a millisecond
_PAUSE, _TRIES, _CALLS = 0.5, 3, 8  # a burst: after so many seconds, the best of so many blocks of so many calls
_SECONDS, _COUNTED = 5.0, 1.5  # how long the GEMMs run, and how much of the end counts: the clocks settle in tenths of a second


def power_slowdown(session: Session, quick: bool) -> float:
    """Return how many times as long a GEMM takes after seconds of GEMMs as in a burst, on the slowest rank; 1 on a CPU.

    All ranks of a node run it at once, so that they share what cools them. It also brings a GPU to its clocks under load.
    """
    device = session.device
    if device.type != "cuda" or quick:
        return 1.0
    gemm = _gemm(device)
    burst = min(_burst(gemm, device) for _ in range(_TRIES))
    session.beat()
    return session.agree(max(_sustained(gemm, device, session) / burst, 1.0))


def preheat(session: Session, quick: bool) -> None:
    """Bring a GPU to its clocks under sustained load; a power-limited GPU boosts for tenths of a second."""
    if session.device.type == "cuda" and not quick:
        _sustained(_gemm(session.device), session.device, session)


def _gemm(device: torch.device) -> Work:
    a, b = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def call(_: int) -> None:
        torch.mm(a, b, out=out)

    return call


def _burst(gemm: Work, device: torch.device) -> float:
    torch.cuda.synchronize()
    time.sleep(_PAUSE)
    gemm(0)
    return time_block(gemm, 0, _CALLS, device)[0].median


def _sustained(gemm: Work, device: torch.device, session: Session) -> float:
    """Return the mean seconds of a call in the last ``_COUNTED`` of ``_SECONDS``."""
    start, found = time.monotonic(), list[float]()
    mean = 0.0
    while (since := time.monotonic() - start) < _SECONDS:
        block = time_block(gemm, 0, 100, device)[0]
        mean = sum(block.times) / block.count
        if since > _SECONDS - _COUNTED:
            found.append(mean)
        session.beat()
    found = found or [mean]  # of a slow GPU, whose last block began before
    return sum(found) / len(found)
