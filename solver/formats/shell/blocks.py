"""Blocks of a shell script: branches, loops, functions' bodies and brackets, and whether what they hold runs."""

from __future__ import annotations

from collections.abc import Sequence

from solver.formats.shell.cases import begin_case, ends_clause, next_clause
from solver.formats.shell.conditions import condition
from solver.formats.shell.values import Branch, State, all_of, any_of, expanded_word, not_of, set_variable

_DEEPEST = 100  #: blocks within each other


def pass_separator(state: State, token: str, tokens: Sequence[str], at: int) -> int:
    """Pass what separates commands, or enter or leave a block; return where the commands go on.

    Raises ValueError for blocks that are nested too deeply.
    """
    if len(state.branches) > _DEEPEST:
        raise ValueError("blocks are nested too deeply")
    if token in ("&&", "||"):
        state.chained = state.succeeded if token == "&&" else not_of(state.succeeded)
        return at
    state.chained, state.succeeded, state.tested = True, True, frozenset()
    if ends_clause(state, tokens, at):
        return next_clause(state, tokens, at)
    if opens := _OPENING.get(token):
        return opens(state, token, tokens, at)
    if token == "else" and state.branches:
        before = state.branches.pop()
        state.branches.append(Branch(not_of(before.earlier), True, before.defaults))
    elif token in ("fi", "done", "esac", "}") and state.branches:
        state.branches.pop()
        if token == "}" and state.inside:
            state.inside.pop()
    return at


def _begin_if(state: State, token: str, tokens: Sequence[str], at: int) -> int:
    """Enter the branch of an if or elif, whose condition is evaluated."""
    end = next((i for i in range(at, len(tokens)) if tokens[i] == "then"), len(tokens))
    used: set[str] = set()
    holds = condition(state, [t for t in tokens[at:end] if t not in (";", "\n")], used)
    before = state.branches.pop() if token == "elif" and state.branches else Branch(earlier=False)
    runs, earlier = all_of([holds, not_of(before.earlier)]), any_of([holds, before.earlier])
    state.branches.append(Branch(runs, earlier, before.defaults | used))
    return end


def _begin_while(state: State, token: str, tokens: Sequence[str], at: int) -> int:
    """Enter a loop over a condition, of which it is known at most that it never runs."""
    end = next((i for i in range(at, len(tokens)) if tokens[i] == "do"), len(tokens))
    holds = condition(state, [t for t in tokens[at:end] if t not in (";", "\n")], set())
    state.branches.append(Branch(False if holds == (token == "until") else None))
    return end


def _begin_for(state: State, _: str, tokens: Sequence[str], at: int) -> int:
    """Enter a loop over words: one word is the variable's value, of several none is known."""
    end = next((i for i in range(at, len(tokens)) if tokens[i] == "do"), len(tokens))
    words = [token for token in tokens[at + 2 : end] if token not in (";", "\n")]
    over = tokens[at + 1 : at + 2] == ["in"]
    one = over and len(words) == 1 and not set(words[0]) & set("*?[{@")
    word = expanded_word(state, words[0]) if one else None
    once = word if word and len(word.text.split()) == 1 else None  # a variable may hold several words
    if at < end and (over or end == at + 1 or tokens[at] != "("):
        set_variable(state, tokens[at], once)
    state.branches.append(Branch(True if once else None))
    return end


def _begin_case(state: State, _: str, tokens: Sequence[str], at: int) -> int:
    return begin_case(state, tokens, at)


def _begin_braces(state: State, _: str, tokens: Sequence[str], at: int) -> int:
    """Enter a function's body, which runs when it is called, or other braces, which run now."""
    head = [word for word in tokens[max(at - 6, 0) : at - 1] if word != "\n"]
    name = head[-3] if head[-2:] == ["(", ")"] and len(head) > 2 else head[-1] if head[-2:-1] == ["function"] else ""
    state.inside.append(name)
    if name:
        state.functions.setdefault(name, set())
    state.branches.append(Branch() if name else Branch(True))
    return at


_OPENING = {
    "if": _begin_if,
    "elif": _begin_if,
    "while": _begin_while,
    "until": _begin_while,
    "for": _begin_for,
    "case": _begin_case,
    "{": _begin_braces,
}


def pass_bracket(state: State, token: str, starts: bool) -> None:
    """Enter or leave brackets; what a subshell sets is forgotten behind it. starts: the bracket begins a command.

    Raises ValueError for subshells that are nested too deeply.
    """
    depth = len(state.branches)
    if token == "(":
        if len(state.subshells) > _DEEPEST:
            raise ValueError("subshells are nested too deeply")
        state.subshells.append((depth, (dict(state.variables), dict(state.environment)) if starts else None))
    elif state.subshells and state.subshells[-1][0] == depth:
        before = state.subshells.pop()[1]
        state.variables, state.environment = before or (state.variables, state.environment)
