"""Compare predictions with published runs: predict every case, write docs/accuracy.md, its pictures and README's table of them.

    python benchmarks/accuracy.py [--cases FILE.jsonl --output PAGE.md]

Models are fitted to kernels and collectives, not to these runs. With the fits of the shipped profiles cached it takes about
half a minute; the first time it takes as long again per profile.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy_pictures import draw_scatter
from accuracy_tables import (
    Note,
    Peer,
    device_table,
    factor_table,
    fits_table,
    memory_table,
    peer_table,
    skipped_list,
    time_rows,
    time_table,
    twin_table,
    weighed,
    worst_table,
)
from rich.console import Console

from profiler.errors import InputError
from profiler.files import write_text
from profiler.profile.profiles import known_profiles
from profiler.units import GIB
from solver.commands.validate import CostModels
from solver.formats.cases.reading import read_cases
from solver.report.validate import Prediction, predict_cases, timed

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "configs" / "cases"
SHIPPED = CASES / "published.jsonl"
#: Template of the page, with {names} where its tables go.
PAGE = Path(__file__).with_suffix(".md.in")
README = ROOT / "README.md"
#: How a row of README's table begins: the name of a group of the page, then what its runs are.
README_ROW = re.compile(r"^\| (?P<group>[\w ]+?)(?P<about>:[^|]*)? \| \d+ \| [\d.]+% \| [\d.]+% \| [\d.]+% \|$", re.MULTILINE)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises InputError that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None


def document(
    predictions: Sequence[Prediction], groups: Mapping[str, str], notes: Sequence[Note], peers: Sequence[Peer], stem: str
) -> str:
    """The whole page; its pictures are those of draw_pictures."""
    return PAGE.read_text(encoding="utf-8").format(
        cases=len(predictions),
        predicted=sum(not p.skipped for p in predictions),
        timed=len(timed(predictions)),
        stem=stem,
        time=time_table(predictions, groups),
        devices=device_table(predictions),
        twins=twin_table(predictions),
        memory=memory_table(predictions, groups),
        fits=fits_table(predictions),
        peers=peer_table(predictions, peers),
        factors=factor_table(predictions),
        worst=worst_table(predictions, notes),
        skipped=skipped_list(predictions),
    )


def with_figures(readme: str, predictions: Sequence[Prediction]) -> str:
    """README with the runs, median, 90th percentile and constant-MFU baseline of each group that its table names."""
    page = {row[0]: row for row in time_rows(predictions, {})}

    def row(found: re.Match[str]) -> str:
        _, _, runs, constant, median, p90, *_ = page[found["group"]]
        return f"| {found['group']}{found['about'] or ''} | {runs} | {median} | {p90} | {constant} |"

    return README_ROW.sub(row, readme)


def draw_pictures(predictions: Sequence[Prediction], folder: Path, stem: str) -> None:
    """Draw STEM_time.jpg and STEM_memory.jpg; a picture without points is not drawn."""
    with_memory = weighed(predictions)
    if timed(predictions):
        draw_scatter(
            timed(predictions), lambda p: (p.case.measured["step_s"], p.seconds), "step [s]", folder / f"{stem}_time.jpg"
        )
    if with_memory:
        draw_scatter(
            with_memory,
            lambda p: (p.case.measured["peak_memory_gib"], p.memory_bytes / GIB),
            "peak memory [GiB]",
            folder / f"{stem}_memory.jpg",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=SHIPPED, help="measured runs (default: the shipped ones)")
    page_of_shipped = ROOT / "docs" / "accuracy.md"
    parser.add_argument(
        "--output",
        type=Path,
        default=page_of_shipped,
        help="the page; pictures go to pics beside it (the default one brings README's table up to date)",
    )
    args = parser.parse_args(arguments)
    if args.cases != SHIPPED and args.output == page_of_shipped:
        print(f"error: {args.output} is of the shipped runs; give the page of {args.cases} with --output", file=sys.stderr)
        return 2
    start = time.perf_counter()
    try:
        groups, notes, peers = (read_json(CASES / f"{name}.json") for name in ("groups", "notes", "peers"))
        cases = read_cases(args.cases)
        with Console(stderr=True).status(f"predicting {len(cases):,} runs"):
            predictions = predict_cases(cases, CostModels(known_profiles()))
        page = document(predictions, groups, [Note(**n) for n in notes], [Peer(**p) for p in peers], args.output.stem)
        draw_pictures(predictions, args.output.parent / "pics", args.output.stem)
        write_text(args.output, page)
        if args.output == page_of_shipped:
            write_text(README, with_figures(README.read_text(encoding="utf-8"), predictions))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output} and its pictures: {len(predictions):,} runs in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
