"""The step of SimAI-Analytical: byte for byte what its program wrote, and its rules one by one on workloads worked by hand."""

from __future__ import annotations

import math

import pytest
from simai_files import HEADER, MACHINE, analytical_cases, result_of, small, text_of

from profiler.errors import InputError
from solver.simai.analytical import Overlaps, analytical_step
from solver.simai.analytical_csv import analytical_csv, bandwidths
from solver.simai.collective_time import Machine, nvlink_of
from solver.simai.workload_text import parse_workload_text

GIB = 1 << 30
CASES = {case: (workload, arguments) for case, workload, arguments in analytical_cases()}


def step_of(case: str):
    workload, arguments = CASES[case]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    nvlink = float(given["-nv"]) if "-nv" in given else nvlink_of(given["-g_type"])
    machine = Machine(int(given["-g_p_s"]), int(given["-n_p_s"]), nvlink, float(given["-nic"]))
    shares = {name: float(given.get(f"-{name}_o", default)) for name, default in (("dp", 0), ("tp", 0), ("ep", 0), ("pp", 1))}
    return analytical_step(parse_workload_text(text_of(workload), case), machine, overlaps=Overlaps(**shares))


def test_there_are_thirteen_results() -> None:
    assert len(CASES) == 13


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_that_of_simai_analytical_byte_for_byte(case: str) -> None:
    assert analytical_csv(step_of(case), f"{case}-") == result_of(case)


def test_forward_buffers_below_4096_bytes_are_raised_but_not_empty_ones_and_not_in_the_other_policy() -> None:
    rows = ("a -1 1 ALLREDUCE 4 1 ALLREDUCE 4 1 NONE 0 100", "b -1 1 ALLREDUCE 0 1 NONE 0 1 NONE 0 100")
    first, second = analytical_step(small(*rows), MACHINE).rows
    assert (first.forward.size, first.input_grad.size, second.forward.size) == (4096, 4, 0)
    assert (first.forward.comm, second.forward.comm) == (10_000, 0)
    plain = parse_workload_text("HYBRID_TRANSFORMER model_parallel_NPU_group: 2 all_gpus: 2\n1\n" + rows[0], "x")
    assert analytical_step(plain, MACHINE).rows[0].forward.size == 4


def test_bubble_is_of_all_rows_but_the_embedding_over_layers_and_micro_batches() -> None:
    # compute 6000 + 9000 ns, all-reduces over TP 2: 2^28 bytes, 0.25 GiB / 360 * 2 * 1/2 s, twice; not the weight gradient's
    row = f"{1000} ALLREDUCE {1 << 28} 2000 ALLREDUCE {1 << 28} 3000 REDUCESCATTER {1 << 30} 100"
    workload = small(
        f"mlp_layer -1 {row}",
        f"embedding_layer -1 {row}",
        "rest -1 9000 NONE 0 0 NONE 0 0 NONE 0 100",
        pp=4,
        vpp=3,
        ga=5,
        gpus=16,
    )
    step, each = analytical_step(workload, MACHINE), math.floor(0.25 / 360 * 1e9)
    assert step.parts["bubble"] == pytest.approx((6000 + 9000 + 2 * each) / 1e3 * 3 / 15, rel=1e-12)
    assert step.total == pytest.approx(sum(step.parts.values()), rel=1e-12)
    assert step.total == pytest.approx(step.exposed + step.parts["compute"] + step.parts["bubble"], rel=1e-12)


def test_sends_between_stages_are_divided_by_the_overlap_ratio_in_place_of_a_bandwidth() -> None:
    workload = small("a -1 1 NONE 0 1 NONE 0 1 NONE 0 100", pp=2, vpp=3, ga=4, rest="pp_comm: 1073741824")
    assert analytical_step(workload, MACHINE).parts["PP"] == 0  # the default, 1, hides all of it
    # 2 sends * 3 * 4 of 1 GiB / 0.25 "GB/s" = 96 s, of which 0.75 are exposed, in microseconds
    assert analytical_step(workload, MACHINE, overlaps=Overlaps(pp=0.25)).parts["PP"] == 72e6
    with pytest.raises(InputError, match="-pp_o is 0, by which SimAI-Analytical divides"):
        analytical_step(workload, MACHINE, overlaps=Overlaps(pp=0.0))
    with pytest.raises(InputError, match="-pp_o 1e-30 makes sends longer than SimAI's integers hold; give 0.01 or more"):
        analytical_step(workload, MACHINE, overlaps=Overlaps(pp=1e-30))


def test_overlap_is_that_of_the_forward_group_also_for_the_input_gradient() -> None:
    rows = (
        f"a -1 0 ALLTOALL_EP {GIB} 0 ALLREDUCE {GIB} 0 ALLREDUCE {GIB} 100",
        f"b -1 0 ALLREDUCE {GIB} 0 ALLTOALL_EP {GIB} 0 ALLREDUCE_DP_EP {GIB} 100",
    )
    whole = analytical_step(small(*rows, ep=2), MACHINE)
    part = analytical_step(small(*rows, ep=2), MACHINE, overlaps=Overlaps(dp=0.25, tp=0.5, ep=0.75))
    shares = {"DP": 0.75, "DP_EP": 0.75, "TP": 0.5, "EP": 0.25}
    for name, share in shares.items():
        assert whole.parts[name] > 0 and part.parts[name] == pytest.approx(share * whole.parts[name], rel=1e-6)
    both = whole.rows[0].forward.comm + whole.rows[0].input_grad.comm
    assert whole.parts["EP"] == pytest.approx(both / 1e3, rel=1e-6)  # the all-reduce over TP counts as EP


def test_bandwidths_of_what_takes_no_time() -> None:
    lines = analytical_csv(
        analytical_step(small("a -1 0 ALLREDUCE 8 0 NONE 0 0 ALLGATHER 0 100", tp=1), MACHINE), "x-"
    ).splitlines()
    assert lines[3] == "a,Analytical_test,0,0,0,0,0,0,0,inf,-nan,0,-nan,-nan,0,-nan,0.00"
    assert lines[1] == "x-, " + ", ".join(["0 (-nan%)"] * 8) + ", 0"


def test_bus_bandwidth_is_twice_that_of_the_algorithm_for_all_reduce() -> None:
    row = analytical_step(small(f"a -1 0 ALLREDUCE {GIB} 0 ALLGATHER {16 * GIB} 0 NONE 0 100", tp=4), MACHINE).rows[0]
    assert bandwidths(row.forward) == (pytest.approx(240, rel=1e-6), pytest.approx(360, rel=1e-6))
    assert bandwidths(row.input_grad) == (pytest.approx(480, rel=1e-6), pytest.approx(360, rel=1e-6))


def test_a_forward_pass_runs_again_between_a_checkpoint_and_the_row_that_initiates_it() -> None:
    rows = [f"r{i} -1 1000 NONE 0 10 NONE 0 1 NONE 0 100" for i in range(4)]
    first = f"{HEADER} 1 all_gpus: 1 checkpoints: 1 1 checkpoint_initiates: 1 3"
    step = analytical_step(parse_workload_text("\n".join([first, "4", *rows]), "x"), MACHINE)
    assert [row.forward.compute for row in step.rows] == [1000, 2000, 2000, 1000]
    wrong = first.replace("checkpoint_initiates: 1 3", "checkpoint_initiates: 1 1")
    with pytest.raises(InputError, match="checkpoint_initiates: 1 needs a checkpoint in an earlier row"):
        analytical_step(parse_workload_text("\n".join([wrong, "4", *rows]), "x"), MACHINE)


def test_sizes_that_do_not_divide_are_rounded_down_as_in_simai() -> None:
    row = f"a -1 0 NONE 0 0 NONE 0 0 ALLREDUCE {GIB} 100"
    assert analytical_step(small(row, tp=2), MACHINE, gpus=17).rows[0].weight_grad.ranks == 8
    with pytest.raises(InputError, match="7 GPUs hold no copy of a model of tp 2 \\* pp 4; give -g 8 or more"):
        analytical_step(small(row, tp=2, pp=4), MACHINE, gpus=7)


def test_what_cannot_be_priced_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="^MICRO states no groups, and SimAI-Analytical divides by their sizes; it prices"):
        analytical_step(parse_workload_text("MICRO\n1\na -1 1 NONE 0 1 NONE 0 1 ALLREDUCE 9 1", "x"), MACHINE)
    with pytest.raises(InputError, match="states no all_gpus:; say with -g how many GPUs there are"):
        analytical_step(parse_workload_text(f"{HEADER} 2\n1\na -1 1 NONE 0 1 NONE 0 1 NONE 0 1", "x"), MACHINE)
    few = Machine(gpus=8, nics=1, nvlink=360, nic=48.5)
    with pytest.raises(InputError, match="1 NICs a server leave none to a group that shares it with others"):
        analytical_step(small(f"a -1 0 NONE 0 0 NONE 0 0 ALLREDUCE {GIB} 100"), few)
    with pytest.raises(InputError, match=f"a buffer of {17 * GIB} bytes is above the largest of SimAI's ratio tables"):
        analytical_step(small(f"a -1 0 ALLGATHER {17 * GIB} 0 NONE 0 0 NONE 0 100"), MACHINE)


def test_old_first_lines_are_priced_with_the_sizes_that_they_lack_read_as_one() -> None:
    old = parse_workload_text(
        f"{HEADER} 2 checkpoints: 0 checkpoint_initiates: 0\n1\na -1 5 ALLREDUCE {GIB} 1 NONE 0 1 NONE 0 1", "x"
    )
    step = analytical_step(old, MACHINE, gpus=8)
    assert step.assumed == ("ep:", "pp:", "vpp:", "ga:", "all_gpus:")
    assert step.parts["bubble"] == 0 and step.parts["TP"] == pytest.approx(1e6 / 360, rel=1e-6)
