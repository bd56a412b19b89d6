"""Read one log of nccl-tests into tables by op.

nccl-tests prints as ``size`` the larger of a rank's send and receive buffers (its doc/PERFORMANCE.md): the buffer of
all_reduce, broadcast and sendrecv, the output of all_gather, the input of reduce_scatter, the send buffer of alltoall. The
profile uses the same conventions, so sizes are used unchanged. ``count`` is the number of elements of one rank's share,
so size / (count * bytes of the type) of the last three is the number of ranks; this is checked. Times are those of separate
buffers (out-of-place), as training frameworks call collectives; where a log has only in-place times, those are used and
``env`` states it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import InputError
from profiler.profile.profile import TABLE_COLUMNS, Table
from profiler.published.nccl_log import Line, Run, parse

#: Profile table by test name.
OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all2all",
    "broadcast": "broadcast",
    "sendrecv": "p2p",
}
_OTHER_TESTS = ("reduce", "gather", "scatter", "hypercube", "alltoallv")  # real tests for which a profile has no table
#: Ops in which a rank sends or receives only its share of the buffer, not all of it.
SPLIT_BUFFER = ("all_gather", "reduce_scatter", "all2all")
_TYPE_BYTES = {
    "int8": 1,
    "uint8": 1,
    "char": 1,
    "f8e4m3": 1,
    "f8e5m2": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "half": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "int": 4,
    "float": 4,
    "int64": 8,
    "uint64": 8,
    "double": 8,
}
DTYPES = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}


@dataclass(frozen=True)
class Log:
    """Content of one log.

    tables: columns by op, one row per message size. devices: names of the GPUs. notes: what was left out, in words.
    """

    name: str
    tables: dict[str, Table]
    devices: frozenset[str]
    notes: tuple[str, ...]


def read_log(path: str | Path, test: str | None = None) -> Log:
    """Read one log.

    test: the test that printed the log ("alltoall"), where the log does not state it; without ``test`` the file name decides.
    Raises InputError if the file is not a log, its test is unknown, or its ranks and nodes cannot be determined.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot read the log: {error.strerror}") from None
    runs = parse(text)
    if not runs:
        raise InputError(f"{path}: no output of nccl-tests, which starts with '# nThread 1 nGpus 8 minBytes ...'")
    notes: list[str] = []
    parts: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        name = run.test or test or _test_in(path.stem)
        if name in _OTHER_TESTS:
            notes.append(f"{path.name}: {name}_perf left out: a profile has no table of it")
            continue
        if name not in OPS:
            raise InputError(
                f"{path}:{run.first_line}: the log does not say which test it is of; name the file after one "
                f"({', '.join(f'{known}_perf' for known in OPS)}) or state it"
            )
        columns = _columns(run, OPS[name], path, notes)
        if len(columns["bytes"]):
            parts.setdefault(OPS[name], []).append(columns)
    tables = {op: joined(op, [Table.from_columns(op, part) for part in columns]) for op, columns in parts.items()}
    return Log(path.name, tables, frozenset().union(*(run.devices for run in runs)), tuple(notes))


def _test_in(stem: str) -> str:
    """Return the longest test name that a file name contains ("reduce_scatter" also contains "reduce"); "" if none."""
    plain = re.sub(r"[-\s.]+", "_", stem.lower()).replace("all_to_all", "alltoall").replace("send_recv", "sendrecv")
    plain = (
        plain.replace("allreduce", "all_reduce").replace("allgather", "all_gather").replace("reducescatter", "reduce_scatter")
    )
    return max((test for test in (*OPS, *_OTHER_TESTS) if test in plain), key=len, default="")


def _columns(run: Run, op: str, path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the columns of one run's usable lines; append to ``notes`` what is unusable."""
    where = f"{path}:{run.first_line}"
    intra, inter, groups = _shape(run, where)
    sound = [line for line in run.lines if line.size > 0 and not line.wrong]
    good = [line for line in sound if line.dtype in _TYPE_BYTES and _seconds(line) > 0]
    for line in good:
        _check_count(line, op, intra * inter, where)
    wrong = sum(line.wrong > 0 for line in run.lines)
    if wrong:
        notes.append(f"{path.name}: {wrong} rows of {op} left out: their results were wrong")
    unknown = sorted({line.dtype for line in sound} - set(_TYPE_BYTES))
    notes.extend(f"{path.name}: rows of {op} left out: their type {name!r} is not known" for name in unknown)
    untimed = sum(line.dtype in _TYPE_BYTES for line in sound) - len(good)
    if untimed:
        notes.append(f"{path.name}: {untimed} rows of {op} left out: they state no time")
    if run.broken:
        notes.append(f"{path.name}: {run.broken} lines of {op} left out: cut off or torn apart")
    if not good:
        notes.append(f"{path.name}: a run of {op} holds no measured size")
    if not run.ended:
        notes.append(f"{path.name}: a run of {op} broke off: it has no summary at its end")
    env = f"nccl-tests, NCCL {run.version}" if run.version else "nccl-tests"
    env += f", {groups} groups at once" if groups > 1 else ""
    return {
        "intra": intra,
        "inter": inter,
        "bytes": [line.size for line in good],
        "seconds": [_seconds(line) for line in good],
        "repeats": run.iterations,
        "dtype": [DTYPES.get(line.dtype, line.dtype) for line in good],
        "env": [env if line.out_of_place > 0 else f"{env}, in-place" for line in good],
        "source": f"nccl-tests log {path.name}",
    }


def _seconds(line: Line) -> float:
    """Return the out-of-place time, or the in-place time where there is none."""
    return line.out_of_place if line.out_of_place > 0 else line.in_place


def _shape(run: Run, where: str) -> tuple[int, int, int]:
    """Return (ranks per node of a group, nodes of a group, number of groups), from the list of devices."""
    if not run.ranks:
        raise InputError(
            f"{where}: the list of devices ('# Rank 0 Group 0 Pid ... on HOST ...') is missing, so ranks are unknown"
        )
    groups = sorted({group for group, _ in run.ranks})
    named, highest = len(run.ranks), max(rank for _, rank in run.ranks) + 1
    if named not in (highest, highest * len(groups)):
        raise InputError(f"{where}: the list of devices names {named} ranks but counts to {highest}; give the whole log")
    place, times = Counter(run.ranks.values()).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"{where}: {times} ranks name device {place[1]} of host {place[0]}, so they share a GPU or nodes share a name"
        )
    shapes = set()
    for group in groups:
        per_host = Counter(host for (of, _), (host, _) in run.ranks.items() if of == group)
        if len(set(per_host.values())) > 1:
            raise InputError(f"{where}: a group has unequal numbers of ranks on its nodes ({dict(per_host)})")
        shapes.add((next(iter(per_host.values())), len(per_host)))
    if len(shapes) > 1:
        raise InputError(f"{where}: the groups of this run lie on nodes in different ways {sorted(shapes)}")
    return *shapes.pop(), len(groups)


def _check_count(line: Line, op: str, ranks: int, where: str) -> None:
    width = _TYPE_BYTES[line.dtype]
    share = ranks if op in SPLIT_BUFFER else 1
    if line.size != line.count * width * share:
        raise InputError(
            f"{where}: a row of {op} has {line.size} bytes and {line.count} elements of {line.dtype}, which does not fit the "
            f"{ranks} ranks of its list of devices"
        )


def least_sent(op: Any, ranks: Any) -> np.ndarray:
    """Return the least bytes, per byte of the buffer, that the busiest of ``ranks`` sends; arrays broadcast.

    (n - 1) / n where a rank sends or receives only its share; of all_reduce (where switches reduce), of p2p and of the first
    rank of a broadcast, whose receivers hold nothing of it before, all of it.
    """
    ranks = np.maximum(ranks, 1)
    return np.where(np.isin(op, SPLIT_BUFFER), (ranks - 1) / ranks, 1.0)


def joined(op: str, tables: Sequence[Table]) -> Table:
    """Return the rows of all ``tables`` of ``op``, in order."""
    return Table.from_columns(op, {name: np.concatenate([t[name] for t in tables]) for name in TABLE_COLUMNS[op]})
