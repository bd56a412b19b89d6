"""Our exports of AICB's models beside AICB's own files: equal where AICB is right, and off by what docs/simai.md names."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from simai_files import text_of

from solver.formats.config_file import CONFIGS
from solver.simai import command
from solver.simai.workload_text import PP_COMM, VPP, Collective, Group, TextWorkload, parse_workload_text, read_workload_text

GPT7B, GPT13B = "gpt7b_tp2_pp1_ws4096_gbs8192_seq4096", "gpt13b_tp4_pp1_ws4_gbs2_seq4096"
GPT175B_SP, MIXTRAL = "gpt175b_tp8_pp8_ws128_gbs32_seq2048_sp", "mixtral8x7b_tp2_ep8_ws128_gbs128_seq2048_sp"
DEEPSEEK = "deepseek16b_tp1_ep16_ws2048_gbs4096_seq4096_sp_aiobExample"
ONCE = ("grad", "layernorm", "embedding_", "moe_grad")
AR, AG, RS, A2A = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def of(name: str) -> TextWorkload:
        path: Path = folder / f"{name}.txt"
        assert command.main(["--export", str(path), "--config", str(CONFIGS / "simai" / f"{name}.json")]) == 0
        return read_workload_text(path)

    return of


def theirs(name: str) -> TextWorkload:
    return parse_workload_text(text_of(name), name)


def of_micro_batches(workload: TextWorkload, way: str, collective: Collective, group: Group = Group.TP) -> tuple[int, int]:
    """Number and bytes of the messages of the layers."""
    rows = [row for row in workload.rows if not row.name.startswith((*ONCE, "cross_entropy", "optimizer"))]
    found = [
        part.size for row in rows if (part := getattr(row, way)).collective is collective and part.group(Group.TP) is group
    ]
    return len(found), sum(found)


def of_step(workload: TextWorkload, collective: Collective, group: Group = Group.DP) -> int:
    rows = [row.weight_grad for row in workload.rows if row.name.startswith(("grad", "moe_grad"))]
    return sum(part.size for part in rows if part.collective is collective and part.group(Group.DP) is group)


@pytest.mark.parametrize(("config", "name", "layers"), [("gpt7b_tp2", GPT7B, 36), ("gpt13b_tp4", GPT13B, 40)])
def test_all_reduces_of_layers_are_those_of_aicb_but_for_what_aiob_loses(config, name, layers, exported) -> None:
    ours, default, aiob = exported(config), theirs(name), theirs(f"{name}_aiobExample")
    number, ga = 2 * layers * ours.header.size("ga:"), ours.header.size("ga:")
    size = default.rows[-9].forward.size
    for workload in (ours, default, aiob):
        assert of_micro_batches(workload, "forward", AR) == (number, number * size)
    assert of_micro_batches(default, "input_grad", AR) == (number, number * size)
    assert of_micro_batches(aiob, "input_grad", AR) == (0, 0)
    assert of_micro_batches(ours, "input_grad", AR) == (number + ga, (number + ga) * size)  # and the head's
    # AICB has the embedding's instead, which no kernel needs
    assert [row.input_grad.comm for row in default.rows if row.name == "embedding_layer"] == ["ALLREDUCE"] * ga
    assert [row.input_grad.comm for row in ours.rows if row.name == "embedding_layer"] == ["NONE"] * ga


def test_gradients_of_the_7b_model_differ_by_embedding_gate_and_norms(exported) -> None:
    ours, default = exported("gpt7b_tp2"), theirs(GPT7B)
    embedding, gate, norms = 25216 * 4096, 36 * 4096 * 10880 // 2, 36 * 2 * 2 * 4096
    assert of_step(ours, AG) == default.rows[0].forward.size + 2 * (-3 * embedding + gate + norms)
    assert of_step(ours, RS) == of_step(default, RS) + 4 * (-3 * embedding + gate + norms)
    assert default.rows[0].forward.group(Group.TP) is Group.TP  # the parameters' all-gather, over the tensor group


def test_gradients_of_the_175b_stage_differ_by_four_embeddings_positions_and_norms(exported) -> None:
    ours, default = exported("gpt175b_tp8_pp8_sp"), theirs(GPT175B_SP)
    embedding, positions, norms = 6400 * 12288, 2048 * 12288, 12 * 2 * 12288
    assert of_step(ours, RS) == of_step(default, RS) + 4 * (-4 * embedding + positions + norms)
    assert ours.header.value(PP_COMM) == default.header.value(PP_COMM) == 6291456
    assert (ours.header.value(VPP), default.header.value(VPP)) == (1, 12)


def test_sequence_parallel_messages_of_the_175b_stage(exported) -> None:
    ours, default, aiob = exported("gpt175b_tp8_pp8_sp"), theirs(GPT175B_SP), theirs(f"{GPT175B_SP}_aiobExample")
    for collective in (AG, RS):
        assert of_micro_batches(ours, "forward", collective) == of_micro_batches(default, "forward", collective)
        assert of_micro_batches(aiob, "forward", collective) == of_micro_batches(default, "forward", collective)
        assert of_micro_batches(default, "input_grad", collective) == (0, 0)
    assert of_micro_batches(ours, "input_grad", RS) == of_micro_batches(ours, "forward", AG)
    assert of_micro_batches(aiob, "input_grad", RS)[1] == 0  # of 0 bytes
    regathered = of_micro_batches(ours, "forward", AG)[0]  # Megatron gathers a column linear's input again in backward
    rows = of_micro_batches(aiob, "input_grad", AG)
    assert of_micro_batches(ours, "input_grad", AG)[0] == rows[0] + regathered


def test_exchange_of_experts_is_that_of_aicb_with_the_probabilities_of_the_rows(exported) -> None:
    ours, default = exported("mixtral8x7b_tp2_ep8_sp"), theirs(MIXTRAL)
    hidden, dispatches = 4096, 64  # of 32 layers in two micro batches: with each, a number for every row
    for way in ("forward", "input_grad"):
        assert of_micro_batches(default, way, A2A, Group.EP) == (2 * dispatches, 1 << 31)
        probabilities = dispatches * (1 << 31) // (2 * dispatches) // hidden
        assert of_micro_batches(ours, way, A2A, Group.EP) == (3 * dispatches, (1 << 31) + probabilities)
    wide, deepseek = exported("deepseek16b_ep16"), theirs(DEEPSEEK)
    number, size = of_micro_batches(deepseek, "input_grad", A2A, Group.EP)
    ours_with = (number + number // 2, size + size // 2 // 10944)
    assert of_micro_batches(wide, "input_grad", A2A, Group.EP) == of_micro_batches(wide, "forward", A2A, Group.EP) == ours_with
    quantised = size / 2 * (1 + (1 + 4 / 128) / 2)  # dispatch, not combine: a byte each and a scale for every 128
    assert of_micro_batches(deepseek, "forward", A2A, Group.EP) == (number, quantised)


def test_parameters_of_the_mixture_differ_by_gate_embedding_positions_router_and_norms(exported) -> None:
    ours, aiob = exported("mixtral8x7b_tp2_ep8_sp"), theirs(f"{MIXTRAL}_aiobExample")
    for collective in (AG, RS):
        assert of_step(ours, collective, Group.DP_EP) == 1.5 * of_step(aiob, collective, Group.DP_EP)
    embedding, positions, router, norms = 25216 * 4096, 2048 * 4096, 32 * 8 * 4096, 32 * 2 * 4096
    assert of_step(ours, RS) == of_step(aiob, RS) + 4 * (-4 * embedding + positions + router + norms)


def test_deepseeks_experts_are_fourteen_matrices_a_layer_in_place_of_twelve(exported) -> None:
    ours, aiob = exported("deepseek16b_ep16"), theirs(DEEPSEEK)
    assert of_step(aiob, RS, Group.DP_EP) * 12 == of_step(ours, RS, Group.DP_EP) * 14 == 4 * 12 * 14 * 26 * 10944 * 1408
