"""Multi-token prediction: modules behind the last layer, each with a projection, a layer of its own and the shared head.

Sources: DeepSeek-V3 (arXiv 2412.19437) section 2.2; Megatron-Core's multi_token_prediction.py, as read: the modules live on the
last pipeline stage, which then also holds a copy of the embedding and looks tokens up in it. They are recomputed as layers are,
but not block by block.
"""

from __future__ import annotations

from dataclasses import replace

from solver.layers.decoder import embedding_program, layer_program
from solver.layers.head import head_program
from solver.layers.norm import norm_ops
from solver.layers.program import FORWARD, INPUT_GRAD, LINEARS, MULTI_TOKEN_PREFIX, LayerKeys, LayerProgram, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import column_linears, tp_collective
from solver.spec.cluster import Cluster
from solver.spec.frameworks import framework_of
from solver.spec.layer_kinds import LayerKind
from solver.spec.model import ModelSpec
from solver.spec.run import Run

MODULE = "multi_token"


def last_program(keys: LayerKeys, model: ModelSpec, run: Run, cluster: Cluster, last_kind: LayerKind) -> LayerProgram:
    """Return the program of what follows the layers: the head, and modules of multi-token prediction where a model has them."""
    head = head_program(keys, model, run, cluster)
    if not framework_of(run.framework).recomputation.includes_head:
        head = replace(head, ops=tuple(replace(op, recomputed_by=()) for op in head.ops))
    modules = model.num_nextn_predict_layers
    if not modules:
        return head
    shapes = Shapes.of(keys, model, run, cluster, last_kind)
    layer = layer_program(keys, model, run, cluster, last_kind)
    h, tokens = model.hidden_size, shapes.norm_tokens
    projection = _projection(shapes)
    norms = [op for name in ("embedding_norm", "hidden_norm") for op in norm_ops(shapes, name)]
    embedding = embedding_program(keys, model, run, cluster)  # autograd makes the whole gradient of its copy of the table
    again = [_named(op, modules) for op in (*embedding.ops, *norms, *projection, *layer.ops, *head.ops)]
    joined = Saved("projection_input", 4 * tokens * h * shapes.element)  # before and after the norms, of both halves
    saved = [
        replace(tensor, name=MULTI_TOKEN_PREFIX + tensor.name, bytes=tensor.bytes * modules)
        for tensor in (joined, *layer.saved, *head.saved)
    ]
    own = [Weight("projection", 2.0 * h * h / shapes.split, LINEARS), Weight("norms", 3.0 * model.norm_parameters)]
    weights = [
        replace(
            weight,
            name=MULTI_TOKEN_PREFIX + weight.name,
            elements=weight.elements * modules,
            matrices=weight.matrices * modules,
        )
        for weight in (*own, *layer.weights)
    ]
    return replace(
        head,
        ops=(*head.ops, *again),
        saved=(*head.saved, *saved),
        weights=(*head.weights, *weights),
        transient_bytes=head.transient_bytes + layer.transient_bytes,
    )


def _projection(shapes: Shapes) -> list[Op]:
    """The linear of both halves, split by columns: its output is all-gathered and, under a sequence split, each rank keeps its
    tokens, whose gradients are all-gathered."""
    h = shapes.model.hidden_size
    everywhere, split = shapes.split > 1, shapes.sequence_split
    return [
        *column_linears(shapes, MODULE, 2 * h, {"projection": h // shapes.split}, normed=False),
        tp_collective(shapes, "projection.output", MODULE, "all_gather", FORWARD, everywhere),
        tp_collective(shapes, "projection.output", MODULE, "all_gather", INPUT_GRAD, split),
    ]


def _named(op: Op, modules: int) -> Op:
    """The op in every module; what it overlaps with is in the same module."""
    under = tuple(MULTI_TOKEN_PREFIX + label for label in op.overlaps_with)
    return replace(
        op, name=MULTI_TOKEN_PREFIX + op.name, count=op.count * modules, launches=op.launches * modules, overlaps_with=under
    )
