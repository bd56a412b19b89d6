"""Conditions of a shell script: tests of [ ] or [[ ]] that compare its own variables."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from itertools import groupby

from solver.formats.shell_values import State, all_of, any_of, expanded_word, not_of, plain_text


def condition(state: State, tokens: Sequence[str], used: set[str]) -> bool | None:
    """Return whether a condition of [ ] or [[ ]] holds, joined by && and ||; None where that cannot be told.

    used: gets the variables whose defaults it looks at.
    """
    words = [token for token in tokens if token not in ("[", "[[", "]", "]]")]
    parts = [list(same) for joint, same in groupby(words, lambda word: word in ("&&", "||")) if not joint]
    joints = [word for word in words if word in ("&&", "||")]
    if not parts or len(parts) != len(joints) + 1 or len(words) != len(tokens) - 2 * len(parts):
        return None
    holds = _test(state, parts[0], used)
    for joint, part in zip(joints, parts[1:], strict=True):
        holds = (all_of if joint == "&&" else any_of)([holds, _test(state, part, used)])
    return holds


def _test(state: State, tokens: Sequence[str], used: set[str]) -> bool | None:
    if tokens and tokens[0] == "!":
        return not_of(_test(state, tokens[1:], used))
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
        return None if set(right) & set("*?[") else (left == right) == (how != "!=")
    compare = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
               "-le": operator.le}.get(how)  # fmt: skip
    if compare is None or not all(re.fullmatch(r"-?\d{1,18}", word) for word in (left, right)):
        return None
    return bool(compare(int(left), int(right)))


def _of_environment(state: State, token: str) -> str:
    """Return the name of the variable that a token is, if only the environment may have it; otherwise ""."""
    match = re.fullmatch(r"\$(?:\{([A-Za-z_]\w*)(?::?-)?\}|([A-Za-z_]\w*))", token)
    name = (match[1] or match[2]) if match else ""
    return "" if name in state.variables else name
