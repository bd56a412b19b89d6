"""Assignments of a shell script: of variables, of arrays and their elements, of references to other variables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from solver.formats.shell.tokens import KEYWORDS, SEPARATORS
from solver.formats.shell.values import EVERY, LONGEST, State, Word, arithmetic, expanded_word, plain_text, set_variable

PREFIXES = ("export", "declare", "local", "readonly", "typeset")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_CALCULATION = re.compile(r"([A-Za-z_]\w*)(?:([-+*/%]?)=(?!=)(.+)|(\+\+|--))")
_KEYED = re.compile(r"\[([^\]]+)\]=(.*)", re.DOTALL)  #: an element of an array with its index or key
ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(.*)\]\+?=(.*)", re.DOTALL)  #: of an array


def assign(state: State, match: re.Match[str], tokens: Sequence[str], at: int) -> int:
    """Set a variable; return where the commands go on, after the elements of an array."""
    name, more, value = match.groups()
    parts, joint = [value], ""
    if not value and at < len(tokens) and tokens[at] == "(":
        end = next((i for i in range(at, len(tokens)) if tokens[i] == ")"), len(tokens))
        if end == len(tokens):
            raise ValueError(f"the list that {name} is set to has no closing parenthesis")
        parts, joint, at = [token for token in tokens[at + 1 : end] if token != "\n"], " ", end + 1
    if state.runs is False:  # what decided that is among what the variable's value depends on
        if kept := state.variables.get(name):
            state.variables[name] = Word(kept.text, kept.defaults | state.decided_by)
        return at
    words = [expanded_word(state, part) for part in parts]
    if _is_prefix(state, tokens, at):
        if state.runs and "\0" not in words[0].text:
            state.environment[name] = plain_text(words[0].text)
        return at
    before = state.variables.get(name, Word("")) if more else Word("")
    if state.runs is None or before is None:
        set_variable(state, name, None)
        return at
    _set_joined(state, name, joint, [before, *words])
    return at


def assign_element(state: State, name: str, index: str, value: str) -> None:
    """Set an element of an array, or append one behind the last; an array whose other elements are not known is not known."""
    before, added = state.variables.get(name, Word("")), expanded_word(state, value)
    if state.runs is False:
        return
    if not state.runs or before is None:
        set_variable(state, name, None)
    elif index == f"${{#{name}[@]}}":
        _set_joined(state, name, " ", [before, added])
    elif before.text and not before.elements:
        set_variable(state, name, None)
    else:
        key, keys = plain_text(expanded_word(state, index).text), dict(before.elements)
        listed = all(one.isdecimal() for one in keys)
        key = (arithmetic(state, key, set()) if listed else None) or key
        _set_elements(state, name, {**keys, key: added.text}, [before, added])


def calculate(state: State, text: str) -> bool:
    """Set the variable that a sum is assigned to (X=..., X+=..., X++); return whether the text is such an assignment."""
    match = _CALCULATION.fullmatch(text.replace(" ", ""))
    if match is None:
        return False
    used: set[str] = set()
    name, sign, right, step = match.groups()
    known = state.variables.get(name)
    found = arithmetic(state, f"{name}{step[0]}1" if step else f"{name}{sign}({right})" if sign else right, used)
    if state.runs is not False:
        defaults = state.decided_by | used | (known.defaults if known else frozenset())
        set_variable(state, name, Word(found, defaults) if found is not None and state.runs else None)
    return True


def _set_joined(state: State, name: str, joint: str, words: Sequence[Word]) -> None:
    """Set a variable to words that follow each other: joint is a blank between the elements of an array, else nothing."""
    before, *added = words
    if joint and (before.elements or not before.text) and not any(set(word.text) & {" ", "\0"} for word in added):
        of = dict(before.elements)
        for word in added:
            if word.text:
                given = _KEYED.fullmatch(word.text)
                of[given[1] if given else str(len(of))] = given[2] if given else word.text
        _set_elements(state, name, of, words)
        return
    text = joint.join(word.text for word in words if word.text)
    set_variable(state, name, Word(text[:LONGEST], _defaults(state, words)))


def _set_elements(state: State, name: str, of: dict[str, str], words: Sequence[Word]) -> None:
    text = " ".join(of.values())[:LONGEST]
    set_variable(state, name, Word(text, _defaults(state, words), elements=tuple(of.items())))


def _defaults(state: State, words: Sequence[Word]) -> frozenset[str]:
    return state.decided_by.union(*(word.defaults for word in words))


def refer(state: State, token: str) -> None:
    """Note that a name stands for another variable (declare -n): all may change where it is set."""
    if not re.fullmatch(r"-[a-zA-Z]*n[a-zA-Z]*", token) or state.runs is False and not state.inside:
        return
    function = state.inside[-1] if state.inside else ""
    if function:
        state.functions.setdefault(function, set()).add(EVERY)
        return
    for variable in list(state.variables):
        set_variable(state, variable, None)


def _is_prefix(state: State, tokens: Sequence[str], at: int) -> bool:
    """Whether an assignment before ``at`` is of the environment of the command that follows, and not of the script."""
    ends = (*SEPARATORS, *KEYWORDS, "(", ")")
    if at > state.assigned_until:  # the first of several of one command
        start = at - 1
        while start > 0 and tokens[start - 1] not in ends:
            start -= 1
        state.assigned_until = next((i for i in range(at, len(tokens)) if not ASSIGNMENT.fullmatch(tokens[i])), len(tokens))
        following = tokens[state.assigned_until] if state.assigned_until < len(tokens) else "\n"
        state.assigns_environment = tokens[start] not in PREFIXES and following not in ends
    return state.assigns_environment
