"""The attention kernels of the flash_attn packages, with stand-ins that use the operand layout of the packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from profiler.measure import attention
from profiler.measure.arena import Arena
from profiler.measure.attention import PACKAGES, fused_attention, package_kernels
from profiler.measure.kernels import workload
from profiler.profile.item import Item, Limits
from profiler.profile.plan import attention_items

calls: list[tuple[torch.Size, bool]] = []


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Take and return [batch, seq, heads, dim]; there may be fewer key heads than query heads."""
    calls.append((q.shape, causal))
    swapped = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*swapped, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install stand-ins of both packages; the newer also returns the sums of its softmax, as some of its releases do."""

    def with_sums(*given: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return flash_attn_func(*given, **options), None

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=with_sums))
    calls.clear()
    attention._function.cache_clear()
    yield
    attention._function.cache_clear()


@pytest.mark.parametrize("kernel", PACKAGES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_package_gets_its_own_layout_and_returns_the_result_of_pytorch(packages: None, kernel: str, causal: bool) -> None:
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    found = fused_attention(kernel, causal)(q, k, v)
    assert calls == [(torch.Size((2, 8, 4, 16)), causal)]
    torch.testing.assert_close(found, fused_attention("torch_flash", causal)(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("which", "calls_before"), [("forward", 0), ("backward", 2)])
def test_a_kernel_of_a_package_is_timed_like_others(packages: None, which: str, calls_before: int) -> None:
    """Forward calls the package each time; backward only runs the graphs of two earlier calls."""
    columns = {"batch": 1, "seq_q": 16, "seq_kv": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "causal": 1}
    row = Item.of("flash_attn", {**columns, "pass": which, "kernel": "flash_attn_2", "dtype": "fp32"})
    work = workload(row, Arena(torch.device("cpu"), 2**20))
    assert len(calls) == calls_before
    work(0)
    assert len(calls) == (calls_before or 1)


def test_packages_are_found_where_they_are_made_for_the_device(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, ampere = (9, 0), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: hopper)
    assert package_kernels(torch.device("cuda")) == ("flash_attn_3", "flash_attn_2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ampere)
    assert package_kernels(torch.device("cuda")) == ("flash_attn_2",)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # not installed
    attention._function.cache_clear()
    assert package_kernels(torch.device("cuda")) == () and package_kernels(torch.device("cpu")) == ()
    with pytest.raises(NotImplementedError, match="flash_attn cannot be imported"):
        fused_attention("flash_attn_2", True)


def test_packages_are_measured_at_every_third_shape() -> None:
    limits = Limits(64, 4096, 4096, 2**24, 2**24, 2.0**33, 1.0, 1e14, grid_rows=60)
    items = attention_items(limits, [], "bf16", ("torch_cudnn", "torch_flash", "flash_attn_2"))
    shapes = {
        name: {item.values[:7] for item in items if item.columns["kernel"] == name} for name in ("torch_cudnn", "flash_attn_2")
    }
    assert shapes["flash_attn_2"] < shapes["torch_cudnn"] and len(shapes["flash_attn_2"]) >= len(shapes["torch_cudnn"]) // 3
