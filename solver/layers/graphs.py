"""CUDA graphs of single modules of a layer: what the host launches no more."""

from __future__ import annotations

from dataclasses import replace

from solver.layers.program import FORWARD, INPUT_GRAD, Op
from solver.layers.shapes import Shapes

#: Launches that replay a graph: a copy into its input, and the graph (assumed).
REPLAY = 2.0
#: Ops of a layer that each module captures, by module of the op or by name (Megatron-Core's transformer_layer.py and
#: moe/moe_layer.py): attn from the first norm to the residual, mlp and moe_router from the second norm on.
_MODULES = {"attn": ("attention",), "mlp": ("mlp",), "moe_router": ("router",), "moe_preprocess": ()}
_NAMES = {
    "attn": ("norm1", "attention_norm", "residual1"),
    "mlp": ("norm2", "mlp_norm", "residual2"),
    "moe_router": ("norm2",),
    "moe_preprocess": ("permute",),
}


def graphed_ops(shapes: Shapes, ops: list[Op]) -> list[Op]:
    """Return ``ops`` with the launches that are left where the modules of ``cuda_graph_modules`` are graphs.

    Modules that follow each other are one graph each way. Shared experts are captured with the router unless they
    run beside the exchange of tokens.
    """
    experts = shapes.kind.experts
    chosen = [name for name in shapes.run.modules_graphed if (name != "mlp") == experts or name == "attn"]
    modules = {module for name in chosen for module in _MODULES[name]}
    names = {op for name in chosen for op in _NAMES[name]}
    if "moe_router" in chosen and not shapes.run.moe_shared_expert_overlap:
        modules.add("shared_experts")
    captured = [i for i, op in enumerate(ops) if op.module in modules or op.name in names]
    first = {phase: next((i for i in captured if ops[i].phase == phase), -1) for phase in (FORWARD, INPUT_GRAD)}
    left = {i: REPLAY * (i in first.values()) for i in captured}
    return [replace(op, launches=left[i]) if i in left else op for i, op in enumerate(ops)]
