"""What a recipe of Megatron-Bridge's library sets, for a file that changes one.

Sources: NVIDIA-NeMo/Megatron-Bridge recipes/common.py (_pretrain_common), recipes/llama, recipes/qwen and recipes/glm,
perf_recipes/qwen, training/mixed_precision.py (MixedPrecisionConfig.setup), as read.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader

_DDP: Mapping[str, Any] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
#: Recipes of GLM have the native cross entropy.
_MODEL: Mapping[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "cross_entropy_fusion_impl": "te"}
_EXPERTS: Mapping[str, Any] = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "expert_tensor_parallel_size": 1}
#: What recipes of larger models set, and nothing but the recipe says.
_OF_LAYOUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel")
_BACKEND = "moe_flex_dispatcher_backend"
_PRECISION_DECIDES = (
    "ddp.grad_reduce_in_fp32 false holds if the recipe's mixed_precision has it too, as those of DeepSeek and Kimi have: "
    "bf16_mixed, which most recipes name, sets it to true; state mixed_precision"
)


def over_recipe(sections: Section, experts: bool, where: str) -> tuple[Section, tuple[str, ...]]:
    """Return the sections of a file with what the recipe sets where they do not, and notes on what was taken.

    experts: whether the recipe's model has them.
    """
    file = SectionReader(sections, "", where, set())
    of_experts = {**_EXPERTS, **_dispatcher(file.section("model"))} if experts else {}
    found, words, overlap = deepcopy(sections), list[str](), file.section("comm_overlap")
    for name, usual in (("ddp", _sharding(file)), ("model", {**_MODEL, **of_experts})):
        section = found[name] = found.get(name) or Section()
        missing = {key: value for key, value in usual.items() if key not in section}
        section.update(missing)
        words += [f"{key} {value}" for key, value in missing.items() if key not in overlap]  # which comm_overlap sets anew
    notes: tuple[str, ...] = (f"the file changes a recipe, which is taken to have {', '.join(words)}",) if words else ()
    unsaid = [key for key in _OF_LAYOUTS if key not in found["model"]]
    if unsaid:
        words_of = ", ".join(f"model.{key}" for key in unsaid)
        notes += (f"not stated, and taken as 1 or off, though the recipe may set it: {words_of}",)
    narrow = not file.section("ddp").flag("grad_reduce_in_fp32", True) and "mixed_precision" not in sections
    return found, (*notes, *((_PRECISION_DECIDES,) if narrow else ()))


def _sharding(file: SectionReader) -> Mapping[str, Any]:
    """Return the settings of ddp: without the distributed optimizer there are no parameters to gather."""
    stated = [file.section(name) for name in ("ddp", "optimizer")]
    keys = [section.flag("use_distributed_optimizer", False) for section in stated if "use_distributed_optimizer" in section]
    if not keys:
        return _DDP
    return {key: _DDP[key] for key in ("overlap_grad_reduce", *(["overlap_param_gather"] if any(keys) else []))}


def _dispatcher(model: SectionReader) -> Mapping[str, Any]:
    """Return what hands tokens to experts: a kernel of its own, the one that the file states, else hybrid-EP."""
    if "moe_token_dispatcher_type" in model:
        return {}
    stated = _BACKEND in model or model.flag("moe_enable_deepep", False)
    return {"moe_token_dispatcher_type": "flex"} | ({} if stated else {_BACKEND: "hybridep"})
