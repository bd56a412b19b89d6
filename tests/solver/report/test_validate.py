"""Measured runs, read and predicted: scores computed by hand, and files with any value at any key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import DEVICE, toy_cost

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.formats.cases.reading import Case, case_of, read_cases
from solver.report.scores import confusion, memory_scores, regret, time_scores, worst
from solver.report.validate import Prediction, as_json, predict_cases
from solver.spec.pipeline_layout import chunk_layers

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
CASE: dict[str, Any] = {
    "id": "lab-1",
    "hardware": "toy",
    "cluster": {"gpus_per_node": 8, "inter_node_gbit_per_gpu": 400},
    "model": MODEL,
    "run": {
        "world_size": 8,
        "seq_len": 2048,
        "tp": 2,
        "pp": 2,
        "vpp": 1,
        "cp": 1,
        "zero": 1,
        "micro_batch_size": 4,
        "num_micro_batches": 2,
        "framework": "megatron-lm",
        "recompute": "none",
        "precision": "bf16",
        "schedule": "1f1b",
        "sequence_parallel": True,
        "dp": 2,
        "cuda_graphs": True,
    },
    "measured": {"step_s": 0.05, "peak_memory_gib": 8.0, "memory_kind": "allocated"},
}


def machines(hardware: str, network_bandwidth: float | None) -> CostModel | None:
    return toy_cost().with_network(network_bandwidth) if hardware == "toy" else None


def predicted(*plain: dict[str, Any]) -> list[Prediction]:
    return predict_cases([case_of(case) for case in plain], machines)


def case(**changes: Any) -> dict[str, Any]:
    """Return CASE with changes; those of its sections (run, model, ...) are merged into them."""
    return {**CASE, **{k: {**CASE[k], **v} if isinstance(CASE.get(k), dict) else v for k, v in changes.items()}}


def report(predictions: list[Prediction]) -> None:
    """Compute everything that the command prints or writes."""
    time_scores(predictions), memory_scores(predictions), confusion(predictions)
    regret(predictions), worst(predictions), as_json(predictions)


# reading


def test_keys_of_a_case() -> None:
    found = case_of(CASE)
    assert found.skipped is None and found.strategy is not None and found.source == "lab"
    s = found.strategy
    assert (s.tp, s.pp, s.dp, s.tp_mode, s.zero, s.zero_shard_size) == (2, 2, 2, "msp", 1, 2)
    assert (s.micro_batch_size, s.num_micro_batches, s.grad_dtype, s.framework) == (4, 2, "fp32", "megatron-lm")
    every = case_of(case(run={"zero_shard_size": -1}))  # as a model file says it: every rank with the same parameters
    assert every.skipped is None and every.strategy == found.strategy


def test_missing_keys_are_assumed_and_reported() -> None:
    run = {"world_size": 8, "seq_len": 2048, "framework": "internevo", "global_batch_size": 32, "weather": "fine"}
    found = case_of({**CASE, "run": run, "cluster": {}, "model": {k: v for k, v in MODEL.items() if k != "vocab_size"}})
    assert found.strategy is not None and found.strategy.num_micro_batches == 4 and found.strategy.dp == 8
    assert found.strategy.grad_dtype == "bf16" and found.strategy.zero_shard_size == 8
    assumptions = "; ".join(found.assumptions)
    for words in ("vocab_size: 51200", "inter_node_gbit_per_gpu", "zero: 1", "recompute: none", "not read: weather=fine"):
        assert words in assumptions
    assert case_of(CASE).assumptions == tuple(a for a in case_of(CASE).assumptions if "network" not in a)


@pytest.mark.parametrize(
    ("layers", "vpp", "assigned"),
    # of 10 layers embedding and loss can be counted as layers
    [(11, 2, "Et*3|(t*3|)*2t*2L"), (9, 2, "Et*2|t*3|t*2|t*2L"), (10, 2, ""), (8, 2, ""), (7, 1, "")],
)
def test_layers_that_do_not_divide_into_chunks_are_dealt(layers: int, vpp: int, assigned: str) -> None:
    # to frameworks that take a layout string; what is left over after the first chunk, and not to the last one
    run = {**CASE["run"], "framework": "megatron-core", "vpp": vpp}
    found = case_of({**CASE, "model": {**MODEL, "num_hidden_layers": layers}, "run": run})
    assert found.strategy is not None and found.strategy.pipeline_layout == assigned
    assert any("assigned as evenly" in text for text in found.assumptions) == bool(assigned)
    if assigned:
        assert sum(chunk_layers(assigned)) == layers


@pytest.mark.parametrize(
    ("model", "framework", "tied"),
    [
        ({"gated_mlp": False}, "megatron-lm 2023", True),
        ({"gated_mlp": False}, "megatron-deepspeed", True),
        ({"gated_mlp": False}, "megatron-lm (zero-bubble fork)", False),  # its examples untie them
        ({"gated_mlp": False}, "nemo 24.09", False),
        ({"gated_mlp": False}, "fsdp", False),
        ({"gated_mlp": True}, "megatron-lm 2023", False),  # Llama's
        ({"gated_mlp": False, "tie_word_embeddings": False}, "megatron-lm 2023", False),
    ],
)
def test_tables_are_one_where_megatron_ties_them(model: dict[str, Any], framework: str, tied: bool) -> None:
    """--untie-embeddings-and-output-weights is off by default; what is stated stands."""
    found = case_of({**CASE, "model": {**MODEL, **model}, "run": {**CASE["run"], "framework": framework}})
    assert found.model is not None and found.model.tie_word_embeddings is tied
    assert ("tie_word_embeddings: true" in found.assumptions) == tied


def test_linears_have_the_biases_that_the_framework_gives_them() -> None:
    # Megatron-LM: unless --disable-bias-linear; a gated MLP belongs to a model without, and what is stated stands
    for model, framework, expected in (
        ({"gated_mlp": False}, "megatron-lm 2023", True),
        ({"gated_mlp": False}, "megatron-deepspeed", True),
        ({"gated_mlp": False}, "nemo 24.09", False),
        ({"gated_mlp": True}, "megatron-lm 2023", False),
        ({"gated_mlp": False, "mlp_bias": False}, "megatron-lm 2023", False),
    ):
        found = case_of({**CASE, "model": {**MODEL, **model}, "run": {**CASE["run"], "framework": framework}})
        assert found.model is not None
        assert {found.model.qkv_bias, found.model.output_bias, found.model.mlp_bias} == {expected}
        assert ("bias: of all linears" in found.assumptions) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"num_experts": 8}}, "experts"),
        ({"model": {"kv_lora_rank": 64}}, "latent"),
        ({"run": {"ep": 4}}, "experts"),
        ({"run": {"dp": 3}}, "world_size"),
        ({"run": {"pp": 16, "world_size": 64}}, "layers"),
        ({"run": {"vpp": 3}}, "8 layers do not divide into 6 equal chunks"),
        ({"run": {"recompute": "some"}}, "recompute"),
        ({"model": {"hiden_size": 3}}, "hiden_size"),
    ],
)
def test_what_cannot_be_expressed_is_skipped_with_its_reason(changes: dict[str, Any], message: str) -> None:
    (found,) = predicted(case(**changes))
    assert found.skipped is not None and message in found.skipped
    assert as_json([found])[0]["skipped"] == found.skipped and np.isnan(found.seconds)


def test_a_case_that_a_device_cannot_run_does_not_stop_other_cases(a100_model: CostModel) -> None:
    cases = [case_of(case(id="lab-1")), case_of(case(id="lab-2", run={"precision": "fp8"}))]
    found = predict_cases(cases, lambda hardware, network_bandwidth: a100_model)
    assert found[0].skipped is None and found[0].seconds > 0
    assert found[1].skipped is not None and "fp8" in found[1].skipped


def test_files_keep_their_order(tmp_path: Path) -> None:
    import json

    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(json.dumps({**CASE, "id": f"lab-{i}"}) for i in (3, 1, 2)))
    assert [found.id for found in read_cases(path)] == ["lab-3", "lab-1", "lab-2"]


# predicting


def test_cases_together_are_predicted_as_one_by_one() -> None:
    cases = [
        case(id="lab-1"),
        case(id="lab-2", run={"tp": 1, "dp": 4}),
        case(id="lab-3", model={"num_hidden_layers": 4}),
        case(id="lab-4", run={"recompute": "full"}),
        case(id="lab-5", cluster={"inter_node_gbit_per_gpu": 100}),
        case(id="lab-6", hardware="unknown"),
    ]
    together, single = predicted(*cases), [predicted(c)[0] for c in cases]
    assert [p.case.id for p in together] == [c["id"] for c in cases]
    for one, other in zip(together[:5], single[:5], strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=1e-12) and one.memory_bytes == other.memory_bytes
    assert together[5].skipped == "no profile of unknown"


def test_the_network_of_the_case_is_used() -> None:
    slow, fast = predicted(
        *(case(id=f"lab-{g}", run={"world_size": 64, "dp": 16}, cluster={"inter_node_gbit_per_gpu": g}) for g in (25, 800))
    )
    assert slow.seconds > fast.seconds


def test_each_kind_of_memory_is_predicted() -> None:
    found = [predicted(case(measured={"memory_kind": kind}))[0].memory_bytes for kind in ("allocated", "reserved", "device")]
    assert found[0] < found[1] < found[2]


# scoring


def test_scores_by_hand() -> None:
    (base,) = predicted(CASE)
    # measured so that the prediction is 20% too long, 8% too short and correct
    cases = [case(id=f"lab-{i}", measured={"step_s": base.seconds / r}) for i, r in enumerate((1.2, 0.92, 1.0))]
    score = time_scores(predicted(*cases))["lab"]
    assert (score.n, score.median, score.bias) == (3, pytest.approx(0.08), pytest.approx(0.12 / 3))
    assert score.p90 == pytest.approx(0.08 + 0.8 * 0.12)
    assert score.coverage == pytest.approx(2 / 3), "the 90% interval of this machine is 10% wide"
    assert [p.case.id for p in worst(predicted(*cases))] == ["lab-0", "lab-1", "lab-2"]


def test_sources_are_scored_separately_and_together() -> None:
    (base,) = predicted(CASE)
    cases = [case(id=f"{name}-1", measured={"step_s": base.seconds / r}) for name, r in (("lab", 1.5), ("other", 1.0))]
    scores = time_scores(predicted(*cases))
    assert list(scores) == ["lab", "other", "all"]
    assert [scores[s].median for s in scores] == [pytest.approx(0.5), pytest.approx(0, abs=1e-12), pytest.approx(0.25)]


def test_regret_by_hand() -> None:
    # three layouts of one family; the one predicted fastest was measured 25% slower than the best
    cases = [case(id=f"lab-{i}", run={"recompute": r}) for i, r in enumerate(("none", "selective", "full"))]
    times = [p.seconds for p in predicted(*cases)]
    assert times == sorted(times)
    for plain, measured in zip(cases, (1.25, 1.0, 2.0), strict=True):
        plain["measured"] = {"step_s": measured}
    found = regret(predicted(*cases))["lab"]
    assert (found.families, found.mean, found.worst) == (1, pytest.approx(0.25), pytest.approx(0.25))


def test_fits_or_oom_by_hand() -> None:
    gib = DEVICE.memory_bytes / 2**30
    assert gib == 80
    big = {"micro_batch_size": 4096}
    cases = [
        case(id="lab-1"),
        case(id="lab-2", measured={"out_of_memory": True}),
        case(id="lab-3", run=big),
        case(id="lab-4", run=big, measured={"out_of_memory": True}),
        case(id="quiet-1"),
    ]
    assert confusion(predicted(*cases)) == {
        "fit, predicted fit": 2,
        "fit, predicted OOM": 1,
        "OOM, predicted fit": 1,
        "OOM, predicted OOM": 1,
    }


# any value at any key

VALUES = [None, 0, -1, 1.5, "x", [], {}, True, 10**9, 3, "2", [1]]


def _places() -> list[tuple[str | None, str]]:
    return [(section, key) for section in ("cluster", "model", "run", "measured") for key in CASE[section]] + [
        (None, key) for key in ("hardware", "id", "cluster", "model", "run", "measured")
    ]


@pytest.mark.parametrize(("section", "key"), _places(), ids=lambda place: str(place))
def test_any_value_is_predicted_skipped_or_refused(section: str | None, key: str) -> None:
    # an error is a sentence about the case, never a traceback
    failures = []
    for value in VALUES:
        plain = copy.deepcopy(CASE)
        (plain if section is None else plain[section])[key] = value
        try:
            with np.errstate(all="raise"):
                report(predicted(plain))
        except InputError as error:
            assert "\n" not in str(error)
        except Exception as error:
            failures.append(f"{value!r}: {type(error).__name__}: {error}")
    assert not failures


def test_nulls_mean_absent() -> None:
    # sources write null for what they do not report
    keys = [
        "cp",
        "ep",
        "vpp",
        "wp",
        "zero",
        "grad_dtype",
        "schedule",
        "num_micro_batches",
        "dp",
        "attention",
        "sequence_parallel",
        "framework",
    ]
    full = {**dict.fromkeys(keys), "world_size": 8, "seq_len": 2048, "global_batch_size": 16}
    bare = {key: value for key, value in full.items() if value is not None}
    first, second = predicted(case(run={}) | {"run": full, "id": "lab-1"}, {**CASE, "run": bare, "id": "lab-2"})
    assert first.skipped is None and first.seconds == second.seconds
    unmeasured = case(measured={"peak_memory_gib": None, "memory_kind": None, "out_of_memory": None})
    report(predicted(unmeasured))
    report(predicted(case(measured={"step_s": None})))


def test_the_case_itself_is_not_changed() -> None:
    before = copy.deepcopy(CASE)
    found: Case = case_of(CASE)
    predict_cases([found], machines)
    assert before == CASE


def test_a_case_may_name_a_shipped_model() -> None:
    named = case_of({**CASE, "model": "llama3_8b"})
    assert named.model is not None and not named.skipped
    assert (named.model.hidden_size, named.model.num_hidden_layers, named.model.vocab_size) == (4096, 32, 128256)
    stated = json.loads((Path("configs") / "models" / "llama3_8b.json").read_text())
    assert named.model == case_of({**CASE, "model": {k: v for k, v in stated.items() if k != "notes"}}).model
