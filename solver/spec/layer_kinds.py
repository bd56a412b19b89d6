"""Kinds of decoder layers: what one layer does differently from another of the same model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from solver.spec.layer_types import CHUNKED_ATTENTION, LINEAR_ATTENTION, MAMBA, MLP, MLP_TYPES, MOE, SLIDING_ATTENTION
from solver.spec.model import ModelSpec


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer.

    window: last tokens that attention sees (0: all). chunk: tokens of the blocks outside of which attention sees nothing (0:
    none). linear, state_space: linear attention or Mamba-2 in place of softmax attention. rope: rotary embedding is applied,
    where the model has it. experts: the MLP is a mixture of experts. quantised: its linears are quantised where the run's are.
    mixes_tokens, has_mlp: a layer has a block that mixes tokens and an MLP, or one of them.
    """

    window: int = 0
    chunk: int = 0
    rope: bool = True
    experts: bool = False
    quantised: bool = True
    linear: bool = False
    state_space: bool = False
    mixes_tokens: bool = True
    has_mlp: bool = True

    @property
    def softmax(self) -> bool:
        """Whether it has softmax attention."""
        return self.mixes_tokens and not (self.linear or self.state_space)

    @property
    def blocks(self) -> int:
        return self.mixes_tokens + self.has_mlp

    def seen_tokens(self, seq_len: int) -> float:
        """Return the tokens that a query attends to on average, itself included to one half (causal, as s / 2 of s)."""
        if not self.softmax:
            return 0.0
        if 0 < self.chunk < seq_len:
            return self.chunk / 2
        if 0 < self.window < seq_len:
            return self.window - self.window**2 / (2 * seq_len)
        return seq_len / 2


PLAIN = LayerKind()  #: full attention and a dense MLP


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of a model's layers. kinds: distinct, in order of first appearance. of_layer: index of each layer's kind."""

    kinds: tuple[LayerKind, ...]
    of_layer: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Layers of each kind: int64 [kinds]."""
        return np.bincount(self.of_layer, minlength=len(self.kinds))


def layer_kinds(
    model: ModelSpec, seq_len: int = 0, bf16_ends: tuple[int, int] = (0, 0), document_tokens: int = 0
) -> LayerKinds:
    """Return the kinds of the model's layers.

    seq_len: windows and chunks that are no shorter see all tokens (0: none is). bf16_ends: layers at the start and at the end
    whose linears are not quantised. document_tokens: of packed documents (0: a sequence is one), which attention treats as
    chunks; a shorter window or chunk stays.
    """
    layers, (start, end) = model.num_hidden_layers, bf16_ends
    each = [
        replace(_kind(model, layer, seq_len, document_tokens), quantised=start <= layer < layers - end)
        for layer in range(layers)
    ]
    kinds = tuple(dict.fromkeys(each))
    return LayerKinds(kinds, np.array([kinds.index(kind) for kind in each], dtype=np.int64))


def _kind(model: ModelSpec, layer: int, seq_len: int, document_tokens: int) -> LayerKind:
    of, mlp = model.layer_types[layer] if model.layer_types else "", not model.one_block_layers
    if of in MLP_TYPES:
        return LayerKind(rope=False, experts=has_experts(model, layer), mixes_tokens=False)
    if of in (LINEAR_ATTENTION, MAMBA):
        linear = of == LINEAR_ATTENTION
        return LayerKind(rope=False, experts=has_experts(model, layer), linear=linear, state_space=not linear, has_mlp=mlp)
    window, chunk = _seen(model, layer)
    if document_tokens and (not window or window >= document_tokens):
        window, chunk = 0, min(chunk or document_tokens, document_tokens)
    if seq_len:
        window, chunk = window * (window < seq_len), chunk * (chunk < seq_len)
    rope = not model.no_rope_layers or bool(model.no_rope_layers[layer])
    return LayerKind(window, chunk, rope, has_experts(model, layer), has_mlp=mlp)


def _seen(model: ModelSpec, layer: int) -> tuple[int, int]:
    """Return (window, chunk) of a layer: as layer_types says, else a window in all but every n-th layer."""
    if model.layer_types:
        kind = model.layer_types[layer]
        return model.sliding_window * (kind == SLIDING_ATTENTION), model.attention_chunk_size * (kind == CHUNKED_ATTENTION)
    every = model.sliding_window_every
    return (0 if every and (layer + 1) % every == 0 else model.sliding_window), model.attention_chunk_size


def window_of(model: ModelSpec, layer: int) -> int:
    """Return the tokens that attention of layer ``layer`` (from 0) sees through its window; 0: it has none."""
    return _seen(model, layer)[0]


def is_linear(model: ModelSpec, layer: int) -> bool:
    """Whether layer ``layer`` (from 0) has linear attention."""
    return bool(model.layer_types) and model.layer_types[layer] == LINEAR_ATTENTION


def dense_layers(model: ModelSpec) -> int:
    """Return the number of layers with an MLP that is no mixture of experts."""
    if model.one_block_layers:
        return model.layer_types.count(MLP)
    return sum(not has_experts(model, layer) for layer in range(model.num_hidden_layers))


def has_experts(model: ModelSpec, layer: int) -> bool:
    """Whether the MLP of layer ``layer`` (from 0) is a mixture of experts: after the first dense ones, every n-th or as listed.

    moe_layer_freq n: layers whose number is a multiple of n, as in Megatron-Core and DeepSeek;
    a list has a 1 for each layer with experts.
    """
    if model.one_block_layers:
        return model.layer_types[layer] == MOE
    if not model.num_experts or layer < model.first_k_dense_replace:
        return False
    freq = model.moe_layer_freq
    return bool(freq[layer]) if isinstance(freq, tuple) else layer % freq == 0
