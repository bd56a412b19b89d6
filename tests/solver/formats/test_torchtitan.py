"""torchtitan's TOML files: what each key means, what is refused, and that layouts come back from what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from round_trip import assert_same_estimate, layouts_of, model_of, round_trips

from profiler.errors import InputError
from solver.api import load_problem
from solver.commands.command_line import main
from solver.formats.config_file import load_run_config
from solver.formats.export import exported, write_export
from solver.formats.same_layout import stated_strategy
from solver.spec.strategy import Strategy

#: As the 8B preset of June 2025 states a run of 64 GPUs.
PRESET = """
[job]
description = "Llama 3 8B training"
[metrics]
log_freq = 10
[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
compile = true
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
#: As the 70B preset of late 2024 does; 8 stages of 10 layers in 4 ranks.
OLDER = """
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
[training]
batch_size = 8
seq_len = 4096
data_parallel_shard_degree = 4
tensor_parallel_degree = 4
[experimental]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "interleaved_1f1b"
pipeline_parallel_split_points = "layers.10,layers.20,layers.30,layers.40,layers.50,layers.60,layers.70"
[activation_checkpoint]
mode = "full"
"""
RUN = Strategy(
    world_size=16,
    seq_len=4096,
    dp=16,
    zero=3,
    zero_shard_size=16,
    grad_dtype="fp32",
    fused_norm=False,
    framework="torchtitan-2025-06",
)


def load(tmp_path: Path, text: str, world: int = 0) -> Any:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_run_config(path, world)


def test_flavors_of_llama_4_are_what_their_code_has(tmp_path: Path) -> None:
    """models/llama4/__init__.py: only "irope" has chunks and layers without rotary embedding, in FlexAttention."""
    for flavor, chunk, note in (("17bx16e", 0, False), ("17bx16e_irope", 8192, True)):
        text = NEWER.replace('"qwen3"', '"llama4"').replace('"30B-A3B"', f'"{flavor}"')
        config = load(tmp_path, text)
        assert config.model.attention_chunk_size == chunk and config.model.qk_norm == "none"
        assert bool(config.model.no_rope_layers) == note == any("FlexAttention's" in said for said in config.notes)


def test_a_shard_degree_that_is_left_open_follows_from_the_gpus(tmp_path: Path) -> None:
    text = PRESET.replace("replicate_degree = 1", "replicate_degree = 2").replace("seq_len", "global_batch_size = 256\nseq_len")
    layout = load(tmp_path, text, 64).layout
    assert (layout["world_size"], layout["dp"], layout["zero_shard_size"], layout["num_micro_batches"]) == (64, 64, 32, 4)
    with pytest.raises(InputError, match="a number: the other degrees, 2, do not divide 63 GPUs"):
        load(tmp_path, text, 63)


@pytest.mark.parametrize("framework", ["torchtitan-2026-02", "torchtitan-2025-06", "torchtitan-2024-12"])
@pytest.mark.parametrize("name", ["llama3_8b", "internlm2_7b"])
def test_hundreds_of_layouts_come_back(framework: str, name: str, tmp_path: Path) -> None:
    model = model_of(name)
    runs = layouts_of(model, framework, 45, cp_comm="allgather", compile=name == "internlm2_7b")
    came, refused = round_trips(model, runs, ".toml", tmp_path)
    # the rest is what torchtitan does not run: whole activations, shards across cp, replicas beside other parallelism, shares
    # of recomputed layers that are not every n-th, in 2024 several batches a step, compiled V-shaped schedules, and 1F1B of
    # fewer micro batches than stages
    known = {"tp_mode", "zero_shard_size", "zero", "recompute_layers", "num_micro_batches", framework}
    assert came > 22 and set(refused) <= known
    assert_same_estimate(model, runs[:6])


#: As a run of 0.2.2 states experts.
NEWER = """
[model]
name = "qwen3"
flavor = "30B-A3B"
[training]
local_batch_size = 8
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 64
tensor_parallel_degree = 2
expert_parallel_degree = 8
expert_parallel_comm_backend = "deepep"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""


def test_a_file_of_2026_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, NEWER)
    back = stated_strategy(config.layout, 128)
    assert back == Strategy(
        world_size=128,
        seq_len=4096,
        framework="torchtitan-2026-02",
        tp=2,
        tp_mode="msp",
        dp=64,
        ep=8,
        zero=3,
        zero_shard_size=64,
        micro_batch_size=8,
        num_micro_batches=1,
        recompute="full",
        grad_dtype="fp32",
        fused_norm=True,
        cp_comm="allgather",
        fp8_recipe="tensorwise",
        moe_permute_fusion=False,
        compile=True,
    )
    assert config.model.num_experts == 128 and config.model.replace(name="x") == model_of("qwen3_30b_a3b").replace(name="x")


@pytest.mark.parametrize(
    ("compiles", "expected"),
    [
        ('enable = true\ncomponents = ["loss"]', (False, True)),  # as in its deepseek_v3_671b.toml
        ('enable = true\ncomponents = ["model"]', (True, False)),
        ('enable = true\ncomponents = ["model", "loss"]', (True, None)),
        ("enable = true\ncomponents = []", (False, None)),
        ('enable = false\ncomponents = ["loss"]', (False, None)),
    ],
)
def test_model_and_loss_are_compiled_apart(compiles: str, expected: tuple[bool, bool | None], tmp_path: Path) -> None:
    config = load(tmp_path, NEWER.replace("enable = true", compiles))
    assert (config.layout["compile"], config.layout.get("compile_loss")) == expected
    run = stated_strategy(config.layout, 128)
    came, refused = round_trips(config.model, [run], ".toml", tmp_path)
    assert came == 1, refused


def test_other_components_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="components is .*; it must be of model and loss, not optimizer"):
        load(tmp_path, NEWER.replace("enable = true", 'enable = true\ncomponents = ["model", "optimizer"]'))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ("", {"pipeline_layout": "Et*8|t*9|t*8|t*7L"}),  # 34 layers with the ends: 9, 9, 8, 8
        ("pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0", {}),
        ("pipeline_parallel_degree = 2", {}),  # 17 and 17, less one each
        (
            "pipeline_parallel_degree = 17",
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        ),
        (
            'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 3',
            {"vpp": 3, "pipeline_layout": "Et*2|(t*3|)*9t*2|tL"},
        ),
    ],
)
def test_stages_of_2026(stages: str, expected: dict[str, Any], tmp_path: Path) -> None:
    degree = "" if "parallel_degree" in stages else "pipeline_parallel_degree = 4\n"
    text = (
        NEWER.replace("expert_parallel_degree = 8", f"{degree}{stages}").replace('"qwen3"', '"llama3"').replace("30B-A3B", "8B")
    )
    layout = load(tmp_path, text).layout
    names = ("pipeline_layout", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    assert {name: layout[name] for name in names if name in layout} == {k: v for k, v in expected.items() if k in names}
    assert layout["vpp"] == expected.get("vpp", 1)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("expert_parallel_degree = 8", "expert_tensor_parallel_degree = 2", "tensor parallelism within experts under"),
        ('backend = "deepep"', 'backend = "hybridep"', "expert_parallel_comm_backend is 'hybridep'"),
        ("[compile]", "[debug]\nmoe_force = true\n[compile]", "debug has no key 'moe_force'"),
        (
            'mode = "full"',
            'mode = "full"\nper_op_sac_force_recompute_mm_shapes_by_fqns = ["wq"]',
            "recomputation of GEMMs by their shapes",
        ),
        ("enable = true", 'enable = true\nbackend = "aot_eager"', "another compiler"),
        (
            "tensor_parallel_degree = 2",
            'pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["norm"], ["output"]]',
            "lists of tok_embeddings, layers.0 to layers.47, norm and output",
        ),
        (
            "tensor_parallel_degree = 2",
            'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "Interleaved1F1B"\n'
            "pipeline_parallel_layers_per_stage = 10",
            "the layers make 5 stages, no multiple of the pipeline's 4 ranks",
        ),
    ],
)
def test_what_is_refused_of_2026(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load(tmp_path, NEWER.replace(old, new))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "flavor", "shipped"),
    [
        ("deepseek_v3", "16B", "deepseek_v2_lite"),
        ("deepseek_v3", "236B", "deepseek_v2"),
        ("deepseek_v3", "671B", "deepseek_v3"),
        ("gpt_oss", "20b", "gpt_oss_20b"),
        ("gpt_oss", "120b", "gpt_oss_120b"),
    ],
)
def test_flavors_with_flex_attention(name: str, flavor: str, shipped: str, tmp_path: Path) -> None:
    text = NEWER.replace('"qwen3"', f'"{name}"').replace("30B-A3B", flavor)
    config = load(tmp_path, text)
    assert config.model == model_of(shipped).replace(num_nextn_predict_layers=0)  # torchtitan has no such modules
    assert any("FlexAttention" in note for note in config.notes)
    assert config.layout["moe_dispatcher"] == ("deepep" if name == "deepseek_v3" else "alltoall")
    compiled = "compile.enable compiles no layers of this model in torchtitan's code" in config.notes
    assert (config.layout["compile"], compiled) == ((False, True) if name == "gpt_oss" else (True, False))
    told = load(tmp_path, text.replace("tensor_parallel_degree", "context_parallel_degree")).notes
    assert [note for note in told if "flavors with FlexAttention or varlen attention exclude context parallelism" in note]


def test_a_converter_that_does_not_run_changes_nothing(tmp_path: Path) -> None:
    text = NEWER.replace("[compile]", '[quantize.grouped_mm.float8]\nfqns = ["experts"]\n[compile]')
    config = load(tmp_path, text)
    assert config.layout == load(tmp_path, NEWER).layout and "quantize" in config.ignored
    with pytest.raises(InputError, match="converters"):
        load(tmp_path, text.replace('name = "qwen3"', 'name = "qwen3"\nconverters = ["quantize.grouped_mm.float8"]'))


def test_tables_of_quantize_by_their_earlier_names(tmp_path: Path) -> None:
    tables = '[quantize.linear.float8]\nfilter_fqns = ["output"]\n[quantize.grouped_mm.float8]\nfqns = ["experts"]\n[compile]'
    today = NEWER.replace("[compile]", tables).replace(
        'name = "qwen3"', 'name = "qwen3"\nconverters = ["quantize.linear.float8"]'
    )
    earlier = today.replace("quantize.linear", "quantize.dense").replace("quantize.grouped_mm", "quantize.moe")
    config = load(tmp_path, earlier)
    assert config.layout == load(tmp_path, today).layout and config.layout["precision"] == "fp8"


def test_experts_that_are_forced_follow_each_other(tmp_path: Path) -> None:
    text = NEWER.replace("[compile]", "[debug]\nmoe_force_load_balance = true\n[compile]")
    config = load(tmp_path, text)
    assert config.layout["moe_routing"] == "consecutive"
    came, refused = round_trips(config.model, [stated_strategy(config.layout, 128)], ".toml", tmp_path)
    assert came == 1, refused


def test_qwen3_exchanges_by_all_to_all_whatever_the_backend(tmp_path: Path) -> None:
    config = load(tmp_path, NEWER)
    assert config.layout["moe_dispatcher"] == "alltoall"
    assert any("expert_parallel_comm_backend deepep changes nothing" in note for note in config.notes)


def test_layouts_of_experts_come_back(tmp_path: Path) -> None:
    model = model_of("qwen3_30b_a3b")
    runs = layouts_of(model, "torchtitan-2026-02", 100, cp_comm="allgather")
    assert len({run.ep for run in runs}) > 2
    came, refused = round_trips(model, runs, ".toml", tmp_path)
    assert came > 60 and set(refused) <= {"tp_mode", "zero_shard_size", "zero", "recompute_layers", "torchtitan-2026-02"}


def test_listed_modules_are_the_stages(tmp_path: Path) -> None:
    """What a layout string assigns is listed module by module, and read back as the same chunks."""
    model = model_of("llama3_8b")
    run = RUN.replace(
        framework="torchtitan-2026-02",
        fused_norm=True,
        moe_permute_fusion=False,
        pp=4,
        dp=4,
        zero=2,
        zero_shard_size=4,
        num_micro_batches=8,
    )
    write_export(tmp_path / "a.toml", model, run.replace(pipeline_layout="Et*7|t*9|t*9|t*7L"), 8)
    assert load_run_config(tmp_path / "a.toml").layout["pipeline_layout"] == "Et*7|(t*9|)*2t*7L"
    assert '["tok_embeddings", "layers.0"' in (tmp_path / "a.toml").read_text()


def test_the_preset_of_2025_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, PRESET)
    expected = {
        "framework": "torchtitan-2025-06",
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "zero": 3,
        "zero_shard_size": -1,
        "micro_batch_size": 1,
        "num_micro_batches": 1,
        "seq_len": 8192,
        "compile": True,
        "recompute": "selective",
        "precision": "bf16",
        "grad_dtype": "fp32",
        "tp_mode": "mtp",
        "schedule": "1f1b",
        "fused_norm": False,
    }
    assert expected.items() <= config.layout.items() and not {"dp", "world_size"} & config.layout.keys()
    assert config.model.replace(name="llama3_8b") == model_of("llama3_8b") and config.seq_len == 8192
    assert config.ignored == ("job", "metrics", "model.tokenizer_path", "optimizer.lr", "training.steps")
    assert config.assumed == ()


def test_the_preset_of_2024_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, OLDER)
    back = stated_strategy(config.layout, 64)
    assert back == Strategy(
        world_size=64,
        seq_len=4096,
        framework="torchtitan-2024-12",
        tp=4,
        tp_mode="msp",
        pp=4,
        vpp=2,
        dp=4,
        zero=2,
        schedule="interleaved",
        zero_shard_size=4,
        micro_batch_size=1,
        num_micro_batches=8,
        recompute="full",
        grad_dtype="fp32",
        fused_norm=False,
        cp_comm="allgather",
        fp8_recipe="tensorwise",
    )


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ('selective_ac_option = "op"', 'selective_ac_option = "4"', "recompute_layers", 8),
        ("compile = true", 'mixed_precision_param = "float32"', "precision", "fp32"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]', "precision", "fp8"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = "mx"', "precision", "mxfp8"),
        ("tensor_parallel_degree = 1", 'fsdp_reshard_after_forward = "never"', "zero", 2),
        ("shard_degree = -1", "shard_degree = 8\ncontext_parallel_degree = 2", "zero_shard_size", 16),
        ("shard_degree = -1", "shard_degree = 1", "zero", 0),
        ("tensor_parallel_degree = 1", 'context_parallel_rotate_method = "alltoall"', "cp_comm", "ring"),
        ("compile = true", "[parallelism]\nenable_async_tensor_parallel = true", "tp_comm_overlap", True),
    ],
)
def test_what_a_key_means(old: str, new: str, field: str, value: Any, tmp_path: Path) -> None:
    text = PRESET.replace(old, new) if "[parallelism]" not in new else PRESET.replace("[parallelism]", new)
    assert text != PRESET and load(tmp_path, text).layout[field] == value


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("tensor_parallel_degree", "tensor_paralel_degree", "parallelism has no key 'tensor_paralel_degree' (did you mean"),
        ("[metrics]", "[metric]", "line 4: there is no section or setting 'metric' (did you mean 'metrics'?)"),
        ("seq_len = 8192", 'seq_len = "long"', "line 15: training.seq_len is 'long'; it must be a whole number"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["int8"]', "model.converters is ['int8']; it must be one of float8"),
        ("steps = 1000", "enable_cpu_offload = true", "it must be False, because parameters on the host is not modelled"),
        ("lr = 3e-4", 'implementation = "foreach"', "an optimizer of several kernels is not modelled"),
        ('flavor = "8B"', 'flavor = "9B"', "flavor '9B' of torchtitan's model 'llama3' is not known here; put its"),
        (
            "replicate_degree = 1",
            "replicate_degree = 2",
            "a number of ranks beside data_parallel_replicate_degree, or --world_size stated",
        ),
        ("tensor_parallel_degree = 1", 'pipeline_parallel_schedule = "DualPipe"', "one of 1F1B, GPipe, Interleaved1F1B, ZBV"),
        ("steps = 1000", "global_batch_size = 64", "a number beside training.global_batch_size"),
        ('selective_ac_option = "op"', 'selective_ac_option = "some"', "op, or n for every n-th layer"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["int4"]', "one of float8, mx, with parameters in bfloat16"),
        ("[metrics]", "[metrics", "not valid TOML"),
    ],
)
def test_what_is_refused_when_reading(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in PRESET
    with pytest.raises(InputError) as refused:
        load(tmp_path, PRESET.replace(old, new))
    assert sentence in str(refused.value)


def quantised(kind: str, filters: str) -> str:
    section = f"[{kind}]\nfilter_fqns = {filters}\n[metrics]"
    return PRESET.replace('flavor = "8B"', f'flavor = "8B"\nconverters = ["{kind}"]').replace("[metrics]", section)


def test_shards_that_are_gathered_in_8_bits(tmp_path: Path) -> None:
    text = quantised("float8", '["output"]')
    assert load(tmp_path, text).layout["fp8_param_gather"] is False
    gathers = text.replace("[float8]", "[float8]\nenable_fsdp_float8_all_gather = true")
    assert load(tmp_path, gathers).layout["fp8_param_gather"] is True
    for name in ("torchtitan-2024-12", "torchtitan-2025-06", "torchtitan-2026-02"):
        run = RUN.replace(
            framework=name, precision="fp8", fp8_recipe="tensorwise", fp8_param_gather=True, fused_norm=name.endswith("2026-02")
        )
        written = exported(Path("run.toml"), model_of("llama3_8b"), run, 8)["run.toml"]
        assert "enable_fsdp_float8_all_gather = true" in written
        assert load(tmp_path, written, run.world_size).layout["fp8_param_gather"] is True
        plain = exported(Path("run.toml"), model_of("llama3_8b"), run.replace(fp8_param_gather=False), 8)["run.toml"]
        assert "float8_all_gather" not in plain


def test_a_head_in_8_bits_is_named(tmp_path: Path) -> None:
    for filters, named in (('["output", "router.gate"]', False), ("[]", True)):
        said = load(tmp_path, quantised("float8", filters)).notes
        assert any(line.startswith("the head is estimated in 16 bits; torchtitan has it in 8") for line in said) == named
    text = exported(Path("run.toml"), model_of("llama3_8b"), RUN.replace(precision="mxfp8"), 8)["run.toml"]
    assert '[mx]\nrecipe_name = "mxfp8"\nfilter_fqns = ["output"]' in text


@pytest.mark.parametrize(("kind", "name"), [("float8", "attention"), ("float8", "w2"), ("mx", "auto_filter_small_kn")])
def test_linears_of_layers_that_stay_in_16_bits_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it must be output, router.gate or another name of no linear of attention"):
        load(tmp_path, quantised(kind, f'["output", "{name}"]'))


def test_stages_that_are_not_even_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="other divisions are not modelled"):
        load(tmp_path, OLDER.replace("layers.10,", "layers.9,"))
    with pytest.raises(InputError, match="it must be one for 2 stages on each of 4 ranks"):
        load(tmp_path, OLDER.replace("interleaved_1f1b", "1f1b"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tp": 2, "dp": 8, "zero_shard_size": 8}, "tp_mode mtp: torchtitan splits activations along the sequence"),
        ({"cp": 2, "dp": 8, "cp_comm": "a2a"}, "cp_comm a2a: torchtitan rotates keys as allgather or ring"),
        ({"cp": 4, "dp": 4, "zero_shard_size": 2, "cp_comm": "ring"}, "shards over whole groups of cp 4 ranks"),
        ({"pp": 2, "dp": 8, "zero": 0, "zero_shard_size": 1}, "keeps whole copies only where tp, cp and pp are 1"),
        ({"recompute": "full", "recompute_layers": 17}, "torchtitan recomputes all layers or every n-th"),
        ({"pp": 2, "dp": 8, "zero": 2, "zero_shard_size": 8, "schedule": "zb-h1"}, "schedule zb-h1: torchtitan has 1f1b"),
        ({"grad_dtype": "bf16"}, "grad_dtype bf16: torchtitan's TOML has no place for it (it would mean fp32)"),
        ({"cross_entropy_fusion": True}, "cross_entropy_fusion True: torchtitan's TOML has no place for it"),
        ({"precision": "fp8"}, "float8.recipe_name is 'delayed'; it must be one of tensorwise"),
        ({"optimizer_states": "8bit"}, "optimizer_states 8bit: torchtitan's TOML has no place for it"),
    ],
)
def test_what_is_refused_when_writing(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        exported(Path("run.toml"), model_of("llama3_8b"), RUN.replace(**changes), 8)
    assert sentence in str(refused.value)


def test_a_model_that_its_llama_is_not_is_refused() -> None:
    for name in ("qwen2_7b", "qwen3_8b"):
        with pytest.raises(InputError, match="torchtitan's llama3 has no biases"):
            exported(Path("run.toml"), model_of(name), RUN, 8)


def test_the_ending_must_be_the_framework_s() -> None:
    with pytest.raises(InputError, match=r"a layout of torchtitan-2025-06 is written as \.toml"):
        exported(Path("run.sh"), model_of("llama3_8b"), RUN, 8)
    with pytest.raises(InputError, match="the layout is maxtext's, for which no file is written"):
        exported(Path("run.toml"), model_of("llama3_8b"), RUN.replace(framework="maxtext"), 8)


def test_a_model_of_one_s_own_stands_beside_the_file(tmp_path: Path) -> None:
    model = model_of("internlm2_7b")
    written = write_export(tmp_path / "a.toml", model, RUN, 8)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == ["a.toml", "a_model/config.json"]
    assert load_run_config(tmp_path / "a.toml").model.replace(name=model.name) == model


def test_the_command_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    path = str(tmp_path / "run.toml")
    searched = "--run_all_solu --model_size llama3_8b --world_size 16 --framework torchtitan --top 1 --fix tp=1,cp=1,zero=3"
    assert f"wrote {path}" in command(*searched.split(), "--global_batch_size", "1048576", "--export", path)
    assert "tokens/GPU/s" in command("--config", path)


def test_expert_parallelism_of_a_dense_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n[parallelism]\n'
        "data_parallel_shard_degree = 8\nexpert_parallel_degree = 2\n[compile]\nenable = true\n"
    )
    assert load_run_config(path).notes == ("expert_parallel_degree 2 changes nothing: llama3_8b has no experts",)


def test_a_run_may_be_longer_than_its_flavor(tmp_path: Path) -> None:
    """torchtitan gives the model the length of the run (ModelArgs.update_from_config), and a file states no other."""
    path = tmp_path / "long.toml"
    path.write_text(PRESET.replace("seq_len = 8192", "seq_len = 32768"))
    config = load_run_config(path)
    assert config.seq_len == 32768 == config.model.max_position_embeddings
    assert load_problem(config, 8).run.seq_len == 32768


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ('[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[parallelism]\nexpert_parallel_degree = 8', "torchtitan-2026-02"),
        ('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1', "torchtitan-2026-02"),
        ('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\ncompile = true', "torchtitan-2025-06"),
        ('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 1\n[experimental]', "torchtitan-2024-12"),
    ],
)
def test_a_file_is_of_the_newest_release_that_knows_its_keys(tmp_path: Path, text: str, framework: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert load_run_config(path, 32).layout["framework"] == framework


def test_deepseek_v3_is_written_with_its_own_flavor(tmp_path: Path) -> None:
    """Without multi-token prediction, which torchtitan has not; its attention is FlexAttention's, which the file says."""
    model = model_of("deepseek_v3").replace(num_nextn_predict_layers=0)
    run = Strategy(
        world_size=512,
        dp=512,
        ep=8,
        seq_len=4096,
        zero=3,
        zero_shard_size=256,
        micro_batch_size=4,
        recompute="full",
        grad_dtype="fp32",
        moe_permute_fusion=False,
        framework="torchtitan-2026-02",
    )
    (text,) = exported(tmp_path / "run.toml", model, run, 8).values()
    assert 'flavor = "671B"' in text and "attention is FlexAttention's, which the estimate leaves out" in text
    (tmp_path / "run.toml").write_text(text)
    read = load_run_config(tmp_path / "run.toml")
    assert read.model.replace(name=model.name) == model
    assert {key: read.layout[key] for key in ("dp", "ep", "zero", "zero_shard_size", "micro_batch_size", "recompute")} == {
        "dp": 512,
        "ep": 8,
        "zero": 3,
        "zero_shard_size": 256,
        "micro_batch_size": 4,
        "recompute": "full",
    }
