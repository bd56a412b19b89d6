"""How long the host takes to launch one transformer layer, so small that no device keeps it waiting."""

from __future__ import annotations

import torch

from profiler.measure.arena import DTYPES
from profiler.measure.memory_bound import recorded
from profiler.measure.timing import Work
from profiler.profile.item import Item
from profiler.train.model import Block, Dims, rotary_table

#: Kernels of this layer take a GPU a few microseconds each, less than the host takes to launch them.
_DIMS = Dims(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=0
)
_TOKENS = 16
_WARM_UP = 5  # calls: the first ones load kernels and start autograd's thread, which takes as long as hundreds of others


def host_items(dtype: str) -> list[Item]:
    """Return the forward and the backward pass of one layer in plain PyTorch."""
    return [Item.of("host", {"pass": name, "dtype": dtype}) for name in ("forward", "backward")]


def host_work(item: Item, device: torch.device) -> Work:
    """Return the work of an item, to be timed by the host's clock: it ends when the last kernel is launched."""
    dtype = DTYPES[str(item.columns["dtype"])]
    block = Block(_DIMS, recompute=False).to(device, dtype)
    rotary = rotary_table(_TOKENS, _DIMS.head_dim).to(device, dtype)
    x = torch.randn(1, _TOKENS, _DIMS.hidden_size, device=device, dtype=dtype, requires_grad=True)
    work = recorded(lambda *inputs: block(inputs[0], rotary), [[x, *block.parameters()]], item.columns["pass"] == "backward")
    for _ in range(_WARM_UP):
        work(0)
    return work
