"""A layout as DeepSpeed's JSON and the script of Megatron-DeepSpeed that trains with it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from profiler.errors import InputError, require
from solver.formats.deepspeed.names import GRADIENTS, NORMS, PRECISIONS
from solver.formats.launch.torchrun import torchrun
from solver.formats.megatron.arguments import FRAMEWORK
from solver.formats.megatron.export import megatron_arguments
from solver.formats.megatron.untimed import carried as megatron_carried
from solver.spec.dropout import applies_dropout
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

VERSION = "DeepSpeed 0.10 and later with Megatron-DeepSpeed"
#: Arguments of Megatron-LM of today of which the JSON decides, or which say what the fork always does or does by another name.
_WITHOUT = (
    "use-distributed-optimizer",
    "attention-backend",
    "position-embedding-type",
    "group-query-attention",
    "num-query-groups",
    "normalization",
    "transformer-impl",
    "grad-reduce-in-bf16",
    "tokenizer-type",
    "context-parallel-size",
    "mock-data",
    "recompute-modules",
    "optimizer-cpu-offload",
    "optimizer-offload-fraction",
    "use-precision-aware-optimizer",
    "use-rope-scaling",
    "rope-scaling-factor",
)
_RENAMED = {"rotary-base": "rotary-position-embeddings-theta", "norm-epsilon": "layernorm-epsilon"}
#: Arguments of Megatron-DeepSpeed (megatron/arguments.py at 207b2d5) among those that a layout and a model decide.
_ARGUMENTS = frozenset(
    (
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "num-key-value-heads",
        "kv-channels",
        "max-position-embeddings",
        "use-rotary-position-embeddings",
        "rotary-position-embeddings-theta",
        "rotary-percent",
        "make-vocab-size-divisible-by",
        "normalization",
        "layernorm-epsilon",
        "squared-relu",
        "swiglu",
        "disable-bias-linear",
        "untie-embeddings-and-output-weights",
        "attention-dropout",
        "hidden-dropout",
        "micro-batch-size",
        "global-batch-size",
        "train-iters",
        "lr",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "use-flash-attn-v2",
        "optimizer",
        "no-pipeline-parallel",
        "sequence-parallel",
        "no-gradient-accumulation-fusion",
        "fp16",
        "bf16",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "vocab-size",
        "seq-length",
        "tokenizer-type",
        "deepspeed",
        "deepspeed_config",
        "zero-stage",
        "deepspeed-activation-checkpointing",
        "cpu-optimizer",
    )
)


def deepspeed_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.json and NAME.sh. Raises InputError for what they do not express, by name."""
    _refuse(model, run)
    settings = {
        "train_batch_size": run.global_batch_sequences,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.num_micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": _stage(run),
            "reduce_bucket_size": 500_000_000,
            **_offload(run),
            **({} if run.overlap_grad_reduce is None else {"overlap_comm": run.overlap_grad_reduce}),
        },
        "data_types": {"grad_accum_dtype": run.grad_dtype},
        **({run.precision: {"enabled": True}} if run.precision in PRECISIONS else {}),
    }
    return {f"{name}.json": json.dumps(settings, indent=2) + "\n", f"{name}.sh": _script(model, run, gpus_per_node, name)}


def carried(model: ModelSpec) -> frozenset[str]:
    """Return the keys of its config.json without a part in any time that the script holds."""
    return megatron_carried(model) - {"rope_scaling"}


def _stage(run: Strategy) -> int:
    """Return the ZeRO stage: on one rank 1 is the same as 0, and gradients may then be accumulated in another type."""
    return 1 if run.dp == 1 and run.grad_dtype != run.precision and not run.zero else run.zero


def _offload(run: Strategy) -> dict[str, Any]:
    """Return where the optimizer's states are; a part of them only under ZeRO-3 (its partial offload)."""
    share = run.optimizer_offload_fraction
    if not share:
        return {}
    return {"offload_optimizer": {"device": "cpu", "pin_memory": True, **({"ratio": share} if share < 1 else {})}}


def _refuse(model: ModelSpec, run: Strategy) -> None:
    rules = (
        (not model.is_mixture_of_experts, f"{model.name}: mixtures of experts under DeepSpeed are not modelled"),
        (model.qk_norm == "none", f"{model.name}: Megatron-DeepSpeed has no norms of q and k"),
        (model.qkv_bias == model.output_bias, f"{model.name}: Megatron-DeepSpeed has biases in all linears or in none"),
        (run.cp == 1, f"cp {run.cp}: context parallelism under DeepSpeed is not modelled"),
        (
            run.precision in (*PRECISIONS, "fp32"),
            f"precision {run.precision}: DeepSpeed trains in fp32, {' and '.join(PRECISIONS)}",
        ),
        (
            run.optimizer_offload_fraction in (0, 1) or run.zero == 3,
            f"optimizer_offload_fraction {run.optimizer_offload_fraction:g}: DeepSpeed offloads a part under ZeRO-3 only",
        ),
        (
            run.zero < 3 or run.overlap_param_gather,
            "overlap_param_gather false: DeepSpeed gathers the weights of ZeRO-3 ahead in any case",
        ),
        (not run.tp_comm_overlap, "tp_comm_overlap: Megatron-DeepSpeed has none"),
        (not run.cuda_graphs, "cuda_graphs: Megatron-DeepSpeed has none"),
        (run.grad_dtype in GRADIENTS, f"grad_dtype {run.grad_dtype}: DeepSpeed has {', '.join(GRADIENTS)}"),
        (
            not run.zero or run.zero_shard_size == run.dp,
            f"zero_shard_size {run.zero_shard_size}: DeepSpeed's ZeRO shards over all {run.dp} data-parallel ranks",
        ),
        (run.pp == 1 or run.zero < 2, f"zero {run.zero}: DeepSpeed's pipeline engine runs ZeRO-0 and 1"),
        (run.pp == 1 or run.schedule == "1f1b", f"schedule {run.schedule}: DeepSpeed's pipeline engine runs 1f1b"),
        (
            run.recompute != "full" or run.recompute_layers < 0 or run.recompute_layers * run.pp >= model.num_hidden_layers,
            f"recompute_layers {run.recompute_layers}: Megatron-DeepSpeed recomputes all layers or none",
        ),
    )
    require(rules)


def _script(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> str:
    """Return the launch script; as Megatron-LM's but for the names that differ."""
    plain = run.replace(  # the type of gradients stands in the settings
        framework=FRAMEWORK,
        zero=min(run.zero, 1),
        grad_dtype="fp16" if run.precision == "fp16" else "fp32",
        overlap_param_gather=False,
        overlap_grad_reduce=False,
        precision="fp16" if run.precision == "fp16" else "bf16",
        dropout=applies_dropout(model, run),
    )
    flags = {flag.lstrip("-"): value for flag, value in megatron_arguments(model, plain).items()}
    theirs: dict[str, Any] = {flag: value for flag, value in flags.items() if flag not in _WITHOUT}
    theirs = {_RENAMED.get(flag, flag): value for flag, value in theirs.items()}
    if run.precision == "fp32":
        theirs.pop("bf16")
    theirs |= {
        "tokenizer-type": "NullTokenizer",
        "num-key-value-heads": model.num_key_value_heads,
        "normalization": NORMS[flags["normalization"]],
        "use-rotary-position-embeddings": model.position == "rope",
        "use-flash-attn-v2": run.attention == "flash",
        "no-pipeline-parallel": run.pp == 1,
        "deepspeed-activation-checkpointing": run.recompute == "full",
        "deepspeed": True,
        "cpu-optimizer": run.optimizer_offload_fraction > 0,  # DeepSpeed asserts its own Adam for states on the host
        "deepspeed_config": f"{name}.json",
        "zero-stage": _stage(run),
    }
    unknown = next((flag for flag, value in theirs.items() if value is not False and flag not in _ARGUMENTS), None)
    if unknown is not None:
        raise InputError(f"Megatron-DeepSpeed has no argument --{unknown}, which this layout needs")
    if model.position == "none":
        raise InputError(f"{model.name}: Megatron-DeepSpeed has learned or rotary positions")
    words = [
        f"--{flag}" if value is True else f"--{flag} {shlex.quote(str(value))}"
        for flag, value in theirs.items()
        if value is not False
    ]
    lines = [
        "#!/bin/sh",
        f"# {model.name} on {run.world_size} GPUs, for {VERSION}.",
        "# Run it on every node, with NODE_RANK and MASTER_ADDR set. Data and tokenizer are yours to name;",
        "# replace --train-iters and --lr by your own.",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        f"{torchrun(run, gpus_per_node)} --node-rank ${{NODE_RANK:-0}} "
        "--master-addr ${MASTER_ADDR:-localhost} pretrain_gpt.py \\",
    ]
    return "\n".join([*lines, *(f"  {word} \\" for word in words[:-1]), f"  {words[-1]}", ""])
