"""Implementation behaviour of frameworks, each checked by hand; explanations that add up under all of them."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import BYTE, FLOP, LINK, NETWORK, TINY, all_layouts, make_problem, part, tiny, toy_cost

from profiler.errors import InputError
from solver.report.explain import explain
from solver.schedule.stages import stage_layers_counting_ends
from solver.spec.choices import Recompute, TpMode
from solver.spec.framework import Framework
from solver.spec.frameworks import (
    FRAMEWORKS,
    first_with_experts,
    framework_of,
    known_framework,
    names_another,
    release_for_search,
)
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.op_estimates import STREAMS

PARAMETERS = 2 * (36_864 + 2 * 64) + 2 * 256 * 64 + 64  #: of TINY: two layers, embedding and head, the final norm


@pytest.mark.parametrize(
    ("layers", "pp", "first", "middle", "last"),
    [
        (40, 1, 40, 40, 40),
        (40, 2, 21, 21, 19),
        (40, 4, 10, 11, 8),
        (40, 8, 5, 6, 3),
        (60, 2, 31, 31, 29),
        (60, 4, 15, 16, 13),
        (60, 16, 3, 4, 1),
    ],
)
def test_embedding_norm_and_head_count_as_items(layers: int, pp: int, first: int, middle: int, last: int) -> None:
    found = stage_layers_counting_ends(layers, np.array([pp]))
    assert (int(found.first[0]), int(found.middle[0]), int(found.last[0])) == (first, middle, last)


def test_gradients_are_cast_to_fp32_and_reduced_whole() -> None:
    # 4 bytes per gradient on the link between two devices of a node, 32 bytes per parameter for copies, casts and norm
    found = tiny("aleph alpha", 2, run={"overlap_grad_reduce": False, "overlap_param_gather": False}, zero=1, zero_shard_size=2)
    assert part(found, "gradient_sync")[0] == pytest.approx(PARAMETERS * (4 * LINK + 32 * BYTE), rel=1e-12)
    # the bf16 parameters are all-gathered afterwards
    assert part(found, "parameter_gather")[0] == pytest.approx(PARAMETERS * 2 * LINK, rel=1e-12)


def test_reduce_scattered_gradients_are_copied_too() -> None:
    # FSDP2 has two and FSDP1 four reads and writes of a whole fp32 gradient; 32 bytes per parameter where buckets are copied
    for framework, sent, copied in (("pytorch", 4, 8.0), ("fsdp", 4, 16.0), ("aleph alpha", 4, 32.0)):
        found = tiny(framework, 2, run={"overlap_grad_reduce": False, "grad_dtype": "fp32"}, zero=2, zero_shard_size=2)
        assert part(found, "gradient_sync")[0] == pytest.approx(PARAMETERS * (sent * LINK + copied * BYTE), rel=1e-12)


def test_blocking_stages_send_whole_activations() -> None:
    # 32 tokens of 64 values of 2 bytes to the other node, unsplit from each of two tensor ranks: one each way, in turn
    layout: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 4, "num_micro_batches": 4}
    found = tiny("aleph alpha", 16, **layout)
    assert part(found, "pp_transfer")[0] == pytest.approx(4 * 2 * 32 * 64 * 2 * NETWORK, rel=1e-12)
    # Megatron-LM sends half from each rank, all-gathers it on the other side, and sends and receives at once; then its host
    # waits for the device, which idles for five launches' worth of Python
    found = tiny("megatron-lm", 16, **layout)
    message = 32 * 64 * NETWORK + 32 * 64 * 2 * LINK
    assert part(found, "pp_transfer")[0] == pytest.approx(4 * (message + 5 * 107e-6), rel=1e-12)


def test_full_recomputation_includes_the_head_where_every_item_is_checkpointed() -> None:
    # norm of 2,048 elements (4 bytes each), 2 * 32 * 64 * 256 FLOPs; the loss is not recomputed
    recomputed = 2048 * 4 * BYTE + 2 * 32 * 64 * 256 * FLOP
    with_head, without = tiny("aleph alpha", recompute="full"), tiny("megatron-lm", recompute="full")
    layers = [2 * float(s.table.layer.times.recompute[2].sum()) for s in (with_head, without)]
    head = with_head.table.head
    full = [i for i, op in enumerate(head.estimates.ops) if Recompute.FULL in op.recomputed_by]
    assert head.exposed[full].sum() == pytest.approx(recomputed, rel=1e-12)
    assert part(with_head, "recompute")[0] == pytest.approx(layers[0] + head.times.recompute[2].sum(), rel=1e-12)
    assert part(without, "recompute")[0] == pytest.approx(layers[1], rel=1e-12)


def test_one_rank_updates_the_largest_whole_tensor() -> None:
    # 106,816 parameters over 8 ranks are 13,352 each, but the vocabulary matrix of 16,384 stays whole: 132 bytes per parameter
    found = tiny("internevo", 8, run={"overlap_grad_reduce": False, "overlap_param_gather": False}, zero=1, zero_shard_size=8)
    assert PARAMETERS == 106_816
    assert part(found, "optimizer")[0] == pytest.approx(16_384 * 132 * BYTE + 4 * LINK, rel=1e-12)
    partitioned = tiny("megatron-core", 8, zero=1, zero_shard_size=8, run={"grad_dtype": "fp32"})
    # Megatron's buffer of all fp32 gradients is zeroed, searched for NaN and divided (read and written) by every rank
    whole = PARAMETERS * 4 * 4 * BYTE
    assert part(partitioned, "optimizer")[0] == pytest.approx(PARAMETERS / 8 * (30 + 8) * BYTE + whole + 4 * LINK, rel=1e-12)


def test_norms_on_fp32_copies_move_more_bytes() -> None:
    def norms(framework: str) -> float:
        ops = tiny(framework).table.layer.estimates.ops
        return float(sum(np.ravel(op.dims["bytes"])[0] for op in ops if op.module == "norm"))

    assert norms("internevo") == 2 * 2048 * (12 + 37)
    assert norms("internevo-2024") == 2 * 2048 * (8 + 11)


@pytest.mark.parametrize(
    ("framework", "offered"),
    [
        ("torchtitan", (0, 2, 3)),
        ("fsdp", (0, 2, 3)),
        ("fms-fsdp", (0, 2, 3)),
        ("pytorch", (0, 1)),
        ("profiler-train", (0, 1, 2, 3)),
        ("internevo", (0, 1, 3)),
        ("megatron-core", (0, 1)),
        ("nemo", (0, 1)),
        ("megatron-lm-2021", (0,)),
    ],
)
def test_zero_stages_that_a_search_may_choose(framework: str, offered: tuple[int, ...]) -> None:
    problem = make_problem(TINY, 8, toy_cost(), 32, framework=framework)
    assert sorted(set(all_layouts(problem, 8).zero.tolist())) == list(offered)


def test_a_search_uses_what_the_release_can_run() -> None:
    def searched(framework: str, cp_comm: str = "ring") -> Layouts:
        return all_layouts(make_problem(TINY, 8, toy_cost(), 512, framework=framework, cp_comm=cp_comm), 8)

    of_2021 = searched("megatron-lm-2021")
    assert set(of_2021.splits.cp.tolist()) == {1} and set(of_2021.splits.mode.tolist()) == {int(TpMode.MTP)}
    assert set(of_2021.recompute.tolist()) == {int(Recompute.NONE), int(Recompute.FULL)}
    assert set(searched("megatron-core-0.8").splits.cp.tolist()) == {1, 2, 4}  # 512 tokens in parts of at least 128
    assert set(searched("megatron-core-0.8", "a2a").splits.cp.tolist()) == {1}
    assert set(searched("megatron-core-0.12", "a2a").splits.cp.tolist()) == {1, 2}  # of 4 and 2 heads


def test_releases_differ() -> None:
    assert framework_of("internevo").kernels.flash_attention == 1 and framework_of("InternLM v0.1").name == "internevo-2023"
    assert framework_of("internevo-2024").kernels.flash_attention == 0
    assert framework_of("fms-fsdp (PyTorch FSDP)").recomputation.selective_is_full
    assert not framework_of("fsdp").recomputation.selective_is_full
    assert len({f.name for f in FRAMEWORKS}) == len(FRAMEWORKS)


def test_a_run_means_the_release_of_its_time_and_a_search_the_newest() -> None:
    attention = [framework_of(name).kernels.flash_attention for name in ("llm-foundry", release_for_search("LLM-Foundry"))]
    assert attention == [1, 2]
    names = ("internevo", "Megatron-LM", "Megatron", "nemo", "torchtitan", "nemo-24", "fsdp")
    newest = {name: release_for_search(name) for name in names}
    assert newest == {
        "internevo": "internevo-2024",
        "Megatron-LM": "megatron-core-0.12",
        "Megatron": "megatron-core-0.12",
        "nemo": "nemo-25",
        "torchtitan": "torchtitan-2026-02",
        "nemo-24": "nemo-24",
        "fsdp": "fsdp",
    }


def test_a_derived_release_changes_what_it_names_and_keeps_the_rest() -> None:
    base = known_framework("megatron-core-0.12")
    later = base.derive("later", "2026-01", kernels={"flash_attention": 3}, flags={"zero": 1})
    assert later.kernels == replace(base.kernels, flash_attention=3) and later.flags == {**base.flags, "zero": 1}
    assert (later.name, later.released, later.aliases) == ("later", "2026-01", ())
    assert (later.memory, later.can_run, later.best_practice) == (base.memory, base.can_run, base.best_practice)
    for framework in FRAMEWORKS:
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", framework.released)
        assert {**framework.flags, **framework.best_practice}.keys() <= {field.name for field in fields(Strategy)}


def test_every_release_differs_from_every_other() -> None:
    def behaviour(framework: Framework) -> tuple[object, ...]:
        names = (field.name for field in fields(Framework))
        named = ("name", "family", "released", "aliases", "broad_aliases")
        return tuple(getattr(framework, name) for name in names if name not in named)

    found = [behaviour(framework) for framework in FRAMEWORKS]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("NVIDIA NeMo 25.02", "nemo-25"),
        ("nemo 24.07 (megatron-core)", "nemo-24"),
        ("nemo 24.09/24.11", "nemo-24.09"),
        ("NeMo 24.12", "nemo-24.09"),
        ("nemo (megatron-core)", "nemo-24"),
        ("Megatron Core r0.13", "megatron-core-0.12"),
        ("megatron-lm core_v0.14.0 (23e00ed)", "megatron-core-0.12"),
        ("Megatron-LM", "megatron-lm-2023"),
        ("MegaScale", "nemo-24"),
        ("Megatron Core r0.8", "megatron-core-0.8"),
        ("Megatron-LM 2021", "megatron-lm-2021"),
        ("megatron-lm (zero-bubble fork)", "megatron-lm-zero-bubble"),
        ("Aleph Alpha scaling", "aleph-alpha-scaling"),
        ("torchtitan (PyTorch FSDP2)", "torchtitan-2024-12"),
        ("pytorch fsdp2", "fsdp2"),
        ("PyTorch FSDP", "fsdp"),
        ("Hugging Face accelerate (FSDP2)", "fsdp2"),
        ("fms-fsdp (PyTorch FSDP)", "fms-fsdp"),
        ("pytorch ddp", "pytorch-ddp"),
        ("GPT-NeoX", "megatron-deepspeed"),
        ("llm-foundry/composer FSDP", "llm-foundry-2023"),
        ("internlm 0.1", "internevo-2023"),
        ("something else", "generic"),
        ("PyTorch 2.4 FSDP", "fsdp"),
        ("PyTorch + DeepSpeed ZeRO-3", "megatron-deepspeed"),
        ("PyTorch Lightning", "pytorch-ddp"),
        ("Hugging Face accelerate", "fsdp"),
        ("accelerated JAX", "generic"),
        ("Nemotron (Megatron-LM)", "megatron-lm-2023"),
        ("megatron-bridge 26.02", "megatron-bridge-26"),
        ("megatron-bridge 25.09", "megatron-bridge-25"),
        ("nemo automodel (FSDP2, DTensor)", "nemo-automodel"),
        ("NeMo Framework 25.11", "nemo-25"),
        ("torchtitan v0.1.0", "torchtitan-2025-06"),
        ("torchtune 0.5", "torchtitan-2025-06"),
        ("Megatron", "megatron-lm-2023"),
        ("axolotl", "fsdp"),
        ("LLaMA-Factory (DeepSpeed ZeRO-3)", "transformers-deepspeed"),
        ("TRL (FSDP)", "fsdp"),
        ("Megatron style FSDP", "fsdp"),
    ],
)
def test_a_name_means_the_framework_that_it_names_first(text: str, meant: str) -> None:
    assert framework_of(text).name == meant


@pytest.mark.parametrize("framework", [f.name for f in FRAMEWORKS])
@pytest.mark.parametrize(
    "layout",
    [
        {"zero": 1},
        {"zero": 3},
        {"zero": 0, "recompute": "full"},
        {"pp": 2, "dp": 4, "num_micro_batches": 4},
        {"tp": 2, "dp": 4, "recompute": "full"},
    ],
)
def test_explanations_add_up_under_every_framework(framework: str, layout: dict[str, Any]) -> None:
    shard = layout.get("dp", 8)
    found = tiny(framework, 8, zero_shard_size=shard, **layout)
    explanation = explain(found, 0)
    assert sum(line.seconds for line in explanation.lines) == pytest.approx(found.times.seconds[0], rel=1e-9)


def test_the_page_of_frameworks_lists_every_release() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    for framework in FRAMEWORKS:
        assert f"| `{framework.name}` | {framework.family} | {framework.released} |" in page


def test_only_gemms_of_frameworks_that_fuse_it_add_to_fp32_gradients() -> None:
    def adds(framework: str) -> bool:
        ops = tiny(framework, run={"grad_dtype": "fp32"}).table.layer.estimates.ops
        return any(op.dims.get("accumulate") for op in ops)

    assert {name: adds(name) for name in ("megatron-core", "nanotron", "fsdp", "torchtitan", "pytorch")} == {
        "megatron-core": True,
        "nanotron": False,
        "fsdp": False,
        "torchtitan": False,
        "pytorch": False,
    }


def test_rings_of_nanotron_between_nodes_are_late() -> None:
    # tp 16 on two nodes of 8: each of the four and six collectives of a layer takes 15 steps of 40 us more; tp 8 none
    model = TINY.replace(num_attention_heads=16, num_key_value_heads=16)

    def sent(tp: int) -> list[float]:
        found = tiny("nanotron", 16, model, tp=tp, tp_mode="msp", zero=0, dp=16 // tp)
        return [float(way[0, STREAMS.index("tp"), 0]) for way in (found.terms.layers.forward, found.terms.layers.backward)]

    assert sent(16) == pytest.approx([4 * 15 * 40e-6, 6 * 15 * 40e-6], rel=1e-3)
    assert max(sent(8)) < 1e-6


def test_zero_1_of_nanotron_is_one_collective_and_a_copy_of_each_part() -> None:
    # 16 ranks; 12 tensors in the layers, 7 us for each and rank. Elsewhere buckets of gradients are sent during the last pass
    found = tiny("nanotron", 16, zero=1, zero_shard_size=16)
    assert part(found, "parameter_gather")[0] == pytest.approx(16 * 12 * 7e-6, rel=1e-2)
    counts = {op.name: np.max(op.count) for op in found.terms.once.estimates.ops if op.kind in ("reduce_scatter", "all_gather")}
    assert counts["gradients.reduce_scatter"] == counts["parameters.all_gather"] == 1
    assert part(tiny("nanotron", 16, zero=0), "parameter_gather")[0] == 0


def test_what_nanotron_keeps_to_synchronise() -> None:
    # 16-bit buckets of all gradients; with ZeRO-1 none, two bytes of a rank's share, and lists of six bytes in the step, which
    # here outlast the activations of 32 tokens
    def states(world: int, zero: int) -> list[float]:
        found = tiny("nanotron", world, run={"grad_dtype": "fp32"}, zero=zero, zero_shard_size=world if zero else 1)
        return [float(part) / PARAMETERS for part in found.memory.parts[1:3, 0]]

    assert [states(1, 0), states(8, 0), states(8, 1)] == [[4, 12], [6, 12], [4, 6 + 14 / 8]]


def test_a_run_of_experts_means_the_first_release_that_has_them() -> None:
    names = ("torchtitan", "megatron-core", "megatron-lm", "fsdp")
    means = [first_with_experts(framework_of(name)).name for name in names]
    assert means == ["torchtitan-2026-02", "megatron-core-0.12", "megatron-core-0.8", "fsdp"]


@pytest.mark.parametrize(
    ("engine", "dummies", "originals"),
    [("1.13", False, False), ("2.3", True, False), ("2.5", True, False), ("2.6", True, True)],
)
def test_releases_of_transformer_engine(engine: str, dummies: bool, originals: bool) -> None:
    # dummy gradients since 2.3; save_original_input, which Megatron-Core sets, since 2.6
    memory = framework_of(f"megatron-core-0.12, transformer-engine {engine}").memory
    assert (memory.dummy_gradients, memory.original_inputs) == (dummies, originals)
    assert not framework_of(f"megatron-core-0.8, transformer-engine {engine}").memory.original_inputs


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("torchtitan-0.2.2", "torchtitan-2026-02"),
        ("torchtitan", "torchtitan-2026-02"),
        ("megatron-core 0.14.1", "megatron-core-0.12"),
        ("megatron-lm core_v0.13", "megatron-core-0.12"),
        ("mcore 0.8", "megatron-core-0.8"),
        ("nemo 25.04", "nemo-25"),
        ("Hugging Face transformers", "fsdp"),
    ],
)
def test_releases_that_a_user_may_name(name: str, release: str) -> None:
    assert release_for_search(name) == release and known_framework(name).name


@pytest.mark.parametrize(
    "name",
    ["torchtitan-2026-03", "torchtitan-0.3", "megatron-core-0.17", "megatron-core-foo", "nemo-26", "fsdp-2", "internevo-2025"],
)
def test_a_release_that_is_not_described_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is no release that is described.*; described are"):
        known_framework(release_for_search(name))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("megatron-lm@285068c8", False),
        ("megatron-lm (zero-bubble fork)", False),
        ("nemo 24.09/24.11", False),
        ("olmo-core", False),
        ("metaseq (FSDP + Megatron TP)", True),
        ("internal (FSDP, xformers)", True),
        ("generic", False),
    ],
)
def test_names_of_trainers_that_are_made_of_a_framework(name: str, other: bool) -> None:
    assert names_another(name) is other


def test_what_only_stands_for_a_trainer_is_less_certain() -> None:
    known, other = (tiny(name) for name in ("fsdp", "our trainer (FSDP)"))
    assert explain(other, 0).relative_std > explain(known, 0).relative_std


@pytest.mark.parametrize("framework", ["megatron-lm-2021", "megatron-lm-2023", "megatron-core-0.12"])
def test_megatron_widens_the_gradients_of_bf16_runs_only(framework: str) -> None:
    """arguments.py forces --accumulate-allreduce-grads-in-fp32 with --bf16."""
    assert {kind: framework_of(framework).flags_of(kind)["grad_dtype"] for kind in ("bf16", "fp16", "fp8")} == {
        "bf16": "fp32",
        "fp16": "fp16",
        "fp8": "fp32",
    }


@pytest.mark.parametrize("name", ["nemo-25", "megatron-bridge-26"])
def test_recipes_that_quantise_in_blocks_keep_16_bit_weights(name: str) -> None:
    framework = framework_of(name)
    assert framework.flags_of("fp8", "tensorwise")["fp8_param_gather"] is True
    assert "fp8_param_gather" not in framework.flags_of("fp8", "blockwise")
