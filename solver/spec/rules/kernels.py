"""Rules of kernels: attention, the loss, and what torch compiles."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.precision import QUANTISED
from solver.spec.run import Run


def attention_rules(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of what is stated of attention's kernels."""
    flash = s.attention == "flash"
    return (
        (framework.can_run.fp8_attention or not s.fp8_attention, f"{framework.name} does not offer fp8_attention"),
        (
            not s.fp8_attention or (flash and s.precision in QUANTISED),
            f"fp8_attention needs attention flash and precision {', '.join(QUANTISED)}, not {s.attention} and {s.precision}",
        ),
        (flash or not s.flash_generation, f"flash_generation changes nothing with attention {s.attention}; leave it out"),
        (not flash or s.fused_softmax is None, "fused_softmax changes nothing with attention flash; leave it out"),
    )


def loss_rules(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of a loss that is compiled, or is not, apart from the model."""
    return (
        (
            framework.can_run.compiles_loss_apart or s.compile_loss is None,
            f"{framework.name} does not offer compile_loss; leave it out",
        ),
        (
            s.compile_loss is None or not s.cross_entropy_fusion,
            "compile_loss changes nothing with cross_entropy_fusion; leave it out",
        ),
    )


def fusion_rules(framework: Framework, model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of kernels that only some frameworks let a run choose, or compile."""
    can, name = framework.can_run, framework.name
    return (
        (
            can.compiles_sinks or not (s.compile and model.attention_sinks),
            f"{name} compiles no layers of models with attention sinks; leave out compile",
        ),
        (can.chooses_rope or s.rope_fusion is None, f"{name} does not offer rope_fusion; leave it out"),
        (can.chooses_router_type or s.moe_router_fp32 is None, f"{name} does not offer moe_router_fp32; leave it out"),
    )


def projection_rule(framework: Framework, s: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of a cross entropy that is fused with the vocabulary's projection."""
    fuses = s.cross_entropy_fusion and s.cross_entropy_fusion_impl == "linear"
    return framework.can_run.fuses_projection or not fuses, f"{framework.name} does not offer cross_entropy_fusion_impl linear"


def compile_rule(framework: Framework, run: Run) -> tuple[bool, str]:
    """Return (holds, what is broken): Transformer Engine's modules are kernels, which torch does not compile."""
    return not (run.compile and framework.kernels.transformer_engine), (
        f"{framework.name} runs Transformer Engine's modules, which torch.compile leaves as they are; leave out compile"
    )
