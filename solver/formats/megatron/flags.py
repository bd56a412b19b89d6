"""Every flag of Megatron-LM's pretrain_gpt.py that is known here, by what it does to the memory and the time of a step.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py of autumn 2025, as read.
"""

from __future__ import annotations

from solver.formats.megatron.earlier import EARLIER


def _flags(names: str) -> frozenset[str]:
    return frozenset(names.split())


#: Flags that only arrange data, logs, checkpoints, evaluation, initial values and the schedule of the learning rate.
ARRANGEMENTS = _flags(
    # data and tokenizer
    "allow-ambiguous-pad-tokens blend-example-in-order decrease-batch-size-if-needed inference-max-requests "
    "inference-max-seq-length inference-rng-tracker max-tokens-to-oom no-weight-decay-cond-type s3-cache-path "
    "data-args-path data-cache-path data-path data-sharding no-data-sharding "
    "dataloader-type eod-mask-loss full-validation "
    "inference-batch-times-seqlen-threshold "
    "legacy-tokenizer mask-prob merge-file mid-level-dataset-surplus no-create-attention-mask-in-dataloader no-mmap-bin-files "
    "num-dataset-builder-threads num-workers object-storage-cache-path "
    "per-split-data-args-path sample-rate short-seq-prob split test-data-path tiktoken-num-special-tokens tiktoken-pattern "
    "tiktoken-special-tokens tokenizer-hf-include-special-tokens tokenizer-library tokenizer-metadata tokenizer-model "
    "tokenizer-prompt-format train-data-path trust-remote-code valid-data-path vocab-extra-ids vocab-file "
    # optimizer and learning rate
    "adam-beta1 adam-beta2 adam-eps apply-wd-to-qk-layernorm check-for-large-grads clip-grad decoupled-lr decoupled-min-lr "
    "decoupled-weight-decay dump-param-to-param-group-map end-weight-decay "
    "hysteresis init-method-std init-method-xavier-uniform initial-loss-scale loss-scale loss-scale-window lr lr-decay-iters "
    "lr-decay-samples lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters "
    "lr-wsd-decay-samples lr-wsd-decay-style min-loss-scale min-lr muon-extra-scale-factor muon-fp32-matmul-prec "
    "muon-momentum muon-no-split-qkv muon-scale-mode muon-use-nesterov "
    "override-opt-param-scheduler override-opt_param-scheduler "
    "seed sgd-momentum start-weight-decay train-iters train-samples "
    "use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler "
    "weight-decay weight-decay-incr-style "
    # checkpoints and evaluation
    "adlr-autoresume adlr-autoresume-interval async-save auto-detect-ckpt-format ckpt-assume-constant-structure "
    "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-format "
    "ckpt-fully-parallel-load ckpt-fully-parallel-save ckpt-step dist-ckpt-format dist-ckpt-optim-fully-reshardable "
    "dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness distrib-optim-fully-reshardable-mem-efficient "
    "eval-global-batch-size eval-interval eval-iters "
    "exit-duration-in-mins exit-interval exit-on-missing-checkpoint exit-signal-handler inprocess-restart load "
    "load-main-params-from-ckpt moe-upcycling-granularity moe-use-upcycling multiple-validation-sets "
    "no-ckpt-fully-parallel-save "
    "no-initialization no-load-optim no-load-rng no-save-optim no-save-rng no-strict-fsdp-dtensor-load "
    "no-use-tokenizer-model-from-checkpoint-args non-persistent-ckpt-type non-persistent-global-ckpt-dir "
    "non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir non-persistent-save-interval persistent-save-interval "
    "pretrained-checkpoint replication replication-factor replication-jump save "
    "save-interval save-retain-interval use-checkpoint-args use-dist-ckpt use-mp-args-from-checkpoint-args "
    "use-persistent-ckpt-worker verify-integrity "
    # logs and supervision
    "app-tag-run-name app-tag-run-version barrier-with-L1-time calc-ft-timeouts check-for-spiky-loss "
    "check-weight-hash-across-dp-replicas-interval config-logger-dir disable-msc "
    "disable-straggler-on-startup distributed-timeout-minutes distributed-timeout-seconds-after-init enable-ft-package "
    "enable-one-logger error-injection-rate error-injection-type exp-dir iterations-to-skip log-energy log-interval "
    "log-batch-size-to-tensorboard log-learning-rate-to-tensorboard "
    "log-loss-scale-to-tensorboard log-max-attention-logit log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm "
    "log-progress log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard "
    "log-world-size-to-tensorboard logging-level manual-gc manual-gc-eval manual-gc-interval memory-snapshot-path "
    "no-barrier-with-level-1-timing no-log-learning-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-manual-gc-eval "
    "no-one-logger one-logger-async one-logger-project one-logger-run-name profile profile-ranks profile-step-end "
    "profile-step-start record-memory-history result-rejected-tracker-filename run-workload-inspector-server "
    "straggler-ctrlr-port straggler-minmax-count tensorboard-dir tensorboard-log-interval "
    "tensorboard-queue-size timing-log-option use-pytorch-profiler wandb-entity wandb-exp-name wandb-project "
    "wandb-save-dir "
    # values that no kernel waits for
    "data-parallel-random-init embedding-init-method-std glu-linear-offset lazy-mpu-init mscale mscale-all-dim norm-epsilon "
    "rotary-base rotary-interleaved rotary-scaling-factor "
    "rotary-seq-len-interpolation-factor rope-scaling-factor rope-type use-cpu-initialization use-rope-scaling "
    "mup-attn-scale-power mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult mup-width-mult "
    "no-yarn-correction-range-round-to-int yarn-beta-fast yarn-beta-slow yarn-original-max-position-embeddings "
    "yarn-rotary-scaling-factor "
    "moe-aux-loss-coeff moe-input-jitter-eps moe-router-bias-update-rate moe-router-num-node-limited moe-z-loss-coeff"
)
#: Flags that change neither memory nor time as modelled: numerics, or what is modelled as Megatron's default behaviour.
NEUTRAL = _flags(
    "accumulate-allreduce-grads-in-fp32 apply-layernorm-1p apply-query-key-layer-scaling attention-softmax-in-fp32 "
    "cache-mla-latents calculate-per-token-loss cuda-graph-warmup-steps ddp-average-in-collective ddp-num-buckets-hint "
    "disable-bf16-reduced-precision-matmul disable-gloo-process-groups "
    "enable-experimental finetune fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin fp8-wgrad "
    "init-model-with-meta-device local-rank "
    "max-position-embeddings mock-data moe-per-layer-logging "
    "moe-router-pre-softmax moe-router-topk-scaling-factor moe-token-drop-policy mtp-loss-scaling-factor no-bias-gelu-fusion "
    "no-check-for-nan-in-loss-and-grad no-gradient-reduce-div-fusion no-position-embedding "
    "no-query-key-layer-scaling "  # of 2021 to 2023, and what today's release does
    "overlap-p2p-communication "  # a switch of 2023 and 2024, whose work today's release does unless told not to
    "reset-attention-mask reset-position-ids "  # Transformer Engine's attention is causal whatever the mask
    "te-rng-tracker tokenizer-type use-flash-attn use-mcore-models use-rotary-position-embeddings"
)
#: Flags whose small effect is left out of the estimate, with what it is.
LEFT_OUT = {
    "ddp-bucket-size": "buckets of another size than Megatron's own",
    "ddp-num-buckets": "buckets of another size than Megatron's own",
    "ddp-pad-buckets-for-high-nccl-busbw": "the padding of buckets",
    "ddp-reduce-scatter-with-fp32-accumulation": "reduce-scatters of gradients as all-to-alls",
    "no-align-grad-reduce": "reductions that pipeline stages begin on their own",
    "no-align-param-gather": "gathers that pipeline stages begin on their own",
    "use-contiguous-parameters-in-local-ddp": "parameters that lie in one buffer",
    "no-scatter-gather-tensors-in-pipeline": "messages between stages that tensor ranks do not divide",
    "use-ring-exchange-p2p": "exchanges between stages by another library",
    "nccl-communicator-config-path": "what NCCL's communicators are told",
    "disable-symmetric-registration": "buffers registered with NCCL",
    "sharp-enabled-group": "reductions in the switches",
    "suggested-communication-unit-size": "Megatron-FSDP's messages of another size",
    "keep-fp8-transpose-cache": "transposed fp8 weights that stay",
    "reuse-grad-buf-for-mxfp8-param-ag": "gathers of weights into the gradients' buffer",
    "use-torch-optimizer-for-cpu-offload": "the host's Adam by torch",
    "no-pin-cpu-grads": "copies to memory of the host that is not pinned",
    "no-pin-cpu-params": "copies to memory of the host that is not pinned",
    "timing-log-level": "timers at which the host waits for the device",
    "train-sync-interval": "the steps in which the host waits for the device",
    "fp16-lm-cross-entropy": "a loss in 16 bits",
    "openai-gelu": "the kernels of another GELU",
    "quick-geglu": "the kernels of a gated GELU",
    "use-te-activation-func": "Transformer Engine's kernels of the activation",
    "use-fused-weighted-squared-relu": "a fused activation of experts",
    "moe-apply-probs-on-input": "probabilities that scale the experts' input",
    "moe-use-legacy-grouped-gemm": "grouped GEMMs by another library",
    "no-moe-router-aux-loss-fusion": "the kernels of an unfused loss of the router",
    "no-clone-scatter-output-in-embedding": "the whole embedding's output, which stays",
    "tp-comm-overlap-cfg": "how tensor parallelism's overlap is arranged",
    "tp-comm-overlap-rs-dgrad": "how tensor parallelism's overlap is arranged",
    "disable-tp-comm-overlap-ag": "tensor parallelism's overlap of some linears only",
    "disable-tp-comm-overlap-rs": "tensor parallelism's overlap of some linears only",
    "disable-tp-comm-bulk-dgrad": "tensor parallelism's overlap of some linears only",
    "disable-tp-comm-bulk-wgrad": "tensor parallelism's overlap of some linears only",
    "sft": "samples of a fine-tuning set that see only themselves",
    "empty-unused-memory-level": "the pauses in which the allocator's cache is emptied",
    "squared-relu": "the kernels of a squared ReLU",
    "rotary-percent": "rotary embeddings of a part of each head",
    "use-mup": "the factors of muP",
    "use-transformer-engine-op-fuser": "Transformer Engine's fusions across modules",
    "high-priority-stream-groups": "streams of high priority",
    "nccl-ub": "buffers registered with NCCL",
    "use-sharp": "reductions in the switches",
    "tp-comm-bootstrap-backend": "how tensor parallelism's buffers are set up",
    "no-persist-layer-norm": "norms by another kernel",
    "disable-tp-comm-split-ag": "tensor parallelism's overlap of some linears only",
    "disable-tp-comm-split-rs": "tensor parallelism's overlap of some linears only",
    "no-bias-swiglu-fusion": "the kernels of an unfused SwiGLU",
    "no-async-tensor-model-parallel-allreduce": "gradients of inputs that are reduced beside nothing",
    "no-bias-dropout-fusion": "the kernels of unfused dropout",
    "use-tp-pp-dp-mapping": "the order of the ranks, with pipeline stages before replicas inside a node",
    "rampup-batch-size": "the smaller batches before the whole one",
    "overlap-param-gather-with-optimizer-step": "gathers of weights beside the optimizer's step",
    "overlap-p2p-communication-warmup-flush": "exchanges between stages beside the work that fills and empties the pipeline",
    "moe-router-load-balancing-type": "the iterations of the router's sinkhorn",
    "moe-router-padding-for-fp8": "rows that pad the input of each expert",
    "moe-router-padding-for-quantization": "rows that pad the input of each expert",
    "moe-deepep-num-sms": "another number of multiprocessors than DeepEP's own",
    "moe-hybridep-num-sms": "another number of multiprocessors than hybrid-EP's own",
    "fsdp-double-buffer": "Megatron-FSDP's buffers that stay allocated",
}
#: Values of these with which they do nothing.
IDLE: dict[str, tuple[object, ...]] = {
    "rotary-percent": (1.0,),
    "empty-unused-memory-level": (0,),
    "timing-log-level": (0,),
    "tp-comm-bootstrap-backend": ("nccl",),
    "moe-router-load-balancing-type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe-deepep-num-sms": (20,),
    "moe-hybridep-num-sms": (16,),
    "hybrid-attention-ratio": (0, 0.0),
    "hybrid-mlp-ratio": (0, 0.0),
}
#: --spec of layers that are one block each.
HYBRID_LAYERS = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
#: Flags whose effect is not modelled, with what they do.
UNMODELLED = {
    "use-torch-fsdp2": "FSDP2 under Megatron-LM (of other code: --framework fsdp2)",
    "delta-offload-bytes-across-pp-ranks": "stages that keep less on the host than others",
    "overlap-cpu-optimizer-d2h-h2d": "copies beside the host's Adam",
    "hybrid-attention-ratio": "layers that are no transformer layers",
    "hybrid-mlp-ratio": "layers that are no transformer layers",
    "heterogeneous-layers-config-path": "layers that differ in their sizes",
    "apply-residual-connection-post-layernorm": "residuals that are taken after the norm",
    "fp32-residual-connection": "residuals in fp32",
    "distribute-saved-activations": "saved inputs of layers that tensor ranks divide",
    "enable-full-sharding-in-hsdp": "states of the optimizer that are sharded over the instances too",
    "kitchen-config-file": "another library of quantised linears",
    "kitchen-recipe-number": "another library of quantised linears",
    "no-fp8-wgrad": "weight gradients of an fp8 run in 16 bits",
    "moe-extended-tp": "tensor parallelism of experts as it was before expert-tensor-parallel-size",
    "perform-rl-step": "reinforcement learning",
    "skip-train": "a run that trains nothing",
    "use-legacy-models": "Megatron's models before Megatron-Core",
    "yaml-cfg": "arguments of another file",
}
#: Flag -> (its values whose effect is modelled, what the others mean).
MODELLED = {
    "rerun-mode": (("disabled", "validate_results"), "every iteration run twice"),
    "distributed-backend": (("nccl",), "communication by another library than NCCL"),
    "fp4-recipe": (("nvfp4",), "another recipe of fp4 than nvfp4"),
    "experimental-attention-variant": (("gated_delta_net",), "attention of another kind"),
    "spec": ((HYBRID_LAYERS,), "layers of a specification of one's own"),
    "softmax-type": (("vanilla", "learnable"), "another softmax of attention"),
    "main-params-dtype": (("fp32",), "an optimizer without weights in fp32"),
    "pipeline-model-parallel-comm-backend": (("nccl",), "communication by another library than NCCL"),
    "megatron-fsdp-main-params-dtype": (("fp32",), "an optimizer without weights in fp32"),
    "outer-dp-sharding-strategy": (("no_shard",), "states of the optimizer that are sharded over the instances too"),
}
#: flag -> key of the model.
COUNTS = {
    "num-layers": "num_hidden_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "num-experts": "num_experts",
    "moe-router-topk": "num_experts_per_tok",
    "moe-router-num-groups": "router_groups",
    "moe-router-group-topk": "router_topk_groups",
    "moe-shared-expert-intermediate-size": "shared_expert_intermediate_size",
    "mtp-num-layers": "num_nextn_predict_layers",
}
#: flag -> (key of the model, default) of latent attention (_add_mla_args); without a rank of q there is one plain projection.
LATENT = {
    "q-lora-rank": ("q_lora_rank", 0),
    "kv-lora-rank": ("kv_lora_rank", 32),
    "qk-head-dim": ("qk_nope_head_dim", 128),
    "qk-pos-emb-head-dim": ("qk_rope_head_dim", 64),
    "v-head-dim": ("v_head_dim", 128),
}
#: flag -> (key of the model, default) of linear attention (transformer_config.py).
LINEAR = {
    "linear-num-key-heads": ("linear_num_key_heads", 16),
    "linear-num-value-heads": ("linear_num_value_heads", 32),
    "linear-key-head-dim": ("linear_key_head_dim", 128),
    "linear-value-head-dim": ("linear_value_head_dim", 128),
    "linear-conv-kernel-dim": ("linear_conv_kernel_dim", 4),
}
#: flag -> (key of the model, default) of Mamba-2 (transformer_config.py); its heads have a default of their own.
MAMBA_ARGUMENTS = {
    "mamba-state-dim": ("mamba_state_dim", 128),
    "mamba-head-dim": ("mamba_head_dim", 64),
    "mamba-num-groups": ("mamba_num_groups", 8),
}
#: What ssm/mamba_mixer.py has, and no argument states.
MAMBA_FIXED = {"mamba_conv_kernel_dim": 4, "mamba_chunk_size": 128}
#: Flags of patterns of layers: a number, or a list expression.
FREQUENCIES = ("moe-layer-freq", "window-attn-skip-freq", "no-rope-freq", "linear-attention-freq")
#: Flag -> its other name, under which it is read.
RENAMED = {
    "use-custom-fsdp": "use-megatron-fsdp",
    "use-nccl-ub": "nccl-ub",
    "encoder-seq-length": "seq-length",
    "encoder-num-layers": "num-layers",
    "layernorm-epsilon": "norm-epsilon",
    "layernorm-1p": "apply-layernorm-1p",
    "hybrid-layer-pattern": "hybrid-override-pattern",
}
#: flag -> (key of the run, default).
OF_THE_RUN = {
    "seq-length": ("seq_len", None),
    "micro-batch-size": ("micro_batch_size", None),
    "global-batch-size": ("global_batch_size", None),
    "tensor-model-parallel-size": ("tp", 1),
    "pipeline-model-parallel-size": ("pp", 1),
    "context-parallel-size": ("cp", 1),
    "expert-model-parallel-size": ("ep", 1),
    "decoder-first-pipeline-num-layers": ("num_layers_in_first_pipeline_stage", 0),
    "decoder-last-pipeline-num-layers": ("num_layers_in_last_pipeline_stage", 0),
    "overlap-grad-reduce": ("overlap_grad_reduce", False),
    "overlap-param-gather": ("overlap_param_gather", False),
    "cross-entropy-loss-fusion": ("cross_entropy_fusion", False),
    "fp8-param-gather": ("fp8_param_gather", False),
    "overlap-moe-expert-parallel-comm": ("moe_exchange_overlap", False),
    "moe-shared-expert-overlap": ("moe_shared_expert_overlap", False),
    "delay-wgrad-compute": ("delay_wgrad_compute", False),
    "defer-embedding-wgrad-compute": ("defer_embedding_wgrad_compute", False),
    "microbatch-group-size-per-virtual-pipeline-stage": ("micro_batch_group", 0),
    "wgrad-deferral-limit": ("wgrad_deferral_limit", 0),
    "account-for-embedding-in-pipeline-split": ("account_for_embedding_in_pipeline_split", False),
    "account-for-loss-in-pipeline-split": ("account_for_loss_in_pipeline_split", False),
}
#: --optimizer -> (optimizer, whether its states are sharded without --use-distributed-optimizer).
OPTIMIZERS = {"adam": ("adam", False), "muon": ("muon", False), "dist_muon": ("muon", True)}
#: Values of Muon's flags that are modelled, which are the defaults.
MUON = {"muon-tp-mode": "blockwise", "muon-num-ns-steps": "5"}
#: --data-parallel-sharding-strategy of Megatron-FSDP -> ZeRO stage.
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
#: Flags that may be 0.
MAY_BE_ZERO = _flags(
    "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 "
    "max-position-embeddings moe-shared-expert-intermediate-size mtp-num-layers cpu-offloading-num-layers recompute-num-layers "
    "moe-router-num-groups moe-router-group-topk q-lora-rank wgrad-deferral-limit "
    "microbatch-group-size-per-virtual-pipeline-stage"
)
_READ = _flags(
    "data-parallel-sharding-strategy use-megatron-fsdp "
    "cuda-graph-impl cuda-graph-modules cuda-graph-scope enable-cuda-graph external-cuda-graph first-last-layers-bf16 "
    "fp4-format "
    "moe-expert-capacity-factor moe-pad-expert-input-to-capacity no-overlap-p2p-communication num-layers-at-end-in-bf16 "
    "num-layers-at-start-in-bf16 muon-num-ns-steps muon-tp-mode optimizer recompute-activations tp-comm-overlap "
    "no-masked-softmax-fusion no-rope-fusion moe-router-dtype "
    "activation-func-clamp-value enable-gpt-oss moe-layer-recompute moe-shared-expert-gate no-rope-freq padded-vocab-size "
    "qk-l2-norm window-attn-skip-freq window-size attention-output-gate linear-attention-freq "
    "hybrid-override-pattern is-hybrid-model mamba-num-heads "
    "add-qkv-bias attention-backend attention-dropout bf16 cp-comm-type cross-entropy-fusion-impl deterministic-mode "
    "disable-bias-linear hierarchical-context-parallel-sizes expert-tensor-parallel-size ffn-hidden-size fp16 fp8-format "
    "fp8-recipe group-query-attention "
    "hidden-dropout kv-channels make-vocab-size-divisible-by moe-enable-deepep moe-ffn-hidden-size "
    "megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype moe-router-force-load-balancing "
    "moe-flex-dispatcher-backend moe-grouped-gemm moe-layer-freq moe-permute-fusion moe-router-enable-expert-bias "
    "moe-router-fusion "
    "moe-router-score-function moe-token-dispatcher-type multi-latent-attention no-gradient-accumulation-fusion "
    "normalization num-distributed-optimizer-instances num-layers-per-virtual-pipeline-stage num-query-groups "
    "num-virtual-stages-per-pipeline-rank pipeline-model-parallel-layout position-embedding-type "
    "qk-layernorm recompute-num-layers "
    "optimizer-cpu-offload optimizer-offload-fraction use-precision-aware-optimizer exp-avg-dtype exp-avg-sq-dtype "
    "fine-grained-activation-offloading offload-modules activation-offload-fraction min-offloaded-tensor-size "
    "cpu-offloading-num-layers grad-reduce-in-bf16 main-grads-dtype recompute-granularity recompute-method recompute-modules "
    "sequence-parallel swiglu transformer-impl "
    "untie-embeddings-and-output-weights use-distributed-optimizer vocab-size"
)

#: Every flag whose effect is known, known to be none, or said to be left out.
KNOWN = (
    NEUTRAL
    | ARRANGEMENTS
    | LEFT_OUT.keys()
    | MODELLED.keys()
    | RENAMED.keys()
    | EARLIER
    | _READ
    | COUNTS.keys()
    | LATENT.keys()
    | LINEAR.keys()
    | MAMBA_ARGUMENTS.keys()
    | OF_THE_RUN.keys()
)
