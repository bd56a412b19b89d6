"""SimuMax's files as a kind of configuration: read with their model beside them, written, and the same layout again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from round_trip import layouts_of, model_of, round_trips

from profiler.errors import InputError
from solver.formats.config_file import load_run_config
from solver.formats.export import exported
from solver.formats.simumax.configs import ModelConfig, StrategyConfig
from solver.simumax import PerfLLM
from solver.spec.strategy import Strategy

FOLDER = Path("tests/data/simumax")
PLAIN = {"grad_dtype": "fp32", "overlap_param_gather": False, "cross_entropy_fusion": True, "p2p_overlap": True}
CONSTANTS: dict[str, dict[str, Any]] = {
    "llama3_8b": {"cp_comm": "a2a", "recompute_modules": "mlp+core_attn"},
    "llama2_7b": {"precision": "fp8", "overlap_grad_reduce": False},
    "mixtral_8x7b": {"recompute_modules": "moe_act+layernorm", "moe_capacity_factor": 1.25},
}
RUN = Strategy(
    world_size=64,
    seq_len=4096,
    dp=8,
    tp=4,
    tp_mode="msp",
    pp=2,
    vpp=2,
    schedule="interleaved",
    num_micro_batches=8,
    zero=1,
    zero_shard_size=8,
    framework="megatron-core-0.12",
    **PLAIN,
)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_hundreds_of_layouts_come_back(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    runs = [
        run.replace(zero_shard_size=run.dp * run.cp if run.zero else 1)  # SimuMax has no other
        for run in layouts_of(model, "megatron-core-0.12", 40, world=256, **PLAIN, **CONSTANTS[name])
    ]
    came, refused = round_trips(model, runs, ".json", tmp_path)
    assert came == 40 and not refused


def test_what_is_written_is_simumax_s(tmp_path: Path) -> None:
    """Its own classes read it, and its own face prices it as the layout itself."""
    files = exported(tmp_path / "run.json", model_of("llama3_8b"), RUN, 8)
    strategy = StrategyConfig(**json.loads(files["run.json"]))
    assert (strategy.tp_size, strategy.pp_size, strategy.interleaving_size, strategy.dp_size) == (4, 2, 2, 8)
    model = ModelConfig(**json.loads(files["run_model/config.json"]))
    assert (model.head_num, model.layer_num, model.use_swiglu) == (32, 32, True)
    face = PerfLLM()
    face.configure(strategy_config=strategy, model_config=model, system_config="h100_sxm")
    face.run_estimate()
    assert face.analysis_cost()["all_tokens_per_iter"] == RUN.tokens == 262_144


def test_its_own_files_are_configurations(tmp_path: Path) -> None:
    assert load_run_config(FOLDER / "llama3_8b.json").model.num_key_value_heads == 8
    strategy = (FOLDER / "tp1_pp2_dp4_mbs1.json").read_text()
    (tmp_path / "run.json").write_text(strategy)
    with pytest.raises(InputError, match="SimuMax's strategy holds no model; put its Hugging Face config.json beside it"):
        load_run_config(tmp_path / "run.json")
    (tmp_path / "config.json").write_text((FOLDER / "llama3_8b.json").read_text())
    config = load_run_config(tmp_path / "run.json")
    expected = {"tp": 1, "pp": 2, "dp": 4, "num_micro_batches": 8, "zero": 1, "zero_shard_size": -1, "recompute": "none"}
    assert expected.items() <= config.layout.items() and config.model.vocab_size == 128257
    (tmp_path / "run.json").write_text(strategy.replace('"tp_size"', '"tp_sise"'))
    with pytest.raises(InputError, match="run.json: strategy field 'tp_sise' is not known .did you mean 'tp_size'"):
        load_run_config(tmp_path / "run.json")


def test_all_layers_recomputed_come_back(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("")
    run = RUN.replace(recompute="full", recompute_layers=-1)
    for name, text in exported(tmp_path / "run.json", model_of("llama3_8b"), run, 8).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = load_run_config(tmp_path / "run.json").layout
    assert (found["recompute"], found["recompute_layers"]) == ("full", 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_layout": "Et*8|t*8|t*8|t*8L"}, "pipeline_layout .* has no place for it"),
        ({"zero_shard_size": 4}, "zero_shard_size 4: SimuMax's strategy has no place for it"),
        ({"optimizer_states": "bf16"}, "optimizer_states bf16: SimuMax's strategy has no place for it"),
    ],
)
def test_what_its_files_cannot_say_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        exported(tmp_path / "run.json", model_of("llama3_8b"), RUN.replace(**changes), 8)
