"""Exact grouping of rows of integers: each distinct row is estimated once and looked up by index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TABLE_LIMIT = 1 << 21  #: values below this are numbered by a lookup table instead of a sort
_CODE_LIMIT = 1 << 62
_DENSE = 8  #: what stays below so small a multiple of the rows is numbered by a table; longer ones cost more than a sort


def distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (first, inverse): the index of one row per distinct combination, and for every row its combination.

    ``columns`` are arrays of non-negative integers of equal length. Each column is numbered by its distinct values and the
    numbers are combined in mixed radix, so no two combinations can collide.
    """
    code, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        if len(column) and column[0] == column[-1] and (column == column[0]).all():  # most axes of a search do not vary
            continue
        number, count = _numbered(column, _CODE_LIMIT // span)
        if span * count > _CODE_LIMIT:
            values, code = np.unique(code, return_inverse=True)
            span = len(values)
        code, span = code * count + number, span * count
    if span <= _DENSE * len(code):
        return _by_table(code, span)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


def _by_table(code: np.ndarray, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (first, inverse) of codes below ``span``, without a sort."""
    last = np.full(span, -1, dtype=np.int64)
    last[code[::-1]] = np.arange(len(code) - 1, -1, -1)  # of equal codes the first is written last
    present = last >= 0
    return last[present], (np.cumsum(present) - 1)[code]


def _numbered(column: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """Return each value's number among the distinct values of its column, and the number of distinct values.

    Large values stand for themselves if they are below ``room``, which saves a sort.
    """
    most = int(column.max()) if len(column) else 0
    if most < min(_TABLE_LIMIT, _DENSE * len(column)):
        present = np.zeros(most + 1, dtype=np.int64)
        present[column] = 1
        return (np.cumsum(present) - 1)[column], int(present.sum())
    if most < room:
        return column, most + 1
    values, number = np.unique(column, return_inverse=True)
    return number, len(values)
