"""Allocator setting of a CPU process: keep freed memory, so that training and all measurements use the same allocator."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # constants of malloc.h
_KEEP_BYTES, _PAD_BYTES = 2**31 - 1, 2**26


def keep_freed_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the system.

    glibc maps every block above 32 MiB anew, and the system then zeroes each of its pages: an element-wise kernel on such a
    tensor runs at a tenth of the memory bandwidth. Long-running trainers use allocators that keep pages (PyTorch's tuning guide
    recommends jemalloc or tcmalloc for the same reason). Does nothing where the C library has no ``mallopt``.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEEP_BYTES), (_M_TOP_PAD, _PAD_BYTES)):
        mallopt(parameter, value)
