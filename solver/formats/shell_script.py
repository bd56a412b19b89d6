"""The words of a shell script with its own variables put in. The script is read, never run.

Understood are assignments (also arrays, +=), $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}, whole-number $((...)), and
conditions that compare such values. What depends on the environment, on files or on programs stays as it is written, with
its ``$``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile

from solver.formats.shell_cases import begin_case, ends_clause, next_clause
from solver.formats.shell_conditions import compared, condition
from solver.formats.shell_tokens import tokens_of
from solver.formats.shell_values import (
    LONGEST,
    OWN_ARGUMENTS,
    Branch,
    State,
    Word,
    all_of,
    any_of,
    expanded_word,
    not_of,
    plain_text,
    set_variable,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(.*)\]\+?=(.*)", re.DOTALL)  #: of an array
_PREFIXES = ("export", "declare", "local", "readonly", "typeset")
_CHANGING = ("unset", "read", "let", "mapfile", "readarray")  #: commands that change the variables that they name
_EVERY = "*"  #: among the variables that a function changes: it has a reference to one that it is given
#: Commands that are run for their answer, which only they know.
_ASKING = ("grep", "egrep", "fgrep", "diff", "cmp", "pgrep", "which", "command", "type", "hash", "ping", "mountpoint")
_SOURCING = ("source", ".")
_PRINTING = ("echo", "printf")  #: commands that only show their words
_KEYWORDS = ("for", "while", "until", "case", "if", "then", "elif", "else", "fi", "do", "done", "esac", "{", "}")
_SEPARATORS = (";", "\n", "&", "&&", "|", "||")
_DEEPEST = 100  #: blocks within each other


@dataclass(frozen=True)
class Shell:
    """words: those of the commands that run, or may run; ";" stands between two commands. defaults: variable -> value. sourced:
    files whose commands run among them. environment: values of the variables that are set, as far as they are known."""

    words: tuple[Word, ...]
    defaults: dict[str, str]
    sourced: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def read_shell(text: str, known: Mapping[str, str] | None = None) -> Shell:
    """Return the words of a script. known: variables that are set before it.

    Raises ValueError for quotes or lists that stay open, and for blocks nested too deeply.
    """
    tokens, at = tokens_of(text), 0
    state = State({name: Word(value, frozenset()) for name, value in (known or {}).items()}, passed=_passed(tokens))
    found: list[Word] = []
    starts = True  # whether the next token begins a command
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token in _SEPARATORS or (starts and token in _KEYWORDS):
            at = _control(state, token, tokens, at)
            found += [Word(";")] if found and found[-1].text != ";" else []
            starts = True
        elif starts and tokens[at - 1 : at + 1] == ["(", "("]:
            at = _calculated(state, tokens, at - 1)
        elif starts and token == "function":
            at += 1  # its name, behind which its body begins
        elif token in ("(", ")"):  # of a function's head, a subshell: what follows is a command
            _bracket(state, token, starts)
            starts = True
        elif starts and token in _SOURCING:
            state.sourced += (
                [plain_text(expanded_word(state, tokens[at]).text)] if at < len(tokens) and state.runs is not False else []
            )
            starts = False
        elif starts and token in ("[", "[[", "test", "false"):
            at = _tested(state, tokens, at - 1)
            starts = False
        elif starts and (assigned := _ASSIGNMENT.fullmatch(token)):
            at = _assign(state, assigned, tokens, at)
            state.succeeded = True if state.chained else state.succeeded
        elif starts and (element := _ELEMENT.fullmatch(token)):
            _assign_element(state, *element.groups())
        elif starts and token == "eval":
            at = _evaluated(state, tokens, at, found)
            starts = False
        elif starts and (token in _CHANGING or tokens[at - 1 : at + 1] == ["printf", "-v"]):
            at = _forget(state, tokens, at)
        elif starts and token in _PRINTING:
            at = next((i for i in range(at, len(tokens)) if tokens[i] in (*_SEPARATORS, ")")), len(tokens))
            state.succeeded = True if state.chained else state.succeeded
        elif starts and (token in _PREFIXES or token.startswith("-") and tokens[at - 2] in _PREFIXES):
            _reference(state, token, tokens, at)
        else:
            if starts:
                _call(state, token)
            starts = False
            found += _expanded(state, token) if state.runs is not False else []
    return Shell(tuple(found), state.defaults, tuple(state.sourced), state.environment)


def _call(state: State, name: str) -> None:
    """Note what a command that begins with ``name`` changes: a function of the script's own what it sets, others nothing; and
    whether it succeeds, which all do whose answer is not asked for."""
    changed = state.functions.get(name, set()) if state.runs is not False else set()
    for variable in list(state.variables) if _EVERY in changed else changed:
        set_variable(state, variable, None)
    if state.chained:
        state.succeeded = None if name in _ASKING else True


def _passed(tokens: Sequence[str]) -> frozenset[str]:
    """Return the functions of a script that it calls with other arguments than its own; "" where it sets its own anew."""
    heads = {tokens[i - 1] for i in range(1, len(tokens) - 1) if tokens[i : i + 2] == ["(", ")"]}
    heads |= {after for before, after in pairwise(tokens) if before == "function"} | {"set"}
    begins = (*_SEPARATORS, *_KEYWORDS)
    found = set()
    for i, token in enumerate(tokens):
        if token in heads and (i == 0 or tokens[i - 1] in begins) and tokens[i + 1 : i + 2] != ["("]:
            words = list(takewhile(lambda word: word not in _SEPARATORS and word != "}", islice(tokens, i + 1, None)))
            given = words[words.index("--") + 1 :] if token == "set" and "--" in words else words if token != "set" else []
            if any(not OWN_ARGUMENTS.fullmatch(word) for word in given):
                found.add("" if token == "set" else token)
    return frozenset(found)


def _bracket(state: State, token: str, starts: bool) -> None:
    """Enter or leave brackets; what a subshell sets is forgotten behind it."""
    depth = len(state.branches)
    if token == "(":
        if len(state.subshells) > _DEEPEST:
            raise ValueError("subshells are nested too deeply")
        state.subshells.append((depth, (dict(state.variables), dict(state.environment)) if starts else None))
    elif state.subshells and state.subshells[-1][0] == depth:
        before = state.subshells.pop()[1]
        state.variables, state.environment = before or (state.variables, state.environment)


def _tested(state: State, tokens: Sequence[str], at: int) -> int:
    """Evaluate a test that is a command of its own; return where the commands go on."""
    close = {"[": ("]",), "[[": ("]]",)}.get(tokens[at], _SEPARATORS)
    end = next((i for i in range(at, len(tokens)) if tokens[i] in close), len(tokens) - 1) + (close is not _SEPARATORS)
    if state.chained is not False:
        used: set[str] = set()
        state.succeeded = condition(state, tokens[at:end], used) if state.chained else None
        state.tested |= used
    return end


def _calculated(state: State, tokens: Sequence[str], at: int) -> int:
    """Evaluate (( )) as a command: a comparison, or else what may change all that it names; return where the commands go on."""
    end = next((i + 2 for i in range(at, len(tokens) - 1) if tokens[i : i + 2] == [")", ")"]), len(tokens))
    used: set[str] = set()
    holds = compared(state, tokens[at + 2 : end - 2], used)
    if holds is None and re.search(r"(?<![=!<>])=(?!=)|\+\+|--", "".join(tokens[at:end])):
        _forget(state, tokens[:end], at)
    if state.chained is not False:
        state.succeeded = holds if state.chained else None
        state.tested |= used
    return end


def _forget(state: State, tokens: Sequence[str], at: int) -> int:
    """Mark the variables that the words of a command name as unknown; return where the commands go on."""
    end = next((i for i in range(at, len(tokens)) if tokens[i] in (*_SEPARATORS, ")")), len(tokens))
    for name in re.findall(r"[A-Za-z_]\w*", " ".join(tokens[at:end])) if state.runs is not False else ():
        set_variable(state, name, None)
    return end


def _control(state: State, token: str, tokens: Sequence[str], at: int) -> int:
    """Enter or leave a branch; return where the commands go on."""
    if len(state.branches) > _DEEPEST:
        raise ValueError("blocks are nested too deeply")
    if token in ("&&", "||"):
        state.chained = state.succeeded if token == "&&" else not_of(state.succeeded)
        return at
    state.chained, state.succeeded, state.tested = True, True, frozenset()
    if ends_clause(state, tokens, at):
        return next_clause(state, tokens, at)
    if token in ("if", "elif"):
        end = next((i for i in range(at, len(tokens)) if tokens[i] == "then"), len(tokens))
        used: set[str] = set()
        holds = condition(state, [t for t in tokens[at:end] if t not in (";", "\n")], used)
        before = state.branches.pop() if token == "elif" and state.branches else Branch(earlier=False)
        runs, earlier = all_of([holds, not_of(before.earlier)]), any_of([holds, before.earlier])
        state.branches.append(Branch(runs, earlier, before.defaults | used))
        return end
    if token == "else" and state.branches:
        before = state.branches.pop()
        state.branches.append(Branch(not_of(before.earlier), True, before.defaults))
    elif token in ("while", "until"):
        end = next((i for i in range(at, len(tokens)) if tokens[i] == "do"), len(tokens))
        holds = condition(state, [t for t in tokens[at:end] if t not in (";", "\n")], set())
        state.branches.append(Branch(False if holds == (token == "until") else None))
        return end
    elif token == "for":
        return _loop(state, tokens, at)
    elif token == "case":
        return begin_case(state, tokens, at)
    elif token == "{":  # a function's body runs when it is called; other braces run now
        head = [word for word in tokens[max(at - 6, 0) : at - 1] if word != "\n"]
        name = head[-3] if head[-2:] == ["(", ")"] and len(head) > 2 else head[-1] if head[-2:-1] == ["function"] else ""
        state.inside.append(name)
        if name:
            state.functions.setdefault(name, set())
        state.branches.append(Branch() if name else Branch(True))
    elif token in ("fi", "done", "esac", "}") and state.branches:
        state.branches.pop()
        if token == "}" and state.inside:
            state.inside.pop()
    return at


def _loop(state: State, tokens: Sequence[str], at: int) -> int:
    """Enter a loop over words: one word is the variable's value, of several none is known."""
    end = next((i for i in range(at, len(tokens)) if tokens[i] == "do"), len(tokens))
    words = [token for token in tokens[at + 2 : end] if token not in (";", "\n")]
    over = tokens[at + 1 : at + 2] == ["in"]
    one = over and len(words) == 1 and not set(words[0]) & set("*?[{@")
    word = expanded_word(state, words[0]) if one else None
    once = word if word and len(word.text.split()) == 1 else None  # a variable may hold several words
    if over or end == at + 1 or tokens[at] != "(":
        set_variable(state, tokens[at], once)
    state.branches.append(Branch(True if once else None))
    return end


def _assign(state: State, match: re.Match[str], tokens: Sequence[str], at: int) -> int:
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
    text = joint.join(filter(None, (before.text, *(word.text for word in words))))
    defaults = state.decided_by.union(before.defaults, *(word.defaults for word in words))
    set_variable(state, name, Word(text[:LONGEST], defaults))
    return at


def _assign_element(state: State, name: str, index: str, value: str) -> None:
    """Append an element behind the last one of an array; an array with another element set is not known."""
    before, added = state.variables.get(name), expanded_word(state, value)
    if state.runs is False:
        return
    if not state.runs or not before or index != f"${{#{name}[@]}}":
        set_variable(state, name, None)
        return
    text = " ".join(filter(None, (before.text, added.text)))
    set_variable(state, name, Word(text[:LONGEST], state.decided_by | before.defaults | added.defaults))


def _reference(state: State, token: str, tokens: Sequence[str], at: int) -> None:
    """Note that a name stands for another variable (declare -n): all may change where it is set."""
    if not re.fullmatch(r"-[a-zA-Z]*n[a-zA-Z]*", token) or state.runs is False and not state.inside:
        return
    function = state.inside[-1] if state.inside else ""
    if function:
        state.functions.setdefault(function, set()).add(_EVERY)
        return
    for variable in list(state.variables):
        set_variable(state, variable, None)


def _evaluated(state: State, tokens: Sequence[str], at: int, found: list[Word]) -> int:
    """Add the words that eval runs as a command; return where the commands go on. What it may set is not known."""
    end = next((i for i in range(at, len(tokens)) if tokens[i] in (*_SEPARATORS, ")")), len(tokens))
    if state.runs is False:
        return end
    words = [word for token in tokens[at:end] for word in _expanded(state, token)]
    for word in words:
        if assigned := re.match(r"([A-Za-z_]\w*)(?:\[.*\])?\+?=", word.text):
            set_variable(state, assigned[1], None)
    found += [Word(";") if word.text in _SEPARATORS else word for word in words]
    return end


def _is_prefix(state: State, tokens: Sequence[str], at: int) -> bool:
    """Whether an assignment before ``at`` is of the environment of the command that follows, and not of the script."""
    ends = (*_SEPARATORS, *_KEYWORDS, "(", ")")
    if at > state.assigned_until:  # the first of several of one command
        start = at - 1
        while start > 0 and tokens[start - 1] not in ends:
            start -= 1
        state.assigned_until = next((i for i in range(at, len(tokens)) if not _ASSIGNMENT.fullmatch(tokens[i])), len(tokens))
        following = tokens[state.assigned_until] if state.assigned_until < len(tokens) else "\n"
        state.assigns_environment = tokens[start] not in _PREFIXES and following not in ends
    return state.assigns_environment


def _expanded(state: State, token: str) -> list[Word]:
    """Return the words that a token stands for: what comes from variables is split at blanks, $@ is taken to be empty."""
    word = expanded_word(state, token)
    parts = word.text.split() if "$" in token else [word.text]
    return [Word(plain_text(text), word.defaults | state.decided_by) for text in parts]
