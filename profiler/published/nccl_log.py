"""Parser for the output of nccl-tests, of any version since 2.0.

A log holds one or more runs. Each starts with its parameters ("# nThread 1 nGpus 8 minBytes ..."), lists its devices
("#  Rank  0 Group  0 Pid 17 on node-a device  0 [0x1b] NVIDIA H100") and prints one line per message size:

    size  count  type  [redop]  [root]   time algbw busbw #wrong   time algbw busbw #wrong

The first time is with separate send and receive buffers (out-of-place), the second with one buffer (in-place). Early
versions have no redop, root or group, and have ``error`` instead of ``#wrong``; later ones start with the test's name.
Launchers add their own prefix to each line, and NCCL's own messages may stand between lines.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_LAUNCHER = re.compile(r"^(?:\s*(?:\([^()]*\)|\[\d+,\d+\]<std\w+>:|\d+:(?=\s)|>))*\s?")  # mpirun, srun --label, Ray, quotes
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_TEST = re.compile(r"\b([a-z_]+?)_perf(?:_mpi)?\b")
#: rccl-tests writes some of these words with a colon.
_PARAMETERS = re.compile(r"#\s*nThreads?:?\s+\d+\s+nGpus:?\s+\d+\s+minBytes")
_ITERATIONS = re.compile(r"(?<!warmup )(?<!agg )iters:\s*(\d{1,9})")
_RANK = re.compile(
    r"#\s*Rank\s+(?P<rank>\d{1,9})\s+(?:Group\s+(?P<group>-?\d{1,9})\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+"
    r"device\s+(?P<slot>\d+\s+\[[^\]]*\])\s*(?P<device>.*?)\s*$"
)
_END = re.compile(r"#\s*(?:Out of bounds values|Avg bus bandwidth)")
_LIBRARY = re.compile(r"nccl-library=(\d{1,9})")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(.*)$")


@dataclass(frozen=True)
class Line:
    """One message size.

    size: bytes as printed. count: elements as printed. out_of_place, in_place: times [s], NaN where not measured. wrong: number
    of wrong values (0 where not checked).
    """

    size: int
    count: int
    dtype: str
    out_of_place: float
    in_place: float
    wrong: int


_DIGITS = 15  #: of a size or a count; a longer number is a garbled line
_LONGEST_US = 1e9  #: a quarter of an hour; a longer time is a garbled line


@dataclass
class Run:
    """One run of one test.

    test: the word before ``_perf``, such as "all_reduce"; "" where the log does not state it. ranks: (host, device index and
    bus address) by (group, rank). devices: product names. version: of NCCL, "" where unknown. broken: number of lines that are
    cut off or garbled. ended: whether the summary that ends a run was printed.
    """

    test: str
    version: str
    iterations: int
    first_line: int
    ranks: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    lines: list[Line] = field(default_factory=list)
    broken: int = 0
    ended: bool = False


def parse(text: str) -> list[Run]:
    """Return all runs of a log, in order; [] where no run starts."""
    runs: list[Run] = []
    test = version = ""  # stated since the last run started, so they belong to the next run
    for number, raw in enumerate(text.splitlines(), 1):
        line = _TIMESTAMP.sub("", _LAUNCHER.sub("", raw))
        if _PARAMETERS.search(line):
            iterations = _ITERATIONS.search(line)
            runs.append(Run(test, version, int(iterations.group(1)) if iterations else 0, number))
            test = version = ""
        elif runs and _is_of_run(runs[-1], line):
            continue
        else:
            if "concluded" not in line and (named := _TEST.search(line)):
                test = named.group(1)
            version = _version(line) or version
    return runs


def _is_of_run(run: Run, line: str) -> bool:
    """Return whether ``line`` belongs to ``run``; if so, record it there."""
    if rank := _RANK.search(line):
        run.ranks[int(rank["group"] or 0), int(rank["rank"])] = rank["host"], rank["slot"]
        run.devices.add(rank["device"])
        return True
    if row := _ROW.match(line):
        sound = len(row[1]) <= _DIGITS and len(row[2]) <= _DIGITS
        found = _line(int(row[1]), int(row[2]), row[3], row[4].split()) if sound else None
        if found is None:
            run.broken += 1
        else:
            run.lines.append(found)
        return True
    if _END.search(line):
        run.ended = True
        return True
    if not run.lines and not run.version and (version := _version(line)):
        run.version = version
        return True
    return False


def _line(size: int, count: int, dtype: str, cells: list[str]) -> Line | None:
    """Parse a line from the cells after its type; None unless they are one or two measurements of 4 cells.

    A negative time is a root (-1), so the line was cut off.
    """
    if cells and re.fullmatch(r"[a-z]\w*", cells[0]):
        cells = cells[1:]  # redop
    if len(cells) in (5, 9):
        cells = cells[1:]  # root
    numbers = [_number(cell) for cell in cells]
    if len(cells) not in (4, 8) or None in numbers:
        return None
    known = [number if number is not None else math.nan for number in numbers]
    if known[0] < 0 or any(abs(us) > _LONGEST_US for us in known[::4]):
        return None
    wrong = sum(int(cell) for cell in cells[3::4] if cell.isdigit())  # the error of early versions (4e-07) counts as 0
    return Line(size, count, dtype, known[0] * 1e-6, known[4] * 1e-6 if len(cells) == 8 else math.nan, wrong)


def _number(cell: str) -> float | None:
    if cell == "N/A":
        return math.nan
    try:
        return float(cell)
    except ValueError:
        return None


def _version(line: str) -> str:
    """Return NCCL's version from "NCCL version 2.29.3+cuda13.1" or nccl-library=22903 (before 2.9: 2804 is 2.8.4), else ""."""
    if stated := _VERSION.search(line):
        return stated.group(1)
    if not (coded := _LIBRARY.search(line)):
        return ""
    code = int(coded.group(1))
    major = 10000 if code >= 10000 else 1000
    return f"{code // major}.{code % major // 100}.{code % 100}"
