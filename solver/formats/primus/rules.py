"""Rules of Primus beside those of Megatron-LM.

Source: AMD-AGI/Primus, validate_arguments in primus/backends/megatron/core/pipeline_parallel/zerobubble/utils.py, as read in
2026.
"""

from __future__ import annotations

from solver.formats.rule import Arguments, Rule, implies

_ZERO_BUBBLE = "validate_arguments in zerobubble/utils.py"


def _zero_bubble(a: Arguments) -> bool:
    return a.on("patch_zero_bubble")


def _v_shaped(a: Arguments) -> bool:
    return _zero_bubble(a) and a.on("zero_bubble_v_schedule")


RULES = (
    Rule(
        "zero bubble needs untie_embeddings_and_output_weights",
        _ZERO_BUBBLE,
        lambda a: implies(_zero_bubble(a), a.on("untie_embeddings_and_output_weights", True)),
    ),
    Rule(
        "zero bubble excludes overlap_grad_reduce and overlap_param_gather",
        _ZERO_BUBBLE,
        lambda a: implies(_zero_bubble(a), not a.on("overlap_grad_reduce") and not a.on("overlap_param_gather")),
    ),
    Rule(
        "zero bubble excludes defer_embedding_wgrad_compute",
        _ZERO_BUBBLE,
        lambda a: implies(_zero_bubble(a), not a.on("defer_embedding_wgrad_compute")),
    ),
    Rule(
        "zero bubble needs pipeline_model_parallel_size above 1",
        _ZERO_BUBBLE,
        lambda a: implies(_zero_bubble(a), a.size("pipeline_model_parallel_size") > 1),
    ),
    Rule(
        "V-shaped schedules need an even number of layers on every stage",
        _ZERO_BUBBLE,
        lambda a: implies(_v_shaped(a), a.size("num_layers", 0) % (2 * a.size("pipeline_model_parallel_size")) == 0),
    ),
    Rule(
        "V-shaped schedules exclude num_layers_per_virtual_pipeline_stage",
        _ZERO_BUBBLE,
        lambda a: not (_v_shaped(a) and "num_layers_per_virtual_pipeline_stage" in a),
    ),
)
