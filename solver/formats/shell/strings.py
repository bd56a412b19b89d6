"""What a shell cuts out of, or puts into, the text of a variable: ${NAME##*/}, ${NAME%.json}, ${NAME/a/b}, ${NAME,,}."""

from __future__ import annotations

import re
from fnmatch import translate

OPERATION = re.compile(r"(\w+)(##?|%%?|//?|,,?|\^\^?|:(?=\s*\d))(.*)", re.DOTALL)
_LONGEST = 1000  #: characters in which patterns are looked for


def transformed(text: str, operation: str) -> str | None:
    """Return a variable's text after an operation as it stands behind its name; None where it is none of these."""
    match = OPERATION.fullmatch(f"_{operation}")
    if match is None or len(text) > _LONGEST:
        return None
    how, what = match[2], match[3]
    if how in ("#", "##", "%", "%%"):
        return _cut(text, how, what)
    if how in ("/", "//"):
        pattern, _, new = what.partition("/")
        return re.sub(_regular(pattern), lambda _: new, text, count=how == "/") if pattern else text
    if how == ":":
        place = re.fullmatch(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", what)
        if place is None:
            return None
        start = int(place[1])
        return text[start : start + int(place[2])] if place[2] else text[start:]
    change = str.lower if how.startswith(",") else str.upper
    return None if what else change(text) if len(how) == 2 else change(text[:1]) + text[1:]


def _regular(pattern: str) -> str:
    """Return the regular expression of a pattern with wildcards, without its anchor."""
    return translate(pattern).removesuffix("\\Z").removesuffix("\\z")


def _cut(text: str, how: str, pattern: str) -> str:
    """Return a text without the shortest, or with a doubled sign the longest, beginning (#) or end (%) that matches."""
    whole = re.compile(_regular(pattern))
    lengths = range(len(text) + 1) if len(how) == 1 else range(len(text), -1, -1)
    for length in lengths:
        part = text[:length] if how[0] == "#" else text[len(text) - length :]
        if whole.fullmatch(part):
            return text[length:] if how[0] == "#" else text[: len(text) - length]
    return text
