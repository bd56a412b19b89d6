"""Words of sources are translated; assumed releases and unknown words are reported."""

from __future__ import annotations

from typing import Any

import pytest
from toy import toy_cost

from profiler.errors import InputError
from solver.formats.cases.reading import case_of
from solver.formats.cases.release import with_release
from solver.formats.cases.stated_stages import with_stages
from solver.formats.cases.synonyms import normalized_run
from solver.report import validate
from solver.spec.frameworks import framework_of
from solver.spec.model_from_keys import model_from_keys
from solver.spec.strategy import Strategy

MODEL = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def run(**keys: Any) -> dict[str, Any]:
    return normalized_run(keys, [])


def released(keys: dict[str, Any], hardware: str, assumptions: list[str]) -> str:
    """Return the framework of a run of MODEL with its release."""
    run = with_release(normalized_run(keys, assumptions), model_from_keys(MODEL, "model"), hardware, assumptions)
    return str(run["framework"])


@pytest.mark.parametrize(
    ("key", "word", "meant"),
    [
        ("schedule", "1F1B", "1f1b"),
        ("schedule", "Interleaved1F1B", "interleaved"),
        ("schedule", "ZB-H1", "zb-h1"),
        ("schedule", "1f1b-interleaved", "interleaved"),
        ("schedule", "zb-v", "zb-v"),
        ("cp_comm", "p2p", "ring"),
        ("cp_comm", "all_gather", "allgather"),
        ("precision", "bfloat16", "bf16"),
        ("precision", "FP8-hybrid", "fp8"),
        ("precision", "mxfp8", "mxfp8"),
        ("precision", "BF16", "bf16"),
        ("precision", "torch.bfloat16", "bf16"),
        ("grad_dtype", "float32", "fp32"),
        ("recompute", "Full", "full"),
        ("recompute", True, "full"),
        ("recompute", False, "none"),
        ("recompute", "uniform", "full"),
        ("recompute", "False", "none"),
        ("recompute", "selective", "selective"),
    ],
)
def test_words(key: str, word: str | bool, meant: str) -> None:
    assert run(**{key: word}) == {key: meant}


def test_other_keys_and_values_that_are_not_strings() -> None:
    assert run(cp_comm_type="a2a") == {"cp_comm": "a2a"}
    assert run(cp_comm_type="a2a", cp_comm="p2p") == {"cp_comm_type": "a2a", "cp_comm": "ring"}
    assert run(schedule=None, tp=8) == {"schedule": None, "tp": 8}


@pytest.mark.parametrize(
    ("framework", "hardware", "keys", "meant"),
    [
        ("Megatron-LM", "h100_sxm", {}, "megatron-core"),
        ("Megatron-LM", "a100_sxm_80gb", {}, "Megatron-LM"),
        ("nemo 24.12", "h100_sxm", {}, "nemo 24.12"),
        ("internevo", "a100_sxm_80gb", {"tp_mode": "isp"}, "internevo-2024"),
        ("internevo", "a100_sxm_80gb", {"tp_mode": "mtp"}, "internevo"),
        ("internevo", "h100_sxm", {}, "internevo-2024"),
    ],
)
def test_releases(framework: str, hardware: str, keys: dict[str, Any], meant: str) -> None:
    assumptions: list[str] = []
    normalized = released({"framework": framework, **keys}, hardware, assumptions)
    assert normalized == (framework if framework == meant else f"{meant}, {framework}")
    assert bool(assumptions) == (framework != meant) and framework_of(normalized) == framework_of(meant)


@pytest.mark.parametrize(
    ("settings", "layers", "meant"),
    [
        ("layers per stage 5 7 7 7", 24, "Et*4|(t*7|)*2t*6L"),
        ("1F1B, layers per stage 3 5", 8, "Et*3|t*5L"),
        ("layers per stage 26", 24, None),
        ("no DP overlap", 24, None),
        (None, 24, None),
    ],
)
def test_layers_of_stages_in_words(settings: str | None, layers: int, meant: str | None) -> None:
    # 5 + 7 + 7 + 7 are the 24 layers, the embedding and the head; 3 + 5 are the layers alone
    assert with_stages({"settings": settings}, layers).get("pipeline_layout") == meant


def test_layers_of_stages_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InputError, match="do not add up to the model's 24 layers"):
        with_stages({"settings": "layers per stage 5 7 7"}, 24)
    assert with_stages({"settings": "layers per stage 1 2", "pipeline_layout": "Et|t*2L"}, 3)["pipeline_layout"] == "Et|t*2L"


def test_a_case_in_the_words_of_its_source() -> None:
    model = {**MODEL, "layer_drop": 0.1, "rope_theta": None}
    plain = {
        "id": "X-1",
        "hardware": "h100_sxm",
        "model": model,
        "measured": {},
        "run": {
            "framework": "torchtitan",
            "world_size": 16,
            "seq_len": 4096,
            "dp": 8,
            "pp": 2,
            "schedule": "1F1B",
            "precision": "float8",
            "micro_batch_size": 1,
            "num_micro_batches": 4,
        },
    }
    case = case_of(plain)
    assert case.skipped is None and case.strategy is not None
    assert (case.strategy.schedule, case.strategy.precision) == ("1f1b", "fp8")
    assert "not read: model.layer_drop=0.1" in case.assumptions


@pytest.mark.parametrize(
    ("name", "priced"), [("torchtitan", ""), ("torchtitan-0.2.1", ""), ("torchtitan-0.9", "torchtitan-2024-12")]
)
def test_a_release_that_is_not_described_is_named(name: str, priced: str) -> None:
    plain = {
        "id": "X-1",
        "hardware": "h100_sxm",
        "model": MODEL,
        "measured": {},
        "run": {"framework": name, "world_size": 8, "seq_len": 4096, "dp": 8},
    }
    said = f"framework {name!r}: priced as {priced}, no such release is described"
    assert (said in case_of(plain).assumptions) == bool(priced)


def test_the_rest_of_a_name_is_kept() -> None:
    framework = framework_of(released({"framework": "Megatron-LM, transformer-engine 2.11.0"}, "h100_sxm", []))
    assert framework.memory.dummy_gradients and framework.name == "megatron-core-0.12"


def test_a_hugging_face_config_in_a_case_is_read_as_one() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
        "attn_pdrop": 0.1,
    }
    plain = {
        "id": "X-1",
        "hardware": "a100_sxm_80gb",
        "model": config,
        "measured": {},
        "run": {"framework": "pytorch ddp", "world_size": 8, "seq_len": 1024, "dp": 8},
    }
    case = case_of(plain)
    assert (
        case.model is not None
        and not case.model.gated_mlp
        and case.model.qkv_bias
        and case.model.mlp_bias
        and case.model.norm == "layernorm"
    )
    assert not any("attn_pdrop" in text for text in case.assumptions), "dropout changes no shape"


def test_an_unknown_word_is_reported() -> None:
    plain = {
        "id": "X-1",
        "hardware": "h100_sxm",
        "model": MODEL,
        "measured": {},
        "run": {"framework": "nemo", "world_size": 8, "seq_len": 4096, "dp": 8, "schedule": "zb-w"},
    }
    assert "schedule is 'zb-w'" in str(case_of(plain).skipped)


def test_zero3_beside_megatron_lm_of_its_time_was_deepspeeds() -> None:
    assumptions: list[str] = []
    with_zero3 = released({"framework": "megatron-lm", "zero": 3}, "a100_sxm_80gb", assumptions)
    assert framework_of(with_zero3).name == "megatron-deepspeed-2021" and "ran DeepSpeed's" in assumptions[0]
    assert framework_of(released({"framework": "megatron-lm", "zero": 1}, "a100_sxm_80gb", [])).name == "megatron-lm-2023"


@pytest.mark.parametrize(
    ("key", "word", "meant"),
    [
        ("attention", "FlashAttention-2", {"attention": "flash"}),
        ("attention", "eager", {"attention": "unfused"}),
        ("moe_dispatcher", "DeepEP", {"moe_dispatcher": "deepep"}),
        ("schedule", "AFAB", {"schedule": "gpipe"}),
        ("moe_dispatcher", "all-to-all", {"moe_dispatcher": "alltoall"}),
        ("precision", "fp8_blockwise", {"precision": "fp8", "fp8_recipe": "blockwise"}),
        ("tp", "2", {"tp": 2}),
        ("seq_len", 8192.0, {"seq_len": 8192}),
        ("zero", "ZeRO-1", {"zero": 1}),
        ("overlap_grad_reduce", "False", {"overlap_grad_reduce": False}),
        ("compile", 1, {"compile": True}),
        ("tensor_model_parallel_size", 4, {"tp": 4}),
        ("gradient_accumulation_steps", 8, {"num_micro_batches": 8}),
        ("framework", "DeepSpeed ZeRO-3", {"framework": "DeepSpeed ZeRO-3", "zero": 3}),
    ],
)
def test_other_spellings(key: str, word: Any, meant: dict[str, Any]) -> None:
    assert run(**{key: word}) == meant


def predicted(framework: str = "megatron-core", hardware: str = "h100_sxm", model: Any = None, **keys: Any) -> Any:
    whole = {"framework": framework, "world_size": 16, "seq_len": 4096, "global_batch_size": 64, "micro_batch_size": 1, **keys}
    return case_of({"id": "X-1", "hardware": hardware, "model": {**MODEL, **(model or {})}, "run": whole, "measured": {}})


def test_what_no_run_can_have_had_is_refused() -> None:
    for keys, sentence in (
        ({"pp": 64, "world_size": 64}, "pp 64 is more than the model's 32 layers"),
        ({"pp": 2, "tp": 2, "dp": 4, "pipeline_layout": "Et*16|t*15L"}, "assigns 31 layers to 2 chunks, but there are 32"),
        ({"pp": 4, "tp": 1, "dp": 4, "num_layers_in_first_pipeline_stage": 31}, "leave too few of 32 for pp 4"),
        ({"dp": 16, "num_micro_batches": 1}, "global_batch_size 64 is not dp 16 * micro_batch_size 1 * num_micro_batches 1"),
        ({"sequence_parallel": "maybe"}, "sequence_parallel is 'maybe'; it must be true or false"),
    ):
        assert sentence in str(predicted(**keys).skipped)
    mixed = predicted(model={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 11008}, tp=1, ep=16)
    assert "ep 16 * etp 1 do not divide 8 experts" in str(mixed.skipped)
    assert "model key ssm_cfg: its layers are no" in str(predicted(model={"ssm_cfg": {}}).skipped)
    assert "sizes of Mamba-2 need layer_types with mamba" in str(predicted(model={"mamba_num_heads": 8}).skipped)


def test_what_a_run_leaves_open_is_listed() -> None:
    wave = predicted("torchtitan", schedule="zb-v", pp=4, dp=4)
    assert (wave.strategy.vpp, wave.skipped) == (2, None)
    layout = predicted(pp=4, tp=1, dp=4, pipeline_layout="Et*7|t*9|t*9|t*7L")
    assert layout.strategy.vpp == 1 and {other.vpp for other in layout.alternatives} <= {1}
    for framework, mode in (("torchtitan", "msp"), ("nanotron", "mtp"), ("nemo 25.05", "msp")):
        case = predicted(framework, tp=2, dp=8)
        assert case.strategy.tp_mode == mode
        assert any(line.startswith("sequence_parallel: ") for line in case.assumptions)
    said = predicted(hardware="H100 SXM5 80GB").assumptions
    assert {"hardware: h100_sxm", "tp: 1 (not stated)", "pp: 1 (not stated)"} <= set(said)
    assert predicted(model={"hidden_act": "gelu"}).model.gated_mlp is False


def test_one_case_that_cannot_be_estimated_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = predicted(tp=2, dp=8), predicted(tp=4, dp=4)
    real = validate.estimate_layouts

    def fails(problem: Any, layouts: Any) -> Any:
        if (layouts.splits.tp == 4).any():
            raise ValueError("negative dimensions")
        return real(problem, layouts)

    monkeypatch.setattr(validate, "estimate_layouts", fails)
    one, other = validate.predict_cases([good, bad], lambda hardware, network: toy_cost())
    assert one.skipped is None and one.seconds > 0
    assert "its layout cannot be estimated: ValueError('negative dimensions')" in str(other.skipped)


def test_dualpipe_is_its_half_with_twice_the_replicas() -> None:
    said: list[str] = []
    given = {"schedule": "DualPipe", "pp": 16, "dp": 128, "ep": 64, "num_micro_batches": 120, "micro_batch_size": 1}
    halved = normalized_run(given, said)
    assert halved == {
        "schedule": "dualpipev",
        "pp": 8,
        "vpp": 2,
        "dp": 256,
        "ep": 64,
        "num_micro_batches": 60,
        "micro_batch_size": 1,
        "moe_exchange_overlap": True,
    }
    assert halved["pp"] * halved["dp"] == 16 * 128 and halved["dp"] * halved["num_micro_batches"] == 128 * 120
    assert any("dualpipev with pp 8 and twice the replicas" in line for line in said)
    with pytest.raises(InputError, match="schedule dualpipe needs an even number of stages, not pp 5"):
        run(schedule="dualpipe", pp=5)


@pytest.mark.parametrize(
    ("name", "hint"), [("dualpipe", "dualpipev with half as many"), ("zb-h2", "zb-2p plans ZB-H2's passes")]
)
def test_other_names_of_schedules_are_explained(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        Strategy(world_size=16, seq_len=4096, dp=2, pp=8, schedule=name)


def test_tokens_per_gpu_per_second_are_as_good_as_the_seconds_of_a_step() -> None:
    # 64 sequences of 2,048 tokens on 16 GPUs: 8,192 tokens a GPU
    given = {"framework": "megatron-core", "world_size": 16, "seq_len": 2048, "global_batch_size": 64, "micro_batch_size": 1}
    plain = {"id": "x", "hardware": "h100_sxm", "model": MODEL, "run": given, "measured": {"tgs": 4096}}
    case = case_of(plain)
    assert case.skipped is None and case.measured["step_s"] == 2.0
    assert not any("tgs" in assumption for assumption in case.assumptions)
    both = case_of({**plain, "measured": {"tgs": 4096, "step_s": 2.0}})
    assert both.skipped == "step_s and tgs both say how long a step takes; leave one out"
