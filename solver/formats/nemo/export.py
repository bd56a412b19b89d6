"""A layout as a YAML file of NeMo 1; what solver.formats.nemo.config reads as the same layout."""

from __future__ import annotations

from typing import Any

from profiler.errors import require
from solver.formats.file_run import model_path
from solver.formats.hugging_face.export import config_json
from solver.formats.launch.torchrun import nodes_of, torchrun
from solver.formats.megatron.arguments import FRAMEWORK
from solver.formats.megatron.export import megatron_arguments
from solver.formats.nemo.names import GRADIENTS, INVERTED, NORMS, SWITCHES, VALUES
from solver.formats.syntax.yaml_text import write_yaml
from solver.spec.model import VOCAB_MULTIPLE, ModelSpec
from solver.spec.strategy import Strategy

VERSION = "NeMo 1 (24.01 to 24.07)"
_TRAINERS = {"bf16": "bf16", "fp8": "bf16", "fp16": "16", "fp32": "32"}


def nemo_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.yaml, and of the model, whose vocabulary the tokenizer must have.

    Raises InputError for what NeMo 1's settings do not express, by name.
    """
    _refuse(model, run)
    plain = run.replace(framework=FRAMEWORK, tp_comm_overlap=False, grad_dtype="fp32", fp8_amax_reduction="all")
    flags = {flag.lstrip("-"): value for flag, value in megatron_arguments(model, plain).items()}
    nodes, each = nodes_of(run, gpus_per_node)
    comments = [
        f"{model.name} on {run.world_size} GPUs, for {VERSION}. Data, tokenizer and learning rate are yours to name.",
        f"{torchrun(run, gpus_per_node)} megatron_gpt_pretraining.py --config-path . --config-name {name}.yaml",
    ]
    trainer = {"devices": each, "num_nodes": nodes, "accelerator": "gpu", "precision": _TRAINERS[run.precision]}
    sections = {"name": "megatron_gpt", "trainer": trainer, "model": _model(model, run, flags)}
    return {f"{name}.yaml": write_yaml(sections, comments), model_path(name): config_json(model)}


def _refuse(model: ModelSpec, run: Strategy) -> None:
    rules = (
        (not model.is_mixture_of_experts, f"{model.name}: mixtures of experts are not written for NeMo 1"),
        (not model.has_latent_attention, f"{model.name}: NeMo 1 has no latent attention"),
        (model.qkv_bias == model.output_bias, f"{model.name}: NeMo 1 has biases in all linears or in none"),
        (model.qk_norm == "none", f"{model.name}: NeMo 1's settings have no norms of q and k"),
        (run.precision in _TRAINERS, f"precision {run.precision}: NeMo 1 trains in {', '.join(_TRAINERS)}"),
        (run.cp == 1 or run.cp_comm == "ring", f"cp_comm {run.cp_comm}: NeMo 1's context parallelism is a ring"),
        (not run.cuda_graphs, "cuda_graphs: NeMo 1 has none"),
        (run.grad_dtype in GRADIENTS, f"grad_dtype {run.grad_dtype}: NeMo 1's grad_sync_dtype is bf16 or fp32"),
        (
            not run.zero or run.zero_shard_size == run.dp * run.cp,
            f"zero_shard_size {run.zero_shard_size}: NeMo 1's optimizer shards over all {run.dp * run.cp} replicas",
        ),
    )
    require(rules)


def _model(model: ModelSpec, run: Strategy, flags: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: flags[flag] for flag, key in VALUES.items() if flag in flags}
    found |= {key: flag in flags for flag, key in SWITCHES.items()} | {key: flag not in flags for flag, key in INVERTED.items()}
    norm = next(own for own, word in NORMS.items() if word == flags["normalization"])
    return found | {
        "mcore_gpt": True,
        "transformer_engine": True,
        "megatron_amp_O2": True,
        "rampup_batch_size": None,
        "num_query_groups": model.num_key_value_heads,
        "normalization": norm,
        "make_vocab_size_divisible_by": flags.get("make-vocab-size-divisible-by", VOCAB_MULTIPLE),
        "activation": "fast-swiglu" if model.gated_mlp else "gelu",
        "use_flash_attention": run.attention == "flash",
        "activations_checkpoint_granularity": flags.get("recompute-granularity"),
        "cpu_offloading": "cpu-offloading-num-layers" in flags,
        "fp8": run.precision == "fp8",
        "fp8_hybrid": run.precision == "fp8",
        "reduce_amax": run.fp8_amax_reduction != "none",
        "ub_tp_comm_overlap": run.tp_comm_overlap,
        "overlap_p2p_comm": run.p2p_overlap if run.pp > 1 and run.vpp > 1 else True,
        "optim": {
            "name": "distributed_fused_adam" if run.zero else "fused_adam",
            "grad_sync_dtype": run.grad_dtype,
            "overlap_grad_sync": run.overlap_grad_reduce,
            "overlap_param_sync": run.overlap_param_gather and run.zero > 0,
        },
    }
