"""``python -m solver.simai`` as a process, and one sentence for everything that it cannot use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simai_files import DATA, HEADER, analytical_cases, result_of, table_of, text_of

from solver.simai import command
from solver.simai.given import default_prefix, machine_of
from solver.simai.options import parser
from solver.simai.workload_csv import read_workload_csv
from solver.simai.workload_text import read_workload_text

ROOT = Path(__file__).resolve().parents[3]
CASE = "gpt175b_tp8_pp8_sp_aiobExample_ppo0.5"
SERVER = ["-g_p_s", "8", "-n_p_s", "8", "-nv", "360", "-nic", "48.5"]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    name = next(workload for case, workload, _ in analytical_cases() if case == CASE)
    path = tmp_path / "w.txt"
    path.write_text(text_of(name))
    return path


def run(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "solver.simai", *map(str, arguments)]
    return subprocess.run(command_line, cwd=cwd, capture_output=True, text=True, check=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert command.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error.removeprefix("error: ").rstrip()


def test_the_analytical_step_as_a_process(workload: Path, tmp_path: Path) -> None:
    arguments = next(arguments for case, _, arguments in analytical_cases() if case == CASE)
    done = run("--analytical", workload, *arguments, "-g", "128", "-r", f"{CASE}-", "-o", tmp_path / "out.csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out.csv").read_text() == result_of(CASE)
    assert done.stdout.startswith("5,311,127 us a step as SimAI-Analytical computes it: DP 180,691, TP 183,626")


def test_the_workload_may_be_named_as_in_simai_and_results_go_to_its_folders(workload: Path, tmp_path: Path) -> None:
    assert command.main(["--analytical", "-w", str(workload), *SERVER, "-r", "a/b-", "-r_f", str(tmp_path)]) == 0
    assert (tmp_path / "a" / "b-EndToEnd.csv").read_text().splitlines()[1].startswith("b-, 180691 (5.90%)")


def test_names_of_results() -> None:
    aicb = Path("gpt_7B-world_size4096-tp2-pp1-ep1-gbs8192-mbs1-seq4096-MOE-False.txt")
    args = parser().parse_args(["--analytical", "x", *SERVER])
    assert default_prefix(args, aicb, machine_of(args)) == "gpt_7B-tp2-pp1-dp2048-ga4-ep1-NVL8-388.0G-DP0.0-"
    assert default_prefix(args, Path("mine.txt"), machine_of(args)) == "mine-"


def test_bandwidths_by_type_and_what_is_ignored(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-g_p_s", "8", "-n_p_s", "8", "-g_type", "a100", "-v", "1", "-l", "ja", "-o", str(tmp_path / "o.csv")]
    assert command.main(["--analytical", str(workload), *options, "-g", "256"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        "note: -v is ignored: no HTML picture is drawn",
        "note: -l is ignored: messages are in English",
        "note: -g 256 counts, not the 128 GPUs of the workload's first line, as in SimAI-Analytical",
    ]
    args = parser().parse_args(["--analytical", "x", "-g_p_s", "8", "-n_p_s", "4", "-g_type", "A800", "-nic_t", "CX6"])
    assert (machine_of(args).nvlink, machine_of(args).nic, machine_of(args).nics) == (160, 23.5, 4)
    args = parser().parse_args(["--analytical", "x", "-g_p_s", "8", "-n_p_s", "4", "-g_type", "A800", "-nv", "5"])
    assert (machine_of(args).nvlink, machine_of(args).nic) == (5, 48.5)


def test_notes_of_old_files_and_of_single_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.txt").write_text(f"{HEADER} 1 checkpoints: 0\n1\na -1 1 ALLREDUCE 1073741824 1 NONE 0 1 NONE 0 1\n")
    options = [*SERVER, "-g", "4", "-g_type", "H100", "-nic_t", "cx7", "-o", str(tmp_path / "o.csv")]
    assert command.main(["--analytical", str(tmp_path / "w.txt"), *options]) == 0
    assert [line.split(" ", 3)[:3] for line in capsys.readouterr().err.splitlines()] == [
        ["note:", "-g_type", "is"],
        ["note:", "-nic_t", "is"],
        ["note:", "the", "first"],
        ["note:", "collectives", "over"],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-busbw", "busbw.yaml"], "-busbw was removed from SimAI-Analytical in July 2025; give -nv (or -g_type) and -nic"),
        (["-n_p_s", "8", "-nv", "1"], "-g_p_s is missing; SimAI-Analytical needs the GPUs and the NICs of a server"),
        (["-g_p_s", "8", "-nv", "1"], "-n_p_s is missing; SimAI-Analytical needs"),
        (
            ["-g_p_s", "8", "-n_p_s", "8"],
            "-nv or -g_type is missing; SimAI-Analytical needs the bandwidth of NVLink or the type",
        ),
        (["-g_p_s", "8", "-n_p_s", "8", "-g_type", "V100"], "-g_type is 'V100'"),
        (["-g_p_s", "8", "-n_p_s", "8", "-nv", "1", "-nic_t", "ib"], "-nic_t is 'ib'; it must be one of cx6, cx7, bf3"),
        (["-g_p_s", "0", "-n_p_s", "8", "-nv", "1"], "-g_p_s is 0; it must be positive"),
        ([*SERVER[:4], "-nv", "nan"], "-nv is nan; it must be positive"),
        ([*SERVER, "-g", "-8"], "-g is -8; it must be positive"),
        ([*SERVER, "-dp_o", "1.5"], "-dp_o is 1.5; it is a share of communication, from 0 to 1"),
        ([*SERVER, "-pp_o", "0"], "-pp_o is 0, by which SimAI-Analytical divides"),
        ([*SERVER, "-w", "other.txt"], "--analytical needs one workload: --analytical FILE, or --analytical -w FILE"),
    ],
)
def test_options_of_the_analytical_step_that_cannot_be_used(
    options: list[str], message: str, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--analytical", workload, "-o", tmp_path / "o.csv", *options)
    assert not (tmp_path / "o.csv").exists()


def test_exports_as_a_process(tmp_path: Path) -> None:
    options = ["--config", "configs/7B_internlm2.py", "--world_size", "64"]
    for name in ("w.txt", "w.csv"):
        done = run("--export", tmp_path / name, *options)
        assert (done.returncode, done.stderr) == (0, "") and "7B_internlm2: the step, " in done.stdout
    text, table = read_workload_text(tmp_path / "w.txt"), read_workload_csv(tmp_path / "w.csv")
    assert (text.header.value("all_gpus:"), text.header.value("ga:")) == (64, 8)
    computed = sum(item.elapsed or 0 for item in table.items if item.kind == "computation")
    assert sum(row.compute for row in text.rows) == pytest.approx(computed, rel=1e-5)


def test_a_price_as_a_process(workload: Path) -> None:
    done = run("--price", workload, "--profile", "h100_sxm", "-nv", "360", "-nic", "48.5", "--model_size", "gpt3_175b")
    assert (done.returncode, done.stderr) == (0, "")
    assert "128 GPUs, tp 8, pp 8, ep 1, dp 2, profile: h100_sxm" in done.stdout and "-nv 360, -nic 48.5" in done.stdout
    step = next(line for line in done.stdout.splitlines() if line.startswith("│ step"))
    assert "3,061,127" in step and "parameters of the model" in done.stdout


def test_machines_of_a_price(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--price", str(workload), "--cluster", "h100_100g", "--vpp", "2"]) == 0
    out = capsys.readouterr().out
    assert (
        "-nv 370.8, -nic 11.64" in out and "our bubble is of 2 chunks a stage" in out and "--model_size names the model" in out
    )
    assert command.main(["--price", str(workload), "--as", "a800_sxm"]) == 0
    assert "-nv 160," in capsys.readouterr().out


def test_a_price_on_a_topology_simulates_what_crosses_servers(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {}
    for cluster in ("dgx_h100", "Spectrum-X"):
        assert command.main(["--price", str(workload), "--cluster", cluster]) == 0
        out = capsys.readouterr().out
        assert ("simulated flow by flow" in out) == (cluster == "Spectrum-X")
        rows = (line.split("│") for line in out.splitlines() if line.startswith("│"))
        parts[cluster] = {row[1].strip(): float(row[3].replace(",", "")) for row in rows if row[3].strip()}
    measured, simulated = parts["dgx_h100"], parts["Spectrum-X"]
    assert simulated["tensor-parallel messages"] == measured["tensor-parallel messages"]  # within a server, as measured
    assert simulated["data-parallel messages"] != measured["data-parallel messages"]
    assert abs(simulated["data-parallel messages"] / measured["data-parallel messages"] - 1) < 0.2  # both 8 x 400 Gbit/s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world_size", "8"], "--world_size has no effect with --price; leave it out"),
        (["--stage", "1"], "--stage has no effect with --price"),
        (["--vpp", "0"], "--vpp is 0; it must be at least 1"),
        (["--profile", "h1000"], "h1000"),
        (["--config", "a.json", "--model_size", "7"], "--config and --model_size both name a model; give one"),
    ],
)
def test_options_of_a_price_that_cannot_be_used(
    options: list[str], message: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--price", workload, *options)


def test_options_of_an_export_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", "configs/7B_internlm2.py", "--world_size", "64"]
    assert "w.json: the file must end in .txt (SIMAI_workload), .csv (AICB Workload) or .aiob (kernel times)" in refused(
        capsys, "--export", tmp_path / "w.json", *config
    )
    experts = tmp_path / "w.aiob"
    assert "the stage has layers of several kinds, and a kernel-time file holds one" in refused(
        capsys, "--export", experts, "--config", "configs/simai/deepseek16b_ep16.json"
    )
    batch = ["--global_batch_size", "4000000", "--round_batch"]
    assert command.main(["--export", str(tmp_path / "w.txt"), *config, *batch]) == 0
    assert capsys.readouterr().err.startswith("note: global batch rounded from 4,000,000 to 3,932,160 tokens")
    assert "--stage is 1; the layout has stages 0 to 0" in refused(
        capsys, "--export", tmp_path / "w.txt", *config, "--stage", "1"
    )
    assert "which does not divide world_size 3" in refused(
        capsys, "--export", tmp_path / "w.txt", "--config", "configs/7B_internlm2.py", "--world_size", "3"
    )


def test_filling_as_a_process(tmp_path: Path) -> None:
    name = "gpt13b_tp4_pp1_ws4_gbs2_seq4096"
    (tmp_path / "w.txt").write_text(text_of(f"{name}_aiobExample"))
    (tmp_path / "w.csv").write_text(table_of(f"{name}_comp"))
    times = ["--kernel_times", DATA / "aiob_Example.txt"]
    done = run("--fill", tmp_path / "w.txt", *times, "--as_aicb", "-o", tmp_path / "o.txt")
    assert done.returncode == 0 and (tmp_path / "o.txt").read_text() == text_of(f"{name}_aiobExample")
    for options, seconds in ((["--as_aicb"], 2.06304), ([], 1.02016)):
        assert command.main(["--fill", str(tmp_path / "w.csv"), *map(str, times), *options, "-o", str(tmp_path / "o.csv")]) == 0
        found = sum(item.elapsed or 0 for item in read_workload_csv(tmp_path / "o.csv").items if item.kind == "computation")
        assert found / 1e9 == pytest.approx(seconds)
    assert command.main(["--fill", str(tmp_path / "w.txt"), *map(str, times), "-o", str(tmp_path / "p.txt")]) == 0
    assert (tmp_path / "p.txt").read_text() != (tmp_path / "o.txt").read_text()


def test_options_of_filling_that_cannot_be_used(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--fill needs --kernel_times FILE, the times, and -o OUT" in refused(
        capsys, "--fill", workload, "-o", tmp_path / "o"
    )
    times = ["--kernel_times", DATA / "aiob_Example.txt", "-o", tmp_path / "o.txt"]
    assert "--recompute_activations belongs to --as_aicb" in refused(
        capsys, "--fill", workload, *times, "--recompute_activations"
    )
    assert "no such file; it should be an aiob kernel-time file" in refused(
        capsys, "--fill", workload, "--kernel_times", tmp_path / "absent", "-o", tmp_path / "o.txt"
    )


@pytest.mark.parametrize(
    ("arguments", "option", "mode"),
    [
        (["--analytical", "w.txt", *SERVER, "--profile", "h100_sxm"], "--profile", "analytical"),
        (["--price", "w.txt", "-o", "x.csv"], "-o", "price"),
        (["--price", "w.txt", "--approximate"], "--approximate", "price"),
        (["--export", "w.txt", "-nv", "3"], "-nv", "export"),
        (["--export", "w.txt", "--vpp", "3"], "--vpp", "export"),
        (["--fill", "w.txt", "-r", "x"], "-r", "fill"),
        (["--fill", "w.txt", "--as", "h200_sxm"], "--as", "fill"),
    ],
)
def test_options_of_other_modes_are_refused(
    arguments: list[str], option: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *arguments) == f"{option} has no effect with --{mode}; leave it out"


def test_what_is_read_is_not_overwritten(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = workload.read_text()
    for arguments in (
        ["--analytical", workload, *SERVER, "-o", workload],
        ["--fill", workload, "--kernel_times", DATA / "aiob_Example.txt", "-o", workload],
    ):
        assert refused(capsys, *arguments).endswith("w.txt: is read too; write to another file")
    assert workload.read_text() == before


def usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Return the exit status and what is said, also where argparse ends the process."""
    try:
        status: object = command.main([*arguments])
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().err


def test_an_option_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = usage(capsys, "--analytical", "w.txt", "-g", "8", "-g", "16")
    assert status == 2 and said.startswith("error: -g is given twice; ")


def test_without_a_mode_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = usage(capsys)
    assert status == 2 and "one of the arguments --analytical --price --export --fill is required" in said
    assert "Traceback" not in said and usage(capsys, "--help") == (0, "")
