"""Under autocast the residual stream is fp32: what torch saves of a layer, and the casts, by hand."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from toy import DEVICE, layer_keys, toy_layout

from solver.formats.model_file import shipped_model
from solver.layers.decoder import layer_program
from solver.layers.program import FORWARD, LayerProgram
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import layer_kinds

TOKENS, HIDDEN, WIDTH = 32, 64, 256


class Layer(torch.nn.Module):
    """The linears and norms of transformers' Llama; the attention core is an addition, which saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "q": (HIDDEN, HIDDEN),
            "k": (HIDDEN, HIDDEN),
            "v": (HIDDEN, HIDDEN),
            "o": (HIDDEN, HIDDEN),
            "gate": (HIDDEN, WIDTH),
            "up": (HIDDEN, WIDTH),
            "down": (WIDTH, HIDDEN),
        }
        self.linears = torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.scales = torch.nn.ParameterList([torch.ones(HIDDEN), torch.ones(HIDDEN)])

    def norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.scales[index] * scaled.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of = self.linears
        y = self.norm(x, 0)
        x = x + of["o"](of["q"](y) + of["k"](y) + of["v"](y))
        y = self.norm(x, 1)
        return x + of["down"](torch.nn.functional.silu(of["gate"](y)) * of["up"](y))


def saved_by_torch(autocast: bool) -> float:
    """Return the bytes that autograd saves of the layer, but weights, per token and hidden value."""
    layer, x = Layer(), torch.randn(TOKENS, HIDDEN)
    if not autocast:
        layer, x = layer.bfloat16(), x.bfloat16()
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] == TOKENS and tensor.shape[-1] != 1:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    casts = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        out = layer(x.requires_grad_())
    assert out.dtype == x.dtype
    return sum(found.values()) / TOKENS / HIDDEN


def layer_of(framework: str) -> LayerProgram:
    model = shipped_model("llama3_8b").replace(num_key_value_heads=32, intermediate_size=4 * 4096)
    run = toy_layout(8, 4096, framework=framework)
    return layer_program(layer_keys("mtp"), model, run, cluster_of(DEVICE), layer_kinds(model, 4096).kinds[-1])


def saved_here(framework: str) -> float:
    return sum(float(np.ravel(tensor.bytes)[0]) for tensor in layer_of(framework).saved) / 4096 / 4096


def test_an_fp32_stream_and_the_inputs_of_five_linears_are_saved_as_torch_saves_them() -> None:
    # two tensors of the stream with two bytes more, and two copies more after the first norm, one after the second
    wider = 2 * 2 + 2 * 2 + 1 * 2
    assert saved_by_torch(True) - saved_by_torch(False) == wider
    assert saved_here("pytorch-ddp") - saved_here("profiler-train") == wider  # which casts the embedding's output


def test_casts_of_inputs_by_hand() -> None:
    ops = [op for op in layer_of("pytorch-ddp").ops if op.name.endswith(".input_autocast") and op.phase == FORWARD]
    assert sorted(op.name.split(".")[0] for op in ops) == ["w1", "w3", "wk", "wq", "wv"]
    assert all(np.ravel(op.dims["bytes"])[0] == 4096 * 4096 * (4 + 2) for op in ops)
    assert not any("input_autocast" in op.name for op in layer_of("profiler-train").ops)
