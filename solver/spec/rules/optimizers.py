"""Rules of the optimizer: which one, how wide its states are, and what of them is on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from solver.spec.framework import Framework
from solver.spec.precision import QUANTISED, keeps_remainders
from solver.spec.rules.offload import offloads
from solver.spec.run import Run


def zero_broken(run: Run, zero: int) -> str:
    """Return what of a run's optimizer needs another ZeRO stage, or "".

    Muon assigns whole matrices to ranks, and gradients are never cut (Megatron-Core, layer_wise_optimizer.py); the shards of
    ZeRO-3 are the fp32 weights themselves, of which nothing is saved.
    """
    stages = {
        "optimizer muon": (0, 1) if run.optimizer == "muon" else (),
        "optimizer_states remainder": (0, 1, 2) if run.optimizer_states == "remainder" else (),
        "offload_gradients": (2, 3) if run.offload_gradients else (),
    }
    wrong = [(what, of) for what, of in stages.items() if of and zero not in of]
    return "".join(f"{what} runs with ZeRO-{of[0]} to {of[-1]}, not ZeRO-{zero}" for what, of in wrong[:1])


def muon_shards(run: Run, zero: Any, shard: Any, replicas: Any) -> np.ndarray:
    """Whether the optimizer runs with states over ``shard`` of ``replicas`` ranks: muon assigns matrices to all of them."""
    return (np.asarray(zero) == 0) | (np.asarray(shard) == replicas) | (run.optimizer != "muon")


def muon_mode_broken(run: Run, tp_mode: str) -> str:
    """Return why the optimizer does not run with a tensor-parallel mode, or ""."""
    isp = run.optimizer == "muon" and tp_mode == "isp"
    return "optimizer muon is not modelled with weights that tp_mode isp shards" if isp else ""


def optimizer_rules(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken), whatever the ZeRO stage. Muon: asserted in Megatron-Core's optimizer/muon.py."""
    can, name, muon = framework.can_run, framework.name, s.optimizer == "muon"
    return (
        (s.optimizer in can.optimizers, f"{name} does not offer optimizer {s.optimizer}"),
        (s.optimizer_states in can.optimizer_states, f"{name} does not offer optimizer_states {s.optimizer_states}"),
        (
            s.optimizer_states != "remainder" or keeps_remainders(s),
            "optimizer_states remainder is of weights in bf16 (precision bf16, or fp8 with fp8_recipe delayed)",
        ),
        (
            s.optimizer_states == "fp32" or not s.optimizer_offload_fraction,
            f"an optimizer on the host keeps its states in fp32 on both: leave optimizer_states {s.optimizer_states} out",
        ),
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
        (
            not muon or can.overlaps_muon or not (s.fp8_param_gather and s.precision in QUANTISED),
            f"{name} gathers fp8 weights (fp8_param_gather) with its distributed optimizer only, which muon is not",
        ),
        (not muon or s.optimizer_states == "fp32", "optimizer muon keeps its momentum in fp32: leave optimizer_states out"),
        (not muon or not s.optimizer_offload_fraction, "optimizer muon keeps its states on the device"),
    )
