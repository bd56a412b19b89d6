"""Fused attention: PyTorch's own kernels, and those of the flash_attn packages that many training frameworks call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiler.measure.hardware import attention_kernels

#: Attention of q [batch, heads, seq, dim] over k, v [batch, kv_heads, keys, dim]; the output has the shape of q.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

BACKENDS = {"torch_flash": SDPBackend.FLASH_ATTENTION, "torch_cudnn": SDPBackend.CUDNN_ATTENTION}
#: Kernel's name in a profile -> (module, capabilities of devices that it is built for; major numbers of CUDA)
PACKAGES = {"flash_attn_3": ("flash_attn_interface", (9,)), "flash_attn_2": ("flash_attn", (8, 9, 10, 12))}


def package_kernels(device: torch.device) -> tuple[str, ...]:
    """Return the packaged kernels that are installed and built for ``device``, newest first."""
    if device.type != "cuda":
        return ()
    major = torch.cuda.get_device_capability(device)[0]
    return tuple(name for name, (_, majors) in PACKAGES.items() if major in majors and _function(name) is not None)


def fused_kernels(device: torch.device) -> tuple[str, ...]:
    """Return the fused kernels of a device by their names in a profile, the one that predictions are of first."""
    return (*attention_kernels(device), *package_kernels(device))


def fused_attention(kernel: str, causal: bool) -> Attention:
    """Return the function of a kernel by its name in a profile; it supports autograd."""
    return _packaged(kernel, causal) if kernel in PACKAGES else _of_torch(BACKENDS[kernel], causal)


def _of_torch(backend: SDPBackend, causal: bool) -> Attention:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return forward


def _packaged(kernel: str, causal: bool) -> Attention:
    function = _function(kernel)
    if function is None:
        raise NotImplementedError(f"{PACKAGES[kernel][0]} cannot be imported")

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # the packages expect [batch, seq, heads, dim]; some releases also return the softmax's sums
        found = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output.transpose(1, 2)

    return forward


@cache
def _function(kernel: str) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = importlib.import_module(PACKAGES[kernel][0]).flash_attn_func
    except (ImportError, OSError, AttributeError):  # not installed, or built for another release of PyTorch
        return None
    return function
