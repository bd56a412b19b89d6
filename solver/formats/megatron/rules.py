"""Rules of Megatron-LM's arguments, by flag.

Sources, as read: NVIDIA/Megatron-LM megatron/training/arguments.py, validate_args, of the times of Megatron-Core 0.15
(000c4ac) and 0.16; megatron-core 0.12 to 0.16: transformer/transformer_config.py, model_parallel_config.py and
optimizer/optimizer_config.py (__post_init__), parallel_state.py, pipeline_parallel/schedules.py,
transformer/pipeline_parallel_layer_layout.py, num_microbatches_calculator.py. What only some of these releases refuse is
refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from solver.formats.rule import Arguments, Rule, implies
from solver.spec.pipeline_layout import chunk_layers, predicted_layers

_START, _CONFIG, _PARALLEL = "validate_args in arguments.py", "transformer_config.py", "model_parallel_config.py"
_STATE, _OPTIMIZER, _LAYOUT = "parallel_state.py", "optimizer_config.py", "pipeline_parallel_layer_layout.py"
_SCHEDULES, _DISPATCH, _MOE = "schedules.py", "moe/token_dispatcher.py", "moe/moe_layer.py"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
#: NCCL's algorithms that give the same sums in every run.
ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def _tp(a: Arguments) -> int:
    return a.size("tensor-model-parallel-size")


def _pp(a: Arguments) -> int:
    return a.size("pipeline-model-parallel-size")


def _cp(a: Arguments) -> int:
    return a.size("context-parallel-size")


def _ep(a: Arguments) -> int:
    return a.size("expert-model-parallel-size")


def _etp(a: Arguments) -> int:
    return a.size("expert-tensor-parallel-size", _tp(a))


def _assigned(a: Arguments) -> tuple[int, ...]:
    """Layers of every chunk that a layout states."""
    text = a.text("pipeline-model-parallel-layout")
    return chunk_layers(text) if text else ()


def _predicted(a: Arguments) -> int:
    """Layers of multi-token prediction that a layout states."""
    return predicted_layers(a.text("pipeline-model-parallel-layout"))


def _chunks(a: Arguments) -> int:
    """Chunks of a stage: of a layout, stated, or from the layers of a chunk."""
    if _assigned(a):
        return max(len(_assigned(a)) // _pp(a), 1)
    if "num-layers-per-virtual-pipeline-stage" in a and "num-virtual-stages-per-pipeline-rank" not in a:
        return max(a.size("num-layers") // (_pp(a) * a.size("num-layers-per-virtual-pipeline-stage")), 1)
    return a.size("num-virtual-stages-per-pipeline-rank")


def _replicas(a: Arguments) -> int:
    return max(a.world // (_tp(a) * _pp(a) * _cp(a)), 1)


def _micro_batches(a: Arguments) -> int:
    return a.size("global-batch-size") // (a.size("micro-batch-size") * _replicas(a))


def _instances(a: Arguments) -> int:
    return a.size("num-distributed-optimizer-instances")


def _graphed(a: Arguments) -> bool:
    return a.text("cuda-graph-impl", "none") != "none"


def _groups(a: Arguments) -> int:
    return a.size("num-query-groups", a.size("num-attention-heads"))


def _linear(a: Arguments) -> bool:
    return a.text("experimental-attention-variant") == "gated_delta_net"


def _keys(a: Arguments) -> int:
    """Heads of keys of linear attention."""
    return a.size("linear-num-key-heads", 16)


def _ends(a: Arguments) -> int:
    """Stages whose layers are stated."""
    return ("decoder-first-pipeline-num-layers" in a) + ("decoder-last-pipeline-num-layers" in a)


def _counted(a: Arguments) -> int:
    """Embedding and loss that count as layers."""
    return ("account-for-embedding-in-pipeline-split" in a) + ("account-for-loss-in-pipeline-split" in a)


def _others_divide(a: Arguments) -> bool:
    """Whether the stages whose layers are not stated share the rest evenly, in whole chunks."""
    first, last = (a.size(f"decoder-{end}-pipeline-num-layers", 0) for end in ("first", "last"))
    rest, stages, chunks = a.size("num-layers") + _counted(a) - first - last, _pp(a) - _ends(a), _chunks(a)
    even = rest % (stages * chunks) == 0 if stages else rest == 0
    return even and first % chunks == 0 and last % chunks == 0


def _group_fits(a: Arguments) -> bool:
    group, count = a.size("microbatch-group-size-per-virtual-pipeline-stage", _pp(a)), _micro_batches(a)
    return _pp(a) <= group <= count and (count % group == 0 or count % group >= _pp(a))


def _offloaded(a: Arguments) -> list[str]:
    return a.text("offload-modules", "").split()


def _modules(a: Arguments) -> set[str]:
    return set(a.text("recompute-modules", "core_attn").split()) if a.text("recompute-granularity") == "selective" else set()


def _scope(a: Arguments) -> set[str]:
    return set(a.text("cuda-graph-scope").split()) if _graphed(a) else set()


def _product(sizes: str) -> int:
    """The product of numbers in a text; 0: there are none."""
    found = [int(word) for word in re.findall(r"\d+", sizes)]
    return math.prod(found) if found else 0


def _flex(a: Arguments) -> bool:
    return a.text("moe-token-dispatcher-type") == "flex"


def _recipe(a: Arguments) -> str:
    return a.text("fp8-recipe", "delayed")


def _muon(a: Arguments) -> bool:
    return "muon" in a.text("optimizer", "adam")


def _fused_attention(a: Arguments) -> bool:
    return "use-flash-attn" in a or a.text("attention-backend", "auto") in ("flash", "fused")


_SIZES = (
    Rule("the ranks are a multiple of tp * pp * cp", _STATE, lambda a: a.world % (_tp(a) * _pp(a) * _cp(a)) == 0),
    Rule("the ranks are a multiple of etp * ep * pp", _STATE,
         lambda a: implies("num-experts" in a, a.world % (_etp(a) * _ep(a) * _pp(a)) == 0)),
    Rule("--global-batch-size is a multiple of --micro-batch-size times the data-parallel ranks",
         "num_microbatches_calculator.py",
         lambda a: implies("global-batch-size" in a,
                           a.size("global-batch-size") % (a.size("micro-batch-size") * _replicas(a)) == 0)),
    Rule("--num-distributed-optimizer-instances divides the replicas and needs --use-distributed-optimizer", _STATE,
         lambda a: implies(_instances(a) > 1, "use-distributed-optimizer" in a
                           and _replicas(a) * _cp(a) % _instances(a) == 0)),
    Rule("--num-distributed-optimizer-instances divides the ranks that hold copies of the same experts", _STATE,
         lambda a: implies("num-experts" in a, a.world // (_etp(a) * _ep(a) * _pp(a)) % _instances(a) == 0)),
    Rule("tp divides --num-attention-heads", _CONFIG, lambda a: a.size("num-attention-heads") % _tp(a) == 0),
    Rule("tp divides --num-query-groups", _CONFIG,
         lambda a: "multi-latent-attention" in a or _groups(a) % _tp(a) == 0),
    Rule("2 * cp divides --seq-length", _START, lambda a: _cp(a) == 1 or a.size("seq-length") % (2 * _cp(a)) == 0),
    Rule("--max-position-embeddings is at least --seq-length", _START,
         lambda a: a.size("max-position-embeddings", 1 << 30) >= a.size("seq-length")),
    Rule("--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes whose product is cp", _START,
         lambda a: ("a2a+p2p" in a.text("cp-comm-type")) == ("hierarchical-context-parallel-sizes" in a)
         and _product(a.text("hierarchical-context-parallel-sizes")) in (0, _cp(a))),
    Rule("linear attention needs cp 1, a tp that divides --linear-num-key-heads, and these to divide the heads of values",
         _CONFIG, lambda a: implies(_linear(a), _cp(a) == 1 and _keys(a) % _tp(a) == 0
                                    and a.size("linear-num-value-heads", 32) % _keys(a) == 0)),
    Rule("linear attention excludes --deterministic-mode, in which it is computed without its kernels, as described here",
         "ssm/gated_delta_net.py", lambda a: not (_linear(a) and "deterministic-mode" in a)),
    Rule("--attention-output-gate excludes --multi-latent-attention", _CONFIG,
         lambda a: not {"attention-output-gate", "multi-latent-attention"} <= a.keys()),
    Rule("--multi-latent-attention excludes --group-query-attention", _START,
         lambda a: not ("multi-latent-attention" in a and "group-query-attention" in a)),
)  # fmt: skip
_PIPELINE = (
    Rule("the layers (with counted embedding and loss) divide into the stages and their chunks", _CONFIG,
         lambda a: bool(_assigned(a)) or _pp(a) == 1 or _others_divide(a)),
    Rule("interleaved stages need pp above 1", _START, lambda a: _chunks(a) == 1 or _pp(a) > 1),
    Rule("--pipeline-model-parallel-layout excludes --num-virtual-stages-per-pipeline-rank", _START,
         lambda a: not (_assigned(a) and "num-virtual-stages-per-pipeline-rank" in a)),
    Rule("pp divides the chunks of --pipeline-model-parallel-layout, which assigns all layers", _LAYOUT,
         lambda a: not _assigned(a) or (len(_assigned(a)) % _pp(a) == 0 and sum(_assigned(a)) == a.size("num-layers"))),
    Rule("--pipeline-model-parallel-layout holds as many m as --mtp-num-layers", _LAYOUT,
         lambda a: not _assigned(a) or _predicted(a) == a.size("mtp-num-layers", 0)),
    Rule("--pipeline-model-parallel-layout excludes stated and counted end stages", _CONFIG,
         lambda a: not _assigned(a) or not (_ends(a) or _counted(a))),
    Rule("stated end stages exclude counted ones", _CONFIG, lambda a: not (_ends(a) and _counted(a))),
    Rule("interleaving needs groups of pp micro batches or more, and a last one of at least pp", _SCHEDULES,
         lambda a: _chunks(a) == 1 or _pp(a) == 1 or _group_fits(a)),
    Rule("--defer-embedding-wgrad-compute needs pp above 1 and fused gradient accumulation", _PARALLEL,
         lambda a: implies("defer-embedding-wgrad-compute" in a, _pp(a) > 1 and "no-gradient-accumulation-fusion" not in a)),
)  # fmt: skip
_STATES = (
    Rule("--tp-comm-overlap needs --sequence-parallel", _START,
         lambda a: implies("tp-comm-overlap" in a, "sequence-parallel" in a)),
    Rule("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce", _START,
         lambda a: implies("overlap-param-gather" in a, {"use-distributed-optimizer", "overlap-grad-reduce"} <= a.keys())),
    Rule("--use-precision-aware-optimizer needs adam and --use-distributed-optimizer", _OPTIMIZER,
         lambda a: implies("use-precision-aware-optimizer" in a, "use-distributed-optimizer" in a and not _muon(a))),
    Rule("moments in fewer bits need --use-precision-aware-optimizer", _OPTIMIZER,
         lambda a: "use-precision-aware-optimizer" in a
         or {a.text(f"exp-avg-{moment}", "fp32") for moment in ("dtype", "sq-dtype")} == {"fp32"}),
    Rule("--main-grads-dtype other than fp32 needs --use-precision-aware-optimizer", _OPTIMIZER,
         lambda a: implies(a.text("main-grads-dtype", "fp32") != "fp32", "use-precision-aware-optimizer" in a)),
    Rule("--main-grads-dtype other than fp32 excludes --accumulate-allreduce-grads-in-fp32 with --bf16", _START,
         lambda a: implies({"bf16", "accumulate-allreduce-grads-in-fp32"} <= a.keys(),
                           a.text("main-grads-dtype", "fp32") == "fp32")),
    Rule("--optimizer-cpu-offload needs --use-precision-aware-optimizer", _START,
         lambda a: implies("optimizer-cpu-offload" in a, "use-precision-aware-optimizer" in a)),
    Rule("--optimizer-cpu-offload with --fp8-param-gather needs --fp8-recipe delayed", _START,
         lambda a: implies({"optimizer-cpu-offload", "fp8-param-gather"} <= a.keys(), _recipe(a) == "delayed")),
    Rule("--optimizer muon and dist_muon exclude --use-distributed-optimizer, --overlap-grad-reduce and --overlap-param-gather",
         _START, lambda a: not _muon(a) or a.keys().isdisjoint(
             ("use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"))),
    Rule("--optimizer muon and dist_muon need --ckpt-format torch", _START,
         lambda a: implies(_muon(a), a.text("ckpt-format", "torch_dist") == "torch")),
    Rule("--optimizer muon excludes --fp16", "optimizer/muon.py", lambda a: not (_muon(a) and "fp16" in a)),
    Rule(f"--deterministic-mode needs NCCL_ALGO to be one of {', '.join(ALGORITHMS)}", _START,
         lambda a: implies("deterministic-mode" in a, a.sets("NCCL_ALGO", *ALGORITHMS))),
    Rule("--deterministic-mode needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", "extensions/transformer_engine.py",
         lambda a: implies("deterministic-mode" in a, a.sets("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"))),
    Rule("--deterministic-mode excludes --cross-entropy-loss-fusion", _START,
         lambda a: not {"deterministic-mode", "cross-entropy-loss-fusion"} <= a.keys()),
    Rule("--attention-backend flash and fused, and --use-flash-attn, need --bf16 or --fp16", "extensions/transformer_engine.py",
         lambda a: implies(_fused_attention(a), not a.keys().isdisjoint(("bf16", "fp16")))),
    Rule("--attention-backend local needs --spec local", _START,
         lambda a: implies(a.text("attention-backend") == "local", a.text("spec") == "local")),
    Rule("NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN are as --attention-backend has them, all 1 for auto",
         "models/common/language_module/language_module.py", lambda a: all(
             a.sets(f"NVTE_{name.upper()}_ATTN", str(int(a.text("attention-backend", "auto") in (name, "auto"))))
             for name in ("flash", "fused", "unfused"))),
    Rule("--bf16 excludes --fp16", _START, lambda a: not {"bf16", "fp16"} <= a.keys()),
    Rule("--fp8-param-gather needs --fp8-format and --use-distributed-optimizer", _START,
         lambda a: implies("fp8-param-gather" in a, {"fp8-format", "use-distributed-optimizer"} <= a.keys())),
    Rule("--first-last-layers-bf16 excludes --fp8-recipe delayed", _CONFIG,
         lambda a: implies({"first-last-layers-bf16", "fp8-format"} <= a.keys(), _recipe(a) != "delayed")),
    Rule("layers at an end in bf16 are at most those of a stage", _CONFIG,
         lambda a: implies({"first-last-layers-bf16", "fp8-format"} <= a.keys(), max(
             a.size(f"num-layers-at-{end}-in-bf16") for end in ("start", "end")) <= a.size("num-layers") // _pp(a))),
)  # fmt: skip
_RECOMPUTATION = (
    Rule("--recompute-granularity full needs --recompute-method and -num-layers, selective excludes the latter", _CONFIG,
         lambda a: (a.text("recompute-granularity") == "full") == ("recompute-num-layers" in a)
         and implies("recompute-num-layers" in a, "recompute-method" in a)),
    Rule("--recompute-method needs --recompute-granularity full", _START,
         lambda a: implies("recompute-method" in a, a.text("recompute-granularity") == "full")),
    Rule("recomputing moe_act needs --moe-grouped-gemm", _CONFIG,
         lambda a: implies("moe_act" in _modules(a), "moe-grouped-gemm" in a)),
    Rule("recomputing mla_up_proj needs --multi-latent-attention", _CONFIG,
         lambda a: implies("mla_up_proj" in _modules(a), "multi-latent-attention" in a)),
    Rule("recomputing shared_experts excludes --moe-shared-expert-overlap", _CONFIG,
         lambda a: not ("shared_experts" in _modules(a) and "moe-shared-expert-overlap" in a)),
    Rule("recomputing layernorm or moe_act in fp8 needs another --fp8-recipe than delayed", _CONFIG,
         lambda a: implies("fp8-format" in a and _modules(a) & {"layernorm", "moe_act"}, _recipe(a) != "delayed")),
    Rule("--cpu-offloading-num-layers needs pp 1, fewer than all layers, no recomputation and no CUDA graphs", _CONFIG,
         lambda a: implies(a.size("cpu-offloading-num-layers", 0), _pp(a) == 1
                           and a.size("cpu-offloading-num-layers", 0) < a.size("num-layers")
                           and not _graphed(a) and "recompute-granularity" not in a)),
    Rule("--fine-grained-activation-offloading needs --offload-modules, and of these attn_proj core_attn", _CONFIG,
         lambda a: ("fine-grained-activation-offloading" in a) == ("offload-modules" in a)
         and implies("attn_proj" in _offloaded(a), "core_attn" in _offloaded(a))),
    Rule("--fine-grained-activation-offloading excludes --cpu-offloading-num-layers", _CONFIG,
         lambda a: not ("fine-grained-activation-offloading" in a and "cpu-offloading-num-layers" in a)),
    Rule("--cuda-graph-impl excludes --recompute-granularity full", _CONFIG,
         lambda a: not (_graphed(a) and a.text("recompute-granularity") == "full") or "full_iteration" in _scope(a)),
    Rule("--cuda-graph-scope moe_preprocess needs moe_router, which needs experts", _CONFIG,
         lambda a: implies("moe_preprocess" in _scope(a), "moe_router" in _scope(a))
         and implies("moe_router" in _scope(a), "num-experts" in a)),
    Rule("CUDA graphs of moe_router exclude recomputing moe", _CONFIG,
         lambda a: not ("moe_router" in _scope(a) and "moe" in _modules(a))),
)  # fmt: skip
_EXPERTS = (
    Rule("--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall", _CONFIG,
         lambda a: implies("moe-shared-expert-overlap" in a, a.text("moe-token-dispatcher-type", "allgather") == "alltoall")),
    Rule("experts in parallel, or in one grouped GEMM, are not trained with --fp16", _START,
         lambda a: implies("num-experts" in a and "fp16" in a, _ep(a) == 1 and "moe-grouped-gemm" not in a)),
    Rule("ep divides --num-experts", _START, lambda a: _ep(a) == 1 or a.size("num-experts") % _ep(a) == 0),
    Rule("--overlap-moe-expert-parallel-comm needs ep above 1 and the dispatcher alltoall or flex", _CONFIG,
         lambda a: implies("overlap-moe-expert-parallel-comm" in a,
                           _ep(a) > 1 and a.text("moe-token-dispatcher-type", "allgather") in ("alltoall", "flex"))),
    Rule("--overlap-moe-expert-parallel-comm excludes full recomputation and --moe-shared-expert-overlap", _CONFIG,
         lambda a: implies("overlap-moe-expert-parallel-comm" in a, a.text("recompute-granularity") != "full"
                           and "moe-shared-expert-overlap" not in a)),
    Rule("--overlap-moe-expert-parallel-comm with pp above 1 needs interleaved stages", _CONFIG,
         lambda a: implies("overlap-moe-expert-parallel-comm" in a, _pp(a) == 1 or _chunks(a) > 1)),
    Rule("--overlap-moe-expert-parallel-comm allows one layer of multi-token prediction, with pp above 1", _CONFIG,
         lambda a: implies("overlap-moe-expert-parallel-comm" in a and "mtp-num-layers" in a,
                           a.size("mtp-num-layers") == 1 and _pp(a) > 1)),
    Rule("--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm", _CONFIG,
         lambda a: implies("delay-wgrad-compute" in a, "overlap-moe-expert-parallel-comm" in a)),
    Rule("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor, and another backend than deepep", _CONFIG,
         lambda a: implies("moe-pad-expert-input-to-capacity" in a, "moe-expert-capacity-factor" in a
                           and not (_flex(a) and a.text("moe-flex-dispatcher-backend", "deepep") == "deepep"))),
    Rule("--moe-token-dispatcher-type flex needs etp * ep above 1", _DISPATCH,
         lambda a: implies("num-experts" in a and _flex(a), _etp(a) * _ep(a) > 1)),
    Rule("experts with tp above 1 need --sequence-parallel", _MOE,
         lambda a: implies("num-experts" in a and _tp(a) > 1, "sequence-parallel" in a)),
    Rule("experts with biases need etp 1", _CONFIG,
         lambda a: implies("num-experts" in a and "disable-bias-linear" not in a, _etp(a) == 1)),
    Rule("shared experts need --disable-bias-linear", "moe/shared_experts.py",
         lambda a: implies("moe-shared-expert-intermediate-size" in a, "disable-bias-linear" in a)),
    Rule("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid", _CONFIG,
         lambda a: implies("moe-router-enable-expert-bias" in a, a.text("moe-router-score-function") == "sigmoid")),
    Rule("--moe-router-topk 1 with softmax needs --moe-router-pre-softmax, or sinkhorn", _CONFIG,
         lambda a: implies("num-experts" in a and a.size("moe-router-topk", 2) == 1
                           and a.text("moe-router-score-function", "softmax") == "softmax",
                           "moe-router-pre-softmax" in a
                           or a.text("moe-router-load-balancing-type", "aux_loss") == "sinkhorn")),
    Rule("--moe-router-group-topk needs --moe-router-num-groups, as many or more, that divide the experts", _CONFIG,
         lambda a: implies("moe-router-group-topk" in a,
                           a.size("moe-router-group-topk", 0) <= a.size("moe-router-num-groups", 0)
                           and a.size("num-experts") % a.size("moe-router-num-groups") == 0)),
    Rule("--moe-ffn-hidden-size needs --num-experts", _CONFIG,
         lambda a: implies("moe-ffn-hidden-size" in a, "num-experts" in a)),
    Rule("multi-token prediction recomputes full and uniform one layer at a time", "multi_token_prediction.py",
         lambda a: implies("mtp-num-layers" in a and a.text("recompute-granularity") == "full"
                           and a.text("recompute-method") == "uniform", a.size("recompute-num-layers") == 1)),
    Rule("multi-token prediction needs rotary positions or none", _START,
         lambda a: implies("mtp-num-layers" in a, a.text("position-embedding-type", "learned_absolute") in ("rope", "none"))),
)  # fmt: skip
_ENVIRONMENT = (
    Rule("tp or cp above 1 need CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell", _START,
         lambda a: _tp(a) * _cp(a) == 1 or not {"use-megatron-fsdp", "overlap-moe-expert-parallel-comm"}.isdisjoint(a)
         or a.sets(_CONNECTIONS, "1")),
    Rule("--use-megatron-fsdp needs CUDA_DEVICE_MAX_CONNECTIONS above 1", _START,
         lambda a: implies("use-megatron-fsdp" in a, a.environment.get(_CONNECTIONS) != "1")),
    Rule("--use-megatron-fsdp needs --ckpt-format fsdp_dtensor", _START,
         lambda a: implies("use-megatron-fsdp" in a, a.text("ckpt-format", "torch_dist") == "fsdp_dtensor")),
    Rule("--cuda-graph-scope full_iteration needs --no-check-for-nan-in-loss-and-grad", _START,
         lambda a: implies("full_iteration" in a.text("cuda-graph-scope"), "no-check-for-nan-in-loss-and-grad" in a)),
)  # fmt: skip
RULES = (*_SIZES, *_PIPELINE, *_STATES, *_RECOMPUTATION, *_EXPERTS, *_ENVIRONMENT)
#: What Megatron-Core itself checks, whoever starts it.
CORE = tuple(rule for rule in RULES if rule.source != _START)
#: Flag -> the first Megatron-Core whose configuration has it, where that is not 0.12.
SINCE = {
    "pipeline-model-parallel-layout": "0.13", "delay-wgrad-compute": "0.14", "overlap-moe-expert-parallel-comm": "0.14",
    "cuda-graph-impl": "0.15", "fp4-format": "0.15",
    "cuda-graph-scope": "0.16", "moe-flex-dispatcher-backend": "0.16", "optimizer": "0.16",
    "fine-grained-activation-offloading": "0.16", "window-attn-skip-freq": "0.16", "softmax-type": "0.16",
    "no-rope-freq": "0.16", "activation-func-clamp-value": "0.16", "experimental-attention-variant": "0.16",
    "attention-output-gate": "0.16", "moe-shared-expert-gate": "0.16",
}  # fmt: skip


def first_release(flags: Mapping[str, Any]) -> str:
    """Return the first Megatron-Core, from 0.12, whose arguments all of these flags are."""
    modules = ["0.14"] if "shared_experts" in str(flags.get("recompute-modules", "")) else []
    modules += ["0.16"] if "E" in str(flags.get("hybrid-override-pattern", "")) else []
    return max([since for flag, since in SINCE.items() if flag in flags] + modules, default="0.12")
