"""How long the host takes to launch one op of a layer's program."""

from __future__ import annotations

from predictor.cost_model import CostModel
from solver.spec.framework import ASSUMED_LAUNCH, Framework

#: Ops, forward and backward, of the program of one layer of plain PyTorch modules with SwiGLU: the one that the profiler times.
PLAIN_LAUNCHES = 14 + 24
#: Launches' worth of Python between a message that the host has waited for and the first kernel of the next pass: the schedule,
#: the batch, the model's wrappers, autograd's start. Assumed; chosen with published runs in sight (docs/accuracy.md: ZB).
RESTART_LAUNCHES = 5


def restart_seconds(framework: Framework, cost: CostModel) -> float:
    """Return the seconds for which the device idles after a message, because its host waited for it before it went on."""
    return RESTART_LAUNCHES * launch_seconds(framework, cost) if framework.pipeline.synchronises else 0.0


def launch_seconds(framework: Framework, cost: CostModel) -> float:
    """Return the host's seconds per op.

    A framework's own figure is of published runs of it. One whose layers are plain PyTorch modules has none: it takes the
    profile's, where its host was measured, else the assumed one.
    """
    own = framework.kernels.launch_seconds
    if own is None:
        own = cost.host.plain_layer_launch / PLAIN_LAUNCHES if cost.host.plain_layer_launch else ASSUMED_LAUNCH
    return own * cost.host.factor
