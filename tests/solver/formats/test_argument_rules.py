"""Frameworks' own rules of their arguments: obeyed by measured runs and by what is written, and said where broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from round_trip import layouts_of, model_of

from profiler.errors import InputError
from solver.formats.accelerate import rules as accelerate
from solver.formats.bridge import rules as bridge
from solver.formats.config_file import load_run_config
from solver.formats.deepspeed import rules as deepspeed
from solver.formats.export import exported
from solver.formats.internevo import rules as internevo
from solver.formats.megatron import rules as megatron_lm
from solver.formats.megatron.export import shell_command
from solver.formats.nanotron import rules as nanotron
from solver.formats.nemo import rules as nemo
from solver.formats.primus import rules as primus
from solver.formats.rule import Arguments, Rule, broken, flattened
from solver.formats.torchtitan import rules as torchtitan
from solver.spec.strategy import Strategy

CASES = [json.loads(line) for line in Path("configs/cases/published.jsonl").read_text().splitlines()]
OWN = [case for case in CASES if "megatron_args" in case]
RULES: dict[str, tuple[Rule, ...]] = {
    "megatron_lm": megatron_lm.RULES,
    "core": megatron_lm.CORE,
    "primus": primus.RULES,
    "internevo": internevo.RULES,
    "torchtitan": torchtitan.RULES,
    "deepspeed": deepspeed.RULES,
    "nanotron": nanotron.RULES,
    "accelerate": accelerate.RULES,
    "nemo": nemo.RULES,
    "bridge": bridge.RULES,
}


@pytest.mark.parametrize("case", OWN, ids=lambda case: case["id"])
def test_runs_that_were_measured_obey_the_rules(case: dict[str, Any]) -> None:
    """All 88 argument sets of Megatron-LM's own tests, which ran. Of some the number of GPUs is only assumed."""
    given = {flag.lstrip("-"): value for flag, value in case["megatron_args"].items()}
    found = broken(megatron_lm.RULES, Arguments(given, case["run"]["world_size"]))
    assumed = case["megatron_args"].get("world-size-assumed", False)
    found = tuple(rule for rule in found if "--ckpt-format" not in rule)  # arguments of checkpoints were not collected
    assert [rule for rule in found if not (assumed and rule.startswith("the ranks are a multiple"))] == []
    assert len(OWN) >= 88


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_source_and_can_hold(name: str) -> None:
    rules = RULES[name]
    assert len({rule.says for rule in rules}) == len(rules) >= 5
    for rule in rules:
        assert rule.source and len(rule.says) > 15


GOOD = {
    "num-layers": 32,
    "num-attention-heads": 32,
    "micro-batch-size": 1,
    "global-batch-size": 64,
    "seq-length": 4096,
    "tensor-model-parallel-size": 2,
    "pipeline-model-parallel-size": 2,
    "sequence-parallel": True,
    "bf16": True,
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
}
EXPERTS = {
    "num-experts": 8,
    "expert-model-parallel-size": 4,
    "moe-token-dispatcher-type": "alltoall",
    "disable-bias-linear": True,
    "moe-grouped-gemm": True,
}
LINEAR = {"experimental-attention-variant": "gated_delta_net", "linear-attention-freq": 4}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        (EXPERTS, ""),
        ({"global-batch-size": 65}, "--global-batch-size is a multiple"),
        ({"num-attention-heads": 33}, "tp divides --num-attention-heads"),
        ({"context-parallel-size": 2, "seq-length": 4098}, "2 * cp divides --seq-length"),
        ({"num-layers": 33}, "the layers (with counted embedding and loss) divide"),
        ({"num-layers": 33, "account-for-loss-in-pipeline-split": True}, ""),
        ({"num-virtual-stages-per-pipeline-rank": 5}, "the layers (with counted embedding and loss) divide"),
        ({"num-virtual-stages-per-pipeline-rank": 4, "global-batch-size": 20}, "interleaving needs groups of pp micro batches"),
        ({"pipeline-model-parallel-layout": "Et*16|t*15L"}, "pp divides the chunks of --pipeline-model-parallel-layout"),
        ({"use-distributed-optimizer": False}, "--overlap-param-gather needs --use-distributed-optimizer"),
        ({"optimizer-cpu-offload": True}, "--optimizer-cpu-offload needs --use-precision-aware-optimizer"),
        ({"optimizer": "dist_muon"}, "--optimizer muon and dist_muon exclude"),
        ({"recompute-granularity": "full"}, "--recompute-granularity full needs --recompute-method"),
        (
            {"fp8-format": "hybrid", "recompute-granularity": "selective", "recompute-modules": "layernorm"},
            "recomputing layernorm or moe_act in fp8",
        ),
        (
            {
                "cuda-graph-impl": "transformer_engine",
                "recompute-granularity": "full",
                "recompute-method": "uniform",
                "recompute-num-layers": 1,
            },
            "--cuda-graph-impl excludes --recompute-granularity full",
        ),
        ({**EXPERTS, "sequence-parallel": False}, "experts with tp above 1 need --sequence-parallel"),
        (
            {**EXPERTS, "moe-shared-expert-overlap": True, "moe-token-dispatcher-type": "flex"},
            "--moe-shared-expert-overlap needs",
        ),
        ({**EXPERTS, "overlap-moe-expert-parallel-comm": True}, "with pp above 1 needs interleaved stages"),
        ({**EXPERTS, "overlap-moe-expert-parallel-comm": True, "num-layers-per-virtual-pipeline-stage": 2}, ""),
        ({**EXPERTS, "expert-model-parallel-size": 3}, "ep divides --num-experts"),
        ({**EXPERTS, "moe-router-topk": 1}, "--moe-router-topk 1 with softmax needs --moe-router-pre-softmax"),
        ({**EXPERTS, "moe-router-topk": 1, "moe-router-load-balancing-type": "sinkhorn"}, ""),
        ({**EXPERTS, "bf16": False, "fp16": True}, "experts in parallel, or in one grouped GEMM, are not trained with --fp16"),
        (
            {
                "optimizer": "muon",
                "use-distributed-optimizer": False,
                "overlap-grad-reduce": False,
                "overlap-param-gather": False,
            },
            "need --ckpt-format torch",
        ),
        ({"mtp-num-layers": 1, "context-parallel-size": 2, "position-embedding-type": "rope"}, ""),  # since about 0.15
        ({"mtp-num-layers": 1, "pipeline-model-parallel-layout": "Et*4|t*4L"}, "holds as many m as --mtp-num-layers"),
        (LINEAR, ""),
        ({**LINEAR, "context-parallel-size": 2}, "linear attention needs cp 1, a tp that divides --linear-num-key-heads"),
        ({**LINEAR, "linear-num-key-heads": 3, "linear-num-value-heads": 6}, "linear attention needs cp 1"),
        ({**LINEAR, "deterministic-mode": True}, "linear attention excludes --deterministic-mode"),
        ({"attention-output-gate": True, "multi-latent-attention": True}, "--attention-output-gate excludes"),
        ({"use-megatron-fsdp": True}, "--use-megatron-fsdp needs --ckpt-format fsdp_dtensor"),
        ({"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}, ""),
        ({"cuda-graph-impl": "local", "cuda-graph-scope": "full_iteration"}, "needs --no-check-for-nan-in-loss-and-grad"),
    ],
)
def test_rules_of_megatron_by_hand(changes: dict[str, Any], says: str) -> None:
    given = {flag: value for flag, value in {**GOOD, **changes}.items() if value is not False}
    found = broken(megatron_lm.RULES, Arguments(given, 16))
    assert (len(found) == 0) if not says else any(says in rule for rule in found), found


def test_rules_of_the_environment_by_hand() -> None:
    def found(value: str, **flags: bool) -> str:
        given = {**GOOD, **{flag.replace("_", "-"): on for flag, on in flags.items()}}
        return " ".join(broken(megatron_lm.RULES, Arguments(given, 16, {"CUDA_DEVICE_MAX_CONNECTIONS": value})))

    assert "tp or cp above 1 need CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell" in found("8")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found("1")
    assert "--use-megatron-fsdp needs CUDA_DEVICE_MAX_CONNECTIONS above 1" in found("1", use_megatron_fsdp=True)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found("8", use_megatron_fsdp=True)


@pytest.mark.parametrize(
    ("rules", "given", "says"),
    [
        (
            internevo.RULES,
            {"model": {"num_chunks": 2}, "parallel": {"pipeline": {"size": 2}}, "data": {"micro_num": 4}},
            "num_chunks above 1 needs pipeline.interleaved_overlap",
        ),
        (
            internevo.RULES,
            {"parallel": {"pipeline": {"size": 2, "mode": "ZBH1"}}, "hybrid_zero_optimizer": {"overlap_sync_grad": True}},
            "ZBH1 excludes overlap_sync_grad",
        ),
        (internevo.RULES, {"parallel": {"weight": {"size": 2}}}, "weight.size above 1 needs tensor.mode isp"),
        (internevo.RULES, {"model": {"use_flash_attn": False}}, "needs model.use_flash_attn=True"),
        (
            torchtitan.RULES,
            {"parallelism": {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}},
            "enable_async_tensor_parallel needs a compiled model",
        ),
        (
            torchtitan.RULES,
            {
                "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
                "training": {"local_batch_size": 8},
                "compile": {"enable": True},
            },
            "schedules that split the backward pass exclude a compiled model",
        ),
        (
            torchtitan.RULES,
            {
                "parallelism": {
                    "pipeline_parallel_degree": 2,
                    "data_parallel_replicate_degree": 2,
                    "data_parallel_shard_degree": 1,
                }
            },
            "copies without shards exclude",
        ),
        (deepspeed.RULES, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "without ZeRO gradients"),
        (deepspeed.RULES, {"zero_optimization": {"stage": 2}, "--pipeline-model-parallel-size": 2}, "ZeRO below stage 2"),
        (
            nanotron.RULES,
            {
                "parallelism": {"pp": 8},
                "tokens": {"batch_accumulation_per_replica": 4},
                "model": {"model_config": {"hidden_size": 64}},
            },
            "at least pp - 1",
        ),
        (
            accelerate.RULES,
            {
                "num_processes": 16,
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2},
                "parallelism_config": {"parallelism_config_dp_shard_size": 8},
            },
            "multiply to num_processes",
        ),
        (
            nemo.RULES,
            {"trainer": {"precision": "16"}, "model": {"megatron_amp_O2": True, "optim": {"name": "fused_adam"}}},
            "fp16 with megatron_amp_O2",
        ),
        (bridge.RULES, {"model": {"cuda_graph_impl": "local"}}, "needs rng.te_rng_tracker or model.use_te_rng_tracker"),
        *(
            (
                rules,
                {"model": {"virtual_pipeline_model_parallel_size": 4, "megatron_amp_O2": True}},
                "virtual_pipeline_model_parallel_size needs model.pipeline_model_parallel_size above 1",
            )
            for rules in (bridge.RULES, nemo.RULES)
        ),
        (
            primus.RULES,
            {"patch_zero_bubble": True, "overlap_grad_reduce": True, "pipeline_model_parallel_size": 4},
            "zero bubble excludes overlap_grad_reduce",
        ),
    ],
)
def test_rules_of_other_frameworks_by_hand(rules: tuple[Rule, ...], given: dict[str, Any], says: str) -> None:
    found = broken(rules, Arguments(flattened(given)))
    assert len(found) == 1 and says in found[0], found


def test_a_script_sets_the_allocator(tmp_path: Path) -> None:
    model = model_of("llama3_8b")
    run = layouts_of(model, "megatron-core-0.12", 20, expandable_segments=True)[0]
    (tmp_path / "run.sh").write_text(exported(tmp_path / "run.sh", model, run, 8)["run.sh"])
    assert load_run_config(tmp_path / "run.sh").layout["expandable_segments"] is True
    with pytest.raises(InputError, match="expandable_segments True"):  # a YAML has no place for the environment
        exported(tmp_path / "run.yaml", model, run.replace(framework="megatron-bridge-26"), 8)


def test_what_a_framework_refuses_is_neither_written_nor_read_in_silence(tmp_path: Path) -> None:
    model = model_of("llama3_8b")
    run = layouts_of(model, "megatron-core-0.12", 20, deterministic=True, cross_entropy_fusion=True)[0]
    with pytest.raises(InputError, match="--deterministic-mode excludes --cross-entropy-loss-fusion"):
        exported(tmp_path / "run.sh", model, run, 8)
    run = run.replace(cross_entropy_fusion=False)
    text = exported(tmp_path / "run.sh", model, run, 8)["run.sh"]
    assert "export NCCL_ALGO=Ring\n" in text and "export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0\n" in text
    (tmp_path / "run.sh").write_text(text.replace("NCCL_ALGO=Ring", "NCCL_ALGO=NVLS"))
    note, *_ = load_run_config(tmp_path / "run.sh").notes
    assert note.startswith("its framework would refuse this run: --deterministic-mode needs NCCL_ALGO to be one of Tree, Ring")


@pytest.mark.parametrize("value", ["4", "four", True, None, [2], {"a": 1}, float("inf"), float("nan"), -3, 0, 2.5])
def test_sizes_that_are_none_are_left_to_the_readers(value: Any) -> None:
    """Rules are checked before every value is: an unreadable one takes its default, and its reader says what it is."""
    assert Arguments({"context-parallel-size": value}).size("context-parallel-size") == 1
    assert Arguments({"context-parallel-size": 4.0}).size("context-parallel-size") == 4
    assert all(
        isinstance(rule, str) for rule in broken(megatron_lm.RULES, Arguments({**GOOD, "context-parallel-size": value}, 16))
    )


def test_a_script_names_the_first_release_that_knows_its_flags() -> None:
    model = model_of("llama3_8b")
    plain = Strategy(
        world_size=8, seq_len=4096, dp=8, zero=0, grad_dtype="fp32", p2p_overlap=True, framework="megatron-core-0.12"
    )
    assigned = plain.replace(dp=4, pp=2, pipeline_layout="Et*17|t*15L")
    graphs = plain.replace(cuda_graphs=True)
    for run, release in ((plain, "0.12"), (assigned, "0.13"), (graphs, "0.15")):
        assert f"for Megatron-Core {release} to 0.16" in shell_command(model, run, 8)


@pytest.mark.parametrize(
    ("compiled", "runs"),
    [
        ({"training": {"compile": True}}, True),
        ({"compile": {"enable": True}}, True),
        ({"compile": {"enable": True, "components": ["loss"]}}, False),
        ({"compile": {"enable": False, "components": ["model"]}}, False),
    ],
)
def test_torchtitan_compiles_by_the_keys_of_both_releases(compiled: dict[str, Any], runs: bool) -> None:
    asked = {"parallelism": {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}, **compiled}
    assert (not broken(torchtitan.RULES, Arguments(flattened(asked)))) == runs
