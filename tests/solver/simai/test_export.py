"""Exports of priced layouts: all that a layer does is there once, with the bytes that are sent and the predicted times."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from profiler.errors import InputError
from solver.api import configured_strategy, estimate, load_problem
from solver.formats.config_file import CONFIGS, find_model, load_run_config
from solver.simai.aiob import compute_cache, kernel_times_text, parse_kernel_times
from solver.simai.aiob_fill import fill_text
from solver.simai.export_csv import csv_workload
from solver.simai.export_text import text_workload
from solver.simai.export_times import kernel_times
from solver.simai.stage_work import notes_of, split_blocks, stage_work
from solver.simai.step_work import step_work
from solver.simai.workload_csv import CsvWorkload, Gemm, parse_workload_csv, workload_csv
from solver.simai.workload_text import PP_COMM, VPP, Collective, Group, TextWorkload, parse_workload_text, workload_text
from solver.spec.strategy import Strategy
from solver.step.solutions import Solutions
from solver.step.time import TIME_PARTS


@cache
def priced(model: str, framework: str = "megatron-core", **layout: int | str) -> tuple[Strategy, Solutions]:
    config = load_run_config(find_model(model))
    world = int(layout.get("world_size", 16))
    constants = {name: layout.pop(name) for name in [*layout] if name.startswith("moe_")}
    problem = load_problem(config, world, framework=framework, profile="h100_sxm", **constants)
    strategy = configured_strategy(problem, config).replace(**{"zero": 0, "zero_shard_size": 1, **layout})
    return strategy, estimate(problem, [strategy])


def exported(model: str, stage: int | None = None, **layout: int | str) -> tuple[TextWorkload, CsvWorkload, Solutions]:
    _, solutions = priced(model, **layout)
    run = solutions.layouts.strategy(0, solutions.problem.run)
    work, step = stage_work(solutions, 0, stage), step_work(solutions, 0)
    return text_workload(run, work, step), csv_workload(run, work, step), solutions


def sent(text: TextWorkload, part: str, collective: Collective, group: Group) -> tuple[int, int]:
    """Number and bytes of the messages of one kind."""
    default = Group.DP if part == "weight_grad" else Group.TP
    found = [p.size for row in text.rows if (p := getattr(row, part)).collective is collective and p.group(default) is group]
    return len(found), sum(found)


def times(solutions: Solutions) -> dict[str, float]:
    return dict(zip(TIME_PARTS, solutions.times.parts[:, 0].tolist(), strict=True))


def compute_seconds(text: TextWorkload, table: CsvWorkload) -> tuple[float, float]:
    items = (item.elapsed or 0 for item in table.items if item.kind == "computation")
    return sum(row.compute for row in text.rows) / 1e9, sum(items) / 1e9


def assert_all_compute_is_there(text: TextWorkload, table: CsvWorkload, solutions: Solutions) -> None:
    predicted = times(solutions)
    expected = predicted["compute"] + predicted["gradient_accumulation"] + predicted["optimizer"]
    norm = sum(piece.ns for piece in step_work(solutions, 0).other) / 1e9  # an all-reduce, not compute
    assert compute_seconds(text, table) == (pytest.approx(expected - norm, rel=1e-6), pytest.approx(expected - norm, rel=1e-6))


DENSE = {"tp": 2, "tp_mode": "msp", "dp": 8, "num_micro_batches": 3}


def test_compute_of_both_formats_is_the_predicted_compute_of_the_step() -> None:
    text, table, solutions = exported("llama2_7b", **DENSE)
    assert_all_compute_is_there(text, table, solutions)


def test_sequence_parallel_layers_gather_and_scatter_the_activation_in_both_directions() -> None:
    text, table, _ = exported("llama2_7b", **DENSE)
    activation = 4096 * 4096 * 2
    scattered = 2 * 32 + 1  # attention and MLP of each layer, and the embedding
    assert sent(text, "forward", Collective.REDUCE_SCATTER, Group.TP) == (3 * scattered, 3 * scattered * activation)
    assert sent(text, "forward", Collective.ALL_GATHER, Group.TP)[0] == 3 * (2 * 32 + 1)  # and of the head
    assert sent(text, "input_grad", Collective.REDUCE_SCATTER, Group.TP)[0] == 3 * (2 * 32 + 1)
    counts = Counter((item.kind, item.stage.split(".")[0]) for item in table.items if item.group == "tp_group")
    assert counts["reduce_scatter", "forward"] == 3 * scattered and counts["all_reduce", "forward"] == 3 * 3  # the loss


def test_without_sequence_parallelism_backward_has_its_all_reduces() -> None:
    text, _, _ = exported("llama2_7b", **{**DENSE, "tp_mode": "mtp"})
    number, size = sent(text, "input_grad", Collective.ALL_REDUCE, Group.TP)
    assert (number, size) == (3 * 65, 3 * 65 * 4096 * 4096 * 2)  # a column linear of each block, and the head
    names = Counter(row.name for row in text.rows)
    assert (names["attention_layer"], names["mlp_layer"], names["embedding_layer"]) == (96, 96, 3)
    assert names["final_column"] == 3 and names["cross_entropy1"] == 3


def test_gemms_of_a_layer_have_the_gate_the_attention_core_and_the_head() -> None:
    _, table, _ = exported("llama2_7b", **DENSE)
    shapes = Counter(item.size for item in table.items if item.stage.startswith("forward") and isinstance(item.size, Gemm))
    hidden, width, tokens, vocabulary = 4096, 11008, 4096, 32000
    assert shapes[Gemm(((tokens, 1, hidden), (hidden, 2 * width // 2)))] == 3 * 32  # up and gate, on one of two ranks
    assert shapes[Gemm(((tokens, 1, width // 2), (width // 2, hidden)))] == 3 * 32
    assert shapes[Gemm(((16, tokens, 128), (16, 128, tokens)))] == 3 * 32  # queries times keys of 16 heads
    assert shapes[Gemm(((16, tokens, tokens), (16, tokens, 128)))] == 3 * 32
    assert shapes[Gemm(((tokens, 1, hidden), (hidden, vocabulary // 2)))] == 3
    backward = Counter(item.stage for item in table.items if item.stage.startswith("backward") and item.kind == "computation")
    assert backward["backward.attention.wqkv"] == 2 * 3 * 32 and backward["backward.attention.attention"] == 4 * 3 * 32
    assert backward["backward.mlp.w13"] == backward["backward.mlp.w2"] == 2 * 3 * 32 and backward["backward.head.vocab"] == 6


def test_layers_of_one_block_are_attention_or_mlp() -> None:
    """Nemotron-H-8B has 24 layers of Mamba-2, 4 of attention and 24 MLPs."""
    text, table, solutions = exported("nemotron_h_8b", dp=16, num_micro_batches=3)
    rows = Counter(row.name for row in text.rows)
    assert (rows["attention_layer"], rows["mlp_layer"]) == (3 * 28, 3 * 24)
    assert_all_compute_is_there(text, table, solutions)


def test_data_parallel_messages_are_of_the_parameters_of_a_rank() -> None:
    text, table, solutions = exported("llama2_7b", **{**DENSE, "zero": 1, "zero_shard_size": 8})
    parameters = float(solutions.table.layer.parameters[0]) * 32
    parameters += float(solutions.table.embedding.parameters[0] + solutions.table.head.parameters[0])
    number, size = sent(text, "weight_grad", Collective.ALL_GATHER, Group.DP)
    assert size == pytest.approx(2 * parameters, rel=1e-9) and number == 84  # in buckets of 40 million (Megatron's)
    gathered = [item for item in table.items if item.kind == "all_gather" and item.group == "dp_group"]
    assert sum(int(item.size) for item in gathered if isinstance(item.size, int)) == size
    assert {item.group_size for item in gathered} == {8} and len(gathered) == 84


def test_waiting_for_the_host_is_compute() -> None:
    text, table, solutions = exported("qwen3_0_6b", dp=16)  # layers so small that the host launches them no faster
    predicted, rows = times(solutions), compute_seconds(text, table)
    expected = predicted["compute"] + predicted["optimizer"]
    assert rows == (pytest.approx(expected, rel=1e-2), pytest.approx(expected, rel=1e-2))
    assert any(piece.name == "launches" for work in stage_work(solutions, 0).works for piece in work.forward)


def test_collectives_that_are_late_where_a_pipeline_spans_nodes_delay_compute() -> None:
    text, table, solutions = exported("llama2_7b", framework="nanotron", tp=2, dp=2, pp=4, num_micro_batches=8)
    predicted = times(solutions)
    expected = predicted["compute"] + predicted["gradient_accumulation"] + predicted["optimizer"]
    assert compute_seconds(text, table) == (pytest.approx(expected, rel=1e-2), pytest.approx(expected, rel=1e-2))


def test_experts_are_exchanged_in_both_directions_and_their_copies_have_their_own_group() -> None:
    layout = {"ep": 8, "dp": 16, "zero": 1, "zero_shard_size": 16, "num_micro_batches": 2}
    text, table, _ = exported("mixtral_8x7b", **layout)
    rows, probabilities = 4096 * 2 * 4096 * 2, 4096 * 2 * 2  # tokens of a rank, to two experts each, 16 bits
    for part in ("forward", "input_grad"):
        assert sent(text, part, Collective.ALL_TO_ALL, Group.EP) == (3 * 2 * 32, 2 * 32 * (2 * rows + probabilities))
    assert sent(text, "forward", Collective.ALL_GATHER, Group.EP) == (2 * 32, 2 * 32 * 8 * 8 * 8)  # rows of each expert
    expert = 3 * 4096 * 14336 * 32  # of each layer the one that the rank holds, with its gate
    number, size = sent(text, "weight_grad", Collective.ALL_GATHER, Group.DP_EP)
    assert size == pytest.approx(2 * expert, rel=1e-9) and number == round(expert / 40e6)
    stages = Counter(item.stage for item in table.items if item.group == "ep_group")
    assert stages["forward.expert_exchange.dispatch"] == stages["backward.expert_exchange.dispatch"] == 2 * 32
    assert {item.group_size for item in table.items if item.group == "ep_dp_group"} == {2}
    gemms = [item for item in table.items if item.stage == "forward.experts.expert.w13"]
    assert len(gemms) == 64 and gemms[0].size == Gemm(((8192, 1, 4096), (4096, 28672)))


def test_grouped_gemms_and_dispatchers_of_their_own() -> None:
    _, table, _ = exported("mixtral_8x7b", ep=4, dp=16, num_micro_batches=1)
    shapes = {item.stage: item.size for item in table.items if item.stage.endswith("experts.w13")}
    assert shapes["forward.experts.experts.w13"] == Gemm(((2, 4096, 4096), (2, 4096, 28672)))  # two experts, half of the rows
    exchanged = [
        exported("mixtral_8x7b", ep=4, dp=16, num_micro_batches=1, **kernels)[0]
        for kernels in ({}, {"moe_dispatcher": "deepep"})
    ]
    sizes = [sent(text, "forward", Collective.ALL_TO_ALL, Group.EP) for text in exchanged]
    rows, probabilities = 4096 * 2 * 4096 * 2, 4096 * 2 * 2
    assert sizes[1] == (2 * 32, 2 * 32 * rows)  # DeepEP's kernels are written as the all-to-all that they replace
    assert sizes[0] == (3 * 32, 32 * (2 * rows + probabilities))  # and send the probabilities with the rows
    weights = [item.size for item in table.items if item.stage == "backward.experts.experts.w13"]
    assert weights[:2] == [Gemm(((2, 4096, 28672), (2, 28672, 4096))), Gemm(((2, 28672, 4096), (2, 4096, 4096)))]


def test_recomputed_layers_run_forward_again_with_their_messages() -> None:
    plain, _, _ = exported("llama2_7b", **DENSE)
    text, table, solutions = exported("llama2_7b", **{**DENSE, "recompute": "full", "recompute_layers": 5})
    again = [row for row in text.rows if row.name.endswith("_recompute")]
    assert Counter(row.name for row in again) == {"attention_recompute": 3 * 5 * 2, "mlp_recompute": 3 * 5 * 2}
    assert [row.input_grad.comm for row in again[:4]] == ["REDUCESCATTER", "ALLGATHER"] * 2  # rows are walked from below
    assert again[0].name == "mlp_recompute"
    computing = sum(row.compute for row in text.rows) - sum(row.compute for row in plain.rows)
    sent_again = sum(item.size for item in table.items if item.stage.startswith("recompute") and item.group == "tp_group")
    assert sent_again == 3 * 5 * 4 * 4096 * 4096 * 2
    assert 0 < computing / 1e9 < times(solutions)["recompute"]


def test_frameworks_that_recompute_the_head_have_a_row_for_it() -> None:
    layout = {"framework": "aleph-alpha-scaling", "dp": 16, "recompute": "full"}
    text, table, _ = exported("llama2_7b", **layout)
    (row,) = (row for row in text.rows if row.name == "final_recompute")
    forward = sum(one.forward.compute for one in text.rows if one.name in ("final_column", "cross_entropy1"))
    assert 0 < row.input_grad.compute < forward  # the norm and the projection, not the loss
    assert any(item.stage == "recompute.head.vocab" for item in table.items)


def test_stages_hold_their_ends_and_chunks_and_send_to_their_neighbours() -> None:
    layout = {"pp": 4, "vpp": 2, "dp": 4, "num_micro_batches": 8}
    first, sends, _ = exported("llama2_7b", 0, **layout)
    names = Counter(row.name for row in first.rows)
    assert names["embedding_layer"] == 8 and "final_column" not in names and names["attention_layer"] == 8 * 8
    assert (first.header.value(VPP), first.header.value(PP_COMM)) == (2, 4096 * 4096 * 2)
    ways = Counter(item.additional for item in sends.items if item.group == "pp_group")
    assert ways == {"send_next": 16, "recv_prev": 8, "recv_next": 16, "send_prev": 8}
    last, sends, _ = exported("llama2_7b", 3, **layout)
    names = Counter(row.name for row in last.rows)
    assert names["final_column"] == 8 and "embedding_layer" not in names
    assert Counter(item.additional for item in sends.items if item.group == "pp_group")["send_next"] == 8
    with pytest.raises(InputError, match="--stage is 4; the layout has stages 0 to 3"):
        exported("llama2_7b", 4, **layout)


def test_one_forward_one_backward_in_the_order_of_the_schedule() -> None:
    _, table, _ = exported("llama2_7b", 0, pp=2, dp=8, num_micro_batches=3)
    ways = [item.additional for item in table.items if item.additional]
    assert ways == ["send_next", "send_next", "recv_next", "send_next", "recv_next", "recv_next"]
    ends = [i for i, item in enumerate(table.items) if item.kind == "epoch_end"]
    assert ends == [0, len(table.items) - 1]


def test_zero_bubble_schedules_run_weight_gradients_apart() -> None:
    layout = {"framework": "megatron-lm-zero-bubble", "pp": 2, "dp": 8, "num_micro_batches": 4}
    _, whole, _ = exported("llama2_7b", 0, **layout)
    _, split, _ = exported("llama2_7b", 0, schedule="zb-h1", **layout)
    shapes = [Counter(item.size for item in table.items if item.kind == "computation") for table in (whole, split)]
    assert shapes[0] == shapes[1]
    assert [item.stage for item in whole.items] != [item.stage for item in split.items]


def test_v_shaped_schedules_send_nothing_where_the_model_turns() -> None:
    layout = {
        "framework": "torchtitan",
        "pp": 2,
        "vpp": 2,
        "dp": 8,
        "num_micro_batches": 4,
        "schedule": "zb-v",
        "zero": 2,
        "zero_shard_size": 8,
    }
    _, last, _ = exported("llama2_7b", 1, **layout)
    ways = Counter(item.additional for item in last.items if item.group == "pp_group")
    assert ways == {"recv_prev": 4, "send_next": 4, "recv_next": 4, "send_prev": 4}


def test_zero3_gathers_each_layer_twice_and_scatters_its_gradients() -> None:
    text, table, _ = exported("llama2_7b", framework="torchtitan", zero=3, zero_shard_size=16, dp=16)
    names = Counter(row.name for row in text.rows)
    assert names["layer_gather_forward"] == names["layer_gather_backward"] == names["layer_grad_scatter"] == 32
    assert names["embedding_gather_forward"] == 1 and "grad_gather" not in names
    stages = Counter((item.kind, item.stage.split(".")[0]) for item in table.items if item.group == "dp_group")
    # the head is a unit of its own, and stays gathered
    assert stages == {("all_gather", "forward"): 34, ("all_gather", "backward"): 32, ("reduce_scatter", "backward"): 34}


def test_zero3_messages_of_every_unit_are_of_the_ranks_that_shard_it() -> None:
    """DeepSeek-V3: 3 dense layers, 58 with experts, and one of multi-token prediction, which has experts too; layers are
    gathered twice, the ends, which stay, and the last module once."""
    layout = {"ep": 64, "dp": 256, "world_size": 256, "num_micro_batches": 1, "zero": 3, "zero_shard_size": 256}
    _, table, solutions = exported("deepseek_v3", framework="megatron-bridge", **layout)
    items = [item for item in table.items if item.group in ("dp_group", "ep_dp_group")]
    number = Counter((item.group, item.kind) for item in items)
    assert number == {
        ("dp_group", "all_gather"): 2 * 61 + 1 + 1,
        ("dp_group", "reduce_scatter"): 61 + 1 + 1,
        ("ep_dp_group", "all_gather"): 2 * 58 + 1,
        ("ep_dp_group", "reduce_scatter"): 58 + 1,
    }
    experts = 3 * 7168 * 2048 * 256 // 64 * 2  # of a layer on one rank, in 16 bits
    size = sum(int(str(item.size)) for item in items if (item.group, item.kind) == ("ep_dp_group", "reduce_scatter"))
    assert size == 59 * experts * solutions.problem.element_bytes.gradient / 2


@pytest.mark.parametrize(("model", "layout"), [("llama2_7b", DENSE), ("mixtral_8x7b", {"ep": 8, "dp": 16})])
def test_kernel_times_add_up_to_the_blocks_that_aicb_knows(model: str, layout: dict[str, int | str]) -> None:
    _, solutions = priced(model, **layout)
    stage, step = stage_work(solutions, 0), step_work(solutions, 0)
    times = kernel_times(stage, step)
    assert parse_kernel_times(kernel_times_text(times), "x") == times
    attention, mlp = (sum(p.ns for p in block if not p.is_message) for block in split_blocks(stage.works[1].forward, False))
    cache = compute_cache(times)
    assert (cache["attention_forward"], cache["mlp_forward"]) == (pytest.approx(attention, abs=9), pytest.approx(mlp, abs=9))
    ends = {
        name: sum(p.ns for work in stage.works if work.name == name for p in work.forward if not p.is_message)
        for name in ("embedding", "head")
    }
    assert cache["Emb"] == pytest.approx(ends["embedding"], abs=2)
    assert cache["layernorm_post"] + cache["logit_time"] == pytest.approx(ends["head"], abs=2)
    assert cache["grad_forward"] + cache["grad_backward"] == pytest.approx(sum(p.ns for p in step.update), abs=2)


@pytest.mark.parametrize(
    "layout",
    [
        DENSE,
        {"ep": 8, "dp": 16},
        {"pp": 2, "dp": 8, "num_micro_batches": 4},
    ],
)
def test_exports_are_files_of_their_formats(layout: dict[str, int | str]) -> None:
    text, table, _ = exported("mixtral_8x7b" if "ep" in layout else "llama2_7b", **layout)
    assert parse_workload_text(workload_text(text), "x") == text
    assert parse_workload_csv(workload_csv(table), "x") == table
    assert all(item.size is not None and item.elapsed for item in table.items if item.kind == "computation")


def test_what_the_formats_cannot_name_is_refused_or_noted() -> None:
    strategy, solutions = priced("llama2_7b", cp=2, dp=8)
    with pytest.raises(
        InputError, match="cp is 2; workloads of AICB and SimAI have no context-parallel group: export a layout"
    ):
        stage_work(solutions, 0)
    _, isp = priced("internlm2_7b", framework="internevo", tp=2, tp_mode="isp", dp=8)
    with pytest.raises(
        InputError, match="tp_mode isp gathers weights over groups that workloads of AICB and SimAI cannot name"
    ):
        stage_work(isp, 0)
    assert notes_of(strategy) == []
    experts = strategy.replace(cp=1, dp=8, tp=2, ep=2, zero=1, zero_shard_size=4, tp_comm_overlap=True)
    assert [note.split()[0] for note in notes_of(experts)] == ["experts", "ZeRO", "tensor"]
    quantised = strategy.replace(framework="megatron-core-0.12", precision="fp8")
    assert [note.split()[1] for note in notes_of(quantised)] == ["all-reduce"]
    assert notes_of(quantised.replace(fp8_amax_reduction="none")) == []


@pytest.mark.parametrize("path", sorted((CONFIGS / "simai").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_layouts_of_aicbs_models_are_read(path) -> None:
    run = load_run_config(path)
    assert run.layout["world_size"] == run.layout["dp"] * run.layout.get("tp", 1) * run.layout.get("pp", 1)


MIXED = {"ep": 8, "tp": 2, "tp_mode": "msp", "dp": 8}


@pytest.mark.parametrize(("model", "layout"), [("llama2_7b", DENSE), ("mixtral_8x7b", MIXED)])
def test_kernel_times_fill_the_same_layout_with_about_its_own_times(model: str, layout: dict[str, int | str]) -> None:
    """Each kernel once, in however many rows a block's messages split it; backward by the rules of the fill, which know nothing
    of the fp32 buffers that weight gradients are added to."""
    _, solutions = priced(model, **layout)
    text, _, _ = exported(model, **layout)
    filled = fill_text(text, kernel_times(stage_work(solutions, 0), step_work(solutions, 0)))
    for part, tolerance in (("forward", 0.05), ("input_grad", 0.2), ("weight_grad", 0.1)):
        ours, again = (
            sum(getattr(row, part).compute for row in one.rows if row.name.startswith(("attention", "mlp")))
            for one in (text, filled)
        )
        assert again == pytest.approx(ours, rel=tolerance), (part, again / ours)
