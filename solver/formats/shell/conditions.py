"""Conditions of a shell script that compare its own variables."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from solver.formats.shell.values import State, all_of, any_of, arithmetic, expanded_word, not_of, plain_text

_OPEN, _CLOSE = ("[", "[["), ("]", "]]")

_PLAIN_REGULAR = re.compile(r"\^?[\w.\-+*|:/ ]*\$?")  #: expressions that mean the same here, and are matched in no time


def condition(state: State, tokens: Sequence[str], used: set[str]) -> bool | None:
    """Return whether a condition of [ ], [[ ]], test, (( )), true and false holds, joined by && and ||; None: not known.

    used: gets the variables whose defaults it looks at.
    """
    parts: list[list[str]] = [[]]
    joints: list[str] = []
    tests: list[str] = [""]  # the bracket or word that makes a part a test; "" of another command
    inside, depth = "", 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token in ("&&", "||") and depth < 2 or (token in ("-a", "-o") and inside):
            joints.append({"-a": "&&", "-o": "||"}.get(token, token))
            parts.append([])
            tests.append(inside)
        elif token in (*_OPEN, *_CLOSE, "test"):
            inside = token if token in _OPEN else ""
            tests[-1] = inside or tests[-1] or token
        else:
            parts[-1].append(token)
    found = [_part(state, part, test, used) for part, test in zip(parts, tests, strict=True)]
    holds = found[0]
    for joint, other in zip(joints, found[1:], strict=True):
        holds = (all_of if joint == "&&" else any_of)([holds, other])
    return holds


def _part(state: State, tokens: Sequence[str], test: str, used: set[str]) -> bool | None:
    if test:
        return _test(state, tokens, used, patterns=test == "[[")
    if tokens[:1] == ["!"]:
        return not_of(_part(state, tokens[1:], test, used))
    if tokens[:2] == ["(", "("] and tokens[-2:] == [")", ")"]:
        return compared(state, tokens[2:-2], used)
    if len(tokens) != 1:
        return None
    word = expanded_word(state, tokens[0])
    used |= word.defaults
    return {"true": True, ":": True, "false": False}.get(word.text)


def compared(state: State, tokens: Sequence[str], used: set[str]) -> bool | None:
    """Return whether the comparisons of (( )) hold, joined by && and ||; None where it is none or its numbers are not known."""
    for joint, joined in (("||", any_of), ("&&", all_of)):
        if joint in tokens:
            parts = [list(part) for is_joint, part in groupby(tokens, joint.__eq__) if not is_joint]
            return joined([compared(state, part, used) for part in parts])
    found = arithmetic(state, "".join(tokens).replace("$", "").replace("{", "").replace("}", ""), used)
    return None if found is None else found != "0"


def _test(state: State, tokens: Sequence[str], used: set[str], patterns: bool) -> bool | None:
    """Return whether a test holds. patterns: what a word is compared with may have wildcards, or be a regular expression."""
    if tokens and tokens[0] == "!":
        return not_of(_test(state, tokens[1:], used, patterns))
    if len(tokens) == 2 and tokens[0] in ("-n", "-z") and (name := _of_environment(state, tokens[1])):
        used.add(name)
        state.defaults[name] = "not set"
        return tokens[0] == "-z"
    found = [expanded_word(state, token) for token in tokens]
    used.update(*(word.defaults for word in found))
    words = [plain_text(word.text) for word in found]
    if any("$" in word for word in words):
        return None
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, how, right = words
    if how in ("=", "==", "!="):
        if set(right) & set("*?[") and not patterns:
            return None
        return (fnmatchcase(left, right) if patterns else left == right) == (how != "!=")
    if how == "=~" and patterns:
        return bool(re.search(right, left)) if _PLAIN_REGULAR.fullmatch(right) else None
    compare = {
        "-eq": operator.eq,
        "-ne": operator.ne,
        "-gt": operator.gt,
        "-ge": operator.ge,
        "-lt": operator.lt,
        "-le": operator.le,
    }.get(how)
    if compare is None or not all(re.fullmatch(r"-?\d{1,18}", word) for word in (left, right)):
        return None
    return bool(compare(int(left), int(right)))


def _of_environment(state: State, token: str) -> str:
    """Return the name of the variable that a token is, if only the environment may have it; otherwise ""."""
    match = re.fullmatch(r"\$(?:\{([A-Za-z_]\w*)(?::?-)?\}|([A-Za-z_]\w*))", token)
    name = (match[1] or match[2]) if match else ""
    return "" if name in state.variables else name
