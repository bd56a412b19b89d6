"""The shapes that ``foretrain explain --measurements OUT.csv`` asks for, and which of them this machine and job measure."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from profiler.errors import InputError, printable, shown
from profiler.measure.arena import DTYPES
from profiler.measure.attention import fused_kernels
from profiler.measure.grouped import PASSES, lacking
from profiler.measure.session import Session
from profiler.profile.item import WORK, Item, Limits
from profiler.profile.plan import KINDS, LAYOUTS, group_shapes, whole_buffer
from profiler.profile.profile import COLLECTIVES

_COLUMNS = ("kernel", "shape")
_MOST = 10_000  #: rows that a file may have

#: Sizes of one row by name; those that are not there are 0.
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Wanted:
    """What a file of measurements asks for.

    items: to measure, what counts most first. left_out: the other rows, each in words, with why none is measured.
    """

    items: tuple[Item, ...] = ()
    left_out: tuple[str, ...] = ()


def read_wanted(path: Path) -> Wanted:
    """Read the columns ``kernel`` (op, variant, dtype) and ``shape`` ("m 4096, n 1024, ...") of a CSV file.

    Raises InputError for a file that cannot be read or has other columns, and for a row that says no shape.
    """
    items, left_out = [], []
    for line, row in _rows(path):
        words, shape = row["kernel"].split(), row["shape"]
        if not words:
            raise InputError(f"{path}, line {line}: kernel is empty; it must be as in 'linear bf16'")
        found = _item(words[0], " ".join(words[1:-1]), words[-1], _sizes(shape, f"{path}, line {line}"))
        if isinstance(found, Item):
            items.append(found)
        else:
            left_out.append(f"{printable(' '.join(words))} ({printable(shape)}): {found}")
    return Wanted(tuple(dict.fromkeys(items)), tuple(left_out))


def measured_here(session: Session, size: Limits, wanted: Wanted) -> list[Item]:
    """Return the wanted items that are measured here; rank 0 prints the others and why."""
    found, left_out = [], list(wanted.left_out)
    best = fused_kernels(session.device)[0]  # a plan names no attention kernel: predictions are of the best one
    for item in wanted.items:
        if why := _why_not(session, size, item):
            left_out.append(f"{item.label}: {why}")
        else:
            found.append(Item.of(item.op, {**item.columns, "kernel": best}) if item.op == "flash_attn" else item)
    if session.leads and left_out:
        print("not measured of what was asked for:\n  " + "\n  ".join(left_out), file=sys.stderr)
    return found


def _why_not(session: Session, size: Limits, item: Item) -> str:
    group = None if item.op in WORK else (item.number("intra"), item.number("inter"))
    if group and group not in group_shapes(session.ranks_per_node, session.nodes):
        return f"no such group among {session.ranks_per_node} ranks on each of {session.nodes} nodes"
    if item.op == "grouped_linear" and (reason := lacking(session.device)):
        return reason
    return "" if size.allows(item) else "larger than what is measured on this machine"


def _rows(path: Path) -> Sequence[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(
                    f"{path}: no column {missing[0]!r}; foretrain explain --measurements writes {' and '.join(_COLUMNS)}"
                )
            rows = [(reader.line_num, {name: row[name] or "" for name in _COLUMNS}) for row in islice(reader, _MOST + 1)]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a CSV file: {printable(str(error))}") from None
    if not rows or len(rows) > _MOST:
        raise InputError(f"{path}: {f'more than {_MOST:,}' if rows else 0} rows; give 1 to {_MOST:,}")
    return rows


def _sizes(shape: str, where: str) -> dict[str, int]:
    sizes = {}
    for part in filter(None, (part.strip() for part in shape.split(","))):
        name, _, value = part.partition(" ")
        try:
            number = float(value)
            sizes[name] = int(number)
        except (ValueError, OverflowError):
            number = -1.0
        if number < 0 or number != sizes[name]:
            raise InputError(f"{where}: shape says {shown(part)}; a name and a whole number must stand there, as in 'm 4096'")
    return sizes


def _item(op: str, variant: str, dtype: str, sizes: Sizes) -> Item | str:
    """Return the item of one row, or why none is measured."""
    if op not in _ITEMS:
        return f"{printable(op)} is not measured"
    if dtype not in DTYPES:
        return f"only {', '.join(DTYPES)} are measured"
    taken, columns = _ITEMS[op]
    other = next((name for name, value in sizes.items() if value and name not in taken), "")
    if other:
        return f"no shape with {printable(other)} is measured"
    missing = next((name for name in taken[: _NEEDED[op]] if not sizes.get(name)), "")
    if missing:
        return f"{missing} is missing"
    found = columns(variant, sizes)
    return found if isinstance(found, str) else Item.of(op, {"dtype": dtype, "out_dtype": dtype} | found)


def _linear(_: str, sizes: Sizes) -> dict[str, int | str] | str:
    layout = sizes.get("layout", 0)
    if layout >= len(LAYOUTS) or sizes.get("batch", 1) != 1:
        return "batches of matrices are not measured"
    accumulates: dict[str, int | str] = {"accumulate": 1, "out_dtype": "fp32"} if sizes.get("accumulate") else {}
    return {"m": sizes["m"], "n": sizes["n"], "k": sizes["k"], "batch": 1, "layout": LAYOUTS[layout], **accumulates}


def _grouped(_: str, sizes: Sizes) -> dict[str, int | str] | str:
    number, passes = sizes.get("passes", 0), tuple(PASSES)
    if number >= len(passes):
        return "no such pass is measured"
    # the operator adds to nothing: a weight gradient is measured without the sum
    return {**{name: sizes[name] for name in ("groups", "tokens_per_group", "n", "k")}, "pass": passes[number]}


def _attention(variant: str, sizes: Sizes) -> dict[str, int | str] | str:
    if variant:
        return f"attention with {printable(variant)} is not measured"
    if sizes.get("v_head_dim", sizes["head_dim"]) != sizes["head_dim"]:
        return "heads of values that differ from those of keys are not measured"
    if sizes.get("causal") and sizes["seq_q"] != sizes["seq_kv"]:
        return "a causal mask with more keys than queries is not measured"
    same = {name: sizes[name] for name in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")}
    which = "backward" if sizes.get("backward") else "forward"
    return {**same, "v_head_dim": sizes["head_dim"], "causal": min(sizes.get("causal", 0), 1), "pass": which}


def _memory_bound(variant: str, sizes: Sizes) -> dict[str, int | str] | str:
    return {"kind": variant, "bytes": sizes["bytes"]} if variant in KINDS else f"{printable(variant)} is not measured"


def _collective(_: str, sizes: Sizes) -> dict[str, int | str] | str:
    intra, inter = sizes["intra"], sizes["inter"]
    return {"intra": intra, "inter": inter, "bytes": whole_buffer(sizes["bytes"], intra, inter)}


_MESSAGE = ("bytes", "intra", "inter", "strided")  # all groups of one shape are measured at once, strided ones too
#: Op -> the sizes that a row may have, and the columns that they become.
_ITEMS: dict[str, tuple[tuple[str, ...], Callable[[str, Sizes], dict[str, int | str] | str]]] = {
    "linear": (("m", "n", "k", "batch", "layout", "accumulate"), _linear),
    "grouped_linear": (("groups", "tokens_per_group", "n", "k", "passes", "accumulate"), _grouped),
    "flash_attn": (
        ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "v_head_dim", "causal", "backward"),
        _attention,
    ),
    "memory_bound": (("bytes",), _memory_bound),
    **dict.fromkeys((*COLLECTIVES, "p2p"), (_MESSAGE, _collective)),
}
#: How many of these, from the first, a row must have.
_NEEDED = {"linear": 3, "grouped_linear": 4, "flash_attn": 6, "memory_bound": 1, **dict.fromkeys((*COLLECTIVES, "p2p"), 3)}
