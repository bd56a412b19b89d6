"""nanotron's layer beside torch: what its attention and gated activation copy, counted in both passes; and its optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import DEVICE, TINY, layer_keys, part, tiny, toy_layout

from solver.layers.decoder import layer_program
from solver.spec.cluster import cluster_of
from solver.spec.framework import ASSUMED_LAUNCH

TOKENS, HEADS, DIM = 32, 4, 16
MODEL = TINY.replace(num_key_value_heads=HEADS)


class Copied(TorchDispatchMode):
    """Elements that copies write, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func).split(".")[1] in ("clone", "cat", "stack"):
            self.elements += found.numel()
        return found


@pytest.mark.parametrize("batch", [1, 2])
def test_copies_of_queries_keys_and_values(batch: int) -> None:
    tokens = TOKENS // batch
    qkv = torch.randn(tokens, batch, 3 * HEADS * DIM, requires_grad=True)
    with Copied() as forward:
        q, k, v = qkv.view(tokens, batch, 3, HEADS, DIM).permute(2, 1, 0, 3, 4).contiguous()
        joined = torch.cat([k.unsqueeze(0), v.unsqueeze(0)], dim=0).permute(1, 2, 0, 3, 4).contiguous()
        keys, values = torch.split(joined, 1, dim=2)
    with Copied() as backward:
        torch.autograd.backward([q, keys, values], [torch.ones_like(x) for x in (q, keys, values)])
    run = toy_layout(8, tokens, framework="nanotron", precision="bf16")
    program = layer_program(layer_keys("mtp", micro_batch_size=batch), MODEL, run, cluster_of(DEVICE))
    copies = {op.label: float(np.ravel(op.dims["bytes"])[0]) for op in program.ops if op.name == "layout.split"}
    assert copies == {"layout.split.forward": 4 * forward.elements, "layout.split.input_grad": 4 * backward.elements}


def test_halves_of_one_tensor_are_joined_in_the_backward_pass() -> None:
    both = torch.randn(TOKENS, 2 * 128, requires_grad=True)
    gate, up = torch.split(both, 128, dim=-1)
    with Copied() as found:
        (torch.nn.functional.silu(gate) * up).sum().backward()
    assert found.elements == both.numel()  # of 26 bytes an element 8: 4 read and 4 written for both halves
    for framework, copied in (("nanotron", [2 * 2 * found.elements]), ("pytorch-ddp", [])):
        program = layer_program(layer_keys("mtp"), TINY, toy_layout(8, TOKENS, framework=framework), cluster_of(DEVICE))
        joins = [float(np.ravel(op.dims["bytes"])[0]) for op in program.ops if op.label == "activation.join.input_grad"]
        assert joins == copied  # 16 bits, read and written


def test_the_host_launches_five_kernels_a_tensor() -> None:
    # six tensors of each of two layers, embedding and head; the device needs less than that
    found = tiny("nanotron", 8, run={"compile": True}, dp=8, zero=0)
    assert part(found, "optimizer")[0] == pytest.approx(5 * ASSUMED_LAUNCH * (2 * 6 + 2))
