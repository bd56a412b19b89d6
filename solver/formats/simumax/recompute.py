"""SimuMax's switches of recomputation as this program's: whole layers, or modules of the first layers of every stage."""

from __future__ import annotations

from typing import Any

from profiler.errors import InputError
from solver.formats.simumax.configs import ModelConfig, StrategyConfig

SWITCHES = ("attn_recompute", "mla_rms_recompute", "mlp_recompute", "mlp_rms_recompute")
#: The combinations of SWITCHES that SimuMax's search tries.
SEARCHED = ((True, True, True, True), (True, True, False, False), (False, False, True, True))
_MEGATRON_MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe")
_NONE: dict[str, Any] = {"recompute": "none"}
_BOTH_NORMS = "both norms of a layer are recomputed, where the switches name one of them"
_PARTS = "norms that are parts of linears, as Megatron-Core's are, are recomputed with these only"


def recompute_of(config: StrategyConfig, model: ModelConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (fields of the layout, notes).

    Raises InputError for modules that cannot be recomputed on their own here.
    """
    granularity, layers = config.recompute_granularity, config.recompute_layer_num
    if config.megatron_recompute and granularity != "selective_recompute":
        raise InputError("strategy field megatron_recompute needs recompute_granularity 'selective_recompute'")
    if not config.enable_recompute or granularity is None or not layers:
        return _NONE, ()
    if granularity == "full_block":
        return {"recompute": "full", "recompute_layers": layers}, ()
    if granularity == "attn_only":
        raise InputError(
            "strategy field recompute_granularity is 'attn_only', which is not modelled: the projections of attention are "
            "recomputed with their whole layer; give full_block, sdp_only or selective_recompute"
        )
    modules, notes = _modules(config, model, granularity)
    if "layernorm" in modules and not model.has_experts and model.attention_type != "mla":
        modules, notes = [name for name in modules if name != "layernorm"], (_PARTS,)
    if not modules:
        return _NONE, ()
    return {"recompute": "selective", "recompute_layers": layers, "recompute_modules": "+".join(modules)}, notes


def _modules(config: StrategyConfig, model: ModelConfig, granularity: str) -> tuple[list[str], tuple[str, ...]]:
    if granularity == "sdp_only":
        return ["core_attn"], ()
    if granularity == "mlp_only":
        return ["layernorm", "mlp", *(["moe"] if model.has_experts else [])], (_BOTH_NORMS,)
    if config.megatron_recompute:
        return _megatron_modules(config), ()
    return _switched(config, model)


def _megatron_modules(config: StrategyConfig) -> list[str]:
    given = list(config.megatron_recompute_modules or ())
    unknown = [name for name in given if name not in _MEGATRON_MODULES]
    if unknown or not given:
        what = f"has {unknown[0]!r}" if unknown else "is empty"
        raise InputError(f"strategy field megatron_recompute_modules {what}; name some of {', '.join(_MEGATRON_MODULES)}")
    if any(getattr(config, name) for name in SWITCHES):
        raise InputError(f"strategy field megatron_recompute excludes {', '.join(SWITCHES)}")
    return given


def _switched(config: StrategyConfig, model: ModelConfig) -> tuple[list[str], tuple[str, ...]]:
    """Return the modules that SimuMax's own switches name."""
    if config.mlp_recompute and model.has_experts:
        raise InputError(
            "strategy field mlp_recompute is true, which is not modelled for experts: their GEMMs are recomputed with the "
            "exchange of their tokens; give full_block, or megatron_recompute_modules ['moe'] or ['moe_act']"
        )
    for needs, needed in (("mla_rms_recompute", "attn_recompute"), ("mlp_rms_recompute", "mlp_recompute")):
        if getattr(config, needs) and not getattr(config, needed):
            raise InputError(f"strategy field {needs} needs {needed}")
    modules = []
    if config.attn_recompute:
        modules += ["core_attn", *(["mla_up_proj"] if model.attention_type == "mla" else [])]
    if config.mlp_recompute:
        modules.append("mlp")
    norms = (config.mla_rms_recompute, config.mlp_rms_recompute)
    if any(norms):
        modules.append("layernorm")
    return modules, (_BOTH_NORMS,) if any(norms) and not all(norms) else ()
