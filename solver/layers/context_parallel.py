"""Context parallelism: how keys, values and heads travel between the ranks that share a sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.ops import ATTENTION_CORE, memory_bound
from solver.layers.program import ATTENTION, FORWARD, INPUT_GRAD, MEMORY_BOUND, Array, Op, message
from solver.layers.shapes import Shapes
from solver.spec.choices import Recompute
from solver.spec.cluster import Placement
from solver.spec.recipes import FP32

#: Share of the rows, on average, that a step of a ring over zigzag parts of a causal sequence concerns: all or half of them.
RING_ROWS = 0.75
#: Bytes per element of the context with which torch's eager kernels merge a step's part, on average over steps that concern all
#: rows and half of them. All: to fp32 (6), difference (12), times a weight of each row (8), subtracted (12). Half: the same of
#: half the rows, and both halves joined again (8).
EAGER_MERGE = (38.0 + (38.0 / 2 + 8.0)) / 2
#: Cost of adding a step's gradients relative to that of adding all rows (10 bytes): all rows, or half of them and joining (8).
EAGER_ADDING = (10.0 + (10.0 / 2 + 8.0)) / 2 / 10.0


def ring_ops(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """Return what a ring of ``steps`` exchanges with the next rank adds to attention."""
    if not np.any(steps):
        return _kv_ring(shapes, steps)
    if shapes.framework.kernels.torch_context_parallel:
        return _torch_ring(shapes, steps)
    return [*_send_buffer_copies(shapes, steps), *_ring_corrections(shapes, steps), *_kv_ring(shapes, steps)]


def _torch_ring(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """torch's context parallelism, by either of its methods.

    allgather: keys and values are all-gathered once in each pass. ring: they go to the next rank before each further step
    (torch and torchtitan call this alltoall). The sums of their gradients, in fp32, go there after each of cp steps. Eager, the
    gather is under the first step and what is passed on under the steps; compiled, each collective is waited for where it is
    issued. Compiled, forward merges as Transformer Engine does; eager, by a chain of kernels (EAGER_MERGE). Backward sets the
    three fp32 sums to zero and casts them at the end (10 bytes an element), adds each part (10, or EAGER_ADDING), and joins the
    sums of keys and values for each message (8).
    Source: torch/distributed/tensor/experimental/_attention.py (_SDPAMerger, _partial_update,
    _templated_ring_attention_backward, _AllGatherRotater) and torch/distributed/_functional_collectives.py
    (_maybe_wrap_tensor), as read.
    """
    hop, eager = _hop(shapes.groups.cp_ring), not shapes.run.compile
    ring = np.where(steps > 0, 1.0, 0.0)
    keys_values = shapes.kv_elements
    queries = shapes.tokens * shapes.heads * shapes.model.qk_head_dim
    if eager:
        merged, ends, added, joined = shapes.context_elements, ring, EAGER_ADDING, 2.0 * shapes.element
    else:
        merged, ends, added, joined = shapes.context_elements * RING_ROWS, 0.0 * ring, RING_ROWS, 0.0

    def keys_and_values(phase: str, again: tuple[Recompute, ...]) -> Op:
        if shapes.run.cp_comm == "allgather":
            name, kind, under, count = "kv.all_gather", "all_gather", f"attention.{phase}", ring
            dims = message(whole_kv(shapes) * shapes.element, shapes.groups.cp)
        else:
            name, kind, under, count = "kv.send", "p2p", f"attention.step.{phase}", steps
            dims = message(keys_values * shapes.element, hop)
        return Op(name, ATTENTION, kind, phase, dims, "cp", count, (under,) if eager else (), recomputed_by=again)

    def sums(name: str, elements: Array, forward: float, backward: float, count: Array) -> list[Op]:
        ops = memory_bound(f"attention.{name}", ATTENTION, "residual", elements, forward, backward, ATTENTION_CORE)
        return [replace(op, count=count) for op in ops]

    adding = 2.0 * FP32 + shapes.element
    return [
        keys_and_values(FORWARD, ATTENTION_CORE),
        keys_and_values(INPUT_GRAD, ()),
        Op(
            "kv.gradients",
            ATTENTION,
            "p2p",
            INPUT_GRAD,
            message(FP32 * keys_values, hop),
            "cp",
            steps + ring,
            ("attention.step.input_grad",) if eager else (),
        ),
        *sums("correction", merged, EAGER_MERGE if eager else adding, 0.0, steps),
        *sums("wide_context", shapes.context_elements, 2.0 * (FP32 + shapes.element), 0.0, ends),
        *sums("gradients", queries + keys_values, 0.0, adding, ring + added * steps),
        *sums("joined_keys", keys_values, joined, joined, steps * (shapes.run.cp_comm != "allgather")),
        *sums("joined_gradients", keys_values, 0.0, 2.0 * FP32, steps + ring),
        *sums("wide_gradients", queries + keys_values, 0.0, 2.0 * FP32 + shapes.element, ring),
    ]


def _hop(group: Placement) -> Placement:
    """Return the slowest hop of a ring, which is its bottleneck."""
    apart = group.inter > 1
    return Placement(np.where(apart, 1, 2), np.where(apart, 2, 1), group.strided)


def _ring_corrections(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """Sums over the steps of a ring (Transformer Engine's context parallelism, as read).

    Forward rescales and adds each part of the context: the fp32 sum is read and written, the part read, 10 bytes an element.
    Backward adds each part of the gradients of q, k and v, in 16 bits: 6 bytes.
    """
    context = shapes.context_elements * RING_ROWS
    gradients = (shapes.tokens * shapes.heads * shapes.model.qk_head_dim + shapes.kv_elements) * RING_ROWS
    forward, backward = 2.0 * FP32 + shapes.element, 3.0 * shapes.element
    ops = [
        *memory_bound("attention.correction", ATTENTION, "residual", context, forward, 0.0, ATTENTION_CORE),
        *memory_bound("attention.gradients", ATTENTION, "residual", gradients, 0.0, backward),
    ]
    return [replace(op, count=steps) for op in ops]


def _send_buffer_copies(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """The copy of keys and values into one buffer to send, before the first step of each pass (Transformer Engine, as read)."""
    elements = shapes.kv_elements
    ops = memory_bound("kv.join", ATTENTION, "copy", elements, 2.0 * shapes.element, 2.0 * shapes.element, ATTENTION_CORE)
    return [replace(op, count=np.where(steps > 0, 1.0, 0.0)) for op in ops]


def _kv_ring(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """Send of keys and values, overlapped with each step of the ring; backward also sends their gradients."""
    hop = _hop(shapes.groups.cp_ring)
    size = shapes.kv_elements * shapes.element

    def send(phase: str, tensors: int, again: tuple[Recompute, ...]) -> Op:
        under = (f"attention.step.{phase}",)
        return Op("kv.send", ATTENTION, "p2p", phase, message(tensors * size, hop), "cp", steps, under, recomputed_by=again)

    return [send(FORWARD, 1, ATTENTION_CORE), send(INPUT_GRAD, 2, ())]


def kv_gather(shapes: Shapes) -> list[Op]:
    """Context parallelism by all-gather.

    Keys and values of all cp ranks are all-gathered before attention, their gradients are reduce-scattered after it.
    """
    several = np.where(shapes.keys.cp > 1, 1.0, 0.0)
    dims = message(whole_kv(shapes) * shapes.element, shapes.groups.cp)
    return [
        Op("kv.all_gather", ATTENTION, "all_gather", FORWARD, dims, "cp", several, recomputed_by=ATTENTION_CORE),
        Op("kv.reduce_scatter", ATTENTION, "reduce_scatter", INPUT_GRAD, dims, "cp", several),
    ]


def whole_kv(shapes: Shapes) -> Array:
    """Elements of the keys and values of whole sequences, for this rank's heads."""
    return shapes.kv_elements * shapes.keys.cp


#: Passes over whole keys and values, or their gradients, beside the kernel: forward puts the gathered parts in order (read and
#: written); backward does so again, zeroes the gradients, adds those of a rank's two parts of the sequence (which together see
#: as much as all of it; read twice and written), and puts them back in the order of the ranks.
GATHERED_PASSES = (2, 2 + 1 + 3 + 2)


def kv_regather(shapes: Shapes) -> list[Op]:
    """What fused attention adds to context parallelism by all-gather: only a rank's own keys and values are kept, so backward
    gathers them again. Source: Transformer Engine's AttnFuncWithCPAndKVAllGather, as read.
    """
    several = np.where(shapes.keys.cp > 1, 1.0, 0.0)
    dims = message(whole_kv(shapes) * shapes.element, shapes.groups.cp)
    forward, backward = (passes * shapes.element for passes in GATHERED_PASSES)
    copies = memory_bound("kv.order", ATTENTION, "copy", whole_kv(shapes), forward, backward, ATTENTION_CORE)
    return [
        Op("kv.regather", ATTENTION, "all_gather", INPUT_GRAD, dims, "cp", several),
        *(replace(op, count=several) for op in copies),
    ]


def exchange(
    shapes: Shapes, name: str, stream: str, sizes: dict[str, Array], where: np.ndarray, recomputed_by: tuple[Recompute, ...]
) -> list[Op]:
    """All-to-alls between sequence and heads, forward and mirrored in backward, with the copies that split and concatenate."""
    ops: list[Op] = []
    for tensor, size in sizes.items():
        for phase, again in ((FORWARD, recomputed_by), (INPUT_GRAD, ())):
            dims = message(size, shapes.groups.cp_heads if stream == "cp" else shapes.groups.tp)
            ops.append(Op(f"{name}.{tensor}", ATTENTION, "all2all", phase, dims, stream, where, recomputed_by=again))
            ops.append(
                Op(
                    f"{name}.{tensor}.copy",
                    ATTENTION,
                    MEMORY_BOUND,
                    phase,
                    {"bytes": 4.0 * size},
                    count=where,
                    recomputed_by=again,
                    variant="copy",
                )
            )
    return ops


def context_exchange(shapes: Shapes) -> list[Op]:
    """Context parallelism by all-to-all: this rank's heads of q, k, v and context over the cp group.

    It is part of the attention core (Transformer Engine's DotProductAttention), which runs it again where it is recomputed.
    """
    model, where = shapes.model, np.where(shapes.heads_shared > 1, 1.0, 0.0)
    kv = np.maximum(shapes.core_kv_heads, shapes.heads_shared) * shapes.kv_width
    qkv = shapes.tokens * (shapes.heads * model.qk_head_dim + kv) * shapes.element
    context = shapes.context_elements * shapes.element
    ops = exchange(shapes, "context_exchange", "cp", {"qkv": qkv, "context": context}, where, ATTENTION_CORE)
    # the context is kept as it was after its exchange, so backward exchanges it beside its gradient
    again = exchange(shapes, "context_exchange", "cp", {"kept_context": context}, where, ())
    return [*ops, *(op for op in again if op.phase == INPUT_GRAD)]
