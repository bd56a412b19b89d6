"""Model and strategy files: what is read, listed and refused, and that what is read matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from solver.formats.simumax.fields import LISTED, MODEL, READ, STRATEGY
from solver.formats.simumax.model import model_of
from solver.formats.simumax.strategy import layout_of
from solver.simumax import ModelConfig, StrategyConfig, SystemConfig

BASE = {"seq_len": 4096, "micro_batch_size": 1, "micro_batch_num": 8, "world_size": 64, "tp_size": 2, "pp_size": 2}
DENSE = {"hidden_size": 4096, "head_num": 32, "kv_head_num": 8, "intermediate_size": 14336, "layer_num": 32, "vocab_size": 1000}
EXPERTS = {**DENSE, "expert_num": 8, "topk": 2}
LATENT = {
    **EXPERTS,
    "attention_type": "mla",
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}


def layout(model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return layout_of(StrategyConfig(**BASE, **changes), ModelConfig(**(model or DENSE))).fields


def selective(**switches: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective_recompute", "recompute_layer_num": 4, **switches}


#: Field -> (a value, the fields of the layout that it sets), where the model is dense.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "seq_len": (8192, {"seq_len": 8192}),
    "micro_batch_size": (2, {"micro_batch_size": 2}),
    "micro_batch_num": (16, {"num_micro_batches": 16}),
    "dtype": ("fp16", {"precision": "fp16"}),
    "fp8": (True, {"precision": "fp8"}),
    "world_size": (32, {"world_size": 32}),
    "tp_size": (1, {"tp": 1, "tp_mode": "mtp"}),
    "cp_size": (2, {"cp": 2}),
    "pp_size": (4, {"pp": 4}),
    "cp_comm_type": ("p2p", {"cp_comm": "ring"}),
    "num_layers_in_first_pipeline_stage": (15, {"num_layers_in_first_pipeline_stage": 15}),
    "num_layers_in_last_pipeline_stage": (17, {"num_layers_in_last_pipeline_stage": 17}),
    "account_for_embedding_in_pipeline_split": (True, {"account_for_embedding_in_pipeline_split": True}),
    "account_for_loss_in_pipeline_split": (True, {"account_for_loss_in_pipeline_split": True}),
    "grad_reduce_in_bf16": (True, {"grad_dtype": "bf16"}),
    "use_fp32_accum_grad": (False, {"grad_dtype": "bf16"}),
    "enable_sequence_parallel": (False, {"tp_mode": "mtp"}),
    "interleaving_size": (2, {"vpp": 2}),
    "pp_comm_async": (False, {"p2p_overlap": False}),
    "zero_state": (0, {"zero": 0, "zero_shard_size": 1}),
    "enable_dropout": (True, {"dropout": True}),
    "use_accm_weight": (False, {"gradient_accumulation_fusion": False}),
    "use_fused_grad_accumulation": (False, {"gradient_accumulation_fusion": False}),
    "use_flash_sdp": (False, {"attention": "unfused"}),
    "use_math_sdp": (True, {"attention": "unfused"}),
    "use_fused_norm": (False, {"fused_norm": False}),
    "cross_entropy_loss_fusion": (True, {"cross_entropy_fusion": True}),
    "overlap_grad_reduce": (True, {"overlap_grad_reduce": True}),
    "te_version": ("2.11.0+abc", {"framework": "megatron-core-0.12, transformer-engine 2.11"}),
}
#: Read fields that are tested with others below.
_TOGETHER = {
    "ep_size",
    "etp_size",
    "moe_dispatcher_policy",
    "microbatch_group_size_per_vp_stage",
    "enable_recompute",
    "mem_factor",
    "recompute_granularity",
    "recompute_layer_num",
    "attn_recompute",
    "mla_rms_recompute",
    "mlp_recompute",
    "mlp_rms_recompute",
    "megatron_recompute",
    "megatron_recompute_modules",
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_read_field_sets_its_part_of_the_layout(name: str) -> None:
    value, expected = CHANGES[name]
    before, after = layout(), layout_of(StrategyConfig(**{**BASE, name: value}), ModelConfig(**DENSE)).fields
    assert {key: after[key] for key in after if after[key] != before[key]} == expected


def test_every_read_field_is_tested() -> None:
    read = {name for name, field in STRATEGY.items() if field.use == READ}
    assert read == CHANGES.keys() | _TOGETHER


@pytest.mark.parametrize("name", [name for name, field in STRATEGY.items() if field.use == LISTED])
def test_listed_fields_change_nothing_and_are_named(name: str) -> None:
    field = STRATEGY[name]
    value = field.only[-1] if field.only else not field.default if field.kind == "flag" else "2.3.0"
    config = StrategyConfig(**BASE, **{name: value})
    assert layout_of(config, ModelConfig(**DENSE)).fields == layout()
    assert [text for text in config.ignored if text.startswith(f"{name}: ")]


@pytest.mark.parametrize(
    ("changes", "model", "said"),
    [
        ({"cache_groupgemm_col_fp8_inputs": True}, DENSE, "cache_groupgemm_col_fp8_inputs is True, which is not modelled"),
        ({"offload_groupgemm_col_inputs": True}, DENSE, "offload_groupgemm_col_inputs is True, which is not modelled"),
        ({"use_fused_swiglu": False}, DENSE, "use_fused_swiglu is False, which is not modelled: .* it must be true"),
        ({"attention_sparse_ratio": 0.5}, DENSE, "attention_sparse_ratio is 0.5, which is not modelled"),
        ({"order_of_paralielism": "tp-cp-dp-ep-pp"}, DENSE, "order_of_paralielism is .* it must be tp-cp-ep-dp-pp"),
        ({"tp_net": "inter_node"}, DENSE, "tp_net is 'inter_node', which is not modelled: .* it must be auto"),
        ({"cp_comm_type": "a2a+p2p"}, DENSE, "cp_comm_type is .*a2a"),
        ({"skip_ckpt_micro_batch_num": 2}, DENSE, "skip_ckpt_micro_batch_num is 2"),
        ({"no_sync": False}, DENSE, "no_sync is False"),
        ({"zero_state": 4}, DENSE, "zero_state is 4"),
        ({"moe_dispatcher_policy": "deepep"}, EXPERTS, "moe_dispatcher_policy is 'deepep'"),
        ({"interleaving_size": 2, "microbatch_group_size_per_vp_stage": 4}, DENSE, "groups of pp_size; it must be 2"),
        ({"recompute_granularity": "attn_only", "recompute_layer_num": 1}, DENSE, "attn_only', which is not modelled"),
        ({"recompute_granularity": "everything"}, DENSE, "recompute_granularity is 'everything'"),
        (selective(mlp_recompute=True), EXPERTS, "mlp_recompute is true, which is not modelled for experts"),
        (selective(mla_rms_recompute=True), DENSE, "mla_rms_recompute needs attn_recompute"),
        (selective(megatron_recompute=True), DENSE, "megatron_recompute_modules is empty"),
        (
            selective(megatron_recompute=True, megatron_recompute_modules=["norm"]),
            DENSE,
            "modules has 'norm'",
        ),
        (selective(megatron_recompute=True, megatron_recompute_modules=["mlp"], mlp_recompute=True), DENSE, "excludes"),
        ({"megatron_recompute": True}, DENSE, "megatron_recompute needs recompute_granularity"),
        ({"ep_size": 2}, DENSE, "ep_size is 2, but model model has no experts"),
        ({"te_version": "main"}, DENSE, "te_version is 'main'"),
        ({"tp_sise": 2}, DENSE, r"strategy field 'tp_sise' is not known \(did you mean 'tp_size'"),
        ({"fp8": "yes"}, DENSE, "fp8 is 'yes'; it must be true or false"),
        ({"cp_size": 0}, DENSE, "cp_size is 0; it must be a whole number of at least 1"),
        ({}, {**DENSE, "attention_type": "linear"}, "attention_type is 'linear', which is not modelled"),
        ({}, {**DENSE, "attention_type": "mla"}, "needs kv_lora_rank"),
        ({}, {**DENSE, "sliding_window": 4}, "model field 'sliding_window' is not known"),
        ({}, {**DENSE, "hidden_size": None}, "model field hidden_size is missing"),
        ({}, {**DENSE, "kv_head_num": 5}, "num_attention_heads 32 is not a multiple"),
        ({"mem_factor": 0}, DENSE, "mem_factor is 0; it must be above 0"),
        ({"mem_factor": 1.5}, DENSE, "mem_factor is 1.5; it must be above 0 and at most 1"),
        ({}, {**EXPERTS, "capacity": 0}, "capacity is 0; it must be positive"),
        ({"seq_len": None}, DENSE, "strategy field seq_len is missing"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], model: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        config = ModelConfig(**model)
        model_of(config)
        layout_of(StrategyConfig(**{**BASE, **changes}), config)


@pytest.mark.parametrize(
    ("changes", "model", "modules"),
    [
        ({"recompute_granularity": "sdp_only", "recompute_layer_num": 4}, DENSE, "core_attn"),
        ({"recompute_granularity": "mlp_only", "recompute_layer_num": 4}, DENSE, "mlp"),
        ({"recompute_granularity": "mlp_only", "recompute_layer_num": 4}, EXPERTS, "layernorm+mlp+moe"),
        (selective(attn_recompute=True), DENSE, "core_attn"),
        (selective(attn_recompute=True), LATENT, "core_attn+mla_up_proj"),
        (selective(attn_recompute=True, mlp_recompute=True, mlp_rms_recompute=True), DENSE, "core_attn+mlp"),
        (selective(megatron_recompute=True, megatron_recompute_modules=["layernorm", "moe_act"]), EXPERTS, "layernorm+moe_act"),
    ],
)
def test_modules_recomputed(changes: dict[str, Any], model: dict[str, Any], modules: str) -> None:
    found = layout(model, **changes)
    assert (found["recompute"], found["recompute_layers"], found["recompute_modules"]) == ("selective", 4, modules)
    assert layout(model, **changes, enable_recompute=False)["recompute"] == "none"
    assert layout(model, **{**changes, "recompute_layer_num": 0})["recompute"] == "none"


def test_whole_layers_recomputed() -> None:
    found = layout(recompute_granularity="full_block", recompute_layer_num=3)
    assert (found["recompute"], found["recompute_layers"]) == ("full", 3)
    assert layout(**selective())["recompute"] == "none"  # no switch names a module


def test_experts() -> None:
    found = layout({**EXPERTS, "capacity": 2, "group_linear_mode": "sequential"}, ep_size=4, etp_size=2)
    assert {key: found[key] for key in ("ep", "etp", "moe_capacity_factor", "moe_grouped_gemm", "moe_dispatcher")} == {
        "ep": 4,
        "etp": 2,
        "moe_capacity_factor": 2.0,
        "moe_grouped_gemm": False,
        "moe_dispatcher": "alltoall",
    }
    assert layout(etp_size=2) == layout()  # there is nothing to split
    dropless = layout({**EXPERTS, "moe_pad_expert_input_to_capacity": False}, moe_dispatcher_policy="all2all-seq")
    assert dropless["moe_capacity_factor"] == 0.0


def test_notes_say_what_is_priced_otherwise() -> None:
    read = layout_of(
        StrategyConfig(**BASE, zero_state=3, **selective(attn_recompute=True, mla_rms_recompute=True)), ModelConfig(**EXPERTS)
    )
    assert [note.split()[0] for note in read.notes] == ["both", "zero_state", "dispatch_probs"]
    assert not layout_of(StrategyConfig(**BASE, dispatch_probs=True), ModelConfig(**EXPERTS)).notes


def test_model_fields() -> None:
    spec = model_of(
        ModelConfig(
            **{
                **LATENT,
                "q_lora_rank": 256,
                "dense_layers": 2,
                "moe_ffn_hidden_size": 100,
                "use_swiglu": False,
                "moe_shared_expert_intermediate_size": 200,
                "model_name": "m",
            }
        )
    )
    assert (spec.name, spec.num_hidden_layers, spec.first_k_dense_replace, spec.gated_mlp) == ("m", 32, 2, False)
    assert (spec.num_experts, spec.num_experts_per_tok, spec.moe_intermediate_size) == (8, 2, 100)
    assert (spec.shared_expert_intermediate_size, spec.q_lora_rank, spec.kv_lora_rank) == (200, 256, 512)
    assert (spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim, spec.norm) == (128, 64, 128, "rmsnorm")
    assert model_of(ModelConfig(**EXPERTS)).moe_intermediate_size == 14336
    assert ModelConfig(**DENSE, model_type="dense").ignored == ("model_type: expert_num tells",)
    assert {name for name, field in MODEL.items() if field.use == LISTED} == {"model_type"}


@pytest.mark.parametrize(("padded", "multiple", "rows"), [(True, 128, 0), (True, 64, 1024), (False, 128, 1000)])
def test_vocabulary(padded: bool, multiple: int, rows: int) -> None:
    """0: padded by the model's own rule, to a multiple of 128 times the tensor group."""
    config = ModelConfig(**DENSE, padded_vocab_size=padded, make_vocab_size_divisible_by=multiple)
    assert model_of(config, tp=2).padded_vocab_size == rows


def test_sharding_more_is_not_faster(estimated: Any) -> None:
    seconds, bytes_ = [], []
    for stage in (1, 2, 3):
        perf = estimated(zero_state=stage, tp_size=1)
        seconds.append(perf.analysis_cost()["duration_time_per_iter"])
        bytes_.append(perf.analysis_mem()["peak_mem"])
    assert seconds == sorted(seconds)
    assert bytes_ == sorted(bytes_, reverse=True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for text, said in (("[1]", "holds an object"), ("{", "line 1: not valid JSON"), ('{"tp": 1}', "'tp' is not known")):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(InputError, match=f"s.json.*{said}"):
            StrategyConfig.init_from_config_file(tmp_path / "s.json")
    with pytest.raises(InputError, match="no such"):
        ModelConfig.init_from_config_file(tmp_path / "none.json")
    with pytest.raises(InputError, match="the strategy configuration is None"):
        StrategyConfig.of(None)


def test_attributes(tmp_path: Path) -> None:
    config = StrategyConfig.init_from_dict({**BASE, "_remark": "kept out"})
    assert (config.dp_size, config.edp_size, config.global_batch_size, config.tp_size) == (16, 32, 128, 2)
    assert eval(repr(config)).to_dict() == config.to_dict()
    config.tp_size = 4
    assert config.dp_size == 8
    config.tp_size = None  # null counts as not stated
    assert config.tp_size == 1
    with pytest.raises(AttributeError, match="tp_siez"):
        _ = config.tp_siez
    config.world_size = 63
    with pytest.raises(InputError, match="world_size 63 is no multiple"):
        _ = config.dp_size
    (tmp_path / "s.json").write_text(json.dumps(config.changed(world_size=8).to_dict()))
    assert StrategyConfig.of(tmp_path / "s.json").to_dict() == config.changed(world_size=8).to_dict()
    assert SystemConfig.of({"sys_name": "x"}).num_per_node == 8
