"""Configuration files: how real ones are read, what is refused with which message, and that none is ever executed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver.api import estimate, load_problem
from solver.formats.config_file import CONFIGS, MAX_BYTES, find_model, load_cluster, load_run_config
from solver.formats.syntax.literal_python import read_assignments
from solver.spec.cluster import cluster_of
from solver.spec.model_size import parameters
from solver.spec.strategy import Strategy

#: The smallest file with all required keys; tests change single lines of it.
SMALL = """
HIDDEN = 4096
data = dict(seq_len=2048, micro_num=4, micro_bsz=2)
model = dict(num_layers=32, hidden_size=HIDDEN, num_attention_heads=32, vocab_size=32000, mlp_ratio=8 / 3)
parallel = dict(zero1=dict(size=-1), tensor=dict(size=1, mode="mtp"), pipeline=dict(size=1), weight=dict(size=1))
"""


@pytest.fixture
def load(tmp_path):
    def of(text: str | bytes | dict, name: str = "run.py"):
        path = tmp_path / name
        content = json.dumps(text) if isinstance(text, dict) else text
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_run_config(path)

    return of


def with_model(**keys) -> str:
    return SMALL + "model = dict(model, " + ", ".join(f"{key}={value!r}" for key, value in keys.items()) + ")\n"


def with_parallel(text: str) -> str:
    return SMALL + f"parallel = dict(parallel, {text})\n"


# --- shipped files


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda p: p.stem)
def test_every_shipped_run_is_a_layout_of_128_accelerators_and_4_mi_tokens(path):
    run = load_run_config(path)
    layout = dict(run.layout)
    dp = 128 // (layout["tp"] * layout["pp"])
    strategy = Strategy(**{**layout, "world_size": 128, "dp": dp, "zero_shard_size": dp})
    assert strategy.tokens == 4 << 20
    assert run.seq_len == 4096
    assert run.assumed == (("schedule",) if layout["pp"] > 1 else ())
    assert {"adam", "monitor", "model.layer_norm_epsilon"} <= set(run.ignored)


def test_the_shipped_7b_run_is_internlm2():
    run = load_run_config(CONFIGS / "7B_internlm2.py")
    model = run.model
    assert (model.hidden_size, model.intermediate_size, model.num_hidden_layers) == (4096, 14336, 32)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (32, 8, 128)
    assert parameters(model) == pytest.approx(7.738e9, rel=1e-3)
    assert run.layout["precision"] == run.layout["grad_dtype"] == "bf16"
    assert run.layout["overlap_grad_reduce"] is True
    assert run.layout["overlap_param_gather"] is False
    assert run.layout["zero_shard_size"] == -1
    assert run.name == "7B_internlm2"


def test_both_files_of_internlm2_20b_describe_the_same_model():
    from_python, from_json = (load_run_config(find_model(n)).model for n in (20, "internlm2_20b"))
    assert from_python.replace(name="", max_position_embeddings=0) == from_json.replace(name="", max_position_embeddings=0)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("clusters/*.json")), ids=lambda p: p.stem)
def test_every_shipped_cluster_describes_its_hardware(path):
    described = load_cluster(path.stem)
    assert described == load_cluster(path)
    cluster = cluster_of(DEVICES[described["hardware"]], described, path.stem)
    assert cluster.network_bandwidth == described["inter_node_gbit_per_gpu"] * 1e9 / 8
    assert cluster.gpus_per_node == described["gpus_per_node"]
    assert len(described["notes"]) > 40


def test_clusters_have_the_published_network():
    gbit = {name: load_cluster(name)["inter_node_gbit_per_gpu"] for name in ("dgx_h100", "dgx_a100", "a100_polaris")}
    assert gbit == {"dgx_h100": 400, "dgx_a100": 200, "a100_polaris": 100}
    assert load_cluster("a100_polaris")["gpus_per_node"] == 4


@pytest.mark.parametrize("hardware", [-1, True, {"name": "h100_sxm"}, ["h100_sxm"], None])
def test_the_hardware_of_a_cluster_is_a_name(hardware: Any, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps({"hardware": hardware}))
    with pytest.raises(InputError, match=r"cluster.json: hardware is .*; it must be the name of a profile"):
        load_cluster(tmp_path / "cluster.json")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (7, "7B_internlm2.py"),
        ("7", "7B_internlm2.py"),
        ("20B", "20B_internlm2.py"),
        ("70b", "70B_internlm.py"),
        (104, "104B_internlm.py"),
        ("llama3_70b", "models/llama3_70b.json"),
        ("7B_internlm2", "7B_internlm2.py"),
    ],
)
def test_models_are_found_by_size_and_by_name(name, found):
    assert find_model(name) == CONFIGS / found


@pytest.mark.parametrize("name", [8, 0, "", "7.5", "9" * 9000, "٧", "../README", "/etc/passwd", "clusters/b200"])
def test_an_unknown_model_lists_the_choices(name):
    with pytest.raises(InputError, match=r"choose a size of 7, 20, 70, 104 or one of .*llama3_70b"):
        find_model(name)


def test_a_nearly_right_name_is_suggested():
    with pytest.raises(InputError, match="did you mean 'llama3_70b'"):
        find_model("llama3-70b")
    with pytest.raises(InputError, match=r"did you mean 'dgx_h100'.*one of a100_100g"):
        load_cluster("dgx_h10")


# --- meaning of InternEvo's keys


@pytest.mark.parametrize(
    ("hidden", "ratio", "multiple", "width"),
    [
        (4096, "3.5", 256, 14336),
        (4096, "2.6875", 256, 11008),
        (4096, "8 / 3", 256, 11008),
        (6144, "8 / 3", 256, 16384),
        (5120, "2.7", 256, 13824),
        (1024, "1.5", 128, 1536),
        (4096, "8 / 3", 1, 10922),
    ],
)
def test_the_mlp_is_rounded_up_as_internevo_does(load, hidden, ratio, multiple, width):
    run = load(SMALL + f"model = dict(model, hidden_size={hidden}, mlp_ratio={ratio}, multiple_of={multiple})")
    assert run.model.intermediate_size == width


def test_kv_heads_default_to_heads(load):
    assert load(SMALL).model.num_key_value_heads == 32
    assert load(with_model(num_kv_attention_heads=8)).model.num_key_value_heads == 8


@pytest.mark.parametrize(
    ("zero1", "zero", "shard"),
    [
        ("dict(size=-1)", 1, -1),
        ("dict(size=0)", 1, -1),
        ("dict(size=1)", 0, 1),
        ("dict(size=8)", 1, 8),
        ("8", 1, 8),
        ("-1", 1, -1),
        ("dict(size=-1, fsdp=True)", 3, -1),
        ("dict(size=8, fsdp=False)", 1, 8),
    ],
)
def test_zero1_sizes(load, zero1, zero, shard):
    layout = load(with_parallel(f"zero1={zero1}")).layout
    assert (layout["zero"], layout["zero_shard_size"]) == (zero, shard)


@pytest.mark.parametrize(
    ("text", "tp", "mode"),
    [
        ("tensor=4", 4, "mtp"),
        ("tensor=4, sequence_parallel=True", 4, "msp"),
        ("tensor=dict(size=4)", 4, "mtp"),
        ("tensor=dict(size=2, mode='fsp')", 2, "fsp"),
        ("tensor=dict(size=2, mode='mtp'), sequence_parallel=True", 2, "mtp"),
    ],
)
def test_tensor_modes(load, text, tp, mode):
    layout = load(with_parallel(text)).layout
    assert (layout["tp"], layout["tp_mode"]) == (tp, mode)


def test_isp_has_a_weight_group_and_its_overlap(load):
    layout = load(with_parallel("tensor=dict(size=2, mode='isp'), weight=dict(size=4, overlap=True)")).layout
    assert (layout["wp"], layout["overlap_weight_gather"]) == (4, True)
    assert "wp" not in load(SMALL).layout


def test_sequence_2d_splits_the_tensor_group_into_heads_and_context(load):
    planes = "sequence_2D=dict(enable=True, head_size=2, context_size=4)"
    layout = load(with_parallel(f"tensor=dict(size=8, mode='isp'), {planes}")).layout
    assert (layout["tp"], layout["cp"]) == (2, 4)


@pytest.mark.parametrize(
    ("checkpoint", "pp", "recompute", "layers"),
    [
        (False, 1, "none", -1),
        (True, 1, "full", -1),
        (0, 1, "none", -1),
        (1, 4, "full", -1),
        (0.5, 1, "full", 16),
        (0.5, 4, "full", 4),
        (0.3, 4, "full", 2),
        (0.01, 4, "none", -1),
    ],
)
def test_checkpoint_is_the_share_of_a_stages_layers(load, checkpoint, pp, recompute, layers):
    layout = load(with_model(checkpoint=checkpoint) + f"parallel = dict(parallel, pipeline={pp})").layout
    assert (layout["recompute"], layout["recompute_layers"]) == (recompute, layers)


def test_chunks_interleave_the_pipeline(load):
    text = with_model(num_chunks=2, checkpoint=0.5)
    layout = load(text + "parallel = dict(parallel, pipeline=dict(size=4, interleaved_overlap=True))").layout
    assert (layout["vpp"], layout["schedule"], layout["p2p_overlap"]) == (2, "interleaved", True)
    assert layout["recompute_layers"] == 4  # half of each of two chunks of four layers
    one_stage = load(text)
    assert (one_stage.layout["vpp"], one_stage.layout["schedule"]) == (1, "1f1b")
    assert "model.num_chunks" in one_stage.ignored


@pytest.mark.parametrize(
    ("pipeline", "schedule"),
    [
        ("dict(size=4, mode='zbh1')", "zb-h1"),
        ("dict(size=4, zero_bubble=True)", "zb-h1"),
        ("4", "1f1b"),
    ],
)
def test_pipeline_schedules(load, pipeline, schedule):
    assert load(with_parallel(f"pipeline={pipeline}")).layout["schedule"] == schedule


def test_a_missing_key_takes_internevos_default_and_is_listed(load):
    run = load(SMALL)
    assert run.layout["precision"] == "fp16"
    assert run.layout["overlap_grad_reduce"] is False
    assert {"precision", "overlap_grad_reduce", "recompute"} <= set(run.assumed)
    assert not {"tp", "zero", "seq_len", "micro_batch_size"} & set(run.assumed)


def test_experts(load):
    model = load(with_model(num_experts=64, top_k=8, num_shared_experts=8, mlp_ratio=5 / 7, hidden_size=3584)).model
    assert (model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size) == (64, 8, 2560)
    assert model.shared_expert_intermediate_size == 20480
    assert load(with_model(num_experts=4) + "moe = dict(top_k=2)").model.num_experts_per_tok == 2
    assert not load(with_model(num_experts=1)).model.is_mixture_of_experts
    capped = "moe = dict(top_k=2, capacity_factor=1.5, drop_tokens=%s)"
    for drops, layout in ((True, {"moe_capacity_factor": 1.5}), (False, {})):
        found = load(with_model(num_experts=4) + capped % drops).layout
        assert {key: value for key, value in found.items() if key.startswith("moe_capacity")} == layout
    assert "ep" not in load(with_model(num_experts=4)).layout
    assert load(with_model(num_experts=4) + "parallel = dict(parallel, expert=dict(size=2))").layout["ep"] == 2


def test_norms_biases_and_dtypes(load):
    run = load(with_model(norm_type="layernorm", no_bias=False, dtype="torch.half", use_flash_attn=False))
    assert (run.model.norm, run.model.qkv_bias, run.model.mlp_bias) == ("layernorm", True, True)
    assert (run.layout["precision"], run.layout["attention"]) == ("fp16", "unfused")


# --- the Python that is read


def test_what_configurations_compute(load):
    text = (
        SMALL
        + """
'''a text that stands alone'''
THREE: int = 3
COPY = TWO = THREE - 1
job = f"{COPY}_{TWO}"
adam = {"lr": 1e-4, "weight_decay": -0.01, **dict(adam_beta1=0.9)}
lr_scheduler = dict(total_steps=int(50 / 2), init_steps=[1, 2][-1], eta_min=round(0.5), last_epoch=not True)
beta2_scheduler = dict(c=adam["lr"], init_beta2=2**16 % 7 // 2, cur_iter=max(1, 2.5))
ckpt = dict(save_ckpt_folder=job + "/x", oss_snapshot_freq=float("inf"), load_ckpt_info=("model",) + (None,))
model = dict(model, hidden_size=HIDDEN / 1, num_layers=1 << 5)
"""
    )
    assert load(text).model.hidden_size == 4096
    values = read_assignments(text, "run.py").values
    assert values["ckpt"]["save_ckpt_folder"] == "2_2/x"
    assert values["lr_scheduler"] == {"total_steps": 25, "init_steps": 2, "eta_min": 0, "last_epoch": False}
    assert values["beta2_scheduler"] == {"c": 1e-4, "init_beta2": 1, "cur_iter": 2.5}
    assert values["adam"].lines == {"lr": 11, "weight_decay": 11, "adam_beta1": 11}


@pytest.mark.parametrize(
    "attack",
    [
        "x = __import__('os').system('touch {mark}')",
        "import os",
        "from os import system",
        "exec('1')",
        "open('{mark}', 'w')",
        "x = open('{mark}', 'w')",
        "x = (lambda: open('{mark}', 'w'))()",
        "x = [open('{mark}', 'w') for _ in (1,)]",
        "x = ().__class__.__bases__",
        "def f():\n    pass",
        "class C:\n    open('{mark}', 'w')",
        "if True:\n    x = 1",
        "x = 1 if True else 2",
        "with open('{mark}', 'w'):\n    pass",
        "x = f'{{open(\"{mark}\")}}'",
        "x = int(open('{mark}', 'w'))",
        "x = dict(a=eval('1'))",
        "del HIDDEN",
        "x = y = z()",
        "x, y = 1, 2",
        "x: 'open()' = print()",
        "HIDDEN += 1",
        "x = (y := 1)",
        "x = {{*()}}",
        "x = 'a' * 9",
        "x = 'a' % 9",
    ],
)
def test_nothing_is_executed(load, tmp_path, attack):
    mark = tmp_path / "mark"
    with pytest.raises(InputError, match=r"run\.py, line 1: .* is not read.* not run; allowed are numbers"):
        load(attack.format(mark=mark) + "\n" + SMALL)
    assert not mark.exists()


@pytest.mark.parametrize(
    "bomb",
    [
        "a = 9**9**9**9",
        "a = 1 << 10**9",
        "a = [1]\n" + "a = a + a\n" * 60,
        "a = 'x'\n" + "a = f'{a}{a}'\n" * 60,
        "a = [1]\n" + "a = [a, a]\n" * 60 + "model = dict(hidden_size=a)",
        "a = (1,)\n" + "a = (a, a)\n" * 60 + "b = {a: 1}",
        "a = dict(b=1)\n" + "a = dict(b=a, c=a)\n" * 60 + "model = a",
        "a = 1e300**9",
        "a = 10**300 * 10**300 * 1.5",
        "a = " + "(" * 500,
        "a = " + "-" * 200_000 + "1",
        "a = 1" + " + 1" * 50_000,
        "a = " + "9" * 9000,
        "a = '\0'",
    ],
)
def test_no_file_makes_the_reader_slow(load, bomb):
    start = time.process_time()
    with pytest.raises(InputError, match=r"run\.py"):
        load(bomb)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data = dict(\n  seq_len=2048", "line 1: not valid Python: '(' was never closed"),
        ("data = dict(\n  seq_len=LENGTH)", "line 2: the name 'LENGTH' is not assigned above"),
        ("HIDDEN_SIZE = 1\nmodel = dict(hidden_size=HIDEN_SIZE)", "did you mean 'HIDDEN_SIZE'"),
        ("a = 1 / 0", "line 1: cannot be computed: division by zero"),
        ("a = dict(b=1, b=2)", "line 1: the key 'b' is given twice"),
        ("a = dict(lr=1)\nb = a['rl']", "line 2: there is no key 'rl'"),
        ("a = [1, 2][2]", "line 1: there is no item 2"),
    ],
)
def test_mistakes_in_python_are_reported_with_their_line(load, text, message):
    with pytest.raises(InputError) as error:
        load(text)
    assert message in str(error.value)


# --- wrong keys and values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_model(hiden_size=1), "line 6: model has no key 'hiden_size' (did you mean 'hidden_size'?); known keys are"),
        (SMALL + "data = dict(data, micro_bs=1)", "line 6: data has no key 'micro_bs' (did you mean 'micro_bsz'?)"),
        (with_parallel("zero1=dict(sise=1)"), "parallel.zero1 has no key 'sise' (did you mean 'size'?)"),
        (SMALL + "adam = dict(\n  lr=1,\n  weight_deca=2)", "line 8: adam has no key 'weight_deca'"),
        (SMALL + "modle = dict()", "line 6: there is no section or setting 'modle' (did you mean 'model'?); known names"),
        (SMALL.replace("num_layers=32, ", ""), "model.num_layers is missing; it must be a whole number"),
        ("data = dict(seq_len=1)", "model.hidden_size is missing"),
        (with_model(hidden_size="big"), "line 6: model.hidden_size is 'big'; it must be a whole number of at least 1"),
        (with_model(hidden_size=4096.5), "it must be a whole number"),
        (with_model(hidden_size=True), "it must be a whole number"),
        (with_model(num_layers=0), "of at least 1"),
        (with_model(num_layers=2**2000), "it must be a whole number"),
        (with_model(mlp_ratio=-1), "model.mlp_ratio is -1; it must be a positive number"),
        (with_model(num_attention_heads=33), "it must be a divisor of hidden_size 4096"),
        (with_model(num_kv_attention_heads=5), "not a multiple of num_key_value_heads"),
        (with_model(checkpoint=1.5), "it must be True, False or the share of layers"),
        (with_model(dtype="torch.float32"), "it must be one of torch.bfloat16, torch.float16"),
        (with_model(norm_type="batchnorm"), "one of rmsnorm, layernorm"),
        (with_model(use_sliding_window=True), "because a window over the keys is not modelled"),
        (with_model(use_swiglu=False), "because an MLP without a gate"),
        (with_model(drop_rate=0.1), "because dropout is not modelled"),
        (SMALL + "use_fp32_norm = True", "because norms in 32 bits is not modelled"),
        (with_model(parallel_output=False) + "parallel = dict(tensor=4)", "it must be True with tensor parallelism"),
        (SMALL + "model = 5", "line 6: model is 5; it must be a section"),
        (SMALL + "model = [1]", "line 6: model is a list; it must be a section"),
        (with_parallel("tensor=dict(size=2, mode='tsp')"), "parallel.tensor.mode is 'tsp'; it must be one of mtp, msp"),
        (with_parallel("tensor=dict(size=[2])"), "parallel.tensor.size is a list"),
        (with_parallel("weight=dict(size=2)"), "only the tensor mode isp splits weights"),
        (with_parallel("zero1=dict(size=-1, fsdp=True), pipeline=2"), "False with the tensor mode isp or a pipeline"),
        (with_parallel("pipeline=64"), "at most the 32 layers"),
        (with_parallel("pipeline=dict(size=4, mode='zbv')"), "it must be one of 1f1b, zbh1"),
        (with_parallel("pipeline=dict(size=4, use_zeropp=True)"), "that schedule is not modelled"),
        (with_parallel("tensor=8, sequence_2D=dict(enable=True, head_size=2, context_size=2)"), "the tensor size 8"),
        (with_parallel("fsdp=dict(enable=True)"), "zero1=dict(fsdp=True)"),
        (SMALL + "hybrid_zero_optimizer = dict(overlap_sync_grad='yes')", "it must be True or False"),
    ],
)
def test_wrong_keys_and_values_are_reported_with_the_valid_ones(load, text, message):
    with pytest.raises(InputError) as error:
        load(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_helpers_in_capitals_and_used_names_are_valid(load):
    assert load("GPUS = 8\nsize = 2\n" + with_parallel("tensor=size")).layout["tp"] == 2


# --- JSON


LLAMA = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "vocab_size": 32000,
}
BARE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


def test_a_hugging_face_config_is_read_as_it_is(load, tmp_path):
    run = load(LLAMA, "config.json")
    assert parameters(run.model) == pytest.approx(6.738e9, rel=1e-3)
    assert run.name == tmp_path.name
    assert (run.layout, run.seq_len) == ({}, None)
    assert load({"model_type": "llava", "text_config": LLAMA, "vision_config": {}}, "config.json").model == run.model


def test_a_bare_model_refuses_unknown_keys(load):
    assert load(BARE, "m.json").model.intermediate_size == 256
    with pytest.raises(InputError, match="unknown model key 'hiden_size'"):
        load({**BARE, "hiden_size": 1}, "m.json")
    with pytest.raises(InputError, match="model_type is missing, .* with 'rms_norm_eps' is"):
        load({**BARE, "rms_norm_eps": 1e-5}, "m.json")
    with pytest.raises(InputError, match="intermediate_size is 0; it must be at least 1"):
        load({**BARE, "intermediate_size": 0}, "m.json")
    with pytest.raises(InputError, match="the model needs vocab_size"):
        load({k: v for k, v in BARE.items() if k != "vocab_size"}, "m.json")
    with pytest.raises(InputError, match="hidden_size is '64'; it must be a whole number"):
        load({**BARE, "hidden_size": "64"}, "m.json")
    for key, value in [
        ("num_attention_heads", 0),
        ("num_experts", "many"),
        ("bias", 1),
        ("kv_lora_rank", [1]),
        ("vocab_size", 10**400),
        ("max_position_embeddings", -1),
    ]:
        with pytest.raises(InputError, match=r"m\.json"):
            load({**BARE, key: value}, "m.json")


def test_a_model_with_its_layout(load):
    layout = {"tp": 8, "sequence_parallel": True, "pp": 4, "cp": None, "seq_len": 8192, "zero_shard_size": -1}
    run = load({"name": "mine", "model": "llama3_70b", "layout": layout, "notes": "a try"}, "run.json")
    assert run.name == "mine"
    assert run.model == load_run_config(find_model("llama3_70b")).model
    assert run.layout == {"tp": 8, "tp_mode": "msp", "pp": 4, "seq_len": 8192, "zero_shard_size": -1}
    assert run.seq_len == 8192
    assert load({"model": BARE}, "tiny.json").name == "tiny"


def test_a_layout_may_have_more_expert_than_tensor_ranks(load):
    layout = {"tp": 2, "etp": 2, "ep": 8, "dp": 64}
    assert load({"model": "mixtral_8x7b", "layout": layout}, "run.json").layout == layout


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"model": BARE, "layout": {"tpp": 2}}, "unknown layout key 'tpp' (did you mean 'tp'?); known keys are account_for"),
        ({"model": BARE, "layout": {"tp": True}}, "layout key tp is True; it must be a whole number"),
        ({"model": BARE, "layout": {"tp": 0}}, "layout key tp is 0; it must be a whole number of at least 1"),
        ({"model": BARE, "layout": {"tp_mode": "tsp"}}, "tp_mode is 'tsp'; it must be one of mtp"),
        ({"model": BARE, "layout": {"compile": 1}}, "compile is 1; it must be true or false"),
        ({"model": BARE, "layout": [1]}, "layout must be an object"),
        ({"model": BARE, "layouts": {}}, "unknown key 'layouts' (did you mean 'layout'?)"),
        ({"model": 7}, "model must be an object of model keys or a shipped model's name"),
        ({"model": "llama9"}, "no model is called 'llama9'"),
    ],
)
def test_wrong_json_is_reported(load, plain, message):
    with pytest.raises(InputError) as error:
        load(plain, "run.json")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n'a': 1}", "line 2: not valid JSON"),
        ("[1]", "is an object {...}, not a list"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8 text (byte 0)"),
        (b" " * (MAX_BYTES + 1), "larger than 1 MiB"),
        ('{"model": ' * 90_000, r"run.json"),
    ],
)
def test_invalid_json_files(load, content, message):
    with pytest.raises(InputError) as error:
        load(content, "run.json")
    assert message in str(error.value)


# --- the file itself


def test_files_that_cannot_be_read(load, tmp_path):
    for path, message in [
        (tmp_path / "none.py", "no such file; it should be a configuration file"),
        (tmp_path, "is a folder; a configuration is one file"),
        (tmp_path / "run.ini", "a configuration is a framework's file, or a model's"),
        (tmp_path / ("x" * 300 + ".py"), "cannot be read"),
        (Path("a\0b.py"), "cannot be read"),
    ]:
        with pytest.raises(InputError, match=message):
            load_run_config(path)
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(InputError, match="a folder, not a configuration file"):
        load_run_config(tmp_path / "folder.py")
    (tmp_path / "device.py").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="not a regular file"):
        load_run_config(tmp_path / "device.py")
    (tmp_path / "run.toml").write_text("\n")
    with pytest.raises(InputError, match=r"run\.toml is empty"):
        load_run_config(tmp_path / "run.toml")
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 5\)"):
        load(b"a = '\xe9'")


def test_a_byte_order_mark_and_foreign_line_ends_are_read(load):
    assert load(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode()).seq_len == 2048


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"nvlink_domain": 12}, "nvlink_domain 12 is no multiple of gpus_per_node 8"),
        ({"nvlink_domain": 4}, "nvlink_domain 4 is no multiple of gpus_per_node 8"),
        ({"link_peers": 3}, "link_peers is 3; in a full mesh it is one less than gpus_per_node, 7"),
        ({"link_peers": 7, "nvlink_domain": 64}, "link_peers 7 is a full mesh in a node, nvlink_domain 64 a switch beyond it"),
        (
            {"all_reduce_busbw_in_node_gb_s": 2000},
            "is 2000, more than the links of NVIDIA H100 SXM 80GB carry, 450 GB/s each way",
        ),
    ],
)
def test_figures_that_cannot_be(figures: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster_of(DEVICES["h100_sxm"], figures)
    assert cluster_of(DEVICES["h100_sxm"], {"nvlink_domain": 24}).gpus_per_domain == 24


def test_nodes_without_a_switch_split_the_links_of_a_gpu():
    """HGX boards of four A100 connect each pair with a third of the links."""
    cluster = {"hardware": "a100_sxm_80gb", "gpus_per_node": 4}
    given = [load_problem(find_model("llama2_7b"), 8, cluster=c) for c in (cluster, {**cluster, "link_peers": 3})]
    switch, mesh = (problem.cost.network.collective("all_gather", 2**30, [2, 4], 1).seconds for problem in given)
    assert mesh / switch == pytest.approx([3, 1], rel=0.01)


def test_a_cluster_file_of_the_users_own(tmp_path):
    path = tmp_path / "ours.json"
    path.write_text('{"hardware": "h100_sxm", "gpus_per_node": 4}')
    assert load_cluster(path) == {"name": "ours", "hardware": "h100_sxm", "gpus_per_node": 4}
    path.write_text('{"gpus": 4}')
    with pytest.raises(InputError, match="unknown cluster key 'gpus'"):
        cluster_of(DEVICES["h100_sxm"], load_cluster(path))
    with pytest.raises(InputError, match="no such file; it should be a configuration file"):
        load_cluster(tmp_path / "none.json")


def test_lists_are_repeated_up_to_a_length() -> None:
    assert read_assignments("layers = ([0] * 3 + [1]) * 2", "x.py").values["layers"] == [0, 0, 0, 1] * 2
    with pytest.raises(InputError, match="x.py, line 1: .*a text or list of more than 65536 items"):
        read_assignments("layers = [0, 1] * 40000", "x.py")
    with pytest.raises(InputError, match="is not read"):
        read_assignments("layers = 'a' * 3", "x.py")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model = dict(", 'model_type = "LLAVA"\nmodel = dict(', "model_type is 'LLAVA'; it must be one of INTERNLM2"),
        ("model = dict(", 'model_type = "LLAMA2_HF"\nmodel = dict(', "because its sizes are in another file"),
        ("model = dict(", "model = dict(norm_head=True, ", "model.norm_head is True; it must be False, because a head whose"),
        (
            "model = dict(",
            "model = dict(deepnorm=True, ",
            "model.deepnorm is True; it must be False, because a scaled residual",
        ),
    ],
)
def test_models_of_internevo_that_are_others_are_refused(load, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(InputError, match=message):
        load(SMALL.replace(old, new))


def test_biases_of_internevo_are_read_and_an_unknown_model_is_named(load) -> None:
    plain, biased = load(SMALL).model, load(SMALL.replace("model = dict(", "model = dict(qkv_bias=True, mlp_bias=True, ")).model
    assert (plain.qkv_bias, plain.output_bias, plain.mlp_bias) == (False, False, False)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, False, True)
    assert load(SMALL).notes == ()
    assert load('model_type = "FOO"\n' + SMALL).notes == (
        "model_type FOO is not known here: its keys are read as those of a Llama",
    )


@pytest.mark.parametrize(
    ("world", "part"),
    [
        (4, 4),
        (64, 64),
        (72, 72),
        (96, 48),
        (144, 72),
        (256, 64),
        (1024, 64),
        (13824, 64),
        (576, 64),
        (76, 40),
        (108, 56),
        (152, 56),
        (184, 64),
        (104, 56),
        (120, 40),
        (136, 72),
        (208, 72),
        (240, 48),
        (264, 72),
        (60, 60),
    ],
)
def test_the_part_of_each_rack_that_a_job_gets(world: int, part: int) -> None:
    """Of 72 GPUs in hosts of 4: evenly, or where that leaves little, the fewest racks, of which the last gives fewer."""
    cluster = cluster_of(DEVICES["gb200"], {}).for_world(world)
    assert cluster.gpus_per_domain == part
    assert world % 8 or part % 8 == 0 or part == world, "groups of eight do not straddle"
    if world in (76, 108, 152, 184, 104, 136, 208, 264):
        assert -(-world // part) == -(-world // 72), "as few racks as can be"


@pytest.mark.parametrize(
    ("domain", "world", "part"),
    [(144, 576, 64), (144, 1152, 128), (288, 1152, 128), (576, 1152, 384), (128, 1152, 128), (144, 432, 144)],
)
def test_wide_groups_do_not_straddle_domains_of_other_sizes(domain: int, world: int, part: int) -> None:
    cluster = cluster_of(DEVICES["gb200"], {"nvlink_domain": domain}).for_world(world)
    assert cluster.gpus_per_domain == part
    assert part % min(world & -world, 128) == 0


def test_a_few_more_gpus_do_not_tear_the_racks_apart() -> None:
    """76 and 152 are four and eight times a prime; the exchange of experts stays on NVLink as it does on 72 and 80."""
    steps = []
    for world in (72, 76, 80, 152, 160):
        problem = load_problem(CONFIGS / "models" / "qwen3_30b_a3b.json", world, profile="gb200", framework="megatron-bridge")
        layout = problem.layout(dp=world, ep=4, num_micro_batches=8, zero_shard_size=world)
        steps.append(float(estimate(problem, [layout]).times.seconds[0]))
    assert max(steps) < 1.01 * min(steps)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "a.yaml",
            "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 2\n",
            "a file of axolotl, which is not read",
        ),
        ("a.yml", '{"pipe-parallel-size": 4, "num-layers": 44,}', "a file of GPT-NeoX, which is not read; state its model"),
        (
            "a.yaml",
            "step_scheduler: {global_batch_size: 64}\n",
            "(configs/README.md) of framework nemo-automodel",
        ),
        ("a.yaml", "max_seq_len: 2048\ndevice_train_microbatch_size: 8\n", "a file of llm-foundry"),
        (
            "a.py",
            "import nemo_run as run\nfrom nemo.collections import llm\n",
            "a recipe of NeMo 2 is a program",
        ),
        (
            "a.py",
            "from torchtitan.trainer import Trainer\n",
            "a configuration of torchtitan in Python is a program",
        ),
    ],
)
def test_files_of_frameworks_that_are_not_read_are_named(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as refused:
        load_run_config(tmp_path / name)
    assert sentence in str(refused.value)
