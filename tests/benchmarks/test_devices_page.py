"""docs/devices.md states what the program predicts today, in one row of it."""

from __future__ import annotations

from pathlib import Path

import devices

from profiler.profile.devices import DATASHEETS
from profiler.profile.profiles import find_profile

ROOT = Path(__file__).resolve().parents[2]


def test_a_row_of_the_page() -> None:
    name = "h100_sxm"
    row = devices.best_row(name, "llama3_70b", find_profile(name)[0], DATASHEETS[name], "bf16")
    lines = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    stated = next(found for found in rows if found[0] == name and found[2] == "bf16")
    assert stated[:3] == row[:3] and stated[-1] == row[-1]  # the device, where its kernels are from, the layout
    # other processors fit trees that differ in the last digits
    assert abs(int(stated[3].replace(",", "")) / int(row[3].replace(",", "")) - 1) < 0.005
    assert len(rows) == 14 + 14 + 9 + len(devices.origins()) + 4 * 2


def test_a_page_has_every_part() -> None:
    row = ["x"] * len(devices.HEAD)
    text = devices.page({"llama3_70b": [row], "deepseek_v3": [row]}, [row])
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Llama 3 70B",
        "## DeepSeek-V3",
        "## What if",
        "## What a better figure changes",
        "## Figures that are not from a maker's datasheet",
    ]


def test_figures_that_no_datasheet_states() -> None:
    rows = {(row[0], figure): row[2] for row in devices.origins() for figure in row[1].split(", ")}
    assert rows["gh200_96gb", "power_watts"] == "assumed: the GPU's share of the module's power"
    assert ("h100_sxm", "memory_bandwidth_gb_s") not in rows and rows["b300", "num_sms"].endswith("multi_processor_count")
