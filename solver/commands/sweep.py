"""The command ``foretrain sweep``: the best layout of every combination of models, sequences, machines and numbers of GPUs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from profiler.errors import InputError
from profiler.files import locked, replacing, write_text
from profiler.profile.profiles import DEFAULT_PROFILE
from solver.formats.config_file import CONFIG_ENDINGS, find_model
from solver.options.arguments import DEFAULT_TOKENS, StoreOnce, add_approximate_argument, check_picture
from solver.options.axes import parse_constants, parse_fixed
from solver.options.machines import MACHINES, check_machine
from solver.options.terminal_run import progress_bar
from solver.report.output import csv_text
from solver.report.picture_sweep import check_panels, sweep_figure
from solver.report.pictures import save_figure
from solver.report.words import gibibytes, seconds, token_rate
from solver.spec.bounds import whole_number
from solver.spec.frameworks import known_framework
from solver.spec.run import DEFAULT_SEQ_LEN
from solver.spec.strategy import Strategy
from solver.step.memory import FITS
from solver.sweep import COLUMNS, Options, Point, Row, points, sweep

_MOST = 100_000  #: problems
_SHOWN = 40  #: rows in the terminal


def add_sweep_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of a sweep."""
    p.register("action", None, StoreOnce)
    p.add_argument(
        "output", type=Path, metavar="OUT", help="the table: .csv or .parquet; unfinished rows are kept in OUT.partial"
    )
    p.add_argument("--models", required=True, metavar="MODEL,...", help="names as of --model_size, or files as of --config")
    p.add_argument("--world_sizes", required=True, metavar="GPUS,...", help="numbers of GPUs, as in 64,128,256")
    p.add_argument("--machines", default=DEFAULT_PROFILE, metavar="NAME,...", help=f"{MACHINES} (default {DEFAULT_PROFILE})")
    p.add_argument("--seq_lens", metavar="TOKENS,...", help="sequences (default: each model's own)")
    p.add_argument("--frameworks", metavar="NAME,...", help="frameworks or their releases (default: each model's own)")
    p.add_argument(
        "--global_batch_sizes",
        metavar="TOKENS,...",
        help="tokens per step (default: as a search of "
        f"each model: its file's own batch, where it states one, else {DEFAULT_TOKENS})",
    )
    p.add_argument("--set", metavar="KEY=VALUE,...", help="constants of all runs, as in precision=fp8")
    p.add_argument("--fix", metavar="AXIS=VALUE,...", help="search only layouts with these")
    p.add_argument("--memory_limit_gib", type=float, help="memory limit per GPU (default: the cluster's)")
    add_approximate_argument(p)
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    p.add_argument("--scheduler", metavar="ADDRESS", help="price on the workers of a Dask cluster, as tcp://host:8786")
    p.add_argument("--plot", type=Path, metavar="OUT", help="draw tokens per GPU and second against GPUs")


def sweep_all(args: argparse.Namespace, console: Console) -> None:
    """Price every combination, write the table, and print its best rows; a killed sweep goes on where it was."""
    asked, options = _asked(args), _options(args)
    if args.output.suffix == ".parquet":
        _pandas()
    journal = args.output.with_name(args.output.name + ".partial")
    with locked(journal):
        _sweep(args, asked, options, journal, console)


def _sweep(args: argparse.Namespace, asked: list[Point], options: Options, journal: Path, console: Console) -> None:
    try:
        with progress_bar("pricing problems") as report:
            rows = sweep(asked, options, journal, jobs=args.jobs, scheduler=args.scheduler, progress=report)
    except KeyboardInterrupt:
        console.print(f"what is priced is in {journal}; the same command goes on from there", markup=False)
        raise
    console.print(_table(rows))
    failed = sum(row["reason"] is not None for row in rows)
    if failed == len(rows):
        journal.unlink(missing_ok=True)
        raise InputError(f"no problem has a layout, so that {args.output} is left as it is: {rows[0]['reason']}")
    _write(args.output, rows)
    journal.unlink(missing_ok=True)
    console.print(f"wrote {args.output}: {len(rows)} problem{'s' * (len(rows) != 1)}, {failed} without a layout", markup=False)
    if args.plot:
        save_figure(sweep_figure(rows), args.plot)
        console.print(f"wrote {args.plot}", markup=False)


def _asked(args: argparse.Namespace) -> list[Point]:
    """Return the problems. Raises InputError for names that nothing has and numbers that cannot be."""
    models, machines = _names("models", args.models), _names("machines", args.machines)
    for model in models:
        if Path(model).suffix not in CONFIG_ENDINGS:
            find_model(model)
        elif not Path(model).is_file():
            raise InputError(f"--models {model}: no such file")
    for machine in machines:
        check_machine(machine)
    frameworks = _names("frameworks", args.frameworks) if args.frameworks else [None]
    for framework in filter(None, frameworks):
        known_framework(framework)
    found = points(
        model=models,
        seq_len=_numbers("seq_lens", args.seq_lens, "seq_len"),
        machine=machines,
        framework=frameworks,
        world_size=_numbers("world_sizes", args.world_sizes, "world_size"),
        global_batch_size=_numbers("global_batch_sizes", args.global_batch_sizes, "global_batch_size"),
    )
    if len(found) > _MOST:
        raise InputError(f"that is {len(found):,} problems; at most {_MOST:,} are swept at once")
    if args.plot:
        check_panels(len({(point.model, point.seq_len, point.global_batch_size) for point in found}))
    return found


def _options(args: argparse.Namespace) -> Options:
    """Return what all problems share. Raises InputError for what cannot be used."""
    if args.output.suffix not in (".csv", ".parquet"):
        raise InputError(f"{args.output}: a table is a .csv or a .parquet file")
    check_picture("plot", args.plot)
    parse_fixed(args.fix or "")
    Strategy(world_size=1, seq_len=DEFAULT_SEQ_LEN, **parse_constants(args.set or ""))  # refuses a value that none can be
    return Options(args.set, args.fix, args.memory_limit_gib, args.approximate)


def _names(option: str, text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names or len(set(names)) < len(names):
        raise InputError(f"--{option} {text}: give names, each once, with commas between them")
    return names


def _numbers(option: str, text: str | None, what: str) -> list[int | None]:
    if text is None:
        return [None]
    words = _names(option, text)
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise InputError(f"--{option} {text}: {wrong} is no positive whole number")
    return [whole_number(what, int(word)) for word in words]


def _write(path: Path, rows: Sequence[Row]) -> None:
    if path.suffix == ".parquet":
        with replacing(path) as file:
            _pandas().DataFrame(rows, columns=list(COLUMNS)).to_parquet(file, index=False)
        return
    write_text(path, csv_text([{name: row[name] for name in COLUMNS} for row in rows]))


def _pandas() -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401  # pandas writes parquet with it
    except ImportError:
        raise InputError("a .parquet table needs pandas and pyarrow: pip install 'foretrain[import]', or write .csv") from None
    return pandas


def _numbers_of(row: Row) -> tuple[str, ...]:
    """Return speed and memory of a layout; ? stands where it may not fit."""
    memory = gibibytes(row["peak_memory_bytes"], row["verdict"] == FITS)
    return token_rate(row["tgs"]), seconds(row["step_s"]), f"{row['mfu']:.1%}", memory


def _table(rows: Sequence[Row]) -> Table:
    """Return the fastest rows per GPU of each model and sequence."""
    ordered = sorted(rows, key=lambda row: (row["model"], row["seq_len"] or 0, -(row["tgs"] or 0.0)))
    table = Table(title="Best layouts" + (f", the first {_SHOWN}" if len(rows) > _SHOWN else ""), title_justify="left")
    several = len({row["framework"] for row in rows}) > 1
    for name in ("model", "sequence", "machine", *(["framework"] if several else []), "GPUs"):
        table.add_column(name, no_wrap=True)
    for name in ("TGS", "step", "MFU", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout, or why there is none")
    for row in ordered[:_SHOWN]:
        numbers = _numbers_of(row) if row["tgs"] is not None else ("",) * 4
        sequence = "" if row["seq_len"] is None else f"{row['seq_len']:,}"
        table.add_row(
            row["model"],
            sequence,
            row["machine"],
            *([str(row["framework"])] if several else []),
            f"{row['world_size']:,}",
            *numbers,
            row["layout"] or row["reason"],
        )
    return table
