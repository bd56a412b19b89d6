"""The two blocks of a decoder layer, attention and MLP, by what the model and the kind of layer have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from solver.layers import attention, attention_core, latent_attention, linear_attention, mlp, moe, state_space
from solver.layers.program import Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.spec.layer_kinds import LayerKind
from solver.spec.model import ModelSpec


@dataclass(frozen=True)
class Block:
    """One block: its ops, what it saves for backward, the bytes of gradients alive at once in backward, its weights."""

    ops: Callable[[Shapes], list[Op]]
    saved: Callable[[Shapes], list[Saved]]
    working_bytes: Callable[[Shapes], np.ndarray]
    weights: Callable[[Shapes], list[Weight]]


def _none(_: Shapes) -> list[Any]:
    return []


NO_BLOCK = Block(_none, _none, lambda shapes: np.zeros(len(shapes.keys)), _none)  #: where a layer is one block, the other one


def attention_block(model: ModelSpec, kind: LayerKind) -> Block:
    if not kind.mixes_tokens:
        return NO_BLOCK
    if kind.state_space:
        return Block(
            state_space.state_space_ops,
            state_space.state_space_saved,
            state_space.state_space_working_bytes,
            state_space.state_space_weights,
        )
    if kind.linear:
        return Block(
            linear_attention.linear_attention_ops,
            linear_attention.linear_attention_saved,
            linear_attention.linear_attention_working_bytes,
            linear_attention.linear_attention_weights,
        )
    if model.has_latent_attention:
        latent = latent_attention
        return Block(
            latent.latent_attention_ops,
            latent.latent_attention_saved,
            attention_core.core_working_bytes,
            latent.latent_attention_weights,
        )
    return Block(
        attention.attention_ops, attention.attention_saved, attention_core.core_working_bytes, attention.attention_weights
    )


def mlp_block(model: ModelSpec, kind: LayerKind) -> Block:
    if not kind.has_mlp:
        return NO_BLOCK
    if kind.experts:
        return Block(moe.moe_ops, moe.moe_saved, moe.moe_working_bytes, moe.moe_weights)
    width = model.intermediate_size
    return Block(
        partial(mlp.mlp_ops, intermediate=width),
        partial(mlp.mlp_saved, intermediate=width),
        mlp.mlp_working_bytes,
        partial(mlp.mlp_weights, intermediate=width),
    )
