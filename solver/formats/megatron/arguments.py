"""Arguments of Megatron-LM's pretrain_gpt.py as a model and a run, with Megatron's defaults and what its flags imply.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py (defaults, validate_args), training/tokenizer and
megatron/core/transformer/transformer_config.py of autumn 2025, as read. A flag that is not known here is refused by name, and
so is one whose effect is not modelled: memory and time of such a run would be those of another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.megatron.earlier import as_today
from solver.formats.megatron.flags import OF_THE_RUN, OPTIMIZERS, RENAMED, SHARDING
from solver.formats.megatron.given import left_open, left_out, refuse, without_ignored
from solver.formats.megatron.model import model_of, vocabulary_left_open
from solver.formats.megatron.precision import gradients_of, precision_of, recipe_of, remains_only
from solver.formats.megatron.values import choice, share, whole
from solver.spec.choices import CUDA_GRAPH_MODULES, OFFLOAD_LEAST_ELEMENTS, OFFLOAD_MODULES
from solver.spec.pipeline_layout import chunk_layers

#: The release whose arguments these are, over Transformer Engine, with --transformer-impl local, and with Megatron-FSDP.
FRAMEWORK, LOCAL, FSDP = "megatron-core", "megatron-core local", "megatron-bridge"
#: Values of --cuda-graph-scope that mean whole layers.
_WHOLE_LAYERS = ("full", "full_iteration")


def sections_of_megatron(
    arguments: Mapping[str, Any], world_size: int, assumptions: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (model, run) of Megatron's arguments, in the keys of a case. arguments: flag (with its dashes) -> value or true.

    A world size that is only assumed (key ``world-size-assumed``) grows until the groups of experts divide it. Published
    arguments are those that their collector kept: a model with a gated MLP is then taken to train without dropout, unless the
    key ``complete`` says that absent flags have Megatron's default.
    Raises InputError for a flag that is unknown, whose effect is not modelled, or that has no meaning beside the others.
    """
    given = {name.lstrip("-"): value for name, value in arguments.items() if name.startswith("--") and value is not False}
    renamed = {RENAMED.get(flag, flag): value for flag, value in given.items()}
    flags = without_ignored(as_today(renamed, assumptions), assumptions)
    refuse(flags)
    assumptions += left_out(flags)
    if not arguments.get("complete"):
        flags |= left_open(flags, assumptions) | vocabulary_left_open(flags, assumptions)
    if "use-megatron-fsdp" in flags:
        assumptions.append("framework: megatron-bridge, whose Megatron-FSDP is estimated")
    model = model_of(flags)
    if arguments.get("world-size-assumed"):
        groups = _groups(flags)
        world_size = -(-world_size // groups) * groups
        assumptions.append(f"world_size: {world_size}, of which every group is a divisor")
    if arguments.get("complete") and "micro-batch-size" in flags and "global-batch-size" not in flags:
        # validate_args: one micro batch on each data-parallel rank
        sizes = [whole(flags, f"{name}-parallel-size", 1) for name in ("tensor-model", "context", "pipeline-model")]
        flags = {**flags, "global-batch-size": whole(flags, "micro-batch-size") * max(world_size // math.prod(sizes), 1)}
    return model, _run(flags, model, world_size)


def least_ranks(arguments: Mapping[str, Any]) -> int:
    """Return the least ranks that arguments (flags with their dashes) need; 1 where they are wrong, which reading them says."""
    try:
        return _groups({name.lstrip("-"): value for name, value in arguments.items()})
    except InputError:
        return 1


def _groups(flags: Mapping[str, Any]) -> int:
    """Return the least number of ranks that every group of the arguments divides."""
    tp, cp, pp, ep = (
        whole(flags, f"{name}-parallel-size", 1) for name in ("tensor-model", "context", "pipeline-model", "expert-model")
    )
    return pp * math.lcm(tp * cp, ep * whole(flags, "expert-tensor-parallel-size", tp) if "num-experts" in flags else 1)


def _run(flags: Mapping[str, Any], model: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    local = choice(flags, "transformer-impl", "transformer_engine", {"transformer_engine": FRAMEWORK, "local": LOCAL})
    run: dict[str, Any] = {"framework": local, "world_size": world_size}
    for flag, (key, default) in OF_THE_RUN.items():
        value = flags.get(flag, default)
        run[key] = value if isinstance(default, bool) else whole(flags, flag, default)
    tp, pp = run["tp"], run["pp"]
    if world_size % (tp * pp * run["cp"]):
        raise InputError(f"{world_size} ranks are no multiple of tp {tp} * pp {pp} * cp {run['cp']}")
    replicas = world_size // (tp * pp)
    run |= {
        "dp": replicas // run["cp"],
        "sequence_parallel": "sequence-parallel" in flags and tp > 1,  # validate_args turns it off otherwise
        "vpp": _chunks(flags, model["num_hidden_layers"], pp),
        "zero": int("use-distributed-optimizer" in flags or OPTIMIZERS[flags.get("optimizer", "adam")][1]),
        "grad_dtype": gradients_of(flags),
        "precision": precision_of(flags),
        **recipe_of(flags),
        "attention": _attention(flags),
        **({"fused_softmax": False} if "no-masked-softmax-fusion" in flags and _attention(flags) == "unfused" else {}),
        **({"rope_fusion": False} if "no-rope-fusion" in flags and model.get("position", "rope") == "rope" else {}),
        "tp_comm_overlap": "tp-comm-overlap" in flags and "sequence-parallel" in flags and tp > 1,
        "dropout": any(share(flags, flag, 0.1) > 0 for flag in ("attention-dropout", "hidden-dropout")),
        "gradient_accumulation_fusion": "no-gradient-accumulation-fusion" not in flags,
        "fused_norm": True,
        "deterministic": "deterministic-mode" in flags,
    }
    if run["cross_entropy_fusion"]:
        run["cross_entropy_fusion_impl"] = flags.get("cross-entropy-fusion-impl", "native")
    run |= _sharding(flags, run["zero"], replicas)
    if "no-overlap-p2p-communication" in flags:
        run["p2p_overlap"] = False
    if "first-last-layers-bf16" in flags:
        run |= {f"num_layers_at_{end}_in_bf16": whole(flags, f"num-layers-at-{end}-in-bf16", 1) for end in ("start", "end")}
    run |= _context(flags) | _optimizer(flags) | _graphs(flags)
    if "pipeline-model-parallel-layout" in flags:
        run |= _layout(str(flags["pipeline-model-parallel-layout"]), pp)
    if run["vpp"] == 1 or run["micro_batch_group"] == pp:
        run["micro_batch_group"] = 0  # which is Megatron's own
    run |= _recomputation(flags, run["vpp"])
    return {**run, **(_expert_run(flags, tp) if "num-experts" in flags else {})}


def _sharding(flags: Mapping[str, Any], zero: int, replicas: int) -> dict[str, Any]:
    """Return the ZeRO stage, the ranks of a shard, and Megatron-FSDP where that shards; zero: without it."""
    own, found = "num-distributed-optimizer-instances", {}
    if "use-megatron-fsdp" in flags:
        words = {name: name for name in SHARDING}
        zero = SHARDING[choice(flags, "data-parallel-sharding-strategy", "no_shard", words)]
        if zero == 3 and whole(flags, "pipeline-model-parallel-size", 1) > 1:
            raise InputError("--use-megatron-fsdp with optim_grads_params is described without pipeline stages only")
        found = {"framework": FSDP, "zero": zero}
    if not zero:
        return found
    instances = whole(flags, own, 1)
    if replicas % instances:
        raise InputError(f"Megatron's --{own} {instances} does not divide the {replicas} data-parallel ranks")
    return {**found, "zero_shard_size": replicas // instances}


def _recomputation(flags: Mapping[str, Any], chunks: int) -> dict[str, Any]:
    """Return what is recomputed; --recompute-num-layers counts the layers of a chunk.

    Source: megatron/core/transformer/transformer_block.py, _checkpointed_forward.
    """
    whole_experts = "moe-layer-recompute" in flags
    own = "selective" if whole_experts else "none"
    level = choice(flags, "recompute-granularity", own, {name: name for name in ("none", "selective", "full")})
    if "recompute-activations" in flags:  # validate_args sets the granularity, whatever is stated (earlier.py)
        level = "selective"
    if level == "full" and whole_experts:
        raise InputError("Megatron's --moe-layer-recompute does not run with --recompute-granularity full")
    if level == "selective" and (whole_experts or "recompute-modules" in flags):
        modules = re.findall(r"[a-z_]+", str(flags.get("recompute-modules", "core_attn")))
        return {"recompute": level, "recompute_modules": list(dict.fromkeys([*modules, *(["moe"] if whole_experts else [])]))}
    count = whole(flags, "recompute-num-layers", 1) if level == "full" else 1
    if level == "full" and flags.get("recompute-method") == "block":
        return {"recompute": level, "recompute_layers": count * chunks}
    return {"recompute": level, **({"recompute_group": count} if count > 1 else {})}


def _graphs(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is replayed from CUDA graphs: nothing, whole layers, or single modules."""
    how = str(flags.get("cuda-graph-impl", "local" if {"enable-cuda-graph", "external-cuda-graph"} & flags.keys() else "none"))
    if how == "none":
        return {}
    if how not in ("local", "transformer_engine"):
        raise InputError(f"Megatron's --cuda-graph-impl is {shown(how)}; known here are none, local, transformer_engine")
    scope = str(flags.get("cuda-graph-scope", flags.get("cuda-graph-modules", "")))
    modules = re.findall(r"<\w+\.(\w+)", scope) or re.findall(r"\w+", scope)  # a printed enumeration, or words
    unknown = [module for module in modules if module not in (*CUDA_GRAPH_MODULES, *_WHOLE_LAYERS)]
    if unknown:
        known = ", ".join(CUDA_GRAPH_MODULES)
        raise InputError(f"Megatron's CUDA graphs of {shown(unknown[0])} are not modelled; those of {known} are")
    whole = not modules or set(modules) & set(_WHOLE_LAYERS)
    return {"cuda_graphs": True, **({} if whole else {"cuda_graph_modules": "+".join(modules)})}


def _context(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return how context-parallel ranks exchange keys: --cp-comm-type, a2a+p2p with the sizes of its two groups."""
    words = {"p2p": "ring", "a2a": "a2a", "all_gather": "allgather", "allgather": "allgather", "a2a+p2p": "a2a+ring"}
    how = choice(flags, "cp-comm-type", "p2p", words)
    sizes = re.findall(r"\d+", str(flags.get("hierarchical-context-parallel-sizes", "")))
    if (how == "a2a+ring") != (len(sizes) == 2):
        raise InputError(
            "Megatron's --cp-comm-type a2a+p2p and --hierarchical-context-parallel-sizes (two numbers) need each other"
        )
    return {"cp_comm": how, **({"cp_a2a_size": int(sizes[0])} if sizes else {})}


def _optimizer(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return which optimizer it is, where its moments and the activations are, and how wide the moments are."""
    found: dict[str, Any] = {"optimizer": OPTIMIZERS[flags.get("optimizer", "adam")][0]}
    if "optimizer-cpu-offload" in flags:
        found["optimizer_offload_fraction"] = share(flags, "optimizer-offload-fraction", 1.0)
    if "cpu-offloading-num-layers" in flags:
        found["offload_layers"] = whole(flags, "cpu-offloading-num-layers")
    if "fine-grained-activation-offloading" in flags:
        found["offload_modules"] = _offloaded_modules(flags)
    widths = {str(flags.get(flag, "fp32")) for flag in ("exp-avg-dtype", "exp-avg-sq-dtype")}
    known = {"fp32": "remainder" if remains_only(flags) else "fp32", "bf16": "bf16", "fp16": "bf16", "fp8": "8bit"}
    if "use-precision-aware-optimizer" in flags:
        if len(widths) > 1 or not widths <= known.keys():
            got, can = ", ".join(sorted(widths)), ", ".join(known)
            raise InputError(f"Megatron's --exp-avg-dtype and --exp-avg-sq-dtype {got}: give one of {can} for both")
        found["optimizer_states"] = known[widths.pop()]
    return found


def _offloaded_modules(flags: Mapping[str, Any]) -> list[str]:
    """Return --offload-modules, of which everything leaves that Megatron's own least size lets go."""
    wanted = {"activation-offload-fraction": 1.0, "min-offloaded-tensor-size": OFFLOAD_LEAST_ELEMENTS}
    for flag, only in wanted.items():
        if flag in flags and float(flags[flag]) != only:
            raise InputError(f"Megatron's --{flag} {flags[flag]}: only {only:g}, its default, is modelled")
    if "offload-modules" not in flags:
        raise InputError(
            f"Megatron's --fine-grained-activation-offloading needs --offload-modules of {', '.join(OFFLOAD_MODULES)}"
        )
    return re.findall(r"[a-z_0-9]+", str(flags["offload-modules"]))


def _attention(flags: Mapping[str, Any]) -> str:
    """The local implementation has no fused kernel, whatever --use-flash-attn says (models/backends.py, LocalSpecProvider);
    Transformer Engine's "auto" takes one where there is one: of 16 bits."""
    if precision_of(flags) == "fp32" or flags.get("transformer-impl") == "local":
        return "unfused"
    kernels = {"auto": "flash", "flash": "flash", "fused": "flash", "unfused": "unfused", "local": "unfused"}
    return choice(flags, "attention-backend", "auto", kernels)


def _chunks(flags: Mapping[str, Any], layers: int, pp: int) -> int:
    """Return the chunks of a stage: stated, or from the layers of a chunk."""
    if "num-virtual-stages-per-pipeline-rank" in flags:
        return whole(flags, "num-virtual-stages-per-pipeline-rank") if pp > 1 else 1
    if "num-layers-per-virtual-pipeline-stage" not in flags or pp == 1:
        return 1
    each = whole(flags, "num-layers-per-virtual-pipeline-stage")
    layers += sum(f"account-for-{end}-in-pipeline-split" in flags for end in ("embedding", "loss"))  # validate_args
    if each < 1 or layers % (pp * each):
        raise InputError(f"Megatron's --num-layers-per-virtual-pipeline-stage {each} does not divide {layers} layers in {pp}")
    return layers // (pp * each)


def _expert_run(flags: Mapping[str, Any], tp: int) -> dict[str, Any]:
    dispatcher = str(flags.get("moe-token-dispatcher-type", "allgather"))
    if dispatcher == "flex":
        dispatcher = str(flags.get("moe-flex-dispatcher-backend", "deepep"))
    if "moe-enable-deepep" in flags and dispatcher != "deepep":
        raise InputError(
            f"Megatron's --moe-enable-deepep is refused beside the dispatcher {shown(dispatcher)}; it needs "
            "--moe-token-dispatcher-type flex, with its backend deepep"
        )
    known = {"alltoall": "alltoall", "allgather": "allgather", "deepep": "deepep", "hybridep": "hybridep"}
    if dispatcher not in known:
        raise InputError(f"Megatron's dispatcher {shown(dispatcher)} is not modelled; modelled are {', '.join(known)}")
    return {
        **_capacity(flags),
        **({"moe_imbalance": 1.0} if "moe-router-force-load-balancing" in flags else {}),
        "etp": whole(flags, "expert-tensor-parallel-size", tp),
        "moe_dispatcher": known[dispatcher],
        "moe_permute_fusion": "moe-permute-fusion" in flags,
        "moe_router_fusion": "moe-router-fusion" in flags,
        **({"moe_router_fp32": True} if "moe-router-dtype" in flags else {}),  # fp64 counts as fp32
        "moe_grouped_gemm": "moe-grouped-gemm" in flags,
    }


def _capacity(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the capacity of experts whose missing rows are padded; without padding, balanced experts fill at most theirs."""
    capacity, padded = flags.get("moe-expert-capacity-factor"), "moe-pad-expert-input-to-capacity" in flags
    if capacity is None or padded:
        return {} if capacity is None else {"moe_capacity_factor": capacity}
    number = isinstance(capacity, int | float) and not isinstance(capacity, bool)
    if number and capacity < 0:  # transformer_config.py: none
        return {}
    if not number or capacity < 1:
        raise InputError(
            f"Megatron's --moe-expert-capacity-factor {shown(capacity)} without --moe-pad-expert-input-to-capacity is not "
            "modelled, for it drops tokens of balanced experts too; a number of at least 1 is"
        )
    return {}


def _layout(text: str, pp: int) -> dict[str, Any]:
    """Return the keys of ``--pipeline-model-parallel-layout``; of a single stage it changes nothing."""
    return {"vpp": len(chunk_layers(text)) // pp, "pipeline_layout": text} if pp > 1 else {}
