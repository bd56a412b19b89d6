"""Commands that change the words of a shell script, or whether the next one runs: a function each, and a table of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from solver.formats.shell.assignments import ASSIGNMENT, ELEMENT, PREFIXES, assign, assign_element, calculate, refer
from solver.formats.shell.conditions import compared, condition
from solver.formats.shell.tokens import DOCUMENT, SEPARATORS, command_end
from solver.formats.shell.values import EVERY, State, Word, expanded_word, expanded_words, plain_text, set_variable

#: Commands that are run for their answer, which only they know.
_ASKING = ("grep", "egrep", "fgrep", "diff", "cmp", "pgrep", "which", "command", "type", "hash", "ping", "mountpoint")
#: Reads a command from the token behind its name on; returns where the tokens go on, and whether a command begins there.
Reader = Callable[[State, Sequence[str], int], tuple[int, bool]]


def reader_of(tokens: Sequence[str], at: int) -> Reader | None:
    """Return what reads the command that begins at ``at``; None for programs, whose words are the script's."""
    token = tokens[at]
    if tokens[at : at + 2] == ["(", "("]:
        return _calculated
    if named := _READERS.get(token):
        return named
    if ASSIGNMENT.fullmatch(token):
        return _assigned
    if ELEMENT.fullmatch(token):
        return _element_assigned
    of_prefix = token in PREFIXES or (token.startswith("-") and tokens[at - 1] in PREFIXES)
    return _prefixed if of_prefix else None


def call(state: State, name: str) -> None:
    """Note what a command that begins with ``name`` changes: a function of the script's own what it sets, others nothing; and
    whether it succeeds, which all do whose answer is not asked for."""
    changed = state.functions.get(name, set()) if state.runs is not False else set()
    for variable in list(state.variables) if EVERY in changed else changed:
        set_variable(state, variable, None)
    if state.chained:
        state.succeeded = None if name in _ASKING else True


def _written(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Note what a here-document writes to a file, with the script's variables put in."""
    document = state.documents[int(tokens[at])]
    if document.target and state.runs:
        text = document.text if document.quoted else plain_text(expanded_word(state, document.text).text)
        state.files[plain_text(expanded_word(state, document.target).text)] = text
    return at + 1, True


def _headed(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Pass the name of a function, behind which its body begins."""
    return at + 1, True


def _sourced(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Note a file whose commands run among the script's."""
    if at < len(tokens) and state.runs is not False:
        state.sourced.append(plain_text(expanded_word(state, tokens[at]).text))
    return at, False


def _tested(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Evaluate a test that is a command of its own."""
    close = {"[": ("]",), "[[": ("]]",)}.get(tokens[at - 1], SEPARATORS)
    end = next((i for i in range(at - 1, len(tokens)) if tokens[i] in close), len(tokens) - 1) + (close is not SEPARATORS)
    if state.chained is not False:
        used: set[str] = set()
        state.succeeded = condition(state, tokens[at - 1 : end], used) if state.chained else None
        state.tested |= used
    return end, False


def _calculated(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Evaluate (( )) as a command: an assignment, a comparison, or else what may change all that it names."""
    at -= 1
    end = next((i + 2 for i in range(at, len(tokens) - 1) if tokens[i : i + 2] == [")", ")"]), len(tokens))
    used: set[str] = set()
    if calculate(state, "".join(tokens[at + 2 : end - 2])):
        return end, True
    holds = compared(state, tokens[at + 2 : end - 2], used)
    if holds is None and re.search(r"(?<![=!<>])=(?!=)|\+\+|--", "".join(tokens[at:end])):
        _changed(state, tokens[:end], at)
    if state.chained is not False:
        state.succeeded = holds if state.chained else None
        state.tested |= used
    return end, True


def _let(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Calculate what let is given."""
    end = command_end(tokens, at)
    return (end, True) if calculate(state, "".join(tokens[at:end])) else _changed(state, tokens, at)


def _changed(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Mark the variables that the words of a command name as unknown."""
    end = command_end(tokens, at)
    for name in re.findall(r"[A-Za-z_]\w*", " ".join(tokens[at:end])) if state.runs is not False else ():
        set_variable(state, name, None)
    return end, True


def _printed(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Pass words that are only shown, or set a variable."""
    if tokens[at - 1 : at + 1] == ["printf", "-v"]:
        return _changed(state, tokens, at)
    state.succeeded = True if state.chained else state.succeeded
    return command_end(tokens, at), True


def _assigned(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Set a variable; behind it another assignment or the command that it is for begins."""
    assigned = ASSIGNMENT.fullmatch(tokens[at - 1])
    assert assigned is not None  # reader_of
    at = assign(state, assigned, tokens, at)
    state.succeeded = True if state.chained else state.succeeded
    return at, True


def _element_assigned(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    element = ELEMENT.fullmatch(tokens[at - 1])
    assert element is not None  # reader_of
    assign_element(state, *element.groups())
    return at, True


def _prefixed(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Pass what stands before the name of a command."""
    refer(state, tokens[at - 1])
    return at, True


def _evaluated(state: State, tokens: Sequence[str], at: int) -> tuple[int, bool]:
    """Add the words that eval runs as a command. What it may set is not known."""
    end = command_end(tokens, at)
    if state.runs is False:
        return end, False
    words = [word for token in tokens[at:end] for word in expanded_words(state, token)]
    for word in words:
        if assigned := re.match(r"([A-Za-z_]\w*)(?:\[.*\])?\+?=", word.text):
            set_variable(state, assigned[1], None)
    state.words += [Word(";") if word.text in SEPARATORS else word for word in words]
    return end, False


_READERS: dict[str, Reader] = {
    DOCUMENT: _written,
    "function": _headed,
    **dict.fromkeys(("source", "."), _sourced),
    **dict.fromkeys(("[", "[[", "test", "false"), _tested),
    "eval": _evaluated,
    "let": _let,
    **dict.fromkeys(("unset", "read", "mapfile", "readarray"), _changed),
    **dict.fromkeys(("echo", "printf"), _printed),
}
