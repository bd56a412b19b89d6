"""Rules that a layout must meet before it can be estimated: which sizes divide which.

The search generates only layouts that meet them.
"""

from __future__ import annotations

from profiler.errors import InputError
from solver.spec.cluster import Cluster
from solver.spec.framework import CanRun, Framework
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

MAX_WORLD_SIZE = 1 << 20
#: Fewest tokens of one sequence per rank: a smaller share is not worth a split (kernels would be all launch time).
MIN_LOCAL_TOKENS = 128


def check_world(world: int, node: int) -> None:
    """Raise InputError unless ``world`` accelerators fill nodes of ``node`` accelerators (or a divisor of one node)."""
    if world > MAX_WORLD_SIZE:
        raise InputError(f"world_size is {world}; this program estimates up to {MAX_WORLD_SIZE} accelerators")
    if (node % world if world < node else world % node) != 0:
        raise InputError(
            f"world_size {world} does not fill nodes of {node} accelerators evenly; use a divisor or a multiple of {node}, "
            "or a cluster with another gpus_per_node"
        )


def heads_divide(model: ModelSpec, tp: int) -> bool:
    """Whether tp shards the query heads evenly, and shards or (where tp exceeds them) replicates key and value heads evenly."""
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    return heads % tp == 0 and (kv % tp == 0 or tp % kv == 0) and model.intermediate_size % tp == 0


def sequence_divides(seq_len: int, cp: int, split: int) -> bool:
    """Whether the sequence can be split over context- and tensor-parallel ranks.

    Context parallelism cuts a causal sequence into 2 * cp chunks; ``split`` ranks (tp, or 1 under MTP) share the rest.
    """
    chunks = 2 * cp if cp > 1 else 1
    long_enough = cp * split == 1 or seq_len // (cp * split) >= MIN_LOCAL_TOKENS
    return seq_len % (chunks * split) == 0 and long_enough


def heads_divide_by_cp(model: ModelSpec, cp_comm: str, tp: int, cp: int) -> bool:
    """Whether all-to-all context parallelism can shard a tensor rank's query heads again over cp ranks."""
    return cp_comm != "a2a" or model.num_attention_heads // tp % cp == 0


def tensor_parallel_runs(can_run: CanRun, model: ModelSpec, tp: int) -> bool:
    """Whether the framework runs this tensor-parallel size; kv heads are sharded, or copied where it can."""
    return tp == 1 or (bool(can_run.tp_modes) and (can_run.replicated_kv_heads or model.num_key_value_heads % tp == 0))


def pipeline_runs(can_run: CanRun, layers: int, pp: int, first: int = 0, last: int = 0) -> bool:
    """Whether the framework runs ``pp`` stages; ``first`` and ``last``: layers of the end stages (0: an even share)."""
    middle = pp - (first > 0) - (last > 0)
    even = middle > 0 and (layers - first - last) % middle == 0
    return pp == 1 or (can_run.pipeline and (even or can_run.uneven_stages))


def zero_runs(can_run: CanRun, zero: int, pp: int) -> bool:
    """Whether the framework runs this ZeRO stage with ``pp`` pipeline stages."""
    return zero in can_run.zero_stages and (zero < 2 or pp == 1)


def _framework_rules(framework: Framework, model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of what the release of a framework can run."""
    can, name, layers = framework.can_run, framework.name, model.num_hidden_layers
    modes = {mode.name.lower() for mode in can.tp_modes} | ({"fsp"} if framework.tensor_parallel.regathers_input else set())
    ends = s.num_layers_in_first_pipeline_stage, s.num_layers_in_last_pipeline_stage
    zero = f"ZeRO-{s.zero}" + (f" with a pipeline of {s.pp} stages" if s.zero > 1 and s.pp > 1 else "")
    return (
        (tensor_parallel_runs(can, model, s.tp), f"{name} does not run tp {s.tp} of {model.num_key_value_heads} kv heads"),
        (s.tp == s.wp == 1 or s.tp_mode in modes, f"{name} does not offer tp_mode {s.tp_mode}"),
        (s.cp == 1 or s.cp_comm in can.cp_comms, f"{name} does not offer context parallelism by {s.cp_comm}"),
        (pipeline_runs(can, layers, s.pp, *ends), f"{name} does not run {layers} layers in {s.pp} pipeline stages"),
        (s.vpp == 1 or can.interleaving, f"{name} does not interleave pipeline stages (vpp {s.vpp})"),
        (zero_runs(can, s.zero, s.pp), f"{name} does not offer {zero}"),
        (s.recompute in can.recompute, f"{name} does not offer recompute {s.recompute}"),
    )


def check_layout(model: ModelSpec, cluster: Cluster, s: Strategy) -> None:
    """Raise InputError with the first rule that an explicit layout breaks: what divides what, then what its framework runs."""
    check_world(s.world_size, cluster.gpus_per_node)
    replicas = s.tp * s.cp * s.dp // s.wp if s.tp_mode == "isp" else s.cp * s.dp
    split = 1 if s.tp_mode == "mtp" else s.tp
    layers = model.num_hidden_layers
    ends = s.num_layers_in_first_pipeline_stage + s.num_layers_in_last_pipeline_stage
    rules = (
        (heads_divide(model, s.tp), f"tp {s.tp} does not divide the model's heads and MLP width"),
        (sequence_divides(s.seq_len, s.cp, split), f"seq_len {s.seq_len} cannot be split by tp {s.tp} * cp {s.cp}"),
        (heads_divide_by_cp(model, s.cp_comm, s.tp, s.cp), f"cp {s.cp} by all-to-all does not divide the heads of tp {s.tp}"),
        (s.pp <= layers, f"pp {s.pp} is more than the model's {layers} layers"),
        (ends + max(s.pp - 2, 0) <= layers, f"the end stages' {ends} layers leave too few of {layers} for pp {s.pp}"),
        (s.vpp == 1 or s.pp > 1, f"vpp {s.vpp} interleaves pipeline stages, but pp is 1"),
        (s.vpp == 1 or layers % (s.pp * s.vpp) == 0, f"pp {s.pp} * vpp {s.vpp} does not divide {layers} layers"),
        (
            s.vpp == 1 or s.num_micro_batches % s.pp == 0,
            f"interleaving needs micro batches in multiples of pp {s.pp}, not {s.num_micro_batches}",
        ),
        (s.recompute_layers <= layers, f"recompute_layers {s.recompute_layers} is more than the model's {layers} layers"),
        (s.wp == 1 or s.tp_mode == "isp", f"wp {s.wp} needs tp_mode isp, not {s.tp_mode}"),
        (s.tp * s.cp * s.dp % s.wp == 0, f"wp {s.wp} does not divide the {s.tp * s.cp * s.dp} ranks of a stage"),
        (
            replicas > 0 and replicas % s.zero_shard_size == 0,
            f"zero_shard_size {s.zero_shard_size} does not divide the {replicas} ranks that share parameters",
        ),
    )
    for holds, broken in (*rules, *_framework_rules(framework_of(s.framework), model, s)):
        if not holds:
            raise InputError(broken)
