"""SimAI's ``SIMAI_workload`` text: the table of rows that SimAI-Analytical and SimAI's simulator read.

Line 1 holds a policy and ``key: value`` pairs in any order, line 2 the number of rows, and then a row follows for each layer of
each micro batch: what it computes [ns] and sends [bytes] in its forward, its input-gradient and its weight-gradient pass.
Source of the format: SimAI's Workload.cc (Apache-2.0), as read, and files that AICB wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from profiler.errors import InputError, closest, shown
from profiler.files import write_text
from profiler.text_file import read_text

FWD_IN_BCKWD, TRANSFORMER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD", "HYBRID_TRANSFORMER"
CUSTOMIZED = "HYBRID_CUSTOMIZED"  #: each row has a policy of its own in a 13th column
POLICIES = (
    FWD_IN_BCKWD,
    TRANSFORMER,
    "MICRO",
    "DATA",
    "MODEL",
    "HYBRID_DATA_MODEL",
    "HYBRID_MODEL_DATA",
    "HYBRID_DLRM",
    "HYBRID_DLRM_ENHANCED",
    CUSTOMIZED,
    "DISTRIBUTED_INFERENCE",
)
#: Keys of the first line in the order in which AICB writes them.
TP, EP, PP, VPP, GA, GPUS = "model_parallel_NPU_group:", "ep:", "pp:", "vpp:", "ga:", "all_gpus:"
CHECKPOINTS, INITIATES, PP_COMM = "checkpoints:", "checkpoint_initiates:", "pp_comm:"
KEYS = (TP, EP, PP, VPP, GA, GPUS, CHECKPOINTS, INITIATES, PP_COMM, "mode:", "DLRM_LAST_BOTTOM_LAYER:")
_LISTS = (CHECKPOINTS, INITIATES)  #: a count, and as many numbers of rows

WHAT = "a SIMAI_workload text"
_MOST_BYTES = 1 << 29
_COLUMNS = 12
_MOST_SIZE = 1 << 63  #: above it SimAI's unsigned integers are no bytes or nanoseconds
_MOST_IN_HEADER = 1 << 31  #: at which std::stoi, with which SimAI reads the first line, throws


class Collective(Enum):
    """What a communication word names; SimAI compares prefixes, the first that fits."""

    NONE = "NONE"
    ALL_REDUCE = "ALLREDUCE"
    ALL_TO_ALL = "ALLTOALL"
    ALL_GATHER = "ALLGATHER"
    REDUCE_SCATTER = "REDUCESCATTER"


class Group(Enum):
    """Ranks of a collective: neighbours (TP), those that hold one shard (DP), or experts (EP, and DP_EP of their copies)."""

    NONE = "none"
    TP = "TP"
    DP = "DP"
    EP = "EP"
    DP_EP = "DP_EP"


@dataclass(frozen=True)
class Pass:
    """What one row does in one direction. compute: nanoseconds. comm: the communication word. size: bytes of the whole buffer
    (all-gather: gathered; reduce-scatter: the input)."""

    compute: int = 0
    comm: str = "NONE"
    size: int = 0

    @property
    def collective(self) -> Collective:
        """The collective of the word; a word of no known prefix communicates nothing, as in SimAI."""
        return next((c for c in Collective if c is not Collective.NONE and self.comm.startswith(c.value)), Collective.NONE)

    def group(self, default: Group) -> Group:
        """The group of the word's suffix. default: that of a word without one. Any other suffix is of no group."""
        collective = self.collective
        if collective is Collective.NONE:
            return Group.NONE
        suffix = self.comm.removeprefix(collective.value)
        return {"": default, "_EP": Group.EP, "_DP_EP": Group.DP_EP}.get(suffix, Group.NONE)


@dataclass(frozen=True)
class Row:
    """One layer of one micro batch. process_time: ticks that SimAI's simulator adds after each collective; policy: the 13th
    column of HYBRID_CUSTOMIZED."""

    name: str
    forward: Pass
    input_grad: Pass
    weight_grad: Pass
    process_time: int = 100
    dependency: int = -1
    policy: str = ""

    @property
    def compute(self) -> int:
        """Nanoseconds of its three passes."""
        return self.forward.compute + self.input_grad.compute + self.weight_grad.compute


@dataclass(frozen=True)
class Entry:
    """One key of the first line, as it is spelt there, and its values."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Header:
    """The first line: the policy and what follows, in the order and spelling of the file."""

    policy: str
    entries: tuple[Entry, ...] = ()

    def value(self, key: str) -> int | None:
        """Return the (first) number of a key, or None where the line has no such key; ``pp_comm`` also without its colon."""
        found = next((e for e in self.entries if e.key == key or (key == PP_COMM and e.key == "pp_comm")), None)
        return None if found is None else _whole(found.values[0])

    def size(self, key: str) -> int:
        """Return a number of ranks or chunks; 1 where the line (as those of old files) has no such key or states 0."""
        return self.value(key) or 1

    def rows_of(self, key: str) -> tuple[int, ...]:
        """Return the rows that ``checkpoints:`` or ``checkpoint_initiates:`` lists."""
        return tuple(int(text) for e in self.entries if e.key == key for text in e.values[1:])

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of the groups and of the schedule that the line does not state."""
        return tuple(key for key in (TP, EP, PP, VPP, GA, GPUS) if self.value(key) is None)


@dataclass(frozen=True)
class TextWorkload:
    """A whole file."""

    header: Header
    rows: tuple[Row, ...]


def training_header(tp: int, ep: int, pp: int, vpp: int, ga: int, gpus: int, pp_comm: int) -> Header:
    """Return the first line of a training step as AICB writes it. pp_comm: bytes of one activation between stages."""
    sizes = {TP: tp, EP: ep, PP: pp, VPP: vpp, GA: ga, GPUS: gpus, CHECKPOINTS: 0, INITIATES: 0, PP_COMM: pp_comm}
    return Header(FWD_IN_BCKWD, tuple(Entry(key, (str(value),)) for key, value in sizes.items()))


def read_workload_text(path: Path) -> TextWorkload:
    """Read a file. Raises InputError, with the line's number, for what SimAI's reader would misread or stop at."""
    return parse_workload_text(read_text(path, WHAT, _MOST_BYTES), str(path))


def lines_of(text: str, where: str, what: str) -> list[str]:
    """Return the lines of a file. Raises InputError where the program that should have written it failed."""
    lines = text.splitlines()
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        raise InputError(f"{where}: holds a Python traceback, not {what}; the program that should have written it failed")
    return lines


def parse_workload_text(text: str, where: str) -> TextWorkload:
    """Read the text of a file. where: its name in messages."""
    lines = lines_of(text, where, WHAT)
    header = _header(lines[0].split() if lines else [], f"{where}, line 1")
    count = _number((lines[1:2] or [""])[0].strip(), f"{where}, line 2", "the number of rows")
    filled = [(number, line) for number, line in enumerate(lines[2:], 3) if line.strip()]
    if len(filled) != count:
        raise InputError(f"{where}, line 2: states {count} rows, but {len(filled)} follow; they must agree")
    customized, rows, known = header.policy == CUSTOMIZED, list[Row](), dict[str, Row]()
    for number, line in filled:
        if line not in known:  # rows repeat for every layer of every micro batch
            known[line] = _row(line.split(), f"{where}, line {number}", customized)
        rows.append(known[line])
    return TextWorkload(header, tuple(rows))


def _header(tokens: Sequence[str], where: str) -> Header:
    if not tokens:
        raise InputError(f"{where}: is empty; it must start with a policy such as {FWD_IN_BCKWD}")
    policy, rest = tokens[0], list(tokens[1:])
    if policy not in POLICIES:
        raise InputError(
            f"{where}: starts with {shown(policy)}{closest(policy, POLICIES)}; a SIMAI_workload starts with one of "
            f"{', '.join(POLICIES)}"
        )
    entries = tuple(_entries(rest, where))
    keys = [entry.key.rstrip(":") for entry in entries]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        raise InputError(f"{where}: {twice} is given twice; give it once")
    if policy in (FWD_IN_BCKWD, TRANSFORMER) and "model_parallel_NPU_group" not in keys:
        raise InputError(f"{where}: states no model_parallel_NPU_group:, the tensor-parallel size; add it")
    return Header(policy, entries)


def _entries(tokens: list[str], where: str) -> Iterator[Entry]:
    while tokens:
        key = tokens.pop(0)
        if not key.endswith(":") and key != "pp_comm":
            raise InputError(f"{where}: {shown(key)} is no key{closest(key, KEYS)}; keys end in a colon, as in ep: 8")
        name = key if key.endswith(":") else f"{key}:"
        if not tokens:
            raise InputError(f"{where}: {key} has no value; a number must follow it")
        values = [tokens.pop(0)]
        if name not in KEYS:  # SimAI skips what it does not know
            yield Entry(key, tuple(values))
            continue
        number = _number(values[0], where, key, least=1 if name in (TP, EP, PP) else 0, most=_MOST_IN_HEADER)
        if name in _LISTS:
            values += [tokens.pop(0) for _ in range(min(number, len(tokens)))]
            if len(values) != number + 1 or not all(re.fullmatch(r"\d{1,9}", value) for value in values[1:]):
                raise InputError(f"{where}: {key} announces {number} rows; as many numbers of rows must follow it")
        yield Entry(key, tuple(values))


def _row(cells: Sequence[str], where: str, customized: bool) -> Row:
    wanted = _COLUMNS + customized
    if len(cells) != wanted:
        raise InputError(f"{where}: has {len(cells)} columns; a row has {wanted}, from a name to a process time")
    dependency = cells[1]
    if not re.fullmatch(r"-?\d{1,18}", dependency):
        raise InputError(f"{where}: column 2 is {shown(dependency)}; it must be a whole number, -1 by custom")
    forward, input_grad, weight_grad = (_pass(cells, at, where) for at in (2, 5, 8))
    process_time = _number(cells[11], where, "column 12 (process time)")
    policy = cells[12] if customized else ""
    if customized and policy not in POLICIES:
        raise InputError(f"{where}: column 13 is {shown(policy)}{closest(policy, POLICIES)}; it must be a policy")
    return Row(cells[0], forward, input_grad, weight_grad, process_time, int(dependency), policy)


def _pass(cells: Sequence[str], at: int, where: str) -> Pass:
    compute = _number(cells[at], where, f"column {at + 1} (compute)")
    size = _number(cells[at + 2], where, f"column {at + 3} (bytes)")
    return Pass(compute, _word(cells[at + 1], where, at + 2), size)


def _word(word: str, where: str, column: int) -> str:
    known = [kind.value for kind in Collective]
    if not word.startswith(tuple(known)):
        meant = closest(word, known)
        raise InputError(
            f"{where}: column {column} is {shown(word)}{meant}; it must be a communication such as NONE or ALLREDUCE_EP"
        )
    return word


def _whole(text: str) -> int:
    """Return a number that is known to be whole, or 0 for None."""
    return 0 if text == "None" else int(text) if text.isdecimal() else int(float(text))


def _number(text: str, where: str, what: str, least: int = 0, most: int = _MOST_SIZE) -> int:
    """Return a whole number that may be written as a float or, for sizes that AICB forgets, as None (0)."""
    try:
        value = 0.0 if text == "None" else int(text) if text.isdecimal() else float(text)
        if value == int(value) and least <= value < most:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise InputError(
        f"{where}: {what} is {shown(text)}; it must be a whole number, {least} or more, below 2^{most.bit_length() - 1}"
    )


def workload_text(workload: TextWorkload) -> str:
    """Return a workload as AICB writes it: blanks in the first line, tabs in the rows."""
    first = " ".join([workload.header.policy, *(token for e in workload.header.entries for token in (e.key, *e.values))])
    return "\n".join([first, str(len(workload.rows)), *("\t".join(_cells(row)) for row in workload.rows), ""])


def _cells(row: Row) -> Iterator[str]:
    yield row.name
    yield str(row.dependency)
    for part in (row.forward, row.input_grad, row.weight_grad):
        yield from (str(part.compute), part.comm, str(part.size))
    yield str(row.process_time)
    if row.policy:
        yield row.policy


def write_workload_text(path: Path, workload: TextWorkload) -> None:
    """Write a workload, atomically."""
    write_text(path, workload_text(workload))
