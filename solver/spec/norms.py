"""Which norms of a layer are modules of their own, and which are parts of the linears that read them."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.model import ModelSpec

NORMS_OF_A_LAYER = ("norm1", "norm2")  #: before attention, and before the MLP


def norms_apart(framework: Framework, model: ModelSpec, experts: bool) -> tuple[str, ...]:
    """Return the norms that a framework can recompute alone."""
    return norms_beside_linears(model, experts) if framework.kernels.transformer_engine else NORMS_OF_A_LAYER


def norms_beside_linears(model: ModelSpec, experts: bool) -> tuple[str, ...]:
    """Return the norms that are no part of a linear of Transformer Engine.

    A norm is part of the linear behind it (TELayerNormColumnParallelLinear): the first one but before latent attention, the
    second one but before experts. Source: Megatron-Core's gpt_layer_specs.py and, for linear attention,
    experimental_attention_variant_module_specs.py.
    """
    apart = zip(NORMS_OF_A_LAYER, (model.has_latent_attention, experts), strict=True)
    return tuple(name for name, alone in apart if alone)
