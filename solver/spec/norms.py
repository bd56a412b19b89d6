"""Which norms of a layer are modules of their own, and which are parts of the linears that read them."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.model import ModelSpec

NORMS_OF_A_LAYER = ("norm1", "norm2")  #: before attention, and before the MLP


def norms_apart(framework: Framework, model: ModelSpec, experts: bool) -> tuple[str, ...]:
    """Return the norms that a framework can recompute, or keep on the host, alone.

    Over Transformer Engine a norm is part of the linear behind it (TELayerNormColumnParallelLinear): the first one but before
    latent attention, the second one but before experts. Source: Megatron-Core's gpt_layer_specs.py and, for linear attention,
    experimental_attention_variant_module_specs.py.
    """
    if not framework.memory.transformer_engine:
        return NORMS_OF_A_LAYER
    apart = zip(NORMS_OF_A_LAYER, (model.has_latent_attention, experts), strict=True)
    return tuple(name for name, alone in apart if alone)
