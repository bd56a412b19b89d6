"""Packed sequences: documents that do not attend to each other, by the distribution of their lengths."""

from __future__ import annotations

import re
from typing import Any

from profiler.errors import InputError, shown


def effective_document(text: Any, seq_len: int) -> int:
    """Return the tokens of equal documents whose attention is as large as that of the distribution ``text``.

    text: ``tokens:share`` joined by +, as in 512:3+4096:1 (three documents of 512 tokens for each of 4,096); a share that is
    left out is 1. A document that is longer than a sequence continues in the next one, which does not see its beginning.
    Causal attention of a document of d tokens covers d^2 / 2, so that equal ones have sum d^2 / sum d tokens. Raises
    InputError.
    """
    wrong = InputError(
        f"document_lengths is {shown(text)}; it must be tokens:share joined by +, as in 512:3+4096:1, of 1 token to 1e9"
    )
    if not isinstance(text, str):
        raise wrong
    squares = total = 0.0
    for part in text.replace(" ", "").split("+"):
        found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}(?:\.\d{1,9})?))?", part)
        if not found or not int(found[1]) or not float(found[2] or 1):
            raise wrong
        pieces, rest = divmod(int(found[1]), seq_len)
        squares += float(found[2] or 1) * (pieces * seq_len**2 + rest**2)
        total += float(found[2] or 1) * int(found[1])
    return max(round(squares / total), 1)
