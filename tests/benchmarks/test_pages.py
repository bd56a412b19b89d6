"""Pages that people read as text: lines of a readable length."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "configs/README.md", "prof_data/SOURCES.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LONGEST = 160


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_text_are_short(page: Path) -> None:
    """Rows of tables, and what stands in blocks of code, are as long as they are."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert not [n for n, line in lines if len(line) > LONGEST and not line.startswith(("|", "    "))]
