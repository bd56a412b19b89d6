"""A Llama-like transformer in plain PyTorch, built and sharded layer by layer, so that no rank ever holds the full model.

Every layer: RMSNorm, grouped-query attention with rotary embedding over torch's scaled_dot_product_attention, RMSNorm, SwiGLU.
Weights of a layer depend only on its number, so all layouts start from the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_INIT_STD = 0.02  # of all weight matrices, as in GPT-2 and Llama
_ROPE_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes of the model, by their names in a Hugging Face config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Norm(nn.RMSNorm):
    """RMSNorm whose weight is cast to the dtype of the activations, so that the output keeps that dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention; under tensor parallelism each rank holds its share of the heads."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        kv_size = dims.num_key_value_heads * dims.head_dim
        self.q_proj = nn.Linear(dims.hidden_size, dims.hidden_size, bias=False)
        self.k_proj = nn.Linear(dims.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(dims.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(dims.hidden_size, dims.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """x: [batch, seq, hidden]. rotary: cosines and sines, [2, seq, head_dim]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, rotary), rotated(k, rotary)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.up_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.down_proj = nn.Linear(dims.intermediate_size, dims.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer; with ``recompute`` it keeps only its input, and the backward pass recomputes its forward pass."""

    def __init__(self, dims: Dims, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.attention = Norm(dims.hidden_size, eps=1e-5), Attention(dims)
        self.mlp_norm, self.mlp = Norm(dims.hidden_size, eps=1e-5), Mlp(dims)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer, x, rotary, use_reentrant=False)
        return self._layer(x, rotary)

    def _layer(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Stage(nn.Module):
    """Consecutive layers of the model; the first stage also has the embedding, the last also the head.

    compute_dtype: dtype of activations and GEMMs; weights keep theirs (autocast).
    """

    def __init__(
        self,
        dims: Dims,
        layers: range,
        seq_len: int,
        device: torch.device,
        compute_dtype: torch.dtype,
        recompute: bool,
        split: Callable[[nn.Module], nn.Module],
    ) -> None:
        """Build the stage; ``split`` shards a part (embedding, Block, norm, head) among ranks as soon as it is built."""
        super().__init__()

        def build(part: Callable[[], nn.Module], number: int) -> nn.Module:
            torch.manual_seed(number)
            with torch.device(device):
                return split(_initialised(part()))

        last = dims.num_hidden_layers
        self.compute_dtype, self.device_type = compute_dtype, device.type
        self.embedding = build(lambda: nn.Embedding(dims.vocab_size, dims.hidden_size), last) if layers.start == 0 else None
        self.blocks = nn.ModuleList(build(lambda: Block(dims, recompute), number) for number in layers)
        ends = layers.stop == last
        self.norm = build(lambda: Norm(dims.hidden_size, eps=1e-5), last + 1) if ends else None
        self.head = build(lambda: nn.Linear(dims.hidden_size, dims.vocab_size, bias=False), last + 2) if ends else None
        self.register_buffer("rotary", rotary_table(seq_len, dims.head_dim).to(device, compute_dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [batch, seq] or activations [batch, seq, hidden] to activations or logits [batch, seq, vocab]."""
        with torch.autocast(self.device_type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            if self.embedding is not None:
                x = self.embedding(x).to(self.compute_dtype)
            for block in self.blocks:
                x = block(x, self.rotary)
            return self.head(self.norm(x)) if self.norm is not None and self.head is not None else x


def _initialised(part: nn.Module) -> nn.Module:
    for weight in part.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=_INIT_STD)
    return part


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy in float32 of logits [batch, seq, vocab] against labels [batch, seq]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def rotary_table(seq_len: int, head_dim: int) -> Tensor:
    """Return cosines and sines of rotary embedding (Su et al. 2021), halves paired as in Llama: [2, seq, head_dim]."""
    rates = _ROPE_BASE ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(seq_len).float(), rates).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Return x [batch, heads, seq, head_dim] with every pair rotated by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]
