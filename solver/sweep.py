"""Many problems: models x sequence lengths x machines x frameworks x numbers of GPUs, the best layout of each."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from profiler.errors import InputError
from solver.api import configured_batch
from solver.formats.config_file import CONFIG_ENDINGS
from solver.options.arguments import DEFAULT_TOKENS
from solver.options.axes import parse_fixed
from solver.options.batch import rounded_batch
from solver.options.inputs import Inputs, load_inputs
from solver.options.journal import inputs_of, new_inputs, read_journal
from solver.options.machines import machine_options
from solver.report.describe import describe
from solver.report.explain import explain
from solver.report.output import layout_dict
from solver.search.laid_out import search_with_strings
from solver.spec.strategy import AXES


@dataclass(frozen=True)
class Point:
    """One problem of a sweep.

    machine: a profile, or a cluster (a name or a file). framework: None for the model's own. global_batch_size: tokens; None
    for the batch that a search of the model's file has.
    """

    model: str
    seq_len: int | None
    machine: str
    framework: str | None
    world_size: int
    global_batch_size: int | None


@dataclass(frozen=True)
class Options:
    """What all problems of a sweep share: the options of a search by the same names."""

    set: str | None = None
    fix: str | None = None
    memory_limit_gib: float | None = None
    approximate: bool = False


Row = dict[str, Any]
#: Columns of a problem whose search found a layout; where none is, ``reason`` says why.
_FOUND = (
    "tgs",
    "step_s",
    "interval_low_s",
    "interval_high_s",
    "mfu",
    "peak_memory_bytes",
    "memory_bound_bytes",
    "verdict",
    "kernels",
    "layouts_priced",
    "layout",
    *AXES,
)
COLUMNS = (*(field.name for field in fields(Point)), *_FOUND, "reason")


def points(**axes: Sequence[Any]) -> list[Point]:
    """Return every combination of the values of Point's fields, the last axis varying fastest."""
    names = [field.name for field in fields(Point)]
    return [Point(**dict(zip(names, values, strict=True))) for values in itertools.product(*(axes[name] for name in names))]


def price(point: Point, options: Options) -> Row:
    """Return the row of one problem. What makes it impossible is its ``reason``; what no problem can have raises InputError."""
    row: Row = dict.fromkeys(COLUMNS) | asdict(point)
    try:
        inputs = load_inputs(_arguments(point, options), of_sweep=True)
        problem = inputs.problem
        row |= {"seq_len": problem.run.seq_len, "framework": problem.run.framework}
        sequences = _sequences(point, inputs)
        row |= {"global_batch_size": sequences * problem.run.seq_len}
        _, result = search_with_strings(problem, sequences, 1, fixed=parse_fixed(options.fix or ""))
    except InputError as error:
        return row | {"reason": str(error)}
    best, why = result.best, explain(result.best, 0)
    low, high = why.interval
    layout = layout_dict(best, 0)
    return row | {
        "tgs": float(best.tgs[0]),
        "step_s": why.seconds,
        "interval_low_s": low,
        "interval_high_s": high,
        "mfu": float(best.mfu[0]),
        "peak_memory_bytes": float(best.memory.device[0]),
        "memory_bound_bytes": float(best.memory.bound[0]),
        "verdict": best.verdict(0),
        "kernels": problem.cost.origin,
        "layouts_priced": result.layouts_estimated,
        "layout": describe(best, 0),
        **{name: value for name, value in layout.items() if name in _FOUND},
    }


def _sequences(point: Point, inputs: Inputs) -> int:
    """Return the sequences of a problem's global batch. Raises InputError where its tokens are no whole number of them."""
    if point.global_batch_size is None and (own := configured_batch(inputs.problem, inputs.config)) is not None:
        return own
    run = inputs.problem.run
    if point.global_batch_size is None:  # the default, rounded as that of a search
        return rounded_batch(DEFAULT_TOKENS, run.seq_len, True, run.world_size)[0]
    sequences, rest = divmod(point.global_batch_size, run.seq_len)
    if rest:
        raise InputError(f"{point.global_batch_size} tokens are not a whole number of sequences of {run.seq_len}")
    return sequences


def _arguments(point: Point, options: Options) -> argparse.Namespace:
    """Return the options of a search as the command line has them."""
    is_file = Path(point.model).suffix in CONFIG_ENDINGS
    return argparse.Namespace(
        config=Path(point.model) if is_file else None,
        model_size=None if is_file else point.model,
        **machine_options(point.machine),
        pre_profiling_data_path=None,
        framework=point.framework,
        seq_len=point.seq_len,
        world_size=point.world_size,
        env=None,
        vocab_size=None,
        set=options.set,
        memory_limit_gib=options.memory_limit_gib,
        approximate=options.approximate,
    )


def sweep(
    asked: Sequence[Point],
    options: Options,
    journal: Path,
    *,
    jobs: int = 1,
    scheduler: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Return the rows of all problems, in their order whatever was finished first.

    Each row is appended to ``journal`` as soon as it is known, and what the journal holds is not priced again. jobs: processes.
    scheduler: the address of a Dask scheduler whose workers do the work instead. Raises InputError for a journal of other
    options or inputs, and for a scheduler that does not answer.
    """
    inputs = inputs_of(dict.fromkeys(point.model for point in asked), dict.fromkeys(point.machine for point in asked))
    lines = read_journal(journal, asdict(options), inputs)
    try:
        done: dict[Point, Row] = {Point(**line["point"]): line["row"] for line in lines if "point" in line}
    except TypeError as error:
        raise InputError(f"{journal} is no unfinished sweep ({error}); delete it or name another output") from None
    left = [point for point in dict.fromkeys(asked) if point not in done]
    client = _client(scheduler) if scheduler else None
    with _opened(journal) as file:
        rows = _by_dask(left, options, client) if client else _by_joblib(left, options, jobs)
        if not lines:
            _append(file, {"options": asdict(options), "inputs": inputs})
        elif further := new_inputs(lines, inputs):
            _append(file, {"inputs": further})
        for number, (point, row) in enumerate(rows, len(asked) - len(left) + 1):
            done[point] = row
            _append(file, {"point": asdict(point), "row": row})
            if progress:
                progress(number, len(asked))
    return [done[point] for point in asked]


@contextmanager
def _opened(journal: Path) -> Iterator[TextIO]:
    """Yield the journal, to append to. Raises InputError where it cannot be written."""
    try:
        journal.parent.mkdir(parents=True, exist_ok=True)
        file = journal.open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{journal}: cannot write there: {error.strerror}") from None
    with file:
        yield file


def _append(file: TextIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _priced(point: Point, options: Options) -> tuple[Point, Row]:
    return point, price(point, options)


def _by_joblib(left: Iterable[Point], options: Options, jobs: int) -> Iterator[tuple[Point, Row]]:
    if jobs == 1:
        return (_priced(point, options) for point in left)
    from joblib import Parallel, delayed  # one process does not need it

    rows: Iterator[tuple[Point, Row]] = Parallel(n_jobs=jobs, return_as="generator_unordered")(
        delayed(_priced)(point, options) for point in left
    )
    return rows


def _client(scheduler: str) -> Any:
    """Return a client of a Dask cluster. Raises InputError where there is none."""
    try:
        from distributed import Client
    except ImportError:
        raise InputError("--scheduler needs the package distributed: pip install 'foretrain[cluster]'") from None
    try:
        return Client(scheduler, timeout=10)
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask scheduler answers at {scheduler}: {error}") from None


def _by_dask(left: Sequence[Point], options: Options, client: Any) -> Iterator[tuple[Point, Row]]:
    """Yield rows from the workers of a Dask cluster, on which this program must be installed too."""
    from distributed import as_completed

    with client:
        futures = client.map(_priced, left, options=options, pure=False)
        for _, found in as_completed(futures, with_results=True):
            yield found
