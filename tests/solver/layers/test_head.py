"""The cross entropy fused with the vocabulary's projection: never all logits, as much work."""

from __future__ import annotations

import numpy as np
import pytest
from references import flops
from toy import BYTE, estimated, layer_keys, make_problem, part, tiny, toy_cost

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.formats.config_file import load_run_config
from solver.layers.head import head_program
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.strategy import Strategy

MODEL = load_run_config("configs/models/llama3_8b.json").model
FUSED = {"cross_entropy_fusion": True, "cross_entropy_fusion_impl": "linear"}


def test_bytes_by_hand() -> None:
    cluster, keys = cluster_of(toy_cost().device), layer_keys("mtp")
    tokens, hidden, vocab = 8192, MODEL.hidden_size, MODEL.vocab_size
    run = Strategy(world_size=8, dp=8, seq_len=tokens, framework="generic")
    programs = {
        name: head_program(keys, MODEL, run.replace(**how), cluster)
        for name, how in (("te", {"cross_entropy_fusion": True}), ("linear", FUSED))
    }
    kept = {name: float(program.saved_bytes(Recompute.NONE)[0]) for name, program in programs.items()}
    assert kept["te"] - kept["linear"] == pytest.approx(tokens * (vocab - hidden) * 2, rel=1e-3)
    assert float(np.ravel(programs["linear"].transient_bytes)[0]) == tokens * hidden * 6  # a chunk of logits, 16 bits and fp32
    counted = {name: float(flops(program)[0]) for name, program in programs.items()}
    assert counted["te"] == counted["linear"] == pytest.approx(6 * tokens * hidden * vocab, rel=2e-3)


def test_the_native_loss_by_hand() -> None:
    """Compiled functions between two all-reduces: 34 and 24 bytes of a logit, where one kernel moves 4 and 4."""
    run = Strategy(world_size=8, dp=8, seq_len=256, framework="generic", cross_entropy_fusion=True)
    cluster, logits = cluster_of(toy_cost().device), 256 * MODEL.vocab_size / 2
    for impl, moved, sent in (("te", (4, 4), 3), ("native", (34, 24), 2)):
        ops = head_program(layer_keys("msp", tp=2), MODEL, run.replace(cross_entropy_fusion_impl=impl), cluster).ops
        found = [float(np.ravel(op.dims["bytes"])[0]) for op in ops if op.name == "cross_entropy"]
        assert found == [logits * each for each in moved]
        messages = [float(np.ravel(op.dims["bytes"])[0]) for op in ops if op.module == "loss" and op.kind == "all_reduce"]
        assert len(messages) == sent and sum(messages) == 256 * 3 * 4, "natively sum and target's logit are one message"


def test_it_saves_memory_and_takes_no_less_time(h100_model: CostModel) -> None:
    def step(**how: object) -> tuple[float, float]:
        problem = make_problem(MODEL, 8, h100_model, 8192, framework="generic", precision="bf16", **how)
        found = estimated(problem, [problem.layout(zero=1, zero_shard_size=8, num_micro_batches=1)])
        return float(found.times.seconds[0]), float(found.memory.allocated[0])

    plain, fused = step(cross_entropy_fusion=True), step(**FUSED)
    assert plain[1] - fused[1] > 1e9
    assert plain[0] <= fused[0] < 1.02 * plain[0]


@pytest.mark.parametrize("fused", [True, False])
def test_logits_are_held_in_fp32_with_any_loss(fused: bool) -> None:
    # InternEvo casts them to fp32: 4 bytes of each, and as much while the loss works; inputs of final norm and projection
    run = Strategy(world_size=8, dp=8, seq_len=256, framework="internevo-2024", cross_entropy_fusion=fused)
    logits = 256 * MODEL.padded_vocab(1)
    program = head_program(layer_keys("mtp"), MODEL, run, cluster_of(toy_cost().device))
    assert program.saved_bytes(Recompute.NONE) == 4 * logits + 2 * 256 * 4096 * 2
    assert float(np.ravel(program.transient_bytes)[0]) >= 4 * logits


def test_a_framework_that_does_not_fuse_it_refuses() -> None:
    problem = make_problem(MODEL, 8, toy_cost(), 8192, framework="megatron-core")
    run = problem.layout(zero=1, zero_shard_size=8, num_micro_batches=1, **FUSED)
    with pytest.raises(InputError, match="does not offer cross_entropy_fusion_impl linear"):
        check_layout(MODEL, problem.cluster, run)


def test_logits_gathered_into_a_list_by_hand() -> None:
    # Aleph Alpha's: all logits in 16 bits are copied to a list and joined, the gradient's share is copied; fp32 ones are read
    # once more to count the right tokens
    cluster, tokens = cluster_of(toy_cost().device), 8192
    run = Strategy(world_size=8, dp=8, seq_len=tokens, framework="aleph-alpha-scaling")
    for tp in (1, 4):
        logits = tokens * MODEL.padded_vocab(tp)
        program = head_program(layer_keys("mtp", tp=tp), MODEL, run, cluster)
        found = {
            op.label: float(np.ravel(op.dims["bytes"])[0]) for op in program.ops if op.module == "loss" and "bytes" in op.dims
        }
        expected = {"logits.join.forward": 8 * logits, "logits.split.input_grad": 4 * logits // tp}
        assert found["metric.forward"] == 4 * logits
        assert {name: found[name] for name in expected} == (expected if tp > 1 else dict.fromkeys(expected, 0.0))


def test_gradients_that_are_cast_before_they_are_added() -> None:
    # DeepSpeed's BF16_Optimizer: 2 read and 4 written, then 4 and 4 read and 4 written: 18 bytes per parameter and micro batch
    def accumulation(grad_dtype: str) -> float:
        found = tiny("megatron-deepspeed", run={"grad_dtype": grad_dtype, "precision": "bf16"}, num_micro_batches=2)
        return float(part(found, "gradient_accumulation")[0] / found.terms.once.parameters[0] / BYTE)

    assert accumulation("fp32") == pytest.approx(2 * 18)
    assert accumulation("bf16") == pytest.approx(6), "the first micro batch's gradients stay where they are"
