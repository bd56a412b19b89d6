"""Sizes of a layout that contradict each other or the model, so that no run can have had them."""

from __future__ import annotations

from profiler.errors import require
from solver.spec.choices import V_SHAPED
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers, layers_of_chunks
from solver.spec.rules.experts import experts_divide
from solver.spec.rules.schedules import chunks_broken
from solver.spec.strategy import Strategy


def check_sizes(model: ModelSpec, s: Strategy) -> None:
    """Raise InputError where the sizes of a layout contradict each other or the model, so that no run can have had them."""
    require(size_rules(model, s))


def size_rules(model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of sizes: stages, chunks, layers, and groups of ranks."""
    layers, ranks = model.num_hidden_layers, s.tp * s.cp * s.dp
    ends = s.num_layers_in_first_pipeline_stage + s.num_layers_in_last_pipeline_stage
    chunks = chunks_broken(s.schedule, s.pp, s.vpp, s.num_micro_batches, s.micro_batch_group)
    assigned = assignment_broken(layers, s)
    experts, split = f"{model.num_experts} experts over {ranks} ranks", f"ep {s.ep} * etp {s.etp}"
    again = "" if assigned or chunks else _recomputation_broken(s)
    return (
        (not assigned, assigned),
        (not again, again),
        (s.pp <= layers, f"pp {s.pp} is more than the model's {layers} layers"),
        (ends + max(s.pp - 2, 0) <= layers, f"the end stages' {ends} layers leave too few of {layers} for pp {s.pp}"),
        (s.vpp == 1 or s.pp > 1, f"vpp {s.vpp} interleaves pipeline stages, but pp is 1"),
        (not chunks, chunks),
        (
            s.num_layers_at_start_in_bf16 + s.num_layers_at_end_in_bf16 <= layers,
            f"more layers are to stay in bf16 than the model's {layers}",
        ),
        (s.recompute_layers <= layers, f"recompute_layers {s.recompute_layers} is more than the model's {layers} layers"),
        (s.offload_layers < layers or not layers, f"offload_layers {s.offload_layers} leaves none of the {layers} layers here"),
        (s.wp == 1 or s.tp_mode == "isp", f"wp {s.wp} needs tp_mode isp, not {s.tp_mode}"),
        (
            experts_divide(model, ranks, s.ep, s.etp),
            f"{split} do not divide {experts}" if model.is_mixture_of_experts else f"{split}: {model.name} has no experts",
        ),
        (ranks % s.wp == 0, f"wp {s.wp} does not divide the {ranks} ranks of a stage"),
        (
            s.replicas % s.zero_shard_size == 0,
            f"zero_shard_size {s.zero_shard_size} does not divide the {s.replicas} ranks that share parameters",
        ),
    )


def assignment_broken(layers: int, s: Strategy) -> str:
    """Return what is wrong with the layers that a stated layout of the pipeline assigns, or ""."""
    chunks = chunk_layers(s.pipeline_layout) if s.pipeline_layout else ()
    if not chunks or (len(chunks), sum(chunks)) == (s.pp * s.vpp, layers):
        return ""
    return (
        f"pipeline_layout {s.pipeline_layout} assigns {sum(chunks)} layers to {len(chunks)} chunks, but there are {layers} "
        f"layers and pp {s.pp} * vpp {s.vpp}"
    )


def _recomputation_broken(s: Strategy) -> str:
    """Return what is wrong with the layers that are recomputed stage by stage, or ""."""
    counts = s.recomputed_of_stages
    if not counts:
        return ""
    what = f"recompute_stage_layers {s.recompute_stage_layers}"
    if s.recompute != "full" or s.recompute_layers >= 0:
        return f"{what} is of recompute full, and replaces recompute_layers"
    if not any(counts):
        return f"{what} recomputes nothing: give recompute none"
    if not s.pipeline_layout:
        return f"{what} needs pipeline_layout, which says what each stage holds"
    if len(counts) != s.pp:
        return f"{what} is of {len(counts)} stages, and pp is {s.pp}"
    held = [len(layers) for layers in layers_of_chunks(chunk_layers(s.pipeline_layout), s.pp, s.schedule in V_SHAPED)]
    if any(count > layers for count, layers in zip(counts, held, strict=True)):
        return f"{what}: the stages hold {'+'.join(map(str, held))} layers"
    return ""
