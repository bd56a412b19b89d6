"""The best layouts of every framework obey the rules of its code, which are written out here once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from toy import all_layouts, make_problem, toy_cost

from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver.formats.cases.reading import read_cases
from solver.formats.config_file import CONFIGS
from solver.search.search import search
from solver.search.space import enumerate_splits
from solver.spec.choices import V_SHAPED
from solver.spec.cluster import FIGURES, cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import FRAMEWORKS
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

GQA = ModelSpec(
    name="gqa",
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=1000,
)
MODELS = (
    GQA,
    GQA.replace(num_hidden_layers=10),
    GQA.replace(num_key_value_heads=16, num_hidden_layers=14),
    GQA.replace(num_key_value_heads=2, num_hidden_layers=16),
)

Rule = Callable[[ModelSpec, Strategy], bool]


def one_mode(*modes: str) -> Rule:
    return lambda model, s: s.tp == 1 or s.tp_mode in modes


def zero(*stages: int) -> Rule:
    return lambda model, s: s.zero in stages


def counted(s: Strategy) -> int:
    return s.account_for_embedding_in_pipeline_split + s.account_for_loss_in_pipeline_split


def stated(s: Strategy) -> bool:
    return s.num_layers_in_first_pipeline_stage + s.num_layers_in_last_pipeline_stage > 0


def uneven_stages(model: ModelSpec, s: Strategy) -> bool:
    """Rules of megatron/core/transformer/transformer_config.py for end stages that hold less, or count as less."""
    ends = s.num_layers_in_first_pipeline_stage, s.num_layers_in_last_pipeline_stage
    if not any(ends):
        return (model.num_hidden_layers + counted(s)) % (s.pp * s.vpp) == 0
    middle = s.pp - sum(end > 0 for end in ends)
    left = model.num_hidden_layers - sum(ends)
    return not counted(s) and middle > 0 and left % (middle * s.vpp) == 0 and all(end % s.vpp == 0 for end in ends)


ALL_FRAMEWORKS: tuple[Rule, ...] = (
    lambda model, s: s.tp * s.cp * s.pp * s.dp == s.world_size,
    # torch's pipelines keep gathered weights between the micro batches of a pipeline
    lambda model, s: s.zero < 2 or s.pp == 1 or (s.zero == 2 and s.framework.startswith(("torchtitan", "nemo-automodel"))),
    lambda model, s: s.vpp == 1 or (s.pp > 1 and (s.schedule in V_SHAPED or s.num_micro_batches % s.pp == 0)),
    lambda model, s: s.vpp == 1 or (model.num_hidden_layers + counted(s)) % (s.pp * s.vpp) == 0 or stated(s),
    lambda model, s: s.cp == 1 or s.seq_len % (2 * s.cp) == 0,
    lambda model, s: model.num_attention_heads % s.tp == 0,
)
#: megatron/training/arguments.py, core/transformer/attention.py: even stages, whole query groups, ZeRO-1 at most.
MEGATRON: tuple[Rule, ...] = (
    zero(0, 1),
    one_mode("mtp", "msp"),
    uneven_stages,
    lambda model, s: model.num_key_value_heads % s.tp == 0,
)
EVEN: Rule = lambda model, s: not counted(s) and not stated(s)  # noqa: E731
NO_CP: Rule = lambda model, s: s.cp == 1  # noqa: E731
FSDP: tuple[Rule, ...] = (zero(0, 2, 3), lambda model, s: s.tp == s.cp == s.pp == 1)
NO_CHUNKS: Rule = lambda model, s: s.vpp == 1  # noqa: E731
WHOLE_KV: Rule = lambda model, s: model.num_key_value_heads % s.tp == 0  # noqa: E731
RULES: dict[str, tuple[Rule, ...]] = {
    "megatron-lm-2021": (*MEGATRON, EVEN, NO_CP, zero(0), one_mode("mtp"), lambda model, s: s.recompute != "selective"),
    "megatron-lm-2023": (*MEGATRON, EVEN, NO_CP),
    "megatron-lm-zero-bubble": (zero(0, 1), one_mode("mtp", "msp"), NO_CP, WHOLE_KV),
    "megatron-core-0.8": (*MEGATRON, EVEN),
    "megatron-core-0.12": MEGATRON,
    "megatron-core-local": (*MEGATRON, NO_CP),
    # backends/megatron/core/pipeline_parallel/zerobubble/utils.py: what its zero bubble asserts
    "primus-2026": (
        *MEGATRON,
        lambda model, s: (
            s.schedule in ("1f1b", "interleaved")
            or not (s.overlap_grad_reduce or s.overlap_param_gather or model.tie_word_embeddings)
        ),
        lambda model, s: s.schedule not in V_SHAPED or model.num_hidden_layers % (2 * s.pp) == 0,
    ),
    "nemo-24": (*MEGATRON, EVEN),
    "nemo-24.09": (*MEGATRON, EVEN),
    "nemo-25": MEGATRON[1:],  # Megatron-FSDP (scripts/performance/helpers.py, set_mcore_fsdp_configs) shards parameters too
    "megatron-bridge-25": MEGATRON[1:],
    "megatron-bridge-26": MEGATRON[1:],
    "megatron-bridge-26.06": MEGATRON[1:],
    "nemo-automodel": (zero(0, 2, 3), WHOLE_KV),
    "internevo-2023": (zero(0, 1, 3),),
    "internevo-2024": (zero(0, 1, 3),),
    "sailor": (zero(0, 1), NO_CP, NO_CHUNKS, WHOLE_KV),
    "megatron-deepspeed-2021": (NO_CP, NO_CHUNKS, WHOLE_KV),
    "megatron-deepspeed": (NO_CP, NO_CHUNKS, WHOLE_KV),  # deepspeed/runtime/pipe/engine.py asserts ZeRO below 2
    "transformers-deepspeed": (
        lambda model, s: s.tp == s.cp == s.pp == 1,
        lambda model, s: s.recompute != "selective",
    ),
    "aleph-alpha-scaling": (NO_CP, NO_CHUNKS, WHOLE_KV, zero(0, 1)),
    "torchtitan-2024-12": (zero(0, 2, 3), WHOLE_KV),
    "torchtitan-2025-06": (zero(0, 2, 3), WHOLE_KV),
    "torchtitan-2026-02": (zero(0, 2, 3), WHOLE_KV, lambda model, s: (model.num_hidden_layers + counted(s)) % s.pp == 0),
    "pytorch-ddp": (zero(0, 1), lambda model, s: s.tp == s.cp == s.pp == 1),
    "profiler-train": (NO_CP, WHOLE_KV),
    "fsdp": FSDP,
    **dict.fromkeys(("fsdp2", "fsdp2-2025-10", "fsdp2-2025-04"), (*FSDP, zero(2, 3))),
    "fms-fsdp": FSDP,
    "llm-foundry-2023": FSDP,
    "llm-foundry-2023-10": FSDP,
    "llm-foundry-2024": FSDP,
    "maxtext": (zero(0, 3), lambda model, s: s.tp == s.cp == s.pp == 1),
    "nanotron": (zero(0, 1), one_mode("mtp", "msp"), NO_CP, NO_CHUNKS, WHOLE_KV),
}


def test_every_release_has_its_rules() -> None:
    assert set(RULES) == {framework.name for framework in FRAMEWORKS}


@pytest.mark.parametrize(("number", "framework"), list(enumerate(RULES)), ids=list(RULES))
def test_the_best_hundred_layouts_of_two_problems_can_run(number: int, framework: str) -> None:
    """Of four problems every other framework has the first and third, the others the second and fourth."""
    seen = 0
    for model, world in list(zip(MODELS, (16, 24, 24, 24), strict=True))[number % 2 :: 2]:
        found = search(make_problem(model, world, toy_cost(), 512, framework=framework), 48, top=100).best
        for index in range(0, len(found), 4):  # neighbours in rank differ little
            layout = found.layouts.strategy(index, found.problem.run)
            broken = [i for i, rule in enumerate((*ALL_FRAMEWORKS, *RULES[framework])) if not rule(model, layout)]
            assert not broken, f"{layout} breaks rules {broken}"
        seen += len(found)
    assert seen >= 25


@pytest.mark.parametrize(
    ("framework", "layout", "message"),
    [
        ("megatron-core", {"zero": 3, "dp": 8}, "megatron-core-0.12 does not offer ZeRO-3"),
        ("megatron-deepspeed", {"zero": 2, "pp": 2, "dp": 4}, "does not offer ZeRO-2 with a pipeline of 2 stages"),
        ("megatron-lm", {"cp": 2, "dp": 4}, "megatron-lm-2023 does not offer context parallelism by ring"),
        ("fsdp", {"tp": 2, "dp": 4, "zero": 3}, "fsdp does not run tp 2 of 16 kv heads"),
        ("fsdp", {"dp": 8, "zero": 1}, "fsdp does not offer ZeRO-1"),
        ("llm-foundry", {"pp": 2, "dp": 4, "zero": 0}, "does not run 2 layers in 2 pipeline stages"),
        ("aleph alpha", {"pp": 2, "vpp": 2, "dp": 4, "num_micro_batches": 2}, "does not interleave"),
        ("megatron-lm-2021", {"dp": 8, "zero": 0, "recompute": "selective"}, "does not offer recompute selective"),
        ("megatron-core", {"tp": 2, "tp_mode": "isp", "dp": 4}, "does not offer tp_mode isp"),
        ("internevo", {"tp": 2, "tp_mode": "isp", "dp": 4, "zero": 3}, "ZeRO-3 and tp_mode isp would shard the same weights"),
    ],
)
def test_explicit_layouts_are_held_against_the_same_rules(framework: str, layout: dict[str, object], message: str) -> None:
    from solver import estimate

    model = GQA.replace(num_key_value_heads=16, num_hidden_layers=2 if "vpp" not in layout else 4)
    problem = make_problem(model, 8, toy_cost(), 512, framework=framework)
    shard = {"zero_shard_size": 4} if layout.get("zero") else {}
    with pytest.raises(InputError) as error:
        estimate(problem, [problem.layout(**{"zero": 0, **shard, **layout})])
    assert message in str(error.value)


@pytest.mark.parametrize(("shard", "ep", "runs"), [(16, 8, True), (8, 8, True), (4, 8, False), (4, 4, True), (1, 8, True)])
def test_megatron_shards_experts_into_as_many_groups_as_the_rest(shard: int, ep: int, runs: bool) -> None:
    """parallel_state.py: 16 / shard optimizer instances must divide the 16 / ep ranks that hold copies of an expert."""
    model = GQA.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    problem = make_problem(model, 16, toy_cost(), 512, framework="megatron-core")
    layout = problem.layout(dp=16, ep=ep, zero=1, zero_shard_size=shard)
    if runs:
        check_layout(model, problem.cluster, layout)
        return
    with pytest.raises(InputError, match="shards over 4 of 16 ranks; 2 copies of the experts do not divide alike"):
        check_layout(model, problem.cluster, layout)
    searched = all_layouts(problem, 16)
    split = searched.splits.take(searched.row)
    copies, groups = 16 // (split.pp * split.ep * split.etp), split.dp * split.cp // split.zero_shard_size
    cut = (searched.zero > 0) & (split.ep > 1) & (split.zero_shard_size > 1)
    assert cut.any() and (copies % groups == 0)[cut].all()


@pytest.mark.parametrize("framework", ["megatron-core", "megatron-bridge"])
def test_megatron_gathers_parameters_beside_compute_where_it_reduces_there(framework: str) -> None:
    """arguments.py asserts it; Megatron-Bridge does not run arguments.py."""
    run = {"overlap_grad_reduce": False, "overlap_param_gather": True}
    problem = make_problem(GQA, 8, toy_cost(), 512, framework=framework, **run)
    layout = problem.layout(dp=8, zero=1, zero_shard_size=8)
    if framework == "megatron-bridge":
        check_layout(GQA, problem.cluster, layout)
        return
    for refused in (lambda: check_layout(GQA, problem.cluster, layout), lambda: search(problem, 16)):
        with pytest.raises(InputError, match="overlap_param_gather needs overlap_grad_reduce"):
            refused()


def test_published_runs_are_allowed_because_they_ran() -> None:
    cases = [case for case in read_cases(CONFIGS / "cases" / "published.jsonl") if case.strategy is not None]
    refused = {}
    for case in cases:
        assert case.model is not None and case.strategy is not None
        try:
            cluster = cluster_of(DEVICES[case.hardware], {k: v for k, v in case.cluster.items() if k in FIGURES})
            check_layout(case.model, cluster, case.strategy)
        except InputError as error:
            refused[case.id] = str(error)
    assert len(cases) > 1000 and not refused


def test_automodel_splits_no_tensors_beside_experts() -> None:
    # asserted in its components/moe/parallelizer.py
    model = GQA.replace(num_key_value_heads=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    problem = make_problem(model, 8, toy_cost(), 512, framework="nemo-automodel")
    assert set(enumerate_splits(problem, 16).splits.tp.tolist()) == {1}
    assert set(enumerate_splits(replace(problem, model=GQA), 16).splits.tp.tolist()) > {1}
    with pytest.raises(InputError, match="nemo-automodel does not run tp 2 of 16 kv heads and experts"):
        check_layout(model, problem.cluster, problem.layout(tp=2, tp_mode="msp", zero=3, zero_shard_size=4))
