"""Which models are trained with their modules of multi-token prediction."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.model import ModelSpec


def as_trained(model: ModelSpec, framework: Framework) -> ModelSpec:
    """Return a model as the framework trains it: without modules of multi-token prediction where it has none, as torchtitan's
    and NeMo Automodel's DeepSeek-V3 and transformers, which do not load them."""
    if framework.can_run.multi_token_prediction or not model.num_nextn_predict_layers:
        return model
    return model.replace(num_nextn_predict_layers=0)
