"""A layer's forward pass together with another's backward pass: the exchange of tokens of one beside the compute of the other.

Compute and exchange each run in order on a stream of their own, and wait for what they need from the other:

    compute    attention F | experts B | experts W | experts F | attention B | attention W
    exchange   combine B | dispatch F | dispatch B | combine F

Where weight gradients (W) are not delayed they are part of B. Sources: Megatron-Core's model_chunk_schedule_plan.py
(``--overlap-moe-expert-parallel-comm``, ``--delay-wgrad-compute``) as read; DeepSeek-V3's DualPipe has the same order, with
delayed weight gradients (arXiv 2412.19437, figure 4). What Megatron-Core runs in the nodes of dispatch and combine is on the
exchange's stream whole (fine_grained_callables.py): after combine all-to-all's own permutation of rows, the sum with shared
experts and the residual addition; with hybrid-EP the permutations on both sides, which are in its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from solver.layers.program import COMBINE, DISPATCH, EXCHANGE, EXPERT_MODULE, FORWARD, SHARED_EXPERTS, WEIGHT_GRAD, Op
from solver.step.op_estimates import LayerTimes, OpEstimates

#: Layers that are simulated, and of these those that are left out of the mean: the first pairs fill the two streams.
_LAYERS, _FIRST = 24, 8
_STREAM = "ep"  #: of the exchange
#: Compute kernels on that stream, by what they run with: of every dispatcher, and of each.
_MOVED = {"residual2": COMBINE, "shared.sum": COMBINE}
_OF_DISPATCHER = {
    "alltoall": {"unpermute": COMBINE},
    "allgather": {"unpermute": COMBINE},
    "hybridep": {"permute": DISPATCH, "sort": DISPATCH, "unsort": COMBINE, "unpermute": COMBINE},
    "deepep": {},  # whose permutations are the experts'
}
#: What a kernel that moves bytes slows the GEMMs that it runs beside by, over its own time (assumed: they share the memory and
#: the multiprocessors, and neither uses all of both).
MOVED_CONTENTION = 0.5


class _Compute(NamedTuple):
    """Seconds of passes: [keys] each."""

    forward: np.ndarray
    inputs: np.ndarray  #: gradients of inputs
    weights: np.ndarray  #: gradients of weights


class _Messages(NamedTuple):
    """Seconds of an exchange in each pass: [keys] each."""

    forward: np.ndarray
    backward: np.ndarray


def paired_seconds(estimates: OpEstimates, exposed: np.ndarray, times: LayerTimes, dispatcher: str = "alltoall") -> np.ndarray:
    """Return the seconds of the two passes of a layer of one kind when they run together: [2, keys].

    The second row is with delayed weight gradients. exposed: seconds of each op, [ops, keys] (OpEstimates.exposed). times: of
    the same layer, of which the host's are used: it launches both passes one after the other. The exchange slows the compute
    that it runs beside by its contention. dispatcher: of tokens.
    """
    exchanges = any(op.stream == _STREAM for op in estimates.ops)
    where = [_on_exchange_stream(op, dispatcher) if exchanges else "" for op in estimates.ops]

    def seconds(chosen: Callable[[Op, str], bool], passes: int) -> list[np.ndarray]:
        found = [np.zeros(exposed.shape[1]) for _ in range(passes)]
        for op, place, row in zip(estimates.ops, where, exposed, strict=True):
            if chosen(op, place):
                found[_pass_of(op)] += row
        return found

    def compute(of_experts: bool) -> _Compute:
        return _Compute(*seconds(lambda op, place: not place and _of_experts(op, dispatcher) == of_experts, 3))

    def sent(name: str) -> _Messages:
        return _Messages(*seconds(lambda op, place: place == name, 2))

    attention, experts, dispatch, combine = compute(False), compute(True), sent(DISPATCH), sent(COMBINE)
    attention = attention._replace(forward=attention.forward + times.waits)
    both = np.array([_steady_seconds(attention, experts, dispatch, combine, delays) for delays in (False, True)])
    communication = np.sum([*dispatch, *combine], axis=0)
    slowed = sum(
        (
            exposed[i] * (estimates.contention[i] if op.stream == _STREAM else MOVED_CONTENTION)
            for i, op in enumerate(estimates.ops)
            if where[i]
        ),
        0.0,
    )
    alone = both - np.sum([*attention, *experts], axis=0)
    together = both + slowed * (1.0 - alone / np.maximum(communication, 1e-30))
    return np.maximum(together, times.host.sum(axis=0))


def _on_exchange_stream(op: Op, dispatcher: str) -> str:
    """Return what an op runs with on the exchange's stream, DISPATCH or COMBINE; "" on that of compute."""
    if op.stream == _STREAM:
        return next((name for name in (DISPATCH, COMBINE) if op.name.startswith(name)), _STREAM)
    return (_MOVED | _OF_DISPATCHER[dispatcher]).get(op.name, "")


def _pass_of(op: Op) -> int:
    """0: forward, 1: gradients of inputs, 2: gradients of weights."""
    return 0 if op.phase == FORWARD else 1 + (op.phase == WEIGHT_GRAD)


def _of_experts(op: Op, dispatcher: str) -> bool:
    permuted = ("sort", "unsort", *(("permute", "unpermute") if dispatcher == "deepep" else ()))
    return op.module in (EXPERT_MODULE, SHARED_EXPERTS) or (op.module == EXCHANGE and op.name in permuted)


def _steady_seconds(
    attention: _Compute, experts: _Compute, dispatch: _Messages, combine: _Messages, delays: bool
) -> np.ndarray:
    """Return the seconds from one layer to the next, once the streams are full: the mean of some. delays: weight gradients."""
    nothing = np.zeros_like(attention.forward)
    experts_with, experts_after = (nothing, experts.weights) if delays else (experts.weights, nothing)
    attention_with, attention_after = (nothing, attention.weights) if delays else (attention.weights, nothing)
    computed = gradient = combined = filled = nothing
    for layer in range(_LAYERS):
        if layer == _FIRST:
            filled = combined
        attention_f = np.maximum(computed, combined) + attention.forward
        combine_b = np.maximum(combined, gradient) + combine.backward
        experts_b = np.maximum(attention_f, combine_b) + experts.inputs + experts_with
        dispatch_f = np.maximum(combine_b, attention_f) + dispatch.forward
        dispatch_b = np.maximum(dispatch_f, experts_b) + dispatch.backward
        experts_f = np.maximum(experts_b + experts_after, dispatch_f) + experts.forward
        combined = np.maximum(dispatch_b, experts_f) + combine.forward
        gradient = np.maximum(experts_f, dispatch_b) + attention.inputs + attention_with
        computed = gradient + attention_after
    return (combined - filled) / (_LAYERS - _FIRST)
