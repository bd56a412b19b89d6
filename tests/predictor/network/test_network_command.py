"""``python -m predictor.network`` as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "simai"
CASES = (DATA / "flows" / "ns3_results.jsonl").read_text(encoding="utf-8").splitlines()


def command(*arguments: str, module: str = "predictor.network") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", module, *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_file_is_made_and_read(tmp_path: Path) -> None:
    name = "AlibabaHPN_64g_8gps_DualToR_DualPlane_200Gbps_H100"
    done = command("-topo", "AlibabaHPN", "--dp", "-g", "64", "-psn", "16", "-asn", "4", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).read_bytes() == (DATA / "topology" / name).read_bytes()
    assert done.stderr == "warning: -asn 4 is overridden: 64 GPUs need 16 ASWs here\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    again = command("--file", str(tmp_path / name), "--picture", str(tmp_path / "it.png"))
    assert again.returncode == 0, again.stderr
    assert f"{name}: 8 x (8 H100 and 1 NVSwitch), 32 other switches, 320 links" in again.stdout
    assert (tmp_path / "it.png").stat().st_size > 10_000


def test_cases_are_simulated(tmp_path: Path) -> None:
    cases = tmp_path / "cases.jsonl"
    cases.write_text("\n".join(CASES[:3]))
    done = command("--flows", str(cases), "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in rows] == [json.loads(line)["name"] for line in CASES[:3]]
    assert all(set(row) == {"name", "comm_us", "spread_us", "wall_s"} for row in rows)
    assert "| ring_tp8_16M | 193.2 | 0.0 | 192.8 | +0.2% |" in done.stdout
    lines = command("--flows", str(cases), "--json", str(tmp_path / "out.jsonl"))
    assert lines.returncode == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("3 1 0 1 1 H100\n2\n0 9 1Gbps 1us 0\n")
    (tmp_path / "cases.jsonl").write_text(json.dumps({**json.loads(CASES[0]), "tp": 7}))
    for arguments, words in (
        (["-topo", "Spectrum-X", "-g", "9"], "9 GPUs do not fill servers of 8"),
        (["--file", str(tmp_path / "bad")], "line 3: no node is called '9'"),
        (["--file", str(tmp_path / "bad"), "-g", "8"], "--gpu makes a topology and --file reads one"),
        (["--flows", str(tmp_path / "cases.jsonl")], "ring_tp8_16M: 32 GPUs do not divide into tensor groups of 7"),
        (["--flows", str(tmp_path / "cases.jsonl"), "-g", "8"], "--gpu cannot be combined with --flows"),
        (["--flows", str(tmp_path / "cases.jsonl"), "--draws", "0"], "the draws 1 or more"),
        (["--json", str(tmp_path / "out.json")], "name the cases with --flows"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and words in done.stderr
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_the_fit_of_published_networks_is_still_there() -> None:
    done = command("no_such_folder", module="predictor.network.fit_published")
    assert done.returncode == 2
    assert "no such file; give the folder of the collected" in done.stderr
