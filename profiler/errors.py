"""The only error that users are meant to see, how it is said, the one about a missing torch, and how messages show values."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable
from typing import Any


class InputError(ValueError):
    """Error for user input that cannot be used.

    The message is one sentence for the user: what is wrong, where, and what would be right. Entry points print it and exit with
    status 2; it never reaches the user as a traceback.
    """


def first_broken(rules: Iterable[tuple[object, str]]) -> str:
    """Return what is broken by the first of (whether it holds, what is broken) that does not hold, or ""."""
    return next((broken for holds, broken in rules if not holds), "")


def require(rules: Iterable[tuple[object, str]], where: str = "") -> None:
    """Raise InputError with what the first rule that does not hold breaks; ``where`` begins the sentence."""
    if broken := first_broken(rules):
        raise InputError(f"{where}: {broken}" if where else broken)


def require_torch(purpose: str) -> None:
    """Raise InputError if torch is not installed; reading profiles and predicting do not need it."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"{purpose} needs torch, which is missing here; run `make setup-measure` or pip install torch==2.13.0")


def say_once(sentence: str) -> None:
    """Print why a command ends on stderr, once for all ranks of a job.

    torchrun ends all ranks when the first one fails, so the others wait for rank 0 to say it, and speak if it saw no error.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)
    print(printable(sentence, 1200), file=sys.stderr, flush=True)


def printable(text: str, most: int = 80) -> str:
    """Return a text as a terminal may show it: control characters replaced, the middle left out where it is long."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= most else f"{plain[: most // 2 - 2]}...{plain[-(most // 2 - 1) :]}"


def shown(value: Any) -> str:
    """Return a value as a message shows it: on one line, printable, and short."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) > 10**40:  # printing it could take seconds
        return "a number of more than 40 digits"
    return printable(repr(value))


def counted(number: int, noun: str) -> str:
    """Return ``3 GPUs``, or ``1 GPU``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def closest(word: str, known: Iterable[str], least: float = 0.65) -> str:
    """Return `` (did you mean 'x'?)`` where a known word resembles ``word`` or has its letters as initials (mbs:
    micro_batch_size), else an empty string.

    least: of difflib's ratio; words with parts in common need more.
    """
    words = list(known)
    found = difflib.get_close_matches(str(word), words, n=1, cutoff=least)
    found = found or [name for name in words if "_" in name and "".join(part[:1] for part in name.split("_")) == word]
    return f" (did you mean {found[0]!r}?)" if found else ""
