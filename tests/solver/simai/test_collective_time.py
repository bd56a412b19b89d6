"""One collective as SimAI-Analytical times it: messages, places, bandwidths and ratios worked by hand."""

from __future__ import annotations

import pytest
from simai_files import MACHINE

from profiler.errors import InputError
from solver.simai.collective_time import (
    Machine,
    Place,
    Sizes,
    bandwidth_ratio,
    bus_bandwidth,
    collective_ns,
    nic_of,
    nvlink_of,
    place_of,
)
from solver.simai.ratios import ratio_tables
from solver.simai.workload_text import Collective, Group

MIB, GIB = 1 << 20, 1 << 30
AR, AG, A2A = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL


@pytest.mark.parametrize(
    ("ranks", "us"), [(1, 0), (2, 10), (3, 0), (4, 12), (8, 15), (16, 66), (32, 135), (64, 200), (128, 320), (256, 0)]
)
def test_small_messages_take_a_constant_by_ranks(ranks: int, us: int) -> None:
    sizes = Sizes(tp=ranks, ep=1, pp=1, gpus=ranks)
    for size in (2, MIB - 1):
        assert collective_ns(MACHINE, sizes, AR, Group.TP, ranks, size) == us * 1000
    assert collective_ns(MACHINE, sizes, AR, Group.NONE, ranks, 2) == us * 1000  # before the group is looked at


def test_a_mebibyte_and_a_byte_are_not_small() -> None:
    sizes = Sizes(tp=2, ep=1, pp=1, gpus=2)
    assert collective_ns(MACHINE, sizes, AR, Group.TP, 2, MIB) == int(1 / 1024 / 360 * 1e9)  # 2 * (n - 1) / n is 1
    assert collective_ns(MACHINE, sizes, AR, Group.TP, 2, 1) == 0
    assert collective_ns(MACHINE, sizes, Collective.NONE, Group.NONE, 2, GIB) == 0


@pytest.mark.parametrize(
    ("sizes", "group", "ranks", "place"),
    [
        (Sizes(4, 1, 1, 64), Group.TP, 4, Place(1, 4, 8)),
        (Sizes(16, 1, 1, 64), Group.TP, 16, Place(2, 8, 8)),
        (Sizes(2, 4, 1, 64), Group.EP, 4, Place(1, 4, 8)),
        (Sizes(2, 8, 1, 64), Group.EP, 8, Place(2, 4, 4)),
        (Sizes(8, 4, 1, 64), Group.EP, 4, Place(4, 1, 1)),
        (Sizes(16, 2, 1, 64), Group.EP, 2, Place(4, 1, 1)),
        (Sizes(2, 1, 1, 64), Group.DP, 32, Place(32, 4, 4)),
        (Sizes(3, 1, 1, 63), Group.DP, 21, Place(21, 2, 2)),
        (Sizes(16, 1, 1, 64), Group.DP, 4, Place(4, 1, 1)),
        (Sizes(2, 2, 1, 64), Group.DP_EP, 16, Place(16, 2, 2)),
        (Sizes(2, 8, 1, 64), Group.DP_EP, 4, Place(4, 1, 1)),
        (Sizes(2, 1, 1, 2), Group.DP, 1, None),
        (Sizes(2, 1, 1, 2), Group.NONE, 2, None),
    ],
)
def test_placement_by_integer_divisions(sizes: Sizes, group: Group, ranks: int, place: Place | None) -> None:
    assert place_of(MACHINE, sizes, group, ranks) == place


@pytest.mark.parametrize(
    ("place", "collective", "bandwidth", "nvlink"),
    [
        (Place(1, 8, 8), AR, 360.0, False),
        (Place(4, 1, 1), AG, 48.5, False),
        (Place(4, 4, 4), AR, 194.0, False),
        (Place(2, 8, 8), AR, 388.0, False),  # 388 > 360, so that NVLink counts 360 * 8 / 7 = 411
        (Place(2, 8, 8), A2A, 388 / 8 * 15 / 8, False),
        (Place(1, 4, 8), A2A, 360.0, True),
        (Place(1, 1, 8), AR, 0.0, False),
    ],
)
def test_bus_bandwidth_of_a_ring_and_of_all_to_all(
    place: Place, collective: Collective, bandwidth: float, nvlink: bool
) -> None:
    found = bus_bandwidth(MACHINE, place, collective)
    assert (float(found[0]), found[1]) == (pytest.approx(bandwidth, rel=1e-6), nvlink)


def test_nvlink_bounds_a_ring_of_several_nodes_where_it_is_slower_than_the_nics() -> None:
    found = bus_bandwidth(Machine(8, 8, 240, 48.5), Place(2, 8, 8), AR)
    assert (float(found[0]), found[1]) == (pytest.approx(240 * 8 / 7, rel=1e-6), True)
    found = bus_bandwidth(Machine(8, 8, 150, 20), Place(2, 8, 8), AR)  # 160 > 150, but 150 * 8 / 7 = 171 is more
    assert (float(found[0]), found[1]) == (160.0, False)


def test_ratios_are_interpolated_in_bytes_and_relative_to_the_largest_size() -> None:
    nic, ata = ratio_tables()["nic"], ratio_tables()["ata"]
    assert nic.ratio(24 * MIB, 1) == pytest.approx((0.45 + 0.55) / 2 / 0.81)
    assert nic.ratio(MIB, 2) == nic.ratio(16 * MIB, 2) == pytest.approx(0.32 / 0.96)
    assert nic.ratio(16 * GIB, 128) == 1.0 and nic.ratio(0, 1) == 1.0
    assert nic.ratio(48 * MIB, 3) == nic.ratio(48 * MIB, 16) == pytest.approx((0.11 + 0.21) / 2 / 0.96)
    assert ata.ratio(64 * MIB, 9) == pytest.approx(0.94 / 0.96)  # 16 groups at once
    assert ata.ratio(64 * MIB, 32) == 1.0  # empty cells
    with pytest.raises(InputError, match="is above the largest of SimAI's ratio tables"):
        nic.ratio(16 * GIB + 1, 1)


@pytest.mark.parametrize(
    ("tp", "collective", "group", "ranks", "nvlink", "table", "nodes"),
    [
        (4, AG, Group.TP, 4, False, "nic", 1),
        (8, AG, Group.TP, 8, False, "nic", 1),
        (16, AG, Group.TP, 16, True, "nvlink", 2),
        (2, A2A, Group.EP, 4, True, "ata", 1),
        (2, A2A, Group.EP, 16, False, "ata", 4),
        (8, A2A, Group.EP, 4, False, "ata", 9),
        (8, A2A, Group.TP, 8, True, "ata", 1),
        (16, A2A, Group.TP, 16, False, "ata", 2),
    ],
)
def test_which_table_and_column(
    tp: int, collective: Collective, group: Group, ranks: int, nvlink: bool, table: str, nodes: int
) -> None:
    sizes = Sizes(tp, ranks, 1, tp * ranks)
    found = bandwidth_ratio(MACHINE, sizes, collective, group, ranks, 100 * MIB, nvlink)
    assert found == ratio_tables()[table].ratio(100 * MIB, nodes) < 1


def test_all_reduce_and_copies_reach_the_line_rate() -> None:
    sizes = Sizes(4, 2, 1, 64)
    assert bandwidth_ratio(MACHINE, sizes, AR, Group.TP, 4, 100 * MIB, False) == 1
    assert bandwidth_ratio(MACHINE, sizes, AG, Group.DP, 16, 100 * MIB, False) == 1
    assert bandwidth_ratio(MACHINE, sizes, AG, Group.EP, 2, 100 * MIB, False) == 1


def test_an_all_gather_takes_bytes_over_ratio_and_bandwidth_times_ranks_less_one() -> None:
    ns = collective_ns(MACHINE, Sizes(4, 1, 1, 4), AG, Group.TP, 4, 32 * MIB)
    assert ns == int(32 / 1024 / (0.55 / 0.81 * 360) * 1e9 * 3 / 4)


def test_over_one_gpu_the_original_converts_what_is_no_number() -> None:
    assert collective_ns(MACHINE, Sizes(1, 1, 1, 8), AR, Group.TP, 1, GIB) == 1 << 63


def test_times_that_no_integer_of_the_original_holds_are_refused() -> None:
    with pytest.raises(InputError, match="1073741824 bytes at 1e-12 GB/s take longer than SimAI's integers hold; are -nv and"):
        collective_ns(Machine(8, 8, 1e-12, 1), Sizes(8, 1, 1, 8), AR, Group.TP, 8, GIB)


def test_types_name_bandwidths() -> None:
    assert [nvlink_of(name) for name in ("A100", "a800", "H100", "h20", "H800")] == [240, 160, 370.8, 370.8, 164.8]
    assert [nic_of(name) for name in ("cx6", "CX7", "bf3")] == [23.5, 48.5, 48.5]
    with pytest.raises(
        InputError, match=r"-g_type is 'H10' \(did you mean 'H100'\?\); it must be one of A100, A800, H100, H800, H20"
    ):
        nvlink_of("H10")
    with pytest.raises(InputError, match="-nic_t is 'x'; it must be one of cx6, cx7, bf3"):
        nic_of("x")
