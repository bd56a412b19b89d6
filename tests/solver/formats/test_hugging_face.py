"""Hugging Face configs: published checkpoints to the last parameter, and everything else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from solver import load_problem
from solver.formats.cases import case_of
from solver.formats.hugging_face import model_of_config, unread_keys
from solver.formats.model_types import FAMILIES, NOT_DECODERS
from solver.spec.model import ModelSpec, approximations, check_model
from solver.spec.model_size import parameters

CHECKPOINTS = json.loads((Path(__file__).resolve().parents[2] / "data" / "checkpoints.json").read_text())["checkpoints"]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def read(config: dict[str, Any]) -> ModelSpec:
    return model_of_config(config, "config.json", "m")


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda c: c["name"])
def test_published_checkpoints_have_their_parameters(checkpoint: dict[str, Any]) -> None:
    assert parameters(read(checkpoint["config"])) == checkpoint["parameters"]


def test_the_checkpoints_cover_the_families_of_dense_models() -> None:
    covered = {checkpoint["config"]["model_type"] for checkpoint in CHECKPOINTS}
    experts_or_latent = {"deepseek_v2", "deepseek_v3", "gpt_oss", "minicpm3", "mixtral", "qwen2_moe", "qwen3_moe"}
    without_a_figure = {"codegen", "cohere2", "glm", "glm4", "granite", "minicpm", "nemotron"}
    assert set(FAMILIES) - covered == experts_or_latent | without_a_figure


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL, "m is a mixture of 8 experts, which is not modelled yet"),
        (LLAMA | {"model_type": "gpt_oss", "num_local_experts": 128}, "mixture of 128 experts"),
        (LLAMA | {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}, "mixture of 128 experts"),
        (LLAMA | {"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": 512}, "mixture of 256 experts"),
        (LLAMA | {"model_type": "minicpm3", "kv_lora_rank": 256, "q_lora_rank": 768}, "latent attention (kv_lora_rank 256)"),
        (LLAMA | {"model_type": "minicpm", "q_lora_rank": 768}, "latent attention (q_lora_rank 768)"),
        (LLAMA | {"max_position_embeddings": 4096}, "seq_len 8192 is more than max_position_embeddings 4096 of m"),
    ],
)  # fmt: skip
def test_models_that_are_not_modelled_are_refused_where_a_problem_is_made(config: dict[str, Any], message: str) -> None:
    for approximate in (False, True):
        with pytest.raises(InputError) as error:
            check_model(read(config), 8192, approximate)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "foo9"}, "config.json: model_type 'foo9' is not known; known are baichuan"),
        (LLAMA | {"model_type": "lama"}, "model_type 'lama' is not known (did you mean 'llama'?)"),
        (LLAMA | {"model_type": "bert"}, "config.json: model_type bert is an encoder, which is not modelled"),
        (LLAMA | {"model_type": "mamba2"}, "a state-space model"),
        ({**LLAMA, "model_type": None, "architectures": ["FooModel"]}, "model_type not given is not known"),
        (LLAMA | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers of llama is not modelled (it is 1)"),
        *[(LLAMA | {"model_type": kind, "sliding_window": 1024}, f"sliding_window of {kind} is not modelled (it is 1024)")
          for kind in ("olmo", "olmo2", "glm4", "phi", "stablelm", "nemotron")],
        *[(LLAMA | {"model_type": kind, "layer_types": ["full_attention", "linear_attention"]},
           "layer_types has 'linear_attention', which is not modelled") for kind in ("llama", "mistral", "qwen3", "gemma2")],
        (LLAMA | {"attention_chunk_size": 8192}, "attention_chunk_size of llama is not modelled"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        (LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 8}, "24 does not divide hidden_size 4096; state head_dim"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "config.json: the model needs 'hidden_size'"),
        (LLAMA | {"model_type": "opt", "ffn_dim": 1, "word_embed_proj_dim": 512, "max_position_embeddings": 2048},
         "word_embed_proj_dim 512 differs from hidden_size"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read(config)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_keys_that_are_off_or_change_no_work_are_accepted() -> None:
    harmless = {"num_nextn_predict_layers": 0, "sliding_window": None, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
                "torch_dtype": "bfloat16", "attention_dropout": 0.1, "pretraining_tp": 1, "use_cache": True,
                "some_new_flag": True}  # fmt: skip
    assert read(LLAMA | harmless) == read(LLAMA)
    assert unread_keys(LLAMA | harmless) == [
        "num_nextn_predict_layers",
        "some_new_flag",
    ]


def test_windows_and_soft_caps_need_to_be_allowed() -> None:
    gemma = next(read(c["config"]) for c in CHECKPOINTS if c["name"] == "gemma-2-9b")
    left_out = ["a sliding window of 4096 tokens", "soft-capped attention scores", "soft-capped logits"]
    assert approximations(gemma, 8192) == left_out and approximations(gemma, 4096) == left_out[1:]
    with pytest.raises(
        InputError, match="window of 4096 tokens; soft-capped attention scores; soft-capped logits: not modelled"
    ):
        check_model(gemma, 8192)
    check_model(gemma, 8192, approximate=True)
    mistral = read(LLAMA | {"model_type": "mistral", "sliding_window": 4096})
    check_model(mistral, 4096)  # the window holds the whole sequence
    with pytest.raises(InputError, match="--approximate estimates it without"):
        check_model(mistral, 8192)
    assert read(LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}).sliding_window == 0


def test_the_text_model_of_a_multimodal_config_has_its_class_defaults() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    gemma3 = read({"model_type": "gemma3", "text_config": text})
    assert (gemma3.num_attention_heads, gemma3.num_key_value_heads, gemma3.head_dim, gemma3.vocab_size) == (8, 4, 256, 262208)
    assert parameters(gemma3) == 3_880_263_168  # the language model of gemma-3-4b
    llava = read({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": {}})
    assert (llava.hidden_size, llava.num_hidden_layers, llava.vocab_size) == (4096, 32, 32064)


def test_every_way_in_refuses_a_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from solver.command_line import main

    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    with pytest.raises(InputError, match="mixture of 8 experts"):
        load_problem(path, 64, profile="h100_sxm")
    for arguments in ([], ["--run_all_solu"]):
        assert main(["--config", str(path), "--world_size", "64", *arguments]) == 2
        assert "mixture of 8 experts" in capsys.readouterr().err
    case = case_of({"id": "x-1", "hardware": "h100_sxm", "model": MIXTRAL, "measured": {"step_s": 1.0},
                    "run": {"world_size": 8, "seq_len": 4096, "micro_batch_size": 1}})  # fmt: skip
    assert case.skipped is not None and "mixture of 8 experts" in case.skipped


def test_what_an_approximation_leaves_out_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from solver.command_line import main

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"model_type": "mistral", "sliding_window": 4096, "some_new_flag": 3}))
    options = ["--config", str(path), "--world_size", "8", "--seq_len", "8192"]
    assert main(options) == 2 and "sliding window of 4096 tokens: not modelled" in capsys.readouterr().err
    assert main([*options, "--approximate"]) == 0
    printed = capsys.readouterr().out
    assert "left out of the estimate: a sliding window of 4096 tokens" in printed
    assert "not read from the config: some_new_flag" in printed


def test_model_types_are_either_read_or_refused() -> None:
    assert not set(FAMILIES) & set(NOT_DECODERS) and len(FAMILIES) >= 36
