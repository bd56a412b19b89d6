"""CUDA graphs of single modules of a layer: what the host launches no more."""

from __future__ import annotations

from dataclasses import replace

from solver.layers.program import FORWARD, INPUT_GRAD, ROUTER, SHARED_EXPERTS, Op
from solver.layers.shapes import Shapes

#: Launches that replay a graph: a copy into its input, and the graph (assumed).
REPLAY = 2.0
#: What each module captures: modules of ops, and single ops by name (Megatron-Core's transformer_layer.py, moe/moe_layer.py).
#: attn goes from the first norm to the residual, mlp and moe_router begin with the second norm.
_CAPTURED = {
    "attn": {"norm1", "attention", "attention_norm", "residual1"},
    "mlp": {"norm2", "mlp", "mlp_norm", "residual2"},
    "moe_router": {"norm2", ROUTER},
    "moe_preprocess": {"permute"},
}


def graphed_ops(shapes: Shapes, ops: list[Op]) -> list[Op]:
    """Return ``ops`` with the launches that are left where the modules of ``cuda_graph_modules`` are graphs.

    Modules that follow each other are one graph each way. Shared experts are captured with the router unless they
    run beside the exchange of tokens.
    """
    there = ("attn", "moe_router", "moe_preprocess") if shapes.kind.experts else ("attn", "mlp")
    chosen = [name for name in shapes.run.modules_graphed if name in there]
    wanted: set[str] = set().union(*(_CAPTURED[name] for name in chosen))
    if "moe_router" in chosen and not shapes.run.moe_shared_expert_overlap:
        wanted.add(SHARED_EXPERTS)
    captured = [i for i, op in enumerate(ops) if wanted & {op.module, op.name}]
    first = {phase: next((i for i in captured if ops[i].phase == phase), -1) for phase in (FORWARD, INPUT_GRAD)}
    left = {i: REPLAY * (i in first.values()) for i in captured}
    return [replace(op, launches=left[i]) if i in left else op for i, op in enumerate(ops)]
