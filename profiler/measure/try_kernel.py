"""Time one kernel of a plan, or find out why it cannot be timed here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from profiler.errors import printable
from profiler.measure.arena import Arena
from profiler.measure.timing import Measurement, Work, measure

#: Messages of PyTorch and the flash_attn packages when no kernel takes a shape.
_NO_KERNEL = ("No available kernel", "FlashAttention only supports", "only supports head dimension")
_MOST_SAID = 200  # characters of an error that a profile keeps


def try_kernel(make: Callable[[], Work], arena: Arena, seconds: float, by_host: bool = False) -> Measurement | str | None:
    """Return the times of the work that ``make`` prepares in ``arena``, measured for about ``seconds``.

    by_host: until the host has launched it, by the host's clock, instead of until the device has done it.

    None if it does not fit in memory; the reason if no kernel takes the shape, or if one fails on a GPU that still works (its
    compiler is missing, say): a run of half an hour goes on without it. Other errors are raised.
    """
    try:
        return measure(make(), torch.device("cpu") if by_host else arena.device, seconds)
    except Exception as error:
        if is_out_of_memory(error):
            arena.release()
            return None
        message = str(error).strip() or type(error).__name__
        if not (_no_kernel(error) or _still_works(arena.device)):
            raise
        return printable(message.splitlines()[0], _MOST_SAID)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: PyTorch has an error of its own for it on a GPU, and words on a CPU."""
    on_cpu = isinstance(error, RuntimeError) and "allocate" in str(error)
    return on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _no_kernel(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _NO_KERNEL)


def _still_works(device: torch.device) -> bool:
    """Whether a GPU does more work after an error: one that met an illegal address reports it again with every call."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
