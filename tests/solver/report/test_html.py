"""The report as one page: it says what the estimate says, stands alone, and a browser renders it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from solver.commands.console import main

WORDS = [
    "explain",
    "--model_size",
    "llama3_8b",
    "--framework",
    "megatron-core",
    "--world_size",
    "64",
    "--global_batch_size",
    "1048576",
]
_VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects headings, cells and sources of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("report")
    page, plain = folder / "out.html", folder / "out.json"
    assert main([*WORDS, "--report", str(page), "--json", str(plain)]) == 0
    return page, json.loads(plain.read_text())


def test_the_page_says_what_the_estimate_says(written: tuple[Path, dict[str, object]]) -> None:
    path, plain = written
    page = Page()
    page.feed(path.read_text())
    assert page.open == [] and len(page.headings) == len(set(page.headings))
    for heading in (
        "Speed against memory",
        "One step, pass by pass",
        "Where the time goes",
        "The best layouts of other sizes",
        "One step away",
        "How sure, and what would tell",
        "Assumed, and left open",
        "To launch it",
    ):
        assert heading in page.headings
    text = " ".join(page.text)
    best = plain["best"][0]  # type: ignore[index]
    assert f"{best['tgs']:,.0f} tokens per GPU and second" in text
    assert str(plain["standing"]) in text and "pretrain_gpt.py" in text
    assert shlex.join(sys.argv) in text, "the command that made it"


def test_the_page_stands_alone(written: tuple[Path, dict[str, object]]) -> None:
    page = Page()
    text = written[0].read_text()
    page.feed(text)
    assert len(page.sources) == 3 and all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://", text) and "<script" not in text and len(text) < 2_000_000


def test_names_are_escaped(tmp_path: Path) -> None:
    model = json.loads(Path("configs/models/llama3_8b.json").read_text()) | {"name": '<b>&"x'}
    config, page = tmp_path / "m.json", tmp_path / "out.html"
    config.write_text(json.dumps(model))
    words = [word for word in WORDS if word not in ("--model_size", "llama3_8b")]
    assert main([*words, "--config", str(config), "--fix", "tp=8", "--report", str(page)]) == 0
    text = page.read_text()
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text


def test_it_must_be_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--report", str(tmp_path / "a.pdf")]) == 2
    assert "the file must end in .html" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium here")
def test_a_browser_renders_it(written: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
    ]
    subprocess.run(
        [
            "chromium",
            *options,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1000,3000",
            f"--screenshot={picture}",
            written[0].as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    pixels = imread(picture)
    assert pixels.shape[:2] == (3000, 1000)
    dark = (pixels[..., :3].mean(axis=2) < 0.6).mean(axis=1)  # share of dark pixels in each row: text and pictures
    assert (dark[:2500].reshape(25, 100).max(axis=1) > 0.01).all(), "every part of the page holds something"
