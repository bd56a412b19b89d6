"""A layout as arguments of Megatron-LM's pretrain_gpt.py: what arguments.py beside it reads back as it.

Source: as there. Data and tokenizer are not what a layout decides: the command trains on mock data with the null tokenizer
until they are replaced.
"""

from __future__ import annotations

import shlex
from typing import Any

from predictor.network.expert_exchange import DISPATCHERS
from profiler.errors import InputError, require
from solver.formats.launch.torchrun import torchrun
from solver.formats.megatron.arguments import FRAMEWORK
from solver.formats.megatron.flags import MAMBA_FIXED
from solver.formats.megatron.layer_kinds import layer_kind_flags, listed, plain
from solver.formats.megatron.precision import gradient_flags
from solver.formats.megatron.rules import first_release
from solver.formats.megatron.script import HYBRID_PROGRAM, PROGRAM
from solver.formats.megatron.untimed import untimed_flags
from solver.spec.choices import ONE_F_ONE_B
from solver.spec.dropout import applies_dropout
from solver.spec.frameworks import known_framework
from solver.spec.layer_kinds import has_experts
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import with_predicted
from solver.spec.strategy import Strategy

NEWEST = "0.16"  #: Megatron-Core whose arguments these are
#: Variables of the environment that --deterministic-mode asserts.
DETERMINISTIC = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
_SEVERAL = frozenset(
    {"spec", "recompute-modules", "hierarchical-context-parallel-sizes", "cuda-graph-scope", "offload-modules"}
)
_CONTEXT = {"ring": "p2p", "a2a": "a2a", "allgather": "all_gather", "a2a+ring": "a2a+p2p"}
_MOMENTS = {"bf16": "bf16", "8bit": "fp8"}
#: Of experts, what belongs to the run and not to the model.
_OF_THE_RUN = (
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "moe-grouped-gemm",
    "moe-permute-fusion",
    "moe-router-dtype",
    "moe-router-fusion",
    "overlap-moe-expert-parallel-comm",
    "moe-token-dispatcher-type",
    "moe-flex-dispatcher-backend",
    "mock-data",
    "moe-shared-expert-overlap",
    "moe-expert-capacity-factor",
    "moe-pad-expert-input-to-capacity",
)

Flags = dict[str, Any]


def megatron_arguments(model: ModelSpec, run: Strategy, kinds: bool = False) -> Flags:
    """Return flag (with its dashes) -> value, or True for a switch.

    kinds: whether what is written of them may have windows, sinks, layers without rotary embedding and clamped gates (plain).
    Raises InputError for what Megatron's arguments do not express, by name.
    """
    if known_framework(run.framework).name != known_framework(FRAMEWORK).name:
        raise InputError(f"the layout is {run.framework}'s; arguments of Megatron-LM are written for --framework {FRAMEWORK}")
    _refuse(model, run)
    if not (kinds or plain(model)):
        raise InputError(
            "windows of attention, sinks, layers without rotary embedding, linear attention, Mamba-2, gates of attention, "
            "clamped gates: not among what is written"
        )
    if run.ep * run.etp == 1 and run.moe_dispatcher in DISPATCHERS:
        run = run.replace(moe_dispatcher="alltoall")  # without other ranks there is nothing to dispatch, and flex is refused
    run = run.replace(dropout=applies_dropout(model, run))
    flags = {**_model(model, run), **_layout(run, model.num_nextn_predict_layers), **_training(run)}
    return {f"--{name}": value for name, value in flags.items() if value is not False and value is not None}


def model_arguments(model: ModelSpec, run: Strategy) -> Flags:
    """Return flag (without dashes) -> value of the model alone. Raises InputError for what they do not express."""
    _refuse(model, run)
    flags = {name: value for name, value in _model(model, run).items() if name not in _OF_THE_RUN}
    return {name: value for name, value in flags.items() if value is not False and value is not None}


def megatron_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of a launch script. Raises InputError for YaRN, whose arguments newer releases have."""
    if model.scaled_rope:
        raise InputError(f"rotary embedding with YaRN's factor: not among the arguments of Megatron-Core up to {NEWEST}")
    return {f"{name}.sh": shell_command(model, run, gpus_per_node)}


def shell_command(model: ModelSpec, run: Strategy, gpus_per_node: int) -> str:
    """Return a shell script that launches the layout with torchrun on each of its nodes."""
    arguments = megatron_arguments(model, run, kinds=True)
    words = [name if value is True else f"{name} {_quoted(name, str(value))}" for name, value in arguments.items()]
    first = first_release({flag.lstrip("-"): value for flag, value in arguments.items()})
    releases = first if first == NEWEST else f"{first} to {NEWEST}"
    program = HYBRID_PROGRAM if model.one_block_layers else PROGRAM
    lines = [
        "#!/bin/sh",
        f"# {model.name} on {run.world_size} GPUs, for Megatron-Core {releases}.",
        "# Run it on every node, with NODE_RANK and MASTER_ADDR set.",
        "# Replace --mock-data and the null tokenizer by your own data and tokenizer (its vocabulary is the model's), and",
        "# --train-iters and --lr by your own.",
        f"export CUDA_DEVICE_MAX_CONNECTIONS={_connections(run)}",
        *(["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"] if run.expandable_segments else []),
        *(f"export {name}={value}" for name, value in (DETERMINISTIC if run.deterministic else {}).items()),
        f"{torchrun(run, gpus_per_node)} --node-rank ${{NODE_RANK:-0}} "
        f"--master-addr ${{MASTER_ADDR:-localhost}} --master-port ${{MASTER_PORT:-29500}} {program} \\",
    ]
    return "\n".join([*lines, *(f"  {word} \\" for word in words[:-1]), f"  {words[-1]}", ""])


def _quoted(name: str, value: str) -> str:
    """Return the value of an argument for a shell: of those that take several (nargs in arguments.py) each a word."""
    return " ".join(map(shlex.quote, value.split())) if name.lstrip("-") in _SEVERAL else shlex.quote(value)


def _connections(run: Strategy) -> int:
    """Return the queues of kernels on a device: one, which tensor and context parallelism need before Blackwell; an exchange of
    tokens beside another micro batch needs more (arguments.py)."""
    return 32 if run.moe_exchange_overlap and run.tp * run.cp == 1 else 1


def _refuse(model: ModelSpec, run: Strategy) -> None:
    rules = (
        (model.norms_per_layer == 2 and not model.embedding_norm, "other norms than two a layer"),
        (not model.attention_chunk_size, "chunks of attention"),
        (model.qk_norm != "all", "norms over all heads of q and k"),
        (
            model.qk_norm == "none" or model.qk_norm_bias == (model.norm == "layernorm"),
            "norms of q and k of another class than the others",
        ),
        (model.position != "alibi", "ALiBi positions"),
        (model.norm_weight and (model.norm != "layernorm" or model.norm_bias), "norms without parameters"),
        (not model.head_bias, "a bias of the head"),
        (
            not model.has_state_space or all(getattr(model, key) == value for key, value in MAMBA_FIXED.items()),
            "a convolution or chunks of Mamba-2 of another size",
        ),
        (not model.has_state_space or model.one_block_layers, "Mamba-2 in layers with an MLP"),
        (not model.one_block_layers or not (model.sliding_window or model.no_rope_layers), "windows in layers of one block"),
        (model.mlp_bias == model.output_bias, "biases of attention's output without those of the MLP"),
        (model.qkv_bias or not model.output_bias, "biases of outputs without those of q, k and v"),
        (not run.document_lengths, "packed documents"),
        (run.tp_mode in ("mtp", "msp"), f"tp_mode {run.tp_mode}"),
        (run.schedule in ONE_F_ONE_B, f"schedule {run.schedule}"),
        (run.zero <= 1, f"ZeRO-{run.zero}"),
        (run.precision in ("bf16", "fp16", "fp8", "mxfp8", "nvfp4"), f"precision {run.precision}"),
        (
            run.grad_dtype in ("fp32", "fp16" if run.precision == "fp16" else "bf16"),
            f"grad_dtype {run.grad_dtype} of precision {run.precision}",
        ),
        (run.fused_norm and not run.compile, "unfused norms, or torch.compile"),
        (run.moe_imbalance == 1, "an imbalance of experts"),
        (not run.tp_comm_overlap or run.tp == 1 or run.tp_mode == "msp", "tp_comm_overlap with tp_mode mtp"),
        (
            run.recompute_layers <= 0 or run.recompute_layers % run.vpp == 0,
            f"recompute_layers {run.recompute_layers}, which {run.vpp} chunks do not share evenly,",
        ),
        (not run.launch_blocking, "launch_blocking"),
        (not run.collective_checks, "collective_checks"),
    )
    require((holds, f"{what}: not among the arguments of Megatron-LM that are written here") for holds, what in rules)


def _model(model: ModelSpec, run: Strategy) -> Flags:
    latent, bias = model.has_latent_attention, model.output_bias
    flags: Flags = {
        "num-layers": model.num_hidden_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.intermediate_size,
        "num-attention-heads": model.num_attention_heads,
        "group-query-attention": not latent and model.num_key_value_heads != model.num_attention_heads,
        "num-query-groups": model.num_key_value_heads
        if not latent and model.num_key_value_heads != model.num_attention_heads
        else None,
        "kv-channels": model.head_dim,
        "swiglu": model.gated_mlp and not model.clamped_gate,
        "disable-bias-linear": not bias,
        "add-qkv-bias": model.qkv_bias and not bias,
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.norm],
        "position-embedding-type": _position(model),
        "untie-embeddings-and-output-weights": not model.tie_word_embeddings,
        "max-position-embeddings": model.position_rows or model.max_position_embeddings or run.seq_len,
        "qk-layernorm": model.qk_norm == "head" or latent,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": model.vocab_size - 1,
        "mock-data": True,
        "mtp-num-layers": model.num_nextn_predict_layers or None,
        **untimed_flags(model),
        **layer_kind_flags(model),
    }
    if model.padded_vocab_size:
        flags["make-vocab-size-divisible-by"] = model.padded_vocab_size // run.tp
    if latent:
        flags |= {
            "multi-latent-attention": True,
            "q-lora-rank": model.q_lora_rank or None,
            "kv-lora-rank": model.kv_lora_rank,
            "qk-head-dim": model.qk_nope_head_dim,
            "qk-pos-emb-head-dim": model.qk_rope_head_dim,
            "v-head-dim": model.v_head_dim,
        }
    return {**flags, **(_experts(model, run) if model.is_mixture_of_experts else {})}


def _position(model: ModelSpec) -> str:
    words = {"learned": "learned_absolute", "rope": "yarn" if model.scaled_rope else "rope"}
    return words.get(model.position, model.position)


def _experts(model: ModelSpec, run: Strategy) -> Flags:
    pattern = [int(has_experts(model, layer)) for layer in range(model.num_hidden_layers)]
    flags: Flags = {
        "num-experts": model.num_experts,
        "moe-router-topk": model.num_experts_per_tok,
        "moe-ffn-hidden-size": model.moe_intermediate_size,
        "moe-shared-expert-intermediate-size": model.shared_expert_intermediate_size or None,
        "moe-shared-expert-gate": model.shared_expert_gate,
        "moe-layer-freq": None if all(pattern) or model.one_block_layers else listed(pattern),
        "moe-router-score-function": model.router_score,
        "moe-router-enable-expert-bias": model.router_bias and not model.output_bias,  # beside which it is learned
        "moe-router-num-groups": model.router_groups or None,
        "moe-router-group-topk": model.router_topk_groups or None,
        "expert-model-parallel-size": run.ep,
        "expert-tensor-parallel-size": run.etp,
        "moe-grouped-gemm": run.moe_grouped_gemm,
        "moe-permute-fusion": run.moe_permute_fusion,
        "moe-router-dtype": "fp32" if run.moe_router_fp32 else None,
        "moe-router-fusion": run.moe_router_fusion,
        "overlap-moe-expert-parallel-comm": run.moe_exchange_overlap,
        "delay-wgrad-compute": run.delay_wgrad_compute,
        "moe-shared-expert-overlap": run.moe_shared_expert_overlap,
        "moe-expert-capacity-factor": run.moe_capacity_factor or None,
        "moe-pad-expert-input-to-capacity": run.moe_capacity_factor > 0,
    }
    if run.moe_dispatcher in DISPATCHERS:
        return flags | {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": run.moe_dispatcher}
    return flags | {"moe-token-dispatcher-type": run.moe_dispatcher}


def _layout(run: Strategy, predicted_layers: int) -> Flags:
    replicas = run.dp * run.cp
    flags: Flags = {
        "tensor-model-parallel-size": run.tp,
        "pipeline-model-parallel-size": run.pp,
        "context-parallel-size": run.cp,
        "sequence-parallel": run.tp_mode == "msp" and run.tp > 1,
        "micro-batch-size": run.micro_batch_size,
        "global-batch-size": run.global_batch_sequences,
        "seq-length": run.seq_len,
        "use-distributed-optimizer": (run.zero == 1 or (replicas == 1 and _changed_states(run))) and run.optimizer == "adam",
        "optimizer": {"adam": None, "muon": "dist_muon" if run.zero else "muon"}[run.optimizer],
        "num-distributed-optimizer-instances": replicas // run.zero_shard_size
        if run.zero and run.zero_shard_size != replicas
        else None,
        "cp-comm-type": _CONTEXT[run.cp_comm] if run.cp > 1 else None,
        "hierarchical-context-parallel-sizes": f"{run.cp_a2a_size} {run.cp // run.cp_a2a_size}"
        if run.cp_comm == "a2a+ring" and run.cp > 1
        else None,
        "decoder-first-pipeline-num-layers": run.num_layers_in_first_pipeline_stage or None,
        "decoder-last-pipeline-num-layers": run.num_layers_in_last_pipeline_stage or None,
        "microbatch-group-size-per-virtual-pipeline-stage": run.micro_batch_group or None,
        "account-for-embedding-in-pipeline-split": run.account_for_embedding_in_pipeline_split,
        "account-for-loss-in-pipeline-split": run.account_for_loss_in_pipeline_split,
    }
    if run.pipeline_layout:
        return flags | {"pipeline-model-parallel-layout": with_predicted(run.pipeline_layout, predicted_layers)}
    return flags | {"num-virtual-stages-per-pipeline-rank": run.vpp if run.vpp > 1 else None}


def _changed_states(run: Strategy) -> bool:
    """Whether moments are in fewer bits or on the host, which are the precision-aware optimizer's."""
    return run.optimizer_states != "fp32" or run.optimizer_offload_fraction > 0


def _training(run: Strategy) -> Flags:
    part, each = run.recompute == "full" and run.recompute_layers >= 0, run.recompute_layers // run.vpp
    quantised = run.precision in ("fp8", "mxfp8")
    ends = bool(run.num_layers_at_start_in_bf16 or run.num_layers_at_end_in_bf16)
    return {
        "train-iters": 1000,
        "lr": 1e-4,
        "ckpt-format": "torch" if run.optimizer == "muon" else None,
        "bf16": run.precision != "fp16",
        "fp16": run.precision == "fp16",
        "fp8-format": "hybrid" if quantised else None,
        "fp8-recipe": ("mxfp8" if run.precision == "mxfp8" else run.fp8_recipe) if quantised else None,
        "fp8-param-gather": quantised and run.fp8_param_gather,
        "fp4-format": "e2m1" if run.precision == "nvfp4" else None,
        "first-last-layers-bf16": ends,
        "num-layers-at-start-in-bf16": run.num_layers_at_start_in_bf16 if ends else None,
        "num-layers-at-end-in-bf16": run.num_layers_at_end_in_bf16 if ends else None,
        **gradient_flags(run.precision, run.grad_dtype),
        "recompute-granularity": run.recompute if run.recompute != "none" else None,
        "recompute-modules": " ".join(run.modules_recomputed) if run.recompute == "selective" else None,
        "recompute-method": "block" if part else "uniform" if run.recompute == "full" else None,
        "recompute-num-layers": None if run.recompute != "full" else each if part else run.recompute_group,
        "attention-backend": "auto" if run.attention == "flash" else "unfused",
        "no-masked-softmax-fusion": run.fused_softmax is False,
        "no-rope-fusion": run.rope_fusion is False,
        "attention-dropout": 0.1 * bool(run.dropout),
        "hidden-dropout": 0.1 * bool(run.dropout),
        "tp-comm-overlap": run.tp_comm_overlap and run.tp > 1,
        "cuda-graph-impl": "transformer_engine" if run.cuda_graphs else None,
        "te-rng-tracker": run.cuda_graphs,
        "cuda-graph-scope": " ".join(run.modules_graphed) or None,
        "overlap-grad-reduce": run.overlap_grad_reduce,
        "overlap-param-gather": run.overlap_param_gather and run.zero == 1 and run.optimizer == "adam",
        "cross-entropy-loss-fusion": run.cross_entropy_fusion,
        "cross-entropy-fusion-impl": run.cross_entropy_fusion_impl if run.cross_entropy_fusion else None,
        "no-gradient-accumulation-fusion": run.gradient_accumulation_fusion is False,
        "defer-embedding-wgrad-compute": run.defer_embedding_wgrad_compute,
        "wgrad-deferral-limit": run.wgrad_deferral_limit or None,
        "deterministic-mode": run.deterministic,
        "optimizer-cpu-offload": run.optimizer_offload_fraction > 0,
        "optimizer-offload-fraction": run.optimizer_offload_fraction or None,
        "cpu-offloading-num-layers": run.offload_layers or None,
        "fine-grained-activation-offloading": bool(run.offload_modules),
        "offload-modules": " ".join(run.modules_offloaded) or None,
        "use-precision-aware-optimizer": _changed_states(run),
        "exp-avg-dtype": _MOMENTS.get(run.optimizer_states),
        "exp-avg-sq-dtype": _MOMENTS.get(run.optimizer_states),
        "transformer-impl": "transformer_engine",
    }
