"""Rules that a layout must meet before it can be estimated: which sizes divide which.

The search generates only layouts that meet them.
"""

from __future__ import annotations

from profiler.errors import InputError, require
from solver.spec.alignment import quantised_broken
from solver.spec.bounds import WHOLE_NUMBERS
from solver.spec.can_run import CanRun
from solver.spec.choices import V_SHAPED, TpMode
from solver.spec.cluster import Cluster
from solver.spec.division import (
    MIN_LOCAL_TOKENS,
    context_runs,
    heads_divide,
    not_divided,
    not_piped,
    sequence_divides,
    tensor_parallel_runs,
)
from solver.spec.framework import Framework
from solver.spec.frameworks.for_model import framework_for
from solver.spec.model import ModelSpec
from solver.spec.rules.adapters import adapter_rules
from solver.spec.rules.context import context_exchange_broken, heads_divide_by_cp, heads_of_rank
from solver.spec.rules.deferral import NO_DRAIN, deferral_rules, deferral_runs
from solver.spec.rules.experts import expert_rules, mode_broken
from solver.spec.rules.graphs import graph_rules, graphs_offered
from solver.spec.rules.kernels import attention_rules, fusion_rules, loss_rules, projection_rule
from solver.spec.rules.linears import linear_rules
from solver.spec.rules.offload import check_host, offload_rules
from solver.spec.rules.optimizers import muon_mode_broken, muon_shards, optimizer_rules, zero_broken
from solver.spec.rules.quantised import amax_rule, ends_rule, gather_rule
from solver.spec.rules.recomputation import LAYERS_ALONE, groups_rule, module_rules
from solver.spec.rules.schedules import schedule_broken, schedule_rules
from solver.spec.rules.sizes import assignment_broken, size_rules
from solver.spec.rules.state_space import state_space_rules
from solver.spec.rules.states import state_rules, zero_runs
from solver.spec.strategy import Strategy

MAX_WORLD_SIZE = WHOLE_NUMBERS["world_size"][1]


def check_world(world: int, node: int) -> None:
    """Raise InputError unless ``world`` GPUs fill nodes of ``node`` GPUs (or a divisor of one node)."""
    if world > MAX_WORLD_SIZE:
        raise InputError(f"world_size is {world}; this program estimates up to {MAX_WORLD_SIZE} GPUs")
    if (node % world if world < node else world % node) != 0:
        raise InputError(
            f"world_size {world} does not fill nodes of {node} GPUs evenly; use a divisor or a multiple of {node}, "
            "or a cluster with another gpus_per_node"
        )


def stages_broken(can_run: CanRun, layers: int, s: Strategy) -> str:
    """Return what is wrong with the division of the layers into stages and chunks, or "".

    Rules of Megatron-Core's transformer_config.py and transformer_block.py: stated end stages and counted ends exclude each
    other; what is left over divides by the other stages, and every stage by its chunks.
    """
    if s.pipeline_layout:
        return _layout_broken(can_run, layers, s)
    first, last = s.num_layers_in_first_pipeline_stage, s.num_layers_in_last_pipeline_stage
    counted = s.counts_ends
    others, left = s.pp - (first > 0) - (last > 0), layers + counted - first - last
    even = left % others == 0 if others else left == 0
    if s.schedule in V_SHAPED and (first or last):
        return f"divides the layers evenly under schedule {s.schedule}; leave num_layers_in_first_pipeline_stage and _last_ out"
    if s.pp == 1:
        return "num_layers_in_first_pipeline_stage and _last_ need pp above 1" if first or last else ""
    if not can_run.pipeline:
        return f"has no pipeline parallelism, so it does not run {layers} layers in {s.pp} pipeline stages"
    if counted and (first or last):
        return "layers of an end stage are stated, and account_for_embedding or _loss_in_pipeline_split: give one of them"
    if (first or last) and not (can_run.stated_end_stages or can_run.uneven_stages):
        return "does not offer num_layers_in_first_pipeline_stage and _last_"
    if counted and not can_run.counts_embedding_and_loss:
        return "does not offer account_for_embedding_in_pipeline_split and _loss_"
    if not even and (s.vpp > 1 or not others or not can_run.uneven_stages):
        ends = f" and {counted} counted as such" * (counted > 0)
        ends += f", {first} of them on the first" * (first > 0) + f", {last} of them on the last" * (last > 0)
        return f"does not run {layers} layers{ends} in {s.pp} pipeline stages"
    if s.schedule in V_SHAPED and not even:
        return f"divides the layers evenly under schedule {s.schedule}, and {layers} do not divide by {s.pp}"
    if any(size % s.vpp for size in (first, last, left // max(others, 1))):
        return f"does not divide the layers of {s.pp} pipeline stages into {s.vpp} chunks each"
    return ""


def _layout_broken(can_run: CanRun, layers: int, s: Strategy) -> str:
    """Return what is wrong with a stated layout of the pipeline, or ""."""
    if not can_run.pipeline_layout:
        return "does not offer pipeline_layout"
    if s.pp > 1 and s.schedule not in can_run.laid_out:
        return f"does not offer pipeline_layout under schedule {s.schedule}"
    if wrong := assignment_broken(layers, s):
        return wrong
    if s.num_layers_in_first_pipeline_stage or s.num_layers_in_last_pipeline_stage or s.counts_ends:
        return "pipeline_layout says what every stage holds; leave out the layers of end stages and account_for_..._split"
    return ""


def _framework_rules(framework: Framework, model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of what the release of a framework can run."""
    return (
        *_division_rules(framework, model, s),
        *state_rules(framework, s),
        *schedule_rules(framework, s),
        *_update_rules(framework, model, s),
        *expert_rules(framework, model, s),
        *linear_rules(framework, model, s),
        *state_space_rules(framework, model, s),
        *fusion_rules(framework, model, s),
    )


def _division_rules(framework: Framework, model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the sizes of tensor, context and pipeline parallelism."""
    can, name, layers = framework.can_run, framework.name, model.num_hidden_layers
    modes = {mode.name.lower() for mode in can.tp_modes} | ({"fsp"} if framework.tensor_parallel.regathers_input else set())
    stages, wrong, whole = stages_broken(can, layers, s), "", not_piped(can, model)
    return (
        (
            tensor_parallel_runs(can, model, s.tp),
            f"{name} does not run tp {s.tp} of {model.num_key_value_heads} kv heads"
            + " and linear attention" * model.has_linear_attention
            + " and experts" * (model.is_mixture_of_experts and not can.experts_beside_tp)
            + f" ({can.gathers_qkv_since} does, by gathering q, k and v, which is not modelled)"
            * bool(can.gathers_qkv_since and s.tp > model.num_key_value_heads),
        ),
        (s.tp == s.wp == 1 or s.tp_mode in modes, f"{name} does not offer tp_mode {s.tp_mode}"),
        (s.cp == 1 or s.cp_comm in can.cp_comms, f"{name} does not offer context parallelism by {s.cp_comm}"),
        (context_runs(can, model, s.cp), f"{name} does not run {not_divided(model)} with context parallelism (cp {s.cp})"),
        (not stages, f"{name}: {stages}"),
        (s.pp == 1 or not whole, f"{name} has no pipelines of models with {whole}"),
        (
            s.vpp == 1 or s.schedule in V_SHAPED or "interleaved" in can.schedules,
            f"{name} does not interleave pipeline stages (vpp {s.vpp})",
        ),
        (s.pp == 1 or not (wrong := schedule_broken(framework, model, s, s.schedule, s.zero)), wrong),
        (
            s.cp == 1 or TpMode[s.tp_mode.upper()] in can.context_modes,
            f"{name} does not run cp {s.cp} with tp_mode {s.tp_mode}",
        ),
    )


def _update_rules(framework: Framework, model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the optimizer and its states, of recomputed modules, graphs and precision."""
    can, name = framework.can_run, framework.name
    zero = f"ZeRO-{s.zero}" + (f" with a pipeline of {s.pp} stages" if s.zero > 1 and s.pp > 1 else "")
    return (
        (bool(zero_runs(can, s.zero, s.pp)), f"{name} does not offer {zero}"),
        *adapter_rules(framework, model, s),
        *deferral_rules(framework, s),
        (deferral_runs(s.defer_embedding_wgrad_compute, s.pp, s.schedule), NO_DRAIN),
        projection_rule(framework, s),
        ends_rule(framework, s),
        *optimizer_rules(framework, s),
        (not (wrong := zero_broken(s, s.zero)), wrong),
        (
            bool(muon_shards(s, s.zero, s.zero_shard_size, s.dp * s.cp)),
            f"optimizer muon assigns matrices to all {s.dp * s.cp} replicas, not to {s.zero_shard_size} (zero_shard_size)",
        ),
        (not (wrong := muon_mode_broken(s, s.tp_mode)), wrong),
        (s.recompute in can.recompute, f"{name} does not offer recompute {s.recompute}"),
        (can.recomputes_by_stage or not s.recompute_stage_layers, f"{name} recomputes as many layers on every stage"),
        groups_rule(framework, model, s),
        (
            s.recompute_group == 1 or s.recomputes_all,
            f"recompute_group {s.recompute_group} is of recompute full of all layers",
        ),
        *(
            (module in can.recompute_modules, f"{name} does not offer to recompute {module} alone")
            for module in s.modules_recomputed
        ),
        *graphs_offered(framework, s),
        gather_rule(framework, s),
        amax_rule(framework, s),
    )


def check_layout(model: ModelSpec, cluster: Cluster, s: Strategy) -> None:
    """Raise InputError with the first rule that an explicit layout breaks: what divides what, then what its framework runs."""
    check_world(s.world_size, cluster.gpus_per_node)
    check_host(cluster, s)
    check_rules(model, s)


def _undivided(s: Strategy, split: int) -> str:
    """Return why a sequence cannot be split over ``split`` tensor- and the context-parallel ranks."""
    if sequence_divides(s.seq_len, s.cp, split, least=1):
        return f"seq_len {s.seq_len} over tp {s.tp} * cp {s.cp}: fewer than {MIN_LOCAL_TOKENS} tokens a rank are not estimated"
    return f"seq_len {s.seq_len} cannot be split by tp {s.tp} * cp {s.cp}"


def _heads_undivided(model: ModelSpec, s: Strategy) -> str:
    """Return whose heads all-to-alls of context parallelism cannot divide: those of a tensor-parallel rank."""
    queries, keys = heads_of_rank(model, s.tp)
    return f"cp {s.cp} by {s.cp_comm} does not divide the heads of tp {s.tp}, {queries} of queries and {keys} of keys a rank"


def rules_broken(model: ModelSpec, s: Strategy) -> list[str]:
    """Return every rule of its model and its framework that a layout breaks, on whatever cluster, in words."""
    framework = framework_for(s.framework, model)
    rules = (*_model_rules(framework, model, s), *_framework_rules(framework, model, s))
    return [broken for holds, broken in rules if not holds]


def check_rules(model: ModelSpec, s: Strategy) -> None:
    """Raise InputError with the first rule of its model and its framework that a layout breaks, on whatever cluster."""
    require(_model_rules(framework_for(s.framework, model), model, s))
    check_framework(model, s)


def _model_rules(framework: Framework, model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of what divides what, and of what runs together under any framework."""
    split = 1 if s.tp_mode == "mtp" else s.tp
    unmet, unrun = context_exchange_broken(model, s) if s.cp > 1 else "", mode_broken(model, s.tp_mode, s.tp)
    return (
        (heads_divide(model, s.tp), f"tp {s.tp} does not divide the model's heads and MLP width"),
        (not (odd := quantised_broken(model, framework.can_run, s.precision, s.tp)), odd),
        (sequence_divides(s.seq_len, s.cp, split), _undivided(s, split)),
        (heads_divide_by_cp(model, s, s.tp, s.cp), _heads_undivided(model, s)),
        *size_rules(model, s),
        *module_rules(framework, model, s),
        *graph_rules(model, s),
        *offload_rules(model, s),
        *attention_rules(framework, s),
        *loss_rules(framework, s),
        (s.pp == 1 or not s.offload_layers, LAYERS_ALONE),
        (not unrun, unrun),
        (not unmet, f"cp {s.cp} by {s.cp_comm} does not work {unmet}"),
    )


def check_framework(model: ModelSpec, s: Strategy) -> None:
    """Raise InputError with the first rule of its framework that a layout breaks."""
    require(_framework_rules(framework_for(s.framework, model), model, s))
