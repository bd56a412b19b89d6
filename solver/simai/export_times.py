"""The predicted forward pass of a layout as a kernel-time file of aiob, with which AICB's own generators can be run.

AICB knows the sections below; what a layer does besides them (rotary embedding, residuals, the router, permutations) is added
to a section of the same block, so that AICB's sums over attention and MLP are the predicted ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from profiler.errors import InputError
from solver.simai.aiob import PARAM_TIME, Kernel, KernelTimes
from solver.simai.pieces import Piece
from solver.simai.stage_work import SimaiStageWork, split_blocks
from solver.simai.step_work import StepWork

_ATTENTION = {
    "norm1": "layernorm",
    "attention": "atten_flash",
    "scores": "atten_core_qk",
    "softmax": "atten_core_softmax",
    "context": "atten_core_contex",
    "wo": "atten_linear",
    "residual1": "atten_linear",
}
_MLP = {
    "norm2": "layernorm2",
    "activation": "mlp_gelu",
    "experts.activation": "mlp_gelu",
    "w2": "mlp_linear_2",
    "experts.w2": "mlp_linear_2",
    "expert.w2": "mlp_linear_2",
    "residual2": "mlp_linear_2",
}
_HEAD = {"final_norm": "layernorm_post"}
#: Sections of kernels that have none of their own, in AICB's order of sections.
_REST = {"embedding": "Emb", "attention": "atten_qkv", "mlp": "mlp_linear_1", "head": "logit_time"}
_ORDER = (
    "Emb",
    "layernorm",
    "atten_qkv",
    "atten_flash",
    "atten_core_qk",
    "atten_core_softmax",
    "atten_core_contex",
    "atten_linear",
    "layernorm2",
    "mlp_linear_1",
    "mlp_gelu",
    "mlp_linear_2",
    "layernorm_post",
    "logit_time",
)


def kernel_times(stage: SimaiStageWork, step: StepWork) -> KernelTimes:
    """Return the kernel times of a stage's first layer and of its ends; max, min and avg are the same prediction.

    param_time is half of the predicted update, because AICB adds its min and its avg. Raises InputError where layers differ,
    for which AICB has no sections.
    """
    layers = [work for work in stage.works if work.name == "layer"]
    if any(work.forward != layers[0].forward for work in layers):
        raise InputError("the stage has layers of several kinds, and a kernel-time file holds one; export .txt or .csv")
    times = dict.fromkeys(_ORDER, 0.0)
    for work in stage.works:
        if work.name == "layer":
            continue
        _add(times, work.forward, _HEAD if work.name == "head" else {}, _REST[work.name])
    for pieces, sections, rest in zip(
        split_blocks(layers[0].forward, False), (_ATTENTION, _MLP), ("attention", "mlp"), strict=True
    ):
        _add(times, pieces, sections, _REST[rest])
    times[PARAM_TIME] = sum(piece.ns for piece in step.update) / 2
    return KernelTimes(tuple(Kernel(name, *[round(ns / 1e3, 3)] * 3) for name, ns in times.items() if ns))


def _add(times: dict[str, float], pieces: Iterable[Piece], sections: dict[str, str], rest: str) -> None:
    for piece in pieces:
        if not piece.is_message:
            times[sections.get(piece.name, rest)] += piece.ns
