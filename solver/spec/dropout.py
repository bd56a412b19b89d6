"""Whether a run applies dropout, where it does not say."""

from __future__ import annotations

from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.run import Run


def applies_dropout(model: ModelSpec, run: Run) -> bool:
    """Whether dropout runs after attention's softmax and before the residuals.

    As the run states it; otherwise with unfused attention, in frameworks that had it by default, but for models with gated
    MLPs, which are trained without.
    """
    usual = framework_of(run.framework).kernels.dropout and run.attention == "unfused" and not model.gated_mlp
    return usual if run.dropout is None else run.dropout
