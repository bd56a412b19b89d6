"""Time one kernel of a plan, or find out why it cannot be timed here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from profiler.measure.kernels import Arena
from profiler.measure.timing import Measurement, Work, measure

#: Messages of PyTorch and the flash_attn packages when no kernel takes a shape.
_NO_KERNEL = ("No available kernel", "FlashAttention only supports", "only supports head dimension")


def try_kernel(make: Callable[[], Work], arena: Arena, seconds: float, by_host: bool = False) -> Measurement | str | None:
    """Return the times of the work that ``make`` prepares in ``arena``, measured for about ``seconds``.

    by_host: until the host has launched it, by the host's clock, instead of until the device has done it.

    None if it does not fit in memory; the reason if no kernel takes the shape. Other errors are raised.
    """
    try:
        return measure(make(), torch.device("cpu") if by_host else arena.device, seconds)
    except (torch.OutOfMemoryError, MemoryError):
        arena.release()
        return None
    except RuntimeError as error:
        if "allocate" in str(error):  # PyTorch's OOM message on a CPU
            arena.release()
            return None
        if isinstance(error, NotImplementedError) or any(words in str(error) for words in _NO_KERNEL):
            return str(error).splitlines()[0]
        raise
