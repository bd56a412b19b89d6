"""Logs of nccl-tests in the formats of its versions, read into tables of a profile."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gen_profiler_data import main
from predictor.estimate import Basis
from predictor.network.collective import CollectiveModel
from predictor.network.measured_groups import describe_network
from profiler.errors import InputError
from profiler.profile.profiles import PROF_DATA
from profiler.profile.store import read_profile, write_profile
from profiler.published.nccl_rows import least_sent
from profiler.published.nccl_tests import read_log, usable_tables, with_logs

FIXTURE = Path(__file__).resolve().parents[2] / "data" / "h100_nccl_tests.csv"
H100 = "NVIDIA H100 80GB HBM3"
TABLE_HEAD = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def devices(hosts: int, per_host: int, device: str = H100, group_of: int = 0) -> str:
    """Return the list of devices; ``group_of`` ranks form a group (0: all ranks form one)."""
    lines = [
        f"#  Rank {rank:2d} Group {rank // group_of if group_of else 0:2d} Pid {4000 + rank:6d} on node-{rank // per_host:04d} "
        f"device {rank % per_host:2d} [0000:{16 + rank % per_host:02x}:00] {device}"
        for rank in range(hosts * per_host)
    ]
    return "# Using devices\n" + "\n".join(lines) + "\n"


def parameters(iterations: int = 20) -> str:
    return (
        "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 8589934592 step: 2(factor) warmup iters: 5 "
        f"iters: {iterations} agg iters: 1 validation: 1 graph: 0\n#\n"
    )


def time_of(us: float) -> str:
    """Format a time as nccl-tests prints it: seven characters, fewer decimals for longer times."""
    return f"{us:7.0f}" if us >= 1e4 else f"{us:7.1f}" if us >= 100 else f"{us:7.2f}"


def row(size: int, count: int, dtype: str, redop: str, root: int, out: float, inside: float) -> str:
    halves = [f"{time_of(us)} {size / us / 1e3:7.2f} {size / us / 1e3:7.2f} {0:6d}" for us in (out, inside)]
    return f"{size:12d} {count:13d} {dtype:>9} {redop:>7} {root:6d}  {halves[0]}  {halves[1]}\n"


def new_log(test: str, hosts: int, per_host: int, rows: str, **given: object) -> str:
    """Return output of nccl-tests 2.17, which names the test and its own version."""
    return (
        "# nccl-tests version 2.17.9 nccl-headers=22903 nccl-library=22903\n"
        f"# Collective test starting: {test}_perf\n{parameters()}{devices(hosts, per_host, **given)}{TABLE_HEAD}{rows}"
        f"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 98.73\n#\n# Collective test concluded: {test}_perf\n"
    )


def test_least_bytes_that_a_rank_sends() -> None:
    """Of 4 ranks: three quarters where each has its share, all of a buffer that one rank holds or that switches reduce."""
    ops = np.array(["all_gather", "reduce_scatter", "all2all", "all_reduce", "broadcast", "p2p"])
    assert least_sent(ops, 4).tolist() == [0.75, 0.75, 0.75, 1.0, 1.0, 1.0]
    assert least_sent("all_gather", np.array([1, 2, 8])).tolist() == [0.0, 0.5, 0.875]


@pytest.fixture
def fixture_rows() -> list[dict[str, str]]:
    with FIXTURE.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_round_trip_of_a_real_run(tmp_path: Path, fixture_rows: list[dict[str, str]]) -> None:
    """70 measurements printed in the real format are read back: op, size, time and group shape."""
    logs = []
    for test in ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"):
        of_test = [r for r in fixture_rows if r["op"] == test]
        redop, root = ("sum", -1) if "reduce" in test else ("none", -1)
        lines = "".join(
            row(
                int(r["size_bytes"]),
                int(r["count"]),
                r["dtype"],
                redop,
                root,
                float(r["time_us"]),
                float(r["time_us_in_place"]),
            )
            for r in of_test
        )
        logs.append(write(tmp_path, f"{test}.log", new_log(test, 1, int(of_test[0]["ranks"]), lines)))
    tables, _ = usable_tables([read_log(log) for log in logs], None)
    assert sum(map(len, tables.values())) == len(fixture_rows) == 70
    for test, op in (("alltoall", "all2all"), ("sendrecv", "p2p"), ("all_gather", "all_gather"), ("all_reduce", "all_reduce")):
        of_test = [r for r in fixture_rows if r["op"] == test]
        table = tables[op]
        np.testing.assert_array_equal(table["bytes"], [int(r["size_bytes"]) for r in of_test])
        np.testing.assert_allclose(table["seconds"], [float(r["time_us"]) * 1e-6 for r in of_test], rtol=1e-9)
        assert (
            set(table["dtype"]) == {"bf16"} and set(table["intra"]) == {int(of_test[0]["ranks"])} and set(table["inter"]) == {1}
        )
        assert set(table["env"]) == {"nccl-tests, NCCL 2.29.3"} and set(table["repeats"]) == {20}


def test_merged_into_the_shipped_profile(tmp_path: Path, fixture_rows: list[dict[str, str]]) -> None:
    """The cluster's measurements replace the shipped ones of the same group, kernels stay, and every source is stated."""
    lines = "".join(
        row(int(r["size_bytes"]), int(r["count"]), r["dtype"], "sum", -1, float(r["time_us"]), float(r["time_us"]))
        for r in fixture_rows
        if r["op"] == "all_reduce"
    )
    log = write(tmp_path, "mine.log", new_log("all_reduce", 1, 8, lines))
    output = tmp_path / "data.pt"
    assert main(["--import-nccl-tests", str(log), "--profile", "h100_sxm", "--output", str(tmp_path)]) == 0
    shipped, joined = read_profile(PROF_DATA / "h100_sxm.pt"), read_profile(output)
    assert len(joined.table("linear")) == len(shipped.table("linear"))
    table, before = joined.table("all_reduce"), shipped.table("all_reduce")
    group = (table["intra"] == 8) & (table["inter"] == 1)
    assert set(table["source"][group]) == {"nccl-tests log mine.log"} and group.sum() == 14
    assert (~group).sum() == ((before["intra"] != 8) | (before["inter"] != 1)).sum()
    assert joined.meta["nccl_tests"]["logs"] == {"mine.log": {"all_reduce": 14}}
    assert joined.meta["nccl_tests"]["kernels"] == "of profile h100_sxm"


@pytest.mark.parametrize(("slower", "said"), [(5.0, True), (1.02, False)])
def test_groups_that_keep_the_times_of_faster_links_are_named(slower: float, said: bool, tmp_path: Path) -> None:
    """Logs of 8 GPUs say nothing of groups of 2 and 4, but that they too are slower than the profile's."""
    profile = read_profile(PROF_DATA / "h100_sxm.pt")
    table = profile.table("all_reduce")
    table = table.where((table["intra"] == 8) & (table["inter"] == 1) & (table["bytes"] >= 1 << 20))
    size, microseconds = table["bytes"], 1e6 * slower * table["seconds"]
    lines = [row(int(n), int(n) // 2, "bfloat16", "sum", -1, t, t) for n, t in zip(size, microseconds, strict=True)]
    joined = with_logs(profile, [write(tmp_path, "mine.log", new_log("all_reduce", 1, 8, "".join(lines)))])
    kept = sorted(set(profile.table("all_reduce").where(profile.table("all_reduce")["inter"] == 1)["intra"].tolist()) - {8})
    groups = ", ".join(map(str, kept))
    expected = (
        f"all_reduce in a node took 5 times as long as on h100_sxm, but groups of {groups} GPUs keep its times; "
        "import logs of those too"
    )
    assert kept and (expected in joined.meta["nccl_tests"]["notes"]) == said
    assert any("in a node took" in note for note in joined.meta["nccl_tests"]["notes"]) == said


def test_copies_inside_one_gpu_are_left_out(tmp_path: Path) -> None:
    """A sendrecv of 1.4 TB/s did not cross a link of 0.45 TB/s; the note states what was left out."""
    profile = read_profile(PROF_DATA / "h100_sxm.pt")
    fast = new_log("sendrecv", 1, 2, row(8589934592, 4294967296, "bfloat16", "none", -1, 5968.9, 2.5))
    real = new_log("broadcast", 1, 2, row(8589934592, 4294967296, "bfloat16", "none", 0, 24000.0, 24000.0))
    paths = [write(tmp_path, "p2p.log", fast), write(tmp_path, "broadcast.log", real)]
    joined = with_logs(profile, paths)
    assert "1 measurements of p2p left out" in joined.meta["nccl_tests"]["notes"][0]
    assert len(joined.table("p2p")) == len(profile.table("p2p")) and len(joined.table("broadcast")) == 1
    with pytest.raises(InputError, match="no measurement that can be used"):
        usable_tables([read_log(paths[0])], profile)


def test_several_nodes_under_a_launcher(tmp_path: Path) -> None:
    """Two nodes of 8 under mpirun --tag-output, two tests in one file, NCCL's messages in between."""
    text = new_log("all_gather", 2, 8, row(1073741824, 16777216, "float", "none", -1, 10908.0, 10850.0))
    text += new_log("reduce_scatter", 2, 8, row(1073741824, 16777216, "float", "sum", -1, 10700.0, 10650.0))
    text = text.replace(
        "# Using devices\n", "node-0000:4000:4000 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n# Using devices\n"
    )
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines())
    log = read_log(write(tmp_path, "job-17.out", tagged))
    assert set(log.tables) == {"all_gather", "reduce_scatter"} and log.devices == {H100} and not log.notes
    for table in log.tables.values():
        assert (table["intra"][0], table["inter"][0], table["bytes"][0], table["dtype"][0]) == (8, 2, 1 << 30, "fp32")


def test_groups_of_a_split_run(tmp_path: Path) -> None:
    """NCCL_TESTS_SPLIT: 16 ranks in groups of 4; a measurement is of one group while the other groups communicate too."""
    text = new_log("alltoall", 2, 8, row(1048576, 131072, "bfloat16", "none", -1, 75.0, 74.0), group_of=4)
    table = read_log(write(tmp_path, "x.log", text)).tables["all2all"]
    assert (table["intra"][0], table["inter"][0]) == (4, 1) and table["env"][0].endswith("4 groups at once")


def test_early_version(tmp_path: Path) -> None:
    """Version 2.0: no group, no redop and root for all_gather, error in place of #wrong, and a size of 0."""
    text = (
        "# nThread 1 nGpus 8 minBytes 1 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 30 validation: 0 \n#\n"
        "# Using devices\n"
        + "".join(f"#   Rank  {i} Pid 112372 on localhost device  {i} [0x00] A100-SXM4-40GB\n" for i in range(8))
        + "#\n#                                             out-of-place                       in-place          \n"
        "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error\n"
        "#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n"
        "hostname:3442:3442 [0] NCCL INFO Launch mode Parallel\n"
        "           0             0    int8    34.27    0.00    0.00    N/A    33.57    0.00    0.00    N/A\n"
        "  8589934592    1073741824    int8    38438  223.48  195.54    N/A    38443  223.44  195.51    N/A\n"
        "# Out of bounds values : 0 OK\n"
    )
    table = read_log(write(tmp_path, "allgather-8.txt", text)).tables["all_gather"]
    assert (len(table), table["intra"][0], table["repeats"][0], table["env"][0]) == (1, 8, 30, "nccl-tests")
    assert table["seconds"][0] == pytest.approx(38438e-6)
    errors = text.replace("N/A", "4e-07").replace("int8 ", "int8     sum ")  # all_reduce: redop, no root, a float as error
    errors = errors.replace("8589934592    1073741824", "8589934592    8589934592")
    assert len(read_log(write(tmp_path, "all_reduce.txt", errors)).tables["all_reduce"]) == 1


def test_in_place_only(tmp_path: Path) -> None:
    """Where out-of-place is N/A the in-place time is taken, and env states it."""
    line = row(1048576, 262144, "float", "sum", -1, 50.0, 40.0).replace(
        "  50.00   20.97   20.97      0", "    N/A     N/A     N/A    N/A"
    )
    assert "N/A" in line
    table = read_log(write(tmp_path, "x.log", new_log("all_reduce", 1, 4, line))).tables["all_reduce"]
    assert table["seconds"][0] == pytest.approx(40e-6) and table["env"][0].endswith("in-place")


def test_wrong_and_incomplete_lines_are_left_out_and_noted(tmp_path: Path) -> None:
    good = row(1048576, 262144, "float", "sum", -1, 50.0, 50.0)
    wrong = row(2097152, 524288, "float", "sum", -1, 60.0, 60.0).replace("      0\n", "     17\n")
    log = read_log(write(tmp_path, "x.log", new_log("all_reduce", 1, 4, good + wrong + good[:60] + "\n")))
    assert len(log.tables["all_reduce"]) == 1
    assert "1 rows of all_reduce left out" in log.notes[0] and "1 lines of all_reduce left out" in log.notes[1]


ROW = row(1048576, 262144, "float", "sum", -1, 50.0, 50.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "no output of nccl-tests"),
        (parameters() + devices(1, 4) + TABLE_HEAD + ROW, "does not say which test"),
        (new_log("all_reduce", 1, 4, ROW).replace("#  Rank  2", "#  elided"), "names 3 ranks but counts to 4"),
        ("# Collective test starting: all_reduce_perf\n" + parameters() + TABLE_HEAD + ROW, "list of devices"),
        (new_log("all_gather", 1, 4, ROW), "does not fit the 4 ranks"),
        (new_log("all_reduce", 2, 4, ROW).replace("node-0001", "node-0000"), "share a GPU or nodes share a name"),
        (new_log("all_reduce", 2, 4, ROW).replace("node-0001 device  3 [0000:13", "node-0000 device  9 [0000:19"), "unequal"),
    ],
)
def test_unusable_logs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_log(write(tmp_path, "job.log", text))


HALF = " ".join(ROW.split()[:-1])  # all but the last cell: as many cells as a complete row without a root


@pytest.mark.parametrize("torn", [HALF, ROW[:30], ROW[:47], ROW[:70]])
def test_complete_lines_of_a_crashed_run_are_kept(tmp_path: Path, torn: str) -> None:
    whole = new_log("all_reduce", 1, 4, ROW)
    text = whole[: whole.index("# Out of bounds")] + torn
    log = read_log(write(tmp_path, "x.log", text))
    assert len(log.tables["all_reduce"]) == 1 and log.tables["all_reduce"]["seconds"][0] == pytest.approx(50e-6)
    assert "broke off" in log.notes[-1] and not any("broke off" in note for note in read_log(write(tmp_path, "y", whole)).notes)


def test_a_run_that_crashed_before_its_first_line_is_refused(tmp_path: Path) -> None:
    text = new_log("all_reduce", 1, 4, "")
    log = write(tmp_path, "x.log", text[: text.index("# Out of bounds")])
    with pytest.raises(InputError, match="no measurement that can be used: .* holds no measured size"):
        usable_tables([read_log(log)], None)


def test_lines_of_an_unknown_type_are_left_out_and_noted(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, "x.log", new_log("all_reduce", 1, 4, ROW + ROW.replace("float", "fp4x2"))))
    assert len(log.tables["all_reduce"]) == 1 and log.notes == (
        "x.log: rows of all_reduce left out: their type 'fp4x2' is not known",
    )


@pytest.mark.parametrize(("name", "message"), [("none.log", "cannot read the log"), ("empty.log", "no output of nccl-tests")])
def test_files_that_are_not_logs(tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "empty.log", "")
    assert main(["--import-nccl-tests", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err and not captured.out and not (tmp_path / "out").exists()


def test_a_second_import_keeps_the_first(tmp_path: Path) -> None:
    """Logs are added to the existing data.pt, whatever the default profile is; earlier logs stay listed."""
    for test, ranks in (("all_reduce", 4), ("broadcast", 2)):
        log = write(tmp_path, f"{test}.log", new_log(test, 1, ranks, ROW))
        assert main(["--import-nccl-tests", str(log), "--output", str(tmp_path)]) == 0
    joined = read_profile(tmp_path / "data.pt")
    assert joined.meta["nccl_tests"]["logs"] == {"all_reduce.log": {"all_reduce": 1}, "broadcast.log": {"broadcast": 1}}
    table = joined.table("all_reduce")
    own = table.where((table["intra"] == 4) & (table["inter"] == 1))
    assert len(own) == 1 and own["source"][0] == "nccl-tests log all_reduce.log" and len(joined.table("broadcast")) == 1


def test_the_heading_of_rccl_tests_has_colons(tmp_path: Path) -> None:
    plain = new_log("all_reduce", 1, 8, ROW)
    assert "# nThread 1 nGpus 1 minBytes 1048576" in plain
    colons = plain.replace("# nThread 1 nGpus 1 minBytes 1048576", "# nThread: 1 nGpus: 1 minBytes: 1048576")
    first, second = (read_log(write(tmp_path, name, text)) for name, text in (("a.log", plain), ("b.log", colons)))
    assert first.tables["all_reduce"]["seconds"].tolist() == second.tables["all_reduce"]["seconds"].tolist()


def test_logs_join_no_derived_profile_whose_kernels_no_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path, "x.log", new_log("all_reduce", 1, 8, ROW).replace("NVIDIA H100 80GB HBM3", "NVIDIA H20"))
    assert main(["--import-nccl-tests", str(log), "--profile", "h20", "--output", str(tmp_path)]) == 2
    assert "profile h20 is derived from h100_sxm: a file holds measurements" in capsys.readouterr().err
    assert not (tmp_path / "data.pt").exists()


def test_a_named_profile_adds_missing_tables_to_an_own_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = read_profile(PROF_DATA / "h100_sxm.pt")
    few = shipped.table("linear").where(np.arange(len(shipped.table("linear"))) < 10)
    write_profile(tmp_path / "data.pt", replace(shipped, tables={"linear": few}))
    log = write(tmp_path, "x.log", new_log("broadcast", 1, 2, ROW))
    command = ["--import-nccl-tests", str(log), "--output", str(tmp_path), "--profile"]
    before = (tmp_path / "data.pt").read_bytes()
    assert main([*command, "a100_sxm_80gb"]) == 2
    assert "differ in device" in capsys.readouterr().err and (tmp_path / "data.pt").read_bytes() == before
    assert main([*command, "h100_sxm"]) == 0
    joined = read_profile(tmp_path / "data.pt")
    assert len(joined.table("linear")) == 10 and len(joined.table("flash_attn")) == len(shipped.table("flash_attn"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "h100_sxm"], "--profile has no effect with a measurement"),
        (["--import-nccl-tests", "x.log", "--append"], "--append has no effect with --import-nccl-tests"),
        (["--merge", "a.pt", "b.pt", "--nccl-test", "alltoall"], "--nccl-test has no effect with --merge"),
    ],
)
def test_options_without_effect_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_test_without_a_table_is_noted(tmp_path: Path) -> None:
    text = new_log("reduce", 1, 4, ROW) + new_log("all_reduce", 1, 4, ROW)
    log = read_log(write(tmp_path, "x.log", text))
    assert list(log.tables) == ["all_reduce"] and "reduce_perf left out" in log.notes[0]


@pytest.mark.parametrize(("device", "fits"), [(H100, True), ("NVIDIA H100 PCIe", False), ("NVIDIA A100-SXM4-80GB", False)])
def test_other_devices_are_refused(tmp_path: Path, device: str, fits: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path, "x.log", new_log("all_reduce", 1, 4, ROW, device=device))
    output = tmp_path / "data.pt"
    command = ["--import-nccl-tests", str(log), "--profile", "h100_sxm", "--output", str(tmp_path)]
    assert main(command) == (0 if fits else 2)
    assert output.exists() == fits
    if not fits:
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and device in error and "H100 SXM" in error


def network_log(folder: Path, hosts: int, start_us: float = 40, gb_s: float = 190, test: str = "all_reduce") -> Path:
    """Write a log of 8 ranks on each of ``hosts`` nodes, of ``start_us`` + size / ``gb_s`` at 22 sizes."""
    sizes = [1 << power for power in range(12, 34)]
    share = hosts * 8 if test in ("all_gather", "reduce_scatter", "alltoall") else 1
    us = [start_us + s / gb_s / 1e3 for s in sizes]
    lines = "".join(row(s, s // 2 // share, "bfloat16", "sum", -1, t, t) for s, t in zip(sizes, us, strict=True))
    return write(folder, f"{test}_{hosts}_{gb_s:g}.log", new_log(test, hosts, 8, lines))


SIZES = np.array([2.0**24, 2.0**28, 2.0**32])


@pytest.mark.parametrize("kinds", [1, 2])
def test_own_network(tmp_path: Path, kinds: int) -> None:
    """Logs of groups over nodes replace the shipped measurements between nodes, and are estimated as measured."""
    profile = read_profile(PROF_DATA / "h100_sxm.pt")
    joined = with_logs(profile, [network_log(tmp_path, hosts) for hosts in (2, 4)[:kinds]])
    table = joined.table("all_reduce")
    over_nodes = set(table["source"][table["inter"] > 1])
    assert len(over_nodes) == kinds and all(source.startswith("nccl-tests log") for source in over_nodes)
    assert not (joined.table("p2p")["inter"] > 1).any() and joined.meta["laws"]["own_network"]
    assert ("efficiency" in joined.meta["nccl_tests"]["notes"][0]) == (kinds == 1)
    assert "no log of all2all, all_gather, broadcast, p2p, reduce_scatter" in joined.meta["nccl_tests"]["notes"][-1]
    fit = CollectiveModel.fit(joined)
    for hosts in (2, 4)[:kinds]:
        found = fit.predict("all_reduce", SIZES, 8, hosts)
        np.testing.assert_allclose(found.seconds, 40e-6 + SIZES / 1.9e11, rtol=1e-3)  # the log has four digits
        assert found.basis.tolist() == [Basis.MEASURED] * 3 and (found.relative_std == 0.05).all()


@pytest.mark.parametrize(
    ("test", "gb_s", "said"),
    [
        ("all_reduce", 190, "all_reduce over 2 nodes x 8: at best 356 GB/s of bus bandwidth; NICS carry 400\n"),
        ("all_reduce", 390, "at best 730 GB/s of bus bandwidth; NICS carry 400\n"),  # as switches add
        ("all_reduce", 440, "at best 823 GB/s of bus bandwidth; NICS carry 400, so the logs are of a faster"),
        ("all_reduce", 2, "carry 400, so hardly any of it is used"),
        ("alltoall", 190, "carry 93.8, so the logs are of a faster network"),  # 15 of 16 parts are sent, 8 of them by the NIC
        ("alltoall", 60, "at best 56.2 GB/s of bus bandwidth; NICS carry 93.8\n"),
    ],
)
def test_rates_of_logs_stand_beside_what_the_network_carries(
    test: str, gb_s: float, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = network_log(tmp_path, 2, gb_s=gb_s, test=test)
    assert main(["--import-nccl-tests", str(log), "--profile", "h100_sxm", "--output", str(tmp_path)]) == 0
    assert said.replace("NICS", "full NICs of 400 Gbit/s per GPU") in capsys.readouterr().out


def test_a_slow_network_slows_what_was_not_measured_too(tmp_path: Path) -> None:
    """Two nodes that show a tenth of the usual rate: other ops and other numbers of nodes slow down about as much."""
    profile = read_profile(PROF_DATA / "h100_sxm.pt")
    usual = CollectiveModel.fit(profile)
    at_two = usual.predict("all_reduce", SIZES, 8, 2).seconds
    slow = network_log(tmp_path, 2, start_us=100, gb_s=SIZES[-1] / at_two[-1] / 10 / 1e9)
    fit = CollectiveModel.fit(with_logs(profile, [slow]))
    for op, nodes in (("all_reduce", 16), ("all_gather", 2), ("reduce_scatter", 8), ("all2all", 4)):
        ratio = fit.predict(op, SIZES[-1], 8, nodes).seconds / usual.predict(op, SIZES[-1], 8, nodes).seconds
        assert 7 < ratio < 13, (op, nodes, ratio)
    inside = fit.predict("all_reduce", SIZES, 8, 1).seconds / usual.predict("all_reduce", SIZES, 8, 1).seconds
    np.testing.assert_allclose(inside, 1.0, rtol=1e-9)
    cached = CollectiveModel.from_arrays(fit.to_arrays())
    measured = fit.predict("all_reduce", SIZES, 8, 2).seconds
    assert cached.predict("all_reduce", SIZES, 8, 2).seconds.tolist() == measured.tolist()
    half = fit.predict("all_reduce", SIZES[-1], 8, 2, 25e9).seconds  # at half the nominal rate it takes twice as long
    assert half / measured[-1] == pytest.approx(2, rel=0.05)


def test_the_same_log_twice_counts_once(tmp_path: Path) -> None:
    first = network_log(tmp_path, 2)
    again = write(tmp_path, "all_reduce_again.log", first.read_text())
    joined = with_logs(read_profile(PROF_DATA / "h100_sxm.pt"), [first, again, first])
    assert joined.meta["nccl_tests"]["rows"] == {"all_reduce": 22}
    notes = joined.meta["nccl_tests"]["notes"][:2]
    assert [note.split(" is the same log as ")[0] for note in notes] == [str(again), str(first)]


def test_a_second_import_of_another_number_of_nodes_joins_the_first(tmp_path: Path) -> None:
    profile = with_logs(read_profile(PROF_DATA / "h100_sxm.pt"), [network_log(tmp_path, 2)])
    both = with_logs(profile, [network_log(tmp_path, 4)])
    assert set(both.table("all_reduce")["inter"][both.table("all_reduce")["inter"] > 1]) == {2, 4}


def test_the_cluster_of_the_logs_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = network_log(tmp_path, 2, gb_s=20)
    command = ["--import-nccl-tests", str(log), "--output", str(tmp_path), "--cluster"]
    assert main([*command, "h100_100g"]) == 0
    said = capsys.readouterr()
    assert "use it: python simulation_train_formulaic.py --run_all_solu --pre_profiling_data_path" in said.out
    assert said.err.count("warning: ") == 2 and "other numbers of nodes" in said.err
    written = read_profile(tmp_path / "data.pt")
    assert written.device.network_bandwidth == 12.5e9
    assert "2 x 8 ranks; those are used as measured" in describe_network(written)
    assert "published logs of other clusters" in describe_network(read_profile(PROF_DATA / "h100_sxm.pt"))
    assert main([*command, "nowhere"]) == 2 and "no cluster is called" in capsys.readouterr().err


@pytest.mark.parametrize("cell", ["9" * 5000, "1e30"])
def test_numbers_that_no_run_prints_are_garbled_lines(tmp_path: Path, cell: str) -> None:
    broken = ROW.replace(ROW.split()[0], "9" * 5000, 1) if cell[0] == "9" else ROW.replace(ROW.split()[5], cell, 1)
    log = read_log(write(tmp_path, "all_reduce.log", new_log("all_reduce", 1, 4, ROW + broken)))
    assert len(log.tables["all_reduce"]) == 1 and "1 lines of all_reduce left out" in log.notes[0]


def test_sends_of_whole_nodes_are_no_measurement_of_the_network(tmp_path: Path) -> None:
    """In sendrecv_perf's ring over 2 nodes of 8 most ranks send to a neighbour in their node."""
    lines = row(1 << 30, 1 << 29, "bfloat16", "none", -1, 30000.0, 30000.0)
    joined = with_logs(read_profile(PROF_DATA / "h100_sxm.pt"), [write(tmp_path, "p2p.log", new_log("sendrecv", 2, 8, lines))])
    assert "published logs of other clusters" in describe_network(joined)
