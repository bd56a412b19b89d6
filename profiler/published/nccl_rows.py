"""One log of nccl-tests as tables of rows by op.

nccl-tests prints as ``size`` the larger of a rank's send and receive buffer (its doc/PERFORMANCE.md): the buffer of
all_reduce, broadcast and sendrecv, the output of all_gather, the input of reduce_scatter, the send buffer of alltoall.
These are the profile's own conventions, so sizes are taken over as they are. ``count`` is the elements of one rank's
share, so size / (count * bytes of the type) of the last three is the number of ranks, which is checked.
Times are those of separate buffers (out-of-place), as training frameworks call collectives; where a log has only the
other, they are taken and ``env`` says so.
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

#: The profile's table by the name of a test.
OPS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all2all",
    "broadcast": "broadcast", "sendrecv": "p2p",
}  # fmt: skip
_OTHER_TESTS = ("reduce", "gather", "scatter", "hypercube", "alltoallv")  # real tests that no table is for
#: Of these a rank sends or receives only its share of the buffer, not all of it.
SPLIT_BUFFER = ("all_gather", "reduce_scatter", "all2all")
_TYPE_BYTES = {
    "int8": 1, "uint8": 1, "char": 1, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "half": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "int": 4, "float": 4, "int64": 8, "uint64": 8, "double": 8,
}  # fmt: skip
_DTYPES = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}


@dataclass(frozen=True)
class Log:
    """What one file holds. tables: columns by op, one row per message size. devices: names of the GPUs.

    notes: in words, what was left out.
    """

    name: str
    tables: dict[str, Table]
    devices: frozenset[str]
    notes: tuple[str, ...]


def read_log(path: str | Path, test: str | None = None) -> Log:
    """Read one log. ``test``: the test that printed it ("alltoall"), where neither the log nor the file's name says.

    Raises InputError where the file is no log, its test is unknown, or its ranks and nodes cannot be told.
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
    """The test that a file's name mentions, the longest where several fit ("reduce_scatter" holds "reduce"); "" if none."""
    plain = re.sub(r"[-\s.]+", "_", stem.lower()).replace("all_to_all", "alltoall").replace("send_recv", "sendrecv")
    plain = (
        plain.replace("allreduce", "all_reduce").replace("allgather", "all_gather").replace("reducescatter", "reduce_scatter")
    )
    return max((test for test in (*OPS, *_OTHER_TESTS) if test in plain), key=len, default="")


def _columns(run: Run, op: str, path: Path, notes: list[str]) -> dict[str, Any]:
    """The columns of one run's rows that can be used; what cannot is noted."""
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
        "intra": intra, "inter": inter, "bytes": [line.size for line in good],
        "seconds": [_seconds(line) for line in good], "repeats": run.iterations,
        "dtype": [_DTYPES.get(line.dtype, line.dtype) for line in good],
        "env": [env if line.out_of_place > 0 else f"{env}, in-place" for line in good],
        "source": f"nccl-tests log {path.name}",
    }  # fmt: skip


def _seconds(line: Line) -> float:
    """The out-of-place time, or the in-place time where there is none."""
    return line.out_of_place if line.out_of_place > 0 else line.in_place


def _shape(run: Run, where: str) -> tuple[int, int, int]:
    """(ranks of a group in one node, nodes of a group, groups), from the list of devices."""
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


def joined(op: str, tables: Sequence[Table]) -> Table:
    """The rows of all tables of ``op``, in order."""
    return Table.from_columns(op, {name: np.concatenate([t[name] for t in tables]) for name in TABLE_COLUMNS[op]})
