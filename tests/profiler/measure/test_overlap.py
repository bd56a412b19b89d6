"""Grouped GEMMs, accumulated weight gradients, and GEMMs overlapped with collectives: the stated shape is what is timed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from profiler.measure import collectives
from profiler.measure.arena import Arena
from profiler.measure.collectives import Group
from profiler.measure.grouped import PASSES, grouped_items, grouped_work
from profiler.measure.kernels import workload
from profiler.measure.overlap import overlap_items, slowdown
from profiler.profile.item import Item, Limits
from profiler.profile.plan import ACCUMULATING, ModelDims, linear_items
from profiler.profile.profile import TABLE_COLUMNS

CPU = torch.device("cpu")
LIMITS = Limits(64, 8192, 8192, 2**24, 2**30, 2.0**33, 1.0, 1e13, grid_rows=64)


def test_passes_of_a_grouped_gemm_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(48, 32), torch.randn(48, 64)
    weight = torch.randn(3, 64, 32)
    ends = torch.tensor([16, 32, 48], dtype=torch.int32)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.cat([leaves[0][16 * g : 16 * g + 16] @ leaves[1][g].t() for g in range(3)])
    gradients = torch.autograd.grad(expected, leaves, dy)
    torch.testing.assert_close(PASSES["forward"](x, weight, ends), expected.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(PASSES["input_grad"](dy, weight, ends), gradients[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(PASSES["weight_grad"](dy, x, ends), gradients[1], rtol=1e-5, atol=1e-4)


def test_grouped_shapes_cover_the_range_and_hold_the_experts_of_models() -> None:
    model = ModelDims(2048, 6144, 16, 4, 128, 32000, seq_len=4096, num_experts=64, moe_intermediate=1024, top_k=8)
    items = grouped_items(LIMITS, [model], "bf16")
    shapes = {tuple(item.number(c) for c in ("groups", "tokens_per_group", "n", "k")) for item in items}
    assert {(64, 512, 2048, 2048), (64, 512, 2048, 1024), (8, 4096, 2048, 2048)} <= shapes  # 4096 tokens * 8 / 64; of 8 ranks
    assert len(items) == 3 * len(shapes) and {item.columns["pass"] for item in items} == set(PASSES)
    groups, tokens, n, k = (sorted(column) for column in zip(*shapes, strict=True))
    assert groups[0] <= 3 and groups[-1] == 64 and tokens[0] <= 32 and 4096 < tokens[-1] <= 8192
    for sides in (n, k):
        assert 512 <= sides[0] < 640 and 6144 < sides[-1] <= 8192 and all(side % 16 == 0 for side in sides)
    assert all(2.0 * math.prod(shape) <= LIMITS.flops * LIMITS.call_seconds for shape in shapes)
    dense = ModelDims(2048, 6144, 16, 4, 128, 32000)
    assert grouped_items(LIMITS, [dense], "bf16") == grouped_items(LIMITS, [], "bf16")


@pytest.mark.parametrize("which", PASSES)
def test_grouped_work_multiplies_the_shape_of_its_item(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    call = PASSES[which]
    monkeypatch.setitem(PASSES, which, lambda *given: seen.append(call(*given).shape))
    columns = {"groups": 4, "tokens_per_group": 16, "n": 48, "k": 32, "pass": which, "dtype": "fp32"}
    grouped_work(Item.of("grouped_linear", columns), Arena(CPU, 2**16))(5)
    assert seen == [{"forward": (64, 48), "input_grad": (64, 32), "weight_grad": (4, 48, 32)}[which]]


def test_every_eighth_shape_has_a_weight_gradient_accumulated_in_fp32() -> None:
    items = linear_items(LIMITS, [], ("bf16", "fp32"))
    summed = [item for item in items if item.number("accumulate")]
    plain = {item.values[:3] for item in items if item.columns["layout"] == "NT" and not item.number("accumulate")}
    assert len(summed) == 8 and {item.values[:3] for item in summed} < plain
    assert {(i.columns["layout"], i.columns["out_dtype"], i.columns["dtype"]) for i in summed} == {("NT", "fp32", "bf16")}
    assert not any(item.columns["layout"] == ACCUMULATING for item in items)


def test_an_accumulated_weight_gradient_adds_to_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[torch.Tensor] = []
    zeros = torch.zeros

    def kept(*shape: object, **options: object) -> torch.Tensor:
        sums.append(zeros(*shape, **options))
        return sums[-1]

    monkeypatch.setattr(torch, "zeros", kept)
    arena = Arena(CPU, 4096)
    columns = {"m": 64, "n": 32, "k": 48, "batch": 1, "layout": "NT", "out_dtype": "fp32", "accumulate": 1, "dtype": "fp32"}
    work = workload(Item.of("linear", columns), arena)
    (a, b), *others = arena.sets(torch.float32, (48, 64), (48, 32))
    assert not others and sums[0].shape == (1, 64, 32)  # one set of operands is more than twice the cache size of this arena
    work(0)
    work(1)
    torch.testing.assert_close(sums[0][0], 2 * a.t() @ b, rtol=1e-5, atol=1e-4)


def test_a_slowdown_counts_only_the_overlapped_time() -> None:
    """8 s of work without overlap; overlapped it runs at half its rate."""
    assert slowdown((0.0, 16.0), (0.0, 16.0), 8.0) == pytest.approx(2.0)
    assert slowdown((0.0, 12.0), (0.0, 8.0), 8.0) == pytest.approx(2.0)  # 4 s of the work overlapped, 4 s without overlap after
    assert slowdown((1.0, 13.0), (4.0, 12.0), 8.0) == pytest.approx(2.0)  # 3 s without overlap before, 1 s after
    assert slowdown((0.0, 8.0), (0.0, 99.0), 8.0) == pytest.approx(1.0)
    assert math.isnan(slowdown((0.0, 8.0), (9.0, 10.0), 8.0))  # no overlap
    assert math.isnan(slowdown((0.0, 8.0), (7.0, 20.0), 8.0))  # too short an overlap
    assert math.isnan(slowdown((0.0, 16.5), (0.0, 9.0), 8.0))  # slower than any overlap explains: something else disturbed it


def test_overlap_pairs_every_collective_with_every_gemm() -> None:
    items = overlap_items(8, 2, LIMITS, "bf16")
    assert len(items) == len(set(items)) == 4 * 3 * 3
    assert {item.number("bytes") for item in items} == {2**22, 2**24, 2**26, 2**28}
    assert {(item.number("m"), item.number("n")) for item in items} == {(256, 256), (512, 512), (1024, 1024)}
    assert {(item.number("intra"), item.number("inter")) for item in items} == {(8, 2)}
    assert len({item.columns["collective"] for item in items[:3]}) == 3  # a budget that ends early covers all of them
    odd = overlap_items(3, 1, Limits(32, 128, 64, 2**18, 2**14, 2**24, 0.05, 1e9), "fp32")
    assert odd and all(item.number("bytes") % 12 == 0 for item in odd)
    assert {"intra", "inter", "gemm_slowdown", "collective_slowdown"} <= set(TABLE_COLUMNS["overlap"])


def test_a_collective_that_does_not_fit_in_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises a plain RuntimeError on a CPU; any other is no matter of memory."""
    session = SimpleNamespace(agree=lambda value: value, device=CPU)
    item, group = Item.of("all_reduce", {"bytes": 8}), Group((0,), None)
    for said in ("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory", "invalid device"):

        def fails(*_: object, said: str = said) -> None:
            raise RuntimeError(said)

        monkeypatch.setattr(collectives, "collective_work", fails)
        if "allocate" in said:
            assert collectives.time_collective(session, item, group, 0.01) is None
        else:
            with pytest.raises(RuntimeError, match="invalid device"):
                collectives.time_collective(session, item, group, 0.01)
