"""AICB's ``Workload`` CSV: what rank 0 of a training job computes and sends, an item a line in the order of execution.

Mock workloads state sizes only, aiob-filled ones nanoseconds of compute, logs of physical runs milliseconds and bandwidths.
Source of the format: AICB's log.py (Apache-2.0), as read, and files that AICB wrote.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profiler.errors import InputError, closest, shown
from profiler.files import write_text
from profiler.text_file import read_text
from solver.simai.workload_text import lines_of

COMPUTATION, EPOCH_END = "computation", "epoch_end"
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "isend",
    "irecv",
    "barrier",
    COMPUTATION,
    EPOCH_END,
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)
GROUPS = (
    "tp_group",
    "dp_group",
    "pp_group",
    "ep_group",
    "ep_dp_group",
    "ep_tp_group",
    "embedding_group",
    "all",
    "all_nodes",
)
_KIND, _GROUP = "CommType.", "CommGroup."
COLUMNS = (
    "comm_type",
    "comm_group",
    "comm_group_size",
    "msg_size",
    "stage",
    "dst",
    "src",
    "additional",
    "_elapsed_time",
    "algbw",
    "busbw",
    "count",
)
#: Columns without which a file is no workload; old logs lack the size of the group, others what was not measured.
_NEEDED = ("comm_type", "comm_group", "msg_size", "stage")
#: A GEMM of two operands as AICB prints it, without commas: ((tokens batch k) (k n)).
_SHAPES = re.compile(r"\(((?:\([0-9][0-9 ]*\) ?)+)\)")

WHAT = "an AICB Workload CSV"
_MOST_BYTES = 1 << 29

Number = int | float


@dataclass(frozen=True)
class Gemm:
    """The shapes of the operands of a computation."""

    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"({' '.join(f'({chr(32).join(map(str, shape))})' for shape in self.shapes)})"


@dataclass(frozen=True)
class Item:
    """One line. size: bytes of the whole buffer, or the shapes of a computation; elapsed: milliseconds of a physical run, or
    nanoseconds of a computation that aiob filled; algbw, busbw: "GB/s" of the log. None: as the file has it."""

    kind: str
    group: str | None
    size: Number | Gemm | None
    stage: str
    group_size: Number | None = None
    dst: str = "None"
    src: str = "None"
    additional: str = ""
    elapsed: Number | None = None
    algbw: Number | None = None
    busbw: Number | None = None
    count: Number | None = 1


@dataclass(frozen=True)
class CsvWorkload:
    """A whole file, or one section of it.

    columns: as in its header line. ranks: the bracketed line before it, as in ``[rank0 ~ rank127]``. headed: whether a header
    line of its own follows the bracketed one. others: further sections, of the ranks that their bracketed lines name.
    """

    items: tuple[Item, ...]
    columns: tuple[str, ...] = COLUMNS
    ranks: str | None = None
    headed: bool = True
    others: tuple[CsvWorkload, ...] = ()


def read_workload_csv(path: Path) -> CsvWorkload:
    """Read a file. Raises InputError, with the line's number, for what no AICB program writes."""
    return parse_workload_csv(read_text(path, WHAT, _MOST_BYTES), str(path))


def parse_workload_csv(text: str, where: str) -> CsvWorkload:
    """Read the text of a file. where: its name in messages."""
    lines = lines_of(text, where, WHAT)
    starts = [0, *(i for i, line in enumerate(lines) if i and line.startswith("["))]
    sections: list[CsvWorkload] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        sections.append(_section(lines[start:end], start + 1, where, sections[0].columns if sections else None))
    return replace(sections[0], others=tuple(sections[1:]))


def _section(lines: Sequence[str], number: int, where: str, columns: tuple[str, ...] | None) -> CsvWorkload:
    """Read one section. number: of its first line in the file. columns: of the first section, where there is one before."""
    ranks = lines[0] if lines and lines[0].startswith("[") else None
    first = 0 if ranks is None else 1
    header = lines[first] if len(lines) > first else ""
    headed = columns is None or header.startswith("comm_type,")
    if columns is None or headed:
        columns = _columns(header, f"{where}, line {number + first}")
    begin = first + headed
    rows = enumerate(csv.reader(lines[begin:]), number + begin)
    try:
        items = tuple(_item(columns, cells, f"{where}, line {line}") for line, cells in rows if cells)
    except csv.Error as error:
        raise InputError(f"{where}: is no CSV after line {number + begin - 1} ({error}); it must be {WHAT}") from None
    return CsvWorkload(items, columns, ranks, headed)


def _columns(line: str, where: str) -> tuple[str, ...]:
    columns = tuple(line.split(","))
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise InputError(f"{where}: has no column {missing[0]}; a Workload CSV starts with {','.join(COLUMNS)}")
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or len(set(columns)) < len(columns):
        wrong = f"an unknown column {shown(unknown[0])}" if unknown else "a column twice"
        raise InputError(f"{where}: has {wrong}; known are {','.join(COLUMNS)}")
    return columns


def _item(columns: Sequence[str], cells: Sequence[str], where: str) -> Item:
    if len(cells) != len(columns):
        raise InputError(f"{where}: has {len(cells)} cells; the header line has {len(columns)}")
    cell = dict(zip(columns, cells, strict=True))
    kind = _named(cell["comm_type"], _KIND, KINDS, f"{where}: comm_type")
    group = None if cell["comm_group"] in ("None", "") else _named(cell["comm_group"], _GROUP, GROUPS, f"{where}: comm_group")
    if group is None and kind not in (COMPUTATION, EPOCH_END):
        raise InputError(f"{where}: comm_group is None; {kind} needs a group, as in CommGroup.dp_group")

    def number(column: str) -> Number | None:
        return _number(cell.get(column, "None"), f"{where}: {column}")

    return Item(
        kind,
        group,
        _size(cell["msg_size"], f"{where}: msg_size"),
        cell["stage"],
        number("comm_group_size"),
        cell.get("dst", "None"),
        cell.get("src", "None"),
        cell.get("additional", ""),
        number("_elapsed_time"),
        number("algbw"),
        number("busbw"),
        number("count"),
    )


def _named(text: str, prefix: str, known: Sequence[str], where: str) -> str:
    name = text.removeprefix(prefix)
    if name not in known:
        raise InputError(f"{where} is {shown(text)}{closest(name, known)}; it must be {prefix} and one of {', '.join(known)}")
    return name


_DIGITS = 18  #: of a size, below 2^63


def _size(text: str, where: str) -> Number | Gemm | None:
    found = _SHAPES.fullmatch(text.replace(",", ""))
    if found:
        shapes = [shape.split() for shape in re.findall(r"\(([0-9 ]*)\)", found[1])]
        if any(len(size) > _DIGITS for shape in shapes for size in shape):
            raise InputError(f"{where} is {shown(text)}; a size of a GEMM has at most {_DIGITS} digits")
        return Gemm(tuple(tuple(map(int, shape)) for shape in shapes))
    return _number(text, where)


def _number(text: str, where: str) -> Number | None:
    if text in ("None", ""):
        return None
    try:
        value: Number = int(text) if text.isdecimal() else float(text)
        if math.isfinite(value) and 0 <= value < 1e30:
            return value
    except (ValueError, OverflowError):
        pass
    raise InputError(f"{where} is {shown(text)}; it must be a number that is not negative, or None")


def workload_csv(workload: CsvWorkload) -> str:
    """Return a workload as AICB writes it, in the columns that it was read with."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for section in (workload, *workload.others):
        if section.ranks is not None:
            out.write(f"{section.ranks}\n")
        if section.headed:
            writer.writerow(section.columns)
        for item in section.items:
            cells = dict(zip(COLUMNS, _cells(item), strict=True))
            writer.writerow([cells[name] for name in section.columns])
    return out.getvalue()


def _cells(item: Item) -> Iterator[str]:
    yield f"{_KIND}{item.kind}"
    yield "None" if item.group is None else f"{_GROUP}{item.group}"
    yield from (str(item.group_size), str(item.size), item.stage, item.dst, item.src, item.additional)
    yield from (str(item.elapsed), str(item.algbw), str(item.busbw), str(item.count))


def write_workload_csv(path: Path, workload: CsvWorkload) -> None:
    """Write a workload, atomically."""
    write_text(path, workload_csv(workload))
