"""The models of configs/models: parameters as published, in all and those that a token passes through."""

from __future__ import annotations

import pytest
from references import nextn_parameters

from solver.formats.config_file import CONFIGS, find_model, load_run_config
from solver.spec import model_size
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import parameters

#: Parameters of the checkpoints' tensors, the correction biases of routers included, multi-token prediction not. Those of
#: multimodal models are the language model's: the checkpoint without vision tower and projector.
TENSORS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "qwen2_7b": 7_615_616_512,
    "qwen2_5_32b": 32_763_876_352,
    "internlm2_7b": 7_737_708_544,
    "internlm2_20b": 19_861_149_696,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_419_200,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "llama4_scout": 107_769_861_120 + 48 * 256,  # its norm of queries and keys has no weights; ModelSpec counts some
    "llama4_maverick": 400_711_848_960,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "mistral_nemo_12b": 12_247_782_400,
    "mistral_small_24b": 23_572_403_200,
    "qwen3_next_80b_a3b": 79_674_391_296,  # what transformers 4.57.1 builds
    "nemotron_h_8b": 8_100_852_736,
    "nemotron_nano_9b_v2": 8_888_227_328,
    "nemotron4_15b": 15_628_775_424,
    "nemotron4_340b": 341_029_195_776,  # norms with biases; 3.2 + 12.5 B and 9.4 + 331.6 B
}
#: Announced figures, and sums by hand, where the number of the checkpoint is not known here to its last digit. GPT-3's table
#: states 174,600 millions; Grok-1's 314 B are not what its shapes add up to; of GLM-4.5 see MULTI_TOKEN; Qwen3.5's names say 9,
#: 27, 35 and 397 B.
ANNOUNCED = {
    "gpt3_175b": 174.6e9,
    "kimi_k2": 1.026e12,
    "grok_1": 315.7e9,
    "glm4_5": 352.8e9,
    "glm4_5_air": 106.9e9,
    "qwen3_5_9b": 8.95e9,
    "qwen3_5_27b": 26.9e9,
    "qwen3_5_35b_a3b": 34.66e9,
    "qwen3_5_397b_a17b": 396.3e9,
    "nemotron3_nano_30b_a3b": 31.58e9,
}
#: Whole checkpoints with a multi-token prediction module and its copies of embedding and head.
MULTI_TOKEN = {"deepseek_v3": 684_489_845_504, "glm4_5": 358.34e9, "glm4_5_air": 110.47e9}
#: Announced active parameters in billions, and which tables they count: embedding and head (2), head (1), or neither (0).
ACTIVE = {
    "mixtral_8x7b": (12.9, 2),
    "mixtral_8x22b": (39, 2),
    "deepseek_v2_lite": (2.4, 1),
    "deepseek_v2": (21, 1),
    "deepseek_v3": (37, 1),
    "kimi_k2": (32, 1),
    "qwen3_30b_a3b": (3.3, 2),
    "qwen3_235b_a22b": (22, 2),
    "gpt_oss_20b": (3.61, 1),
    "gpt_oss_120b": (5.13, 1),
    "llama4_scout": (17, 2),
    "llama4_maverick": (17, 2),
    "glm4_5": (32, 0),
    "glm4_5_air": (12, 0),
    "qwen3_5_397b_a17b": (17, 2),
    "qwen3_5_35b_a3b": (3, 1),
    "nemotron3_nano_30b_a3b": (3.2, 1),
}


def shipped(name: str) -> ModelSpec:
    return load_run_config(find_model(name)).model


def test_every_shipped_model_is_checked() -> None:
    assert {path.stem for path in CONFIGS.glob("models/*.json")} == {*TENSORS, *ANNOUNCED}


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    assert parameters(shipped(name)) == TENSORS[name]


@pytest.mark.parametrize("name", sorted(ANNOUNCED))
def test_parameters_are_those_announced(name: str) -> None:
    assert parameters(shipped(name)) == pytest.approx(ANNOUNCED[name], rel=5e-4)


@pytest.mark.parametrize("name", sorted(MULTI_TOKEN))
def test_checkpoints_with_multi_token_prediction_are_larger_by_its_module(name: str) -> None:
    model = shipped(name)
    whole = parameters(model) + nextn_parameters(model) + 2 * model.vocab_size * model.hidden_size
    assert whole == pytest.approx(MULTI_TOKEN[name], rel=1e-4 if name != "deepseek_v3" else 0)


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_active_parameters_are_those_announced(name: str) -> None:
    model, (billions, tables) = shipped(name), ACTIVE[name]
    active = model_size.parameters(model, active=True) - (2 - tables) * model.vocab_size * model.hidden_size
    assert active / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize("name", sorted({*TENSORS, *ANNOUNCED}))
def test_a_shipped_model_has_its_file_s_name_and_nothing_is_left_unread(name: str) -> None:
    run = load_run_config(find_model(name))
    assert run.name == run.model.name == name
    assert run.layout == {} and run.model.max_position_embeddings >= 2048
    assert set(run.ignored) <= {"bias"}


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral_7b", {4096: 32}),
        ("mixtral_8x7b", {0: 32}),
        ("gemma2_9b", {4096: 21, 0: 21}),
        ("gemma3_27b", {1024: 52, 0: 10}),
        ("gemma3_1b", {512: 22, 0: 4}),
        ("gpt_oss_120b", {128: 18, 0: 18}),
        ("qwen3_8b", {0: 36}),
    ],
)
def test_windows_are_those_of_the_published_configs(name: str, windows: dict[int, int]) -> None:
    found = layer_kinds(shipped(name))
    assert {kind.window: int(count) for kind, count in zip(found.kinds, found.counts, strict=True)} == windows


def test_layers_of_llama_4() -> None:
    scout, maverick = (layer_kinds(shipped(name)) for name in ("llama4_scout", "llama4_maverick"))
    assert [(k.chunk, k.rope, k.experts) for k in scout.kinds] == [(8192, True, True), (0, False, True)]
    assert [*scout.counts] == [36, 12]
    assert [(k.chunk, k.rope, k.experts) for k in maverick.kinds] == [
        (8192, True, False),
        (8192, True, True),
        (0, False, True),
    ]
    assert [*maverick.counts] == [24, 12, 12]
