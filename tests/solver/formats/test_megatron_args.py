"""Arguments of Megatron-LM's pretrain_gpt.py: defaults, implications, refusals, and the peak of its last rank by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from toy import BEFORE_HOPPER, toy_cost

from profiler.errors import InputError
from solver.formats.cases.reading import case_of
from solver.formats.config_file import load_run_config
from solver.formats.megatron.arguments import sections_of_megatron
from solver.formats.model_file import shipped_model
from solver.report.validate import Prediction
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import layer_kinds
from solver.spec.layer_types import LINEAR_SIZES
from solver.spec.model_from_keys import model_from_keys
from solver.spec.model_size import attention_linears, parameters
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.problem import problem_of
from solver.step.solutions import estimate_layouts

#: The model of most of Megatron-LM's functional tests.
SMALL: dict[str, Any] = {
    "--num-layers": 12,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 4,
    "--global-batch-size": 32,
    "--bf16": True,
}


def read(world: int = 8, **flags: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    named = {"--" + name.replace("_", "-"): value for name, value in flags.items()}
    return sections_of_megatron({**SMALL, **named}, world, [])


def test_defaults_are_those_of_arguments_py() -> None:
    model, run = read(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    # GPT-2's 50,257 tokens, padded to a multiple of 128 * tp; four times the width; learned positions; biases; tied
    assert (model["vocab_size"], model["padded_vocab_size"], model["intermediate_size"]) == (50257, 50432, 2048)
    assert model["position"] == "learned" and model["norm"] == "layernorm" and model["tie_word_embeddings"]
    assert model["qkv_bias"] and model["output_bias"] and model["mlp_bias"] and not model["gated_mlp"]
    assert (run["tp"], run["pp"], run["cp"], run["dp"], run["vpp"], run["zero"]) == (2, 2, 1, 2, 1, 0)
    assert run["dropout"] and run["gradient_accumulation_fusion"] and run["attention"] == "flash"
    assert (run["grad_dtype"], run["recompute"], run["overlap_grad_reduce"]) == ("fp32", "none", False)


def test_flags_imply_others() -> None:
    model, run = read(
        swiglu=True,
        group_query_attention=True,
        num_query_groups=2,
        use_distributed_optimizer=True,
        sequence_parallel=True,
        num_distributed_optimizer_instances=2,
        num_layers_per_virtual_pipeline_stage=1,
        pipeline_model_parallel_size=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
    )
    assert (model["intermediate_size"], model["num_key_value_heads"]) == (1344, 2)  # 4 * 512 * 2 / 3 to a multiple of 64
    assert (run["zero"], run["zero_shard_size"], run["vpp"]) == (1, 1, 3)  # 2 replicas in 2 instances; 12 layers, 1 a chunk
    assert not run["sequence_parallel"]  # of a tensor group of one
    assert not run["dropout"] and run["attention"] == "unfused" and run["framework"] == "megatron-core local"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"recompute_activations": True}, {"recompute": "selective"}),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, {"recompute": "full"}),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4},
            {"recompute": "full", "recompute_group": 4},
        ),
        # a layer of each of a stage's three chunks
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
                "pipeline_model_parallel_size": 2,
                "num_virtual_stages_per_pipeline_rank": 3,
            },
            {"recompute": "full", "recompute_layers": 3, "vpp": 3},
        ),
        ({"sequence_parallel": True, "tp_comm_overlap": True}, {"tp_comm_overlap": False}),
        ({"sequence_parallel": True, "tp_comm_overlap": True, "tensor_model_parallel_size": 2}, {"tp_comm_overlap": True}),
        ({"no_overlap_p2p_communication": True}, {"p2p_overlap": False}),
        # 12 layers and the two ends, 14, in 2 stages of 7 chunks of one
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            {"vpp": 7},
        ),
        (
            {"fp8_format": "hybrid", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2},
            {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2},
        ),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn mlp"},
            {"cuda_graphs": True, "cuda_graph_modules": "attn+mlp"},
        ),
        ({"enable_cuda_graph": True}, {"cuda_graphs": True}),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": "[<CudaGraphScope.attn: 2>, <CudaGraphScope.mlp: 3>]"},
            {"cuda_graph_modules": "attn+mlp"},
        ),
        (
            {"num_experts": 8, "moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
            {"moe_capacity_factor": 1.5},
        ),
        ({"num_experts": 8, "moe_shared_expert_overlap": True}, {"moe_shared_expert_overlap": True}),
        ({"fp4_format": "e2m1"}, {"precision": "nvfp4"}),
        ({"num_experts": 8, "moe_router_force_load_balancing": True}, {"moe_imbalance": 1.0}),
        ({"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}, {"precision": "nvfp4"}),
        ({"fp8_format": "hybrid", "fp8_recipe": "mxfp8", "fp8_wgrad": True}, {"precision": "mxfp8"}),
        ({"fp8_format": "hybrid", "fp8_recipe": "blockwise"}, {"precision": "fp8", "fp8_recipe": "blockwise"}),
        ({"rerun_mode": "validate_results", "distributed_backend": "nccl"}, {"precision": "bf16"}),
        ({"init_model_with_meta_device": True, "disable_gloo_process_groups": True}, {"precision": "bf16"}),
        ({"num_experts": 8, "moe_token_drop_policy": "position"}, {"moe_dispatcher": "allgather"}),
        ({"num_experts": 8, "moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"}, {"moe_dispatcher": "deepep"}),
        ({"optimizer": "adam", "lr": 1e-4, "accumulate_allreduce_grads_in_fp32": True}, {"grad_dtype": "fp32"}),
    ],
)
def test_what_flags_mean(flags: dict[str, Any], found: dict[str, Any]) -> None:
    run = read(**flags)[1]
    assert found.items() <= run.items()
    assert ("num_layers_at_start_in_bf16" in run) == ("first_last_layers_bf16" in flags)  # which alone turns them on


#: The model part of a public script that fine-tunes GPT-OSS 20B with Megatron-LM.
GPT_OSS: dict[str, Any] = {
    "--num-layers": 24,
    "--hidden-size": 2880,
    "--ffn-hidden-size": 2880,
    "--num-attention-heads": 64,
    "--group-query-attention": True,
    "--num-query-groups": 8,
    "--kv-channels": 64,
    "--max-position-embeddings": 131072,
    "--normalization": "RMSNorm",
    "--untie-embeddings-and-output-weights": True,
    "--quick-geglu": True,
    "--glu-linear-offset": 1.0,
    "--activation-func-clamp-value": 7.0,
    "--softmax-type": "learnable",
    "--window-size": "127,0",
    "--window-attn-skip-freq": 2,
    "--position-embedding-type": "yarn",
    "--rotary-base": 150000,
    "--rotary-percent": 1.0,
    "--rotary-scaling-factor": 32.0,
    "--yarn-original-max-position-embeddings": 4096,
    "--yarn-beta-fast": 32.0,
    "--yarn-beta-slow": 1.0,
    "--mscale": 1.0,
    "--mscale-all-dim": 0.0,
    "--no-yarn-correction-range-round-to-int": True,
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
    "--num-experts": 32,
    "--moe-ffn-hidden-size": 2880,
    "--moe-router-topk": 4,
    "--padded-vocab-size": 201088,
    "--moe-router-load-balancing-type": "none",
}


def test_gpt_oss_is_the_shipped_one() -> None:
    said: list[str] = []
    keys, _ = sections_of_megatron({**SMALL, **GPT_OSS}, 8, said)
    model, shipped = model_from_keys(keys, "test"), shipped_model("gpt_oss_20b")
    kinds = [layer_kinds(one, 4096, (0, 0)) for one in (model, shipped)]
    assert kinds[0].kinds == kinds[1].kinds and list(kinds[0].of_layer) == list(kinds[1].of_layer)
    assert kinds[0].kinds[0].window == 128  # 127 tokens before a token, and itself
    assert (model.attention_sinks, model.clamped_gate, model.scaled_rope, model.gated_mlp) == (True, True, True, True)
    assert parameters(shipped) == parameters(model) == 20_914_757_184
    assert said == ["left out of the estimate: the kernels of a gated GELU (--quick-geglu)"]


#: The model part of slime's script for Qwen3.5-35B-A3B (THUDM/slime), with Megatron-Core's own linear attention.
QWEN: dict[str, Any] = {
    "--num-layers": 40,
    "--hidden-size": 2048,
    "--num-attention-heads": 16,
    "--group-query-attention": True,
    "--num-query-groups": 2,
    "--kv-channels": 256,
    "--normalization": "RMSNorm",
    "--qk-layernorm": True,
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--position-embedding-type": "rope",
    "--vocab-size": 248320,
    "--make-vocab-size-divisible-by": 128,
    "--num-experts": 256,
    "--moe-ffn-hidden-size": 512,
    "--moe-router-topk": 8,
    "--moe-shared-expert-intermediate-size": 512,
    "--moe-shared-expert-gate": True,
    "--attention-output-gate": True,
    "--experimental-attention-variant": "gated_delta_net",
    "--linear-attention-freq": 4,
    "--linear-num-key-heads": 16,
    "--linear-num-value-heads": 32,
    "--apply-layernorm-1p": True,
}


def test_linear_attention_is_that_of_the_shipped_model() -> None:
    keys, _ = sections_of_megatron({**SMALL, **QWEN}, 8, [])
    model, shipped = model_from_keys(keys, "test"), shipped_model("qwen3_5_35b_a3b")
    assert model.layer_types == shipped.layer_types and model.layer_types.count("linear_attention") == 30
    for key in (*LINEAR_SIZES, "attention_gate", "shared_expert_gate"):
        assert getattr(model, key) == getattr(shipped, key)
    assert parameters(model) == parameters(shipped)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"experimental_attention_variant": "gated_delta_net"}, "gated_delta_net needs --linear-attention-freq"),
        ({"experimental_attention_variant": "dsa"}, "attention of another kind"),
        (
            {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4, "window_size": "127,0"},
            "--window-size with --experimental-attention-variant gated_delta_net is not modelled",
        ),
    ],
)
def test_linear_attention_that_megatron_refuses(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(**flags)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"window_size": "(4095, 0)"}, {"sliding_window": 4096}),
        ({"window_size": [4095, 0], "window_attn_skip_freq": 4}, {"sliding_window": 4096, "sliding_window_every": 4}),
        ({"window_size": "-1,0"}, {"sliding_window": 0}),
        (
            {"window_size": "7,0", "window_attn_skip_freq": "([1,0]*2+[1]*8)"},
            {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 8},
        ),
        ({"window_size": "7,0", "window_attn_skip_freq": "[1,1,0]*4"}, {"sliding_window": 8, "sliding_window_every": 3}),
        ({"no_rope_freq": 4}, {"no_rope_layers": [1, 1, 1, 0] * 3}),
        ({"num_experts": 4, "moe_layer_freq": "([0]+[1]*2)*4"}, {"moe_layer_freq": [0, 1, 1] * 4}),
        (
            {"num_experts": 4, "moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 64},
            {"shared_expert_gate": True},
        ),
        ({"qk_l2_norm": True}, {"qk_norm": "head"}),
        ({"padded_vocab_size": 50304, "tensor_model_parallel_size": 8}, {"vocab_size": 50304, "padded_vocab_size": 50304}),
        ({"vocab_size": 32000, "padded_vocab_size": 32768}, {"vocab_size": 32000, "padded_vocab_size": 32768}),
    ],
)
def test_what_flags_say_of_the_model(flags: dict[str, Any], found: dict[str, Any]) -> None:
    model = read(**flags)[0]
    assert found.items() <= model.items() and ("sliding_window_every" in found or "sliding_window_every" not in model)
    model_from_keys(model, "test")


def test_a_layer_of_experts_is_recomputed_whole_by_its_old_flag_too() -> None:
    assert read(num_experts=8, moe_layer_recompute=True)[1]["recompute_modules"] == ["core_attn", "moe"]


def test_a_batch_that_is_not_stated_is_a_micro_batch_on_each_rank() -> None:
    flags = {flag: value for flag, value in SMALL.items() if flag != "--global-batch-size"} | {"complete": True}
    assert sections_of_megatron({**flags, "--tensor-model-parallel-size": 2}, 8, [])[1]["global_batch_size"] == 4 * 8 / 2


def test_a_negative_capacity_is_none() -> None:
    without = read(num_experts=8)[1]
    assert read(num_experts=8, moe_expert_capacity_factor=-1.0)[1] == without


def test_experts_of_a_capacity_without_padding_are_those_without_one() -> None:
    said: list[str] = []
    flags = {**SMALL, "--num-experts": 8, "--moe-token-dispatcher-type": "alltoall"}
    run = sections_of_megatron({**flags, "--moe-expert-capacity-factor": 1.0}, 8, said)[1]
    assert run == sections_of_megatron(flags, 8, [])[1]
    what = "tokens beyond an expert's capacity, which are dropped (--moe-expert-capacity-factor)"
    assert said == [f"left out of the estimate: {what}"]


def test_flags_of_scripts_are_known() -> None:
    idle = (
        "dataloader-type trust-remote-code tokenizer-library reset-position-ids reset-attention-mask rope-type replication "
        "use-cpu-initialization mup-base-hidden-size config-logger-dir inprocess-restart disable-msc "
        "no-gradient-reduce-div-fusion"
    )
    said: list[str] = []
    sections_of_megatron(SMALL | {f"--{flag}": True for flag in idle.split()} | {"--hybrid-mlp-ratio": 0.0}, 8, said)
    assert not said
    doing = "disable-tp-comm-bulk-dgrad fp16-lm-cross-entropy nccl-ub no-moe-router-aux-loss-fusion sft tp-comm-overlap-cfg"
    sections_of_megatron(SMALL | {f"--{flag.replace('nccl-ub', 'use-nccl-ub')}": True for flag in doing.split()}, 8, said)
    assert [line.partition(" (--")[2].rstrip(")") for line in said] == doing.split()


def test_small_effects_are_said_to_be_left_out() -> None:
    said: list[str] = []
    sections_of_megatron({**SMALL, "--use-mup": True, "--squared-relu": True}, 8, said)
    assert said == [
        "left out of the estimate: the kernels of a squared ReLU (--squared-relu)",
        "left out of the estimate: the factors of muP (--use-mup)",
    ]


def test_timers_at_which_the_host_waits_are_said() -> None:
    said: list[str] = []
    sections_of_megatron({**SMALL, "--timing-log-level": 0}, 8, said)
    assert not said
    sections_of_megatron({**SMALL, "--timing-log-level": 2}, 8, said)
    assert said == ["left out of the estimate: timers at which the host waits for the device (--timing-log-level)"]


def test_two_activations_are_refused() -> None:
    with pytest.raises(InputError, match="--swiglu does not run with --squared-relu"):
        read(swiglu=True, squared_relu=True)


def test_values_that_do_nothing_are_not_said_to_be_left_out() -> None:
    idle: dict[str, Any] = {
        "--num-experts": 8,
        "--moe-router-load-balancing-type": "seq_aux_loss global_aux_loss",
        "--moe-deepep-num-sms": 20,
        "--rotary-percent": 1,
    }
    said: list[str] = []
    sections_of_megatron({**SMALL, **idle}, 8, said)
    assert not said
    doing = {
        "--moe-router-load-balancing-type": "sinkhorn",
        "--moe-deepep-num-sms": 24,
        "--moe-router-padding-for-fp8": True,
        "--moe-router-padding-for-quantization": True,
        "--overlap-param-gather-with-optimizer-step": True,
        "--overlap-p2p-communication-warmup-flush": True,
    }
    sections_of_megatron({**SMALL, **idle, **doing}, 8, said)
    assert [line.partition(" (")[2].rstrip(")") for line in said] == sorted(doing)
    assert said[0] == "left out of the estimate: another number of multiprocessors than DeepEP's own (--moe-deepep-num-sms)"
    assert "left out of the estimate: the iterations of the router's sinkhorn (--moe-router-load-balancing-type)" in said


def test_megatron_fsdps_gradients() -> None:
    """Its own types count where gradients are not reduced in fp32 (--grad-reduce-in-bf16); both must then be the same."""
    main, reduced = "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"
    sharded = {
        **SMALL,
        "--use-megatron-fsdp": True,
        "--use-distributed-optimizer": True,
        "complete": True,
        "--data-parallel-sharding-strategy": "optim_grads_params",
    }
    narrow = {**sharded, "--grad-reduce-in-bf16": True}
    for types, found in (
        ({}, "bf16"),
        ({main: "bf16", reduced: "bf16"}, "bf16"),
        ({main: "fp32", reduced: "fp32"}, "fp32"),
        ({main: "fp32"}, "fp32"),
        ({main: "auto", reduced: "auto"}, "bf16"),
    ):
        assert sections_of_megatron({**narrow, **types}, 8, [])[1]["grad_dtype"] == found
    with pytest.raises(InputError, match="kept in fp32 and reduced in bf16 are not modelled; give both the same type"):
        sections_of_megatron({**narrow, main: "fp32", reduced: "bf16"}, 8, [])
    said: list[str] = []
    assert sections_of_megatron({**sharded, main: "bf16", reduced: "fp32"}, 8, said)[1]["grad_dtype"] == "fp32"
    assert said[0] == (
        "ignored, as Megatron does where gradients are reduced in fp32, without --grad-reduce-in-bf16: "
        "--megatron-fsdp-main-grads-dtype"
    ) and not any("comm" in line for line in said)


def test_flags_of_megatron_fsdp_alone_do_nothing() -> None:
    said: list[str] = []
    alone = {"--outer-dp-sharding-strategy": "optim", "--megatron-fsdp-main-params-dtype": "fp32"}
    assert sections_of_megatron({**SMALL, **alone}, 8, said) == sections_of_megatron(SMALL, 8, [])
    assert said == ["ignored, as Megatron does without --use-megatron-fsdp: --outer-dp-sharding-strategy"]


def test_the_old_name_of_megatron_fsdp() -> None:
    new, old = ({**SMALL, flag: True, "--fsdp-double-buffer": True} for flag in ("--use-megatron-fsdp", "--use-custom-fsdp"))
    assert sections_of_megatron(old, 8, []) == sections_of_megatron(new, 8, [])
    said: list[str] = []
    assert sections_of_megatron(old, 8, said)[1]["framework"] == "megatron-bridge"
    assert said[0] == "left out of the estimate: Megatron-FSDP's buffers that stay allocated (--fsdp-double-buffer)"


def test_megatron_fsdp_shards_what_it_is_told_to() -> None:
    sharded = {**SMALL, "--use-megatron-fsdp": True, "--use-distributed-optimizer": True}
    for more, zero in (({}, 3), ({"complete": True}, 0), ({"--data-parallel-sharding-strategy": "optim_grads"}, 2)):
        said: list[str] = []
        run = sections_of_megatron({**sharded, **more}, 8, said)[1]
        assert (run["zero"], run["framework"]) == (zero, "megatron-bridge") and "Megatron-FSDP is estimated" in said[-1]
        assert any("state no strategy" in line for line in said) == (not more)


def test_fp8_beside_another_format_than_bf16() -> None:
    plain = {flag: value for flag, value in SMALL.items() if flag != "--bf16"} | {"--fp8-format": "hybrid"}
    said: list[str] = []
    assert sections_of_megatron(plain, 8, said)[1]["precision"] == "fp8" and said == [
        "precision: bf16 where it is not fp8; the arguments state none"
    ]
    with pytest.raises(InputError, match="--fp8-format without --bf16: weights in fp32 under fp8 are not modelled"):
        sections_of_megatron({**plain, "complete": True}, 8, [])


def test_gradients_of_16_bits() -> None:
    """bf16 implies gradients in fp32, fp16 does not (validate_args); --grad-reduce-in-bf16 is read beside bf16 alone."""
    plain = {flag: value for flag, value in SMALL.items() if flag != "--bf16"} | {"complete": True}
    wide, narrow = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
    for flags, found in (
        (("--fp16",), "fp16"),
        (("--fp16", wide), "fp32"),
        (("--fp16", narrow), "fp16"),
        ((), "fp32"),
        ((narrow,), "fp32"),
        (("--bf16",), "fp32"),
        (("--bf16", wide), "fp32"),
        (("--bf16", narrow), "bf16"),
        (("--bf16", narrow, wide), "bf16"),
    ):
        run = sections_of_megatron(plain | dict.fromkeys(flags, True), 8, [])[1]
        assert run["grad_dtype"] == found, flags
    said: list[str] = []
    sections_of_megatron({**plain, "--fp16": True, "complete": False}, 8, said)
    assert said == ["grad_dtype: fp16, which --fp16 has without --accumulate-allreduce-grads-in-fp32"]


def test_published_arguments_of_gated_models_mean_no_dropout() -> None:
    for more, dropout in (({}, False), ({"complete": True}, True), ({"--hidden-dropout": 0.1}, True)):
        said: list[str] = []
        run = sections_of_megatron({**SMALL, "--swiglu": True, **more}, 8, said)[1]
        assert (run["dropout"], bool(said)) == (dropout, not more)


def test_latent_attention_has_megatrons_sizes() -> None:
    """kv-lora-rank 32, qk-head-dim 128, qk-pos-emb-head-dim 64, v-head-dim 128, a plain q projection; by hand of SMALL."""
    keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    model = read(multi_latent_attention=True)[0]
    assert [model[key] for key in keys] == [0, 32, 128, 64, 128]
    # q; down to the rank and the rotary key that all heads share; up to keys and values; output
    spec = model_from_keys(model, "SMALL", "SMALL")
    assert attention_linears(spec) == 512 * 8 * 192 + 512 * (32 + 64) + 32 * 8 * (128 + 128) + 8 * 128 * 512
    wider = read(multi_latent_attention=True, kv_lora_rank=512, q_lora_rank=1536)[0]
    assert [wider[key] for key in keys] == [1536, 512, 128, 64, 128]


def test_norms_of_q_and_k_are_of_the_class_of_the_others() -> None:
    """SMALL's heads are 64 wide: LayerNorms of q and k have 2 x 2 x 64 parameters a layer, RMSNorms 2 x 64."""
    for norm, found in (("LayerNorm", 256), ("RMSNorm", 128)):
        spec = model_from_keys(read(qk_layernorm=True, normalization=norm)[0], "SMALL", "SMALL")
        assert spec.qk_norm_parameters == found


def test_sizes_of_latent_attention_alone_do_nothing() -> None:
    said: list[str] = []
    sized = {**SMALL, "--kv-lora-rank": 512, "--v-head-dim": 64}
    assert sections_of_megatron(sized, 8, said) == sections_of_megatron(SMALL, 8, []) and said == [
        "ignored, as Megatron does without --multi-latent-attention: --kv-lora-rank",
        "ignored, as Megatron does without --multi-latent-attention: --v-head-dim",
    ]


def test_null_tokenizer_adds_the_end_of_a_document() -> None:
    assert read(tokenizer_type="NullTokenizer", vocab_size=131_071)[0]["vocab_size"] == 131_072


def test_experts() -> None:
    model, run = read(
        num_experts=8,
        moe_router_topk=2,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        moe_layer_freq="([0]*3+[1]*9)",
        moe_ffn_hidden_size=256,
        moe_token_dispatcher_type="flex",
    )
    assert model["moe_layer_freq"] == [0] * 3 + [1] * 9 and model["moe_intermediate_size"] == 256
    assert (run["ep"], run["etp"], run["moe_dispatcher"], run["moe_grouped_gemm"]) == (2, 2, "deepep", False)  # etp: tp


def test_context_flags() -> None:
    assert read()[1]["cp_comm"] == "ring" and read(cp_comm_type="a2a")[1]["cp_comm"] == "a2a"
    both = read(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes="4 2")[1]
    assert (both["cp_comm"], both["cp_a2a_size"]) == ("a2a+ring", 4)
    with pytest.raises(InputError, match="need each other"):
        read(cp_comm_type="a2a+p2p")


def test_groups_of_micro_batches() -> None:
    pipeline = {"pipeline_model_parallel_size": 2, "microbatch_group_size_per_virtual_pipeline_stage": 3}
    stages = {"num_layers_per_virtual_pipeline_stage": 3}, {"pipeline_model_parallel_layout": "Ettt|ttt|ttt|tttL"}
    assert [read(**pipeline, **one)[1]["micro_batch_group"] for one in (*stages, {})] == [3, 3, 0]
    same = {**pipeline, "microbatch_group_size_per_virtual_pipeline_stage": 2}
    assert read(**same, **stages[0])[1]["micro_batch_group"] == 0  # which is Megatron's own


def test_muon() -> None:
    alone, assigned = (read(optimizer=name)[1] for name in ("muon", "dist_muon"))
    assert (alone["optimizer"], alone["zero"], assigned["optimizer"], assigned["zero"]) == ("muon", 0, "muon", 1)
    assert read()[1]["optimizer"] == "adam" and read(optimizer="muon", muon_momentum=0.9)[1] == alone
    for flags, reason in (
        ({"muon_tp_mode": "distributed"}, "--muon-tp-mode 'distributed' is not modelled; blockwise is"),
        ({"use_distributed_optimizer": True}, "does not run with --use-distributed-optimizer"),
        ({"optimizer": "dist_muon", "num_distributed_optimizer_instances": 2}, "it assigns to all|assigns to all"),
        ({"optimizer": "sgd"}, "adam, muon, dist_muon are"),
    ):
        with pytest.raises(InputError, match=reason):
            read(**{"optimizer": "muon", **flags})


def test_optimizer_and_host_flags() -> None:
    run = read(optimizer_cpu_offload=True, optimizer_offload_fraction=0.25, cpu_offloading_num_layers=3)[1]
    assert (run["optimizer_offload_fraction"], run["offload_layers"]) == (0.25, 3)
    assert read(optimizer_cpu_offload=True)[1]["optimizer_offload_fraction"] == 1.0


def test_small_effects_of_router_and_optimizer_are_named() -> None:
    said: list[str] = []
    run = sections_of_megatron({**SMALL, "--num-experts": 8, "--moe-router-dtype": "fp32"}, 8, said)[1]
    assert run["moe_router_fp32"] is True
    aware = {"use_precision_aware_optimizer": True}
    assert read(**aware)[1]["optimizer_states"] == "remainder"
    assert read(**aware, fp8_format="hybrid", fp8_recipe="delayed")[1]["optimizer_states"] == "remainder"
    # master weights of quantised ones, those on the host, and those that Megatron-FSDP shards are whole
    for other in (
        {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
        {"optimizer_cpu_offload": True},
        {"fp16": True, "bf16": False},
    ):
        assert read(**aware, **other)[1]["optimizer_states"] == "fp32"
    sharded = {**SMALL, "--use-megatron-fsdp": True, "--use-precision-aware-optimizer": True}
    assert sections_of_megatron(sharded, 8, said)[1]["optimizer_states"] == "fp32"
    assert any("weights that Megatron-FSDP shards (--use-precision-aware-optimizer)" in line for line in said)


def test_an_unfused_softmax_of_unfused_attention() -> None:
    assert read(no_masked_softmax_fusion=True, attention_backend="unfused")[1]["fused_softmax"] is False
    assert "fused_softmax" not in read(no_masked_softmax_fusion=True)[1]  # fused attention has no softmax of its own


def test_modules_on_the_host() -> None:
    run = read(fine_grained_activation_offloading=True, offload_modules="[core_attn attn_proj]")[1]
    assert run["offload_modules"] == ["core_attn", "attn_proj"]
    with pytest.raises(InputError, match="needs --offload-modules of attn_norm, qkv_linear"):
        read(fine_grained_activation_offloading=True)
    with pytest.raises(InputError, match="--activation-offload-fraction 0.5: only 1, its default, is modelled"):
        read(fine_grained_activation_offloading=True, offload_modules="core_attn", activation_offload_fraction=0.5)
    narrow = read(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")[1]
    assert narrow["optimizer_states"] == "bf16" and "optimizer_states" not in read(exp_avg_dtype="bf16")[1]
    with pytest.raises(InputError, match="give one of fp32"):
        read(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")


@pytest.mark.parametrize(
    ("layout", "pp", "expected"),
    [
        ("Et*6|t*6mL", 2, {"vpp": 1, "pipeline_layout": "Et*6|t*6mL"}),
        ("Et*2|t*4|t*4|t*2L", 4, {"vpp": 1, "pipeline_layout": "Et*2|t*4|t*4|t*2L"}),
        ("Et*3|(ttt|)*2tttL", 2, {"vpp": 2}),
        ("Et*12L", 1, {"vpp": 1}),
    ],
)
def test_layout_strings(layout: str, pp: int, expected: dict[str, Any]) -> None:
    run = read(pipeline_model_parallel_layout=layout, pipeline_model_parallel_size=pp)[1]
    assert expected.items() <= run.items()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"use_torch_fsdp2": True},
            "--use-torch-fsdp2: FSDP2 under Megatron-LM",
        ),
        ({"num_experts": 8, "moe_layer_freq": "([0]*99999999999)"}, "--moe-layer-freq is '([0]*99999999999)'"),
        ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 3}, "3 does not divide the 8"),
        ({"optimizer": "sgd"}, "--optimizer 'sgd' is not modelled; adam, muon, dist_muon are"),
        ({"num_experts": 8, "moe_expert_capacity_factor": 0.9}, "-input-to-capacity is not modelled, for it drops"),
        ({"window_size": "127,1"}, "--window-size 127,1: a window on tokens that follow is not modelled; 127,0 is"),
        ({"window_size": "wide"}, "--window-size is 'wide'; it must be two numbers, as 127,0"),
        (
            {"window_size": "127,0", "window_attn_skip_freq": "[1,0]*5"},
            "--window-attn-skip-freq is of 10 layers; --num-layers is 12",
        ),
        ({"no_rope_freq": "[2]*12"}, "--no-rope-freq is '[2]*12'; it must be a number or like"),
        (
            {"softmax_type": "off-by-one"},
            "--softmax-type 'off-by-one': another softmax of attention is not modelled; vanilla and",
        ),
        ({"no_fp8_wgrad": True}, "--no-fp8-wgrad: weight gradients of an fp8 run in 16 bits is not modelled"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection: residuals in fp32 is not modelled"),
        ({"hybrid_attention_ratio": 0.1}, "--hybrid-attention-ratio: layers that are no transformer layers is not modelled"),
        (
            {"moe_layer_recompute": True, "recompute_granularity": "full", "num_experts": 8},
            "--moe-layer-recompute does not run",
        ),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "moe"}, "CUDA graphs of 'moe' are not modelled"),
        ({"brand_new": 1}, "--brand-new is not known here"),
        (
            {"rerun_mode": "report_determinism_stats"},
            "--rerun-mode 'report_determinism_stats': every iteration run twice is not modelled; disabled and validate_results",
        ),
        ({"distributed_backend": "gloo"}, "communication by another library than NCCL is not modelled; nccl can be"),
        (
            {"use_megatron_fsdp": True, "outer_dp_sharding_strategy": "optim"},
            "--outer-dp-sharding-strategy 'optim': states of the optimizer that are sharded over the instances too",
        ),
        (
            {"use_megatron_fsdp": True, "megatron_fsdp_main_params_dtype": "bf16"},
            "--megatron-fsdp-main-params-dtype 'bf16': an optimizer without weights in fp32 is not modelled; fp32 can be",
        ),
        (
            {"num_experts": 8, "moe_enable_deepep": True, "moe_token_dispatcher_type": "alltoall"},
            "--moe-enable-deepep is refused beside the dispatcher 'alltoall'; it needs --moe-token-dispatcher-type flex",
        ),
        (
            {"fp8_format": "hybrid", "fp8_recipe": "custom"},
            "--fp8-recipe is 'custom'; known here are delayed, tensorwise, blockwise, mxfp8",
        ),
        ({"fp4_format": "e2m1", "fp4_recipe": "custom"}, "--fp4-recipe 'custom': another recipe of fp4 than nvfp4"),
        ({"num_layers": "many"}, "--num-layers is 'many'; it must be a whole number"),
        ({"moe_layer_freq": "__import__('os')", "num_experts": 2}, "it must be a number or like"),
        ({"pipeline_model_parallel_layout": "Et*6|t*6", "pipeline_model_parallel_size": 2}, "end with L in another"),
        ({"pipeline_model_parallel_layout": "Et|tm|t|tL", "pipeline_model_parallel_size": 2}, "'tm' is not modelled"),
        ({"pipeline_model_parallel_size": 3}, "8 ranks are no multiple of tp 1 * pp 3"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=".*") as refused:
        read(**flags)
    assert sentence in str(refused.value)


def test_an_assumed_world_grows_until_its_groups_divide_it() -> None:
    assumptions: list[str] = []
    flags = {
        **SMALL,
        "--num-experts": 8,
        "--tensor-model-parallel-size": 2,
        "--pipeline-model-parallel-size": 2,
        "--expert-model-parallel-size": 8,
        "world-size-assumed": True,
    }
    run = sections_of_megatron(flags, 8, assumptions)[1]
    assert run["world_size"] == 32 and assumptions  # pp 2 x the 16 ranks of ep 8 and etp 2


def predicted(flags: dict[str, Any], **measured: Any) -> Prediction:
    plain = {
        "id": "GV-1",
        "hardware": "h100_sxm",
        "model": {},
        "run": {"world_size": 8},
        "megatron_args": {**SMALL, **flags},
        "measured": {"peak_memory_gib": 1.0, **measured},
    }
    case = case_of(plain)
    assert case.skipped is None and case.model is not None and isinstance(case.strategy, Strategy)
    cost = toy_cost(device=BEFORE_HOPPER)
    problem = problem_of(case.model, case.strategy, cluster_of(cost.device, {}), cost)
    return Prediction(case, None, estimate_layouts(problem, Layouts.of([case.strategy])), 0)


def test_peak_of_the_last_rank_by_hand() -> None:
    """Two stages of six layers, tp 2, unfused attention with dropout: Megatron-LM's gpt3_mcore_te_tp2_pp2, to the byte."""
    flags = {
        "--tensor-model-parallel-size": 2,
        "--pipeline-model-parallel-size": 2,
        "--attention-backend": "unfused",
        "--no-gradient-accumulation-fusion": True,
        "--deterministic-mode": True,
    }
    tokens, h, vocab = 4 * 1024, 512, 50432 // 2
    layer = (4 * h * h + 8 * h * h) // 2 + (3 * h + 4 * h) // 2 + 2 * h + 4 * h  # matrices, split biases, whole ones, norms
    parameters = 6 * layer + 2 * h + vocab * h
    stream = tokens * h * 2
    scores = 4 * 4 * 1024 * 1024  # micro batch, heads of a rank, tokens squared
    # Stream and norm output before each block, whole; q, k, v, context and both sides of the activation, halved; softmax, mask
    # and dropped-out scores 5 bytes; two masks of a byte.
    saved = 4 * stream + (3 + 1 + 4 + 4) * stream // 2 + 5 * scores + 2 * tokens * h
    logits = tokens * vocab
    loss = 2 * stream + 4 * logits + 2 * logits  # final norm's input and output, fp32 probabilities, 16-bit logits
    workspaces = 2 * 32 * 2**20 + 4 * 2**20  # of torch's two threads, deterministic, and Transformer Engine's (before Hopper)
    whole = 18 * parameters + workspaces + 6 * saved + loss
    found = predicted(flags, memory_of="last rank")
    assert found.memory_bytes == pytest.approx(whole, rel=1e-6)
    assert predicted(flags).memory_bytes >= found.memory_bytes  # the fullest rank's


def test_megatrons_own_implementation_keeps_a_buffer_of_scores() -> None:
    engine = predicted({"--attention-backend": "unfused"}).memory_bytes
    local = predicted({"--transformer-impl": "local"}).memory_bytes
    # instead of Transformer Engine's workspace, and its gradients for autograd of QKV, projection, MLP and vocabulary
    dummies = 2 * 512 * (3 * 512 + 512 + 2 * 2048 + 50304)
    assert local - engine == 4 * 8 * 1024 * 1024 * 2 - 4 * 2**20 - dummies


def test_megatrons_compiled_loss_holds_fp32_copies() -> None:
    logits = 4 * 1024 * 50304
    plain, native, te = (
        predicted({"--cross-entropy-loss-fusion": fused, "--cross-entropy-fusion-impl": impl}).memory_bytes
        for fused, impl in ((False, "te"), (True, "native"), (True, "te"))
    )
    assert native - plain == 4 * logits
    assert plain - te == 4 * logits  # beside each an empty gradient of the vocabulary's weight stays


@pytest.mark.parametrize(
    ("flag", "value", "needed"),
    [
        ("fp8-recipe", "tensorwise", "fp8-format"),
        ("num-query-groups", 2, "group-query-attention"),
        ("moe-router-topk", 2, "num-experts"),
        ("recompute-modules", "mlp", "recompute-granularity"),
        ("exp-avg-dtype", "bf16", "use-precision-aware-optimizer"),
        ("window-attn-skip-freq", 2, "window-size"),
        ("data-parallel-sharding-strategy", "optim_grads_params", "use-megatron-fsdp"),
    ],
)
def test_a_flag_that_needs_another_is_named_as_ignored(flag: str, value: object, needed: str) -> None:
    said: list[str] = []
    assert sections_of_megatron({**SMALL, f"--{flag}": value}, 8, said) == sections_of_megatron(SMALL, 8, [])
    assert said == [f"ignored, as Megatron does without --{needed}: --{flag}"]


#: As files and collectors state values: texts, lists of one, names of an enumeration.
SPELLED = {
    "--num-layers": 32,
    "--hidden-size": 4096,
    "--ffn-hidden-size": 11008,
    "--num-attention-heads": 32,
    "--seq-length": "4096",
    "--max-position-embeddings": 4096,
    "--micro-batch-size": 1,
    "--global-batch-size": "512",
    "--swiglu": True,
    "--bf16": True,
    "--tensor-model-parallel-size": 2,
    "--attention-backend": "AttnBackend.flash",
    "--cp-comm-type": ["p2p"],
    "--decrease-batch-size-if-needed": True,
    "--tokenizer-type": "HuggingFaceTokenizer",
}


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        ("meta-llama/Llama-2-7b-hf", 32000),
        ("somebody/else", 51200),
        ("deepseek-ai/DeepSeek-V3", 129280),
        ("mistralai/Mixtral-8x7B-v0.1", 32000),
    ],
)
def test_published_arguments_in_other_spellings(tokenizer: str, tokens: int) -> None:
    arguments = {**SPELLED, "--tokenizer-model": tokenizer}
    found = case_of(
        {
            "id": "X-1",
            "hardware": "h100_sxm",
            "megatron_args": arguments,
            "model": {},
            "run": {"world_size": 64},
            "measured": {},
        }
    )
    assert found.skipped is None and found.model is not None and found.strategy is not None
    assert found.model.vocab_size == tokens and found.strategy.num_micro_batches == 16
    assert f"vocab_size: {tokens}" in " ".join(found.assumptions)


@pytest.mark.parametrize(
    ("more", "found"), [({}, "fp32"), ({"--main-grads-dtype": "fp32"}, "fp32"), ({"--main-grads-dtype": "bf16"}, "bf16")]
)
def test_gradients_that_the_optimizer_reads_in_bf16_are_reduced_in_it(more: dict[str, Any], found: str) -> None:
    """validate_args accumulates in fp32 only where main_grads_dtype is fp32."""
    assert (
        sections_of_megatron({**SMALL, "--use-precision-aware-optimizer": True, "complete": True, **more}, 8, [])[1][
            "grad_dtype"
        ]
        == found
    )


@pytest.mark.parametrize(
    ("flags", "run"),
    [
        ({"checkpoint_activations": True}, {"recompute": "full"}),
        ({"checkpoint_activations": True, "checkpoint_num_layers": 2}, {"recompute": "full", "recompute_group": 2}),
        (
            {"activations_checkpoint_method": "block", "activations_checkpoint_num_layers": 3},
            {"recompute": "full", "recompute_layers": 3},
        ),
        ({"fp8_hybrid": True, "transformer_impl": "transformer_engine"}, {"precision": "fp8"}),
        ({"data_impl": "mmap", "DDP_impl": "local", "no_contiguous_buffers_in_local_ddp": True}, {"recompute": "none"}),
    ],
)
def test_arguments_of_earlier_releases_are_todays_of_the_same_meaning(flags: dict[str, Any], run: dict[str, Any]) -> None:
    named = {"--" + name.replace("_", "-"): value for name, value in flags.items()}
    told: list[str] = []
    _, read_ = sections_of_megatron({**SMALL, **named}, 8, told)
    assert {key: read_[key] for key in run} == run
    assert any(line.startswith("framework: --") and "of an earlier release" in line for line in told)


def test_switches_of_earlier_releases_that_today_s_has_anyway() -> None:
    plain = read(pipeline_model_parallel_size=2)
    assert read(pipeline_model_parallel_size=2, overlap_p2p_communication=True, no_query_key_layer_scaling=True) == plain
    assert read(layernorm_epsilon=1e-6, log_batch_size_to_tensorboard=True, no_data_sharding=True) == read()


def test_activations_overrule_a_full_granularity(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 "
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --bf16 "
        "--recompute-activations --recompute-granularity full --recompute-method uniform --recompute-num-layers 1\n"
    )
    run = load_run_config(path)
    assert run.layout["recompute"] == "selective"
    assert not any("would refuse" in line for line in run.notes)
    assert "ignored, as Megatron does with --recompute-activations: --recompute-granularity full" in run.notes


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"DDP_impl": "torch"}, "--DDP-impl 'torch' is not modelled; 'local' is"),
        ({"activations_checkpoint_method": "all"}, "is 'all'; it must be uniform or block"),
        (
            {"checkpoint_activations": True, "recompute_granularity": "full"},
            "--checkpoint-activations is an earlier release's --recompute-granularity; leave one out",
        ),
    ],
)
def test_what_is_refused_of_earlier_releases(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        read(**flags)
