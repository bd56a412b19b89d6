"""``python -m predictor.accuracy``: errors of the fits of a profile on measurements that they have not seen.

Every score is of a new fit without the measurements that it predicts. The table also lists the error of the simplest predictor
on the same split: the rate interpolated over total FLOPs (bytes, for communication) only. The pictures show the fits to all
measurements, as they are used.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from predictor.accuracy import pictures_comm, pictures_kernels
from predictor.accuracy.crossval import (
    LEAST_ROWS,
    caveat,
    flash_attn_scores,
    formats,
    linear_rows,
    linear_scores,
    memory_bound_scores,
    quantised_linear_rows,
    quantised_linear_scores,
)
from predictor.accuracy.crossval_comm import LEAST_POINTS, collective_scores, network_scores
from predictor.accuracy.crossval_exchange import exchange_scores
from predictor.accuracy.left_out_devices import CHIPS, device_scores
from predictor.accuracy.pictures_exchange import draw_exchange
from predictor.accuracy.score import Score
from predictor.fitted import cost_model
from predictor.kernels.attn_rows import main_rows
from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError
from profiler.files import write_text
from profiler.profile.profile import COLLECTIVES, Profile
from profiler.profile.profiles import PROF_DATA, find_profile, shipped_profiles

ALL = "all"
_TESTS: Mapping[str, Callable[[Profile], list[Score]]] = {
    "linear": linear_scores,
    "linear fp8": quantised_linear_scores,
    "flash_attn": flash_attn_scores,
    "memory_bound": memory_bound_scores,
    "collectives": collective_scores,
    "expert_exchange": exchange_scores,
}
_SOME_PROFILES: Mapping[str, Callable[[Profile], Sized]] = {  # ops that most profiles have no rows of
    "linear fp8": quantised_linear_rows,
    "expert_exchange": lambda profile: profile.table("expert_exchange"),
}
_HEAD = (
    "op",
    "held out",
    "split",
    "measurements",
    "MAPE",
    "90th pct",
    "bias",
    "in 90% interval",
    "by FLOPs or bytes only",
)


@dataclass(frozen=True)
class Accuracy:
    """Held-out scores of one profile. missing: op -> a sentence that states why it has no score."""

    label: str
    profile: Profile
    scores: Sequence[Score]
    missing: Mapping[str, str]
    pictures: Sequence[Path] = ()


def chosen_profiles(names: Sequence[str]) -> dict[str, Profile]:
    """Label -> profile, for ``names``: shipped names or paths; "all" for every shipped one.

    Without names: the profile that predictions use. A label is the file's name without its ending. Raises InputError where two
    files have the same label.
    """
    if not names:
        profile, _ = find_profile()
        return {profile.name: profile}
    profiles: dict[str, Profile] = {}
    asked = [name for given in names for name in (shipped_profiles() if given == ALL else [given])]
    for name in dict.fromkeys(asked):
        path = Path(name) if name.endswith(".pt") or "/" in name else None
        label = path.stem if path else name
        if label in profiles:
            raise InputError(f"two profiles are called {label}; ask for them one at a time")
        profiles[label] = find_profile(None if path else name, path)[0]
    return profiles


def measure(label: str, profile: Profile, step: Callable[[str], None] = lambda said: None) -> Accuracy:
    """Fit and test every model of ``profile``; ``step`` is called with the name of each op before its test."""
    scores: list[Score] = []
    missing = {}
    for op, test in _TESTS.items():
        step(op)
        found = test(profile)
        scores += found
        if not found and (op not in _SOME_PROFILES or len(_SOME_PROFILES[op](profile))):
            missing[op] = _too_few(profile, op)
    return Accuracy(label, profile, scores, missing)


def draw(accuracy: Accuracy, folder: Path, cache_dir: Path | None = None) -> list[Path]:
    """Write ``cal/*.jpg`` and ``comm/*.jpg`` of one profile under ``folder``; returns their paths."""
    model = cost_model(accuracy.profile, cache_dir=cache_dir)
    fits = {"linears": model.kernels.linears, "attention": model.kernels.attention, "memory": model.kernels.memory}
    try:
        kernels = pictures_kernels.draw(accuracy.profile, fits, folder / "cal", accuracy.scores)
        drawn = kernels + pictures_comm.draw(accuracy.profile, model.network.measured_collectives, folder)
        exchange = draw_exchange(
            accuracy.profile, model.network.exchanges, accuracy.scores, folder / "comm" / "expert_exchange.jpg"
        )
        return drawn + ([exchange] if exchange else [])
    except OSError as error:
        raise InputError(f"{folder}: cannot write pictures there: {error.strerror or error}") from None


def score_table(title: str, scores: Sequence[Score]) -> Table:
    """Scores as a rich table, one row each."""
    table = Table(title=title, title_justify="left")
    for name in _HEAD:
        table.add_column(name, justify="left" if name in _HEAD[:3] else "right")
    for i, s in enumerate(scores):
        numbers = (f"{s.mape:.1%}", f"{s.p90:.1%}", f"{s.bias:+.1%}", f"{s.coverage:.0%}")
        naive = f"{s.naive_mape:.1%}" if math.isfinite(s.naive_mape) else "-"
        after = scores[min(i + 1, len(scores) - 1)]
        ends = after.regime != s.regime or (after.op != s.op and after.split != s.split)
        table.add_row(s.op, s.regime, s.split, f"{s.rows:,}", *numbers, naive, end_section=ends)
    return table


def as_json(results: Sequence[Accuracy], networks: Sequence[Score]) -> str:
    """Every score as JSON text; fractions, not percent; null where there is no number."""
    profiles = {
        a.label: {
            "device": a.profile.device.name,
            "digest": a.profile.digest,
            "scores": [_plain(s) for s in a.scores],
            "notes": _notes(a),
            "not_scored": dict(a.missing),
            "pictures": [str(path) for path in a.pictures],
        }
        for a in results
    }
    content = {"profiles": profiles, "networks": [_plain(s) for s in networks]}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _plain(score: Score) -> dict[str, Any]:
    values = asdict(score).items()
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values}


def _too_few(profile: Profile, op: str) -> str:
    """A sentence that states why ``op`` has no score."""
    if op == "collectives":
        points = sum(len(profile.table(name)) for name in (*COLLECTIVES, "p2p"))
        return f"among {points} measurements no curve in one node has {LEAST_POINTS} sizes, too few to hold some of them out"
    if op == "expert_exchange":
        found = len(profile.table(op))
        return f"{found} measurements of dispatch and combine are too few to hold out a row size or a number of nodes"
    rows = {
        "linear": lambda: linear_rows(profile),
        "linear fp8": lambda: quantised_linear_rows(profile),
        "flash_attn": lambda: main_rows(profile.table("flash_attn")),
        "memory_bound": lambda: profile.table("memory_bound"),
    }[op]()
    if len(rows) >= LEAST_ROWS:
        return f"of its {len(rows)} measurements fewer than {LEAST_ROWS} can be held out while enough are left to fit"
    what = " ".join(word for word in (formats(rows), "" if op == "memory_bound" else "forward", "measurements") if word)
    return f"{len(rows)} {what} are too few: errors on fewer than {LEAST_ROWS} tell nothing"


def _notes(accuracy: Accuracy) -> dict[str, str]:
    """For GEMMs and attention, where they have scores: the number format, and what the scores cannot show."""
    tested = {"linear": linear_rows(accuracy.profile), "flash_attn": main_rows(accuracy.profile.table("flash_attn"))}
    scores = {op: [s for s in accuracy.scores if s.op == op] for op in tested}
    said = {op: (f"{formats(rows)} rows", caveat(len(rows), scores[op])) for op, rows in tested.items() if scores[op]}
    return {op: "; ".join(word for word in words if word) for op, words in said.items()}


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    p = ArgumentParser(
        prog="python -m predictor.accuracy",
        description="How far the fits of a profile are off on measurements that they have not seen.",
    )
    choices = f"{', '.join(shipped_profiles())}, {ALL} of them, or a file (default: the one predictions use)"
    p.add_argument("--profile", nargs="+", default=[], metavar="NAME|PATH", action="extend", help=choices)
    p.add_argument("--pics", type=Path, default=PROF_DATA / "pics", metavar="DIR", help="folder of the pictures")
    p.add_argument("--no-pictures", action="store_true", help="print the scores only")
    p.add_argument(
        "--network-logs",
        type=Path,
        metavar="DIR",
        help="folder of <device>_nccl.parquet files: test the fits between nodes too",
    )
    p.add_argument("--leave-device-out", action="store_true", help="predict each measured chip from the others instead")
    p.add_argument("--json", type=Path, metavar="OUT", help="write every score")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2 for input that cannot be used)."""
    args = parser().parse_args(arguments)
    try:
        _run(args, Console(width=None if sys.stdout.isatty() else 160, highlight=False))
    except InputError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(args: argparse.Namespace, console: Console) -> None:
    if args.leave_device_out:
        if args.profile or args.network_logs:
            raise InputError("--leave-device-out is of the shipped profiles; leave out --profile and --network-logs")
        scores = device_scores({name: find_profile(name)[0] for name in CHIPS}, PROF_DATA / ".cache")
        console.print(score_table("devices that were left out", scores))
        if args.json:
            write_text(args.json, json.dumps({"left_out_devices": [_plain(s) for s in scores]}, indent=1) + "\n")
        return
    profiles = chosen_profiles(args.profile)
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(profiles) * (len(_TESTS) + 1) + bool(args.network_logs))
        for label, profile in profiles.items():
            step = partial(_tell, bar, task, label)
            accuracy = measure(label, profile, step)
            if not args.no_pictures:
                step("pictures")
                folder = args.pics / label if len(profiles) > 1 else args.pics
                cache = PROF_DATA / ".cache" if label in shipped_profiles() else None  # other profiles are fitted only once
                accuracy = replace(accuracy, pictures=draw(accuracy, folder, cache))
            results.append(accuracy)
        networks = network_scores(args.network_logs) if args.network_logs else []
    for accuracy in results:
        _show(console, accuracy)
    if networks:
        console.print(score_table("between nodes", networks))
    if args.json:
        write_text(args.json, as_json(results, networks))


def _tell(bar: Progress, task: TaskID, label: str, what: str) -> None:
    bar.update(task, description=f"{label}: {what}", advance=1)


def _show(console: Console, accuracy: Accuracy) -> None:
    title = f"{accuracy.label}: {accuracy.profile.device.name}"
    if accuracy.scores:
        console.print(score_table(title, accuracy.scores))
    else:
        console.print(title)
    for op, note in _notes(accuracy).items():
        console.print(f"  {op}: {note}", soft_wrap=True)
    for op, why in accuracy.missing.items():
        console.print(f"  no held-out test of {op}: {why}", soft_wrap=True)
    if accuracy.pictures:
        console.print(f"  {len(accuracy.pictures)} pictures, of which {accuracy.pictures[0]}", soft_wrap=True)
    console.print()
