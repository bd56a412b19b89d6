"""Rules of the optimizer: which one, how wide its states are, and what of them is on the host."""

from __future__ import annotations

from profiler.errors import require
from solver.spec.framework import Framework
from solver.spec.strategy import Strategy

#: ZeRO stages of Muon: whole matrices are dealt to ranks, and gradients are never cut (Megatron-Core, layer_wise_optimizer.py).
MUON_ZERO = (0, 1)


def offloads(s: Strategy) -> tuple[tuple[str, bool], ...]:
    """Return (what, whether it is on the host), as in CanRun.offloads."""
    return (
        ("optimizer", s.optimizer_offload_fraction > 0),
        ("gradients", s.offload_gradients),
        ("activations", s.offload_layers > 0),
        ("modules", bool(s.offload_modules)),
    )


def optimizer_rules(framework: Framework, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken), whatever the ZeRO stage. Muon: asserted in Megatron-Core's optimizer/muon.py."""
    can, name, muon = framework.can_run, framework.name, s.optimizer == "muon"
    return (
        (s.optimizer in can.optimizers, f"{name} does not offer optimizer {s.optimizer}"),
        (s.optimizer_states in can.optimizer_states, f"{name} does not offer optimizer_states {s.optimizer_states}"),
        *((not used or what in can.offloads, f"{name} does not offer to offload {what}") for what, used in offloads(s)),
        (s.optimizer_offload_fraction > 0 or not s.offload_gradients, "offload_gradients needs optimizer_offload_fraction"),
        (
            "gradients" not in can.offloads or s.offload_gradients == (s.optimizer_offload_fraction > 0),
            f"{name} keeps gradients where its optimizer is: give offload_gradients with optimizer_offload_fraction",
        ),
        (
            not muon or can.overlaps_muon or not s.overlap_grad_reduce,
            f"{name} does not reduce Muon's gradients beside compute: turn overlap_grad_reduce off",
        ),
        (not muon or s.precision != "fp16", "optimizer muon does not run in fp16"),
        (not muon or s.tp_mode != "isp", "optimizer muon is not described with weights that tp_mode isp shards"),
        (not muon or s.optimizer_states == "fp32", "optimizer muon keeps its momentum in fp32: leave optimizer_states out"),
        (not muon or not s.optimizer_offload_fraction, "optimizer muon keeps its states on the device"),
    )


def check_optimizer(framework: Framework, run: Strategy) -> None:
    """Raise InputError where a search's framework does not run its optimizer."""
    require(optimizer_rules(framework, run))
