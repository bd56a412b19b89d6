"""The words of a shell script with its own variables put in. The script is read, never run.

Understood are assignments (also arrays, +=), $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}, ${NAME:+word}, whole-number
$((...)), and conditions that compare such values; commands that another shell is given as one word are among the script's.
What depends on the environment, on files or on programs stays as it is written, with its ``$``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise, takewhile

from solver.formats.shell.assignments import ASSIGNMENT, ELEMENT, PREFIXES, assign, assign_element, calculate, refer
from solver.formats.shell.cases import begin_case, ends_clause, next_clause
from solver.formats.shell.conditions import compared, condition
from solver.formats.shell.tokens import DOCUMENT, KEYWORDS, SEPARATORS, Document, command_end, tokens_of, without_documents
from solver.formats.shell.values import (
    EVERY,
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

_CHANGING = ("unset", "read", "let", "mapfile", "readarray")  #: commands that change the variables that they name
#: Commands that are run for their answer, which only they know.
_ASKING = ("grep", "egrep", "fgrep", "diff", "cmp", "pgrep", "which", "command", "type", "hash", "ping", "mountpoint")
_SOURCING = ("source", ".")
_SHELL, _ITS_COMMANDS = re.compile(r"(?:/\S*/)?(?:ba|z)?sh"), re.compile(r"-[a-z]*c")
_PRINTING = ("echo", "printf")  #: commands that only show their words
_DEEPEST = 100  #: blocks within each other


@dataclass(frozen=True)
class Shell:
    """A shell script as far as it can be known without running it.

    words: those of the commands that run, or may run; ";" stands between two commands. defaults: variable -> value. sourced:
    files whose commands run among them. environment: values of the variables that are set; what is not known of them is as
    it is written, with its ``$``. files: what it writes to files as here-documents, by their names.
    """

    words: tuple[Word, ...]
    defaults: dict[str, str]
    sourced: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def read_shell(text: str, known: Mapping[str, str] | None = None) -> Shell:
    """Return the words of a script. known: variables that are set before it.

    Raises ValueError for quotes or lists that stay open, and for blocks nested too deeply.
    """
    text, documents = without_documents(text)
    tokens, at = tokens_of(text), 0
    variables: dict[str, Word | None] = {name: Word(value.replace("$", "\0")) for name, value in (known or {}).items()}
    state = State(variables, passed=_passed(tokens))
    found: list[Word] = []
    starts = True  # whether the next token begins a command
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token in SEPARATORS or (starts and token in KEYWORDS):
            at = _control(state, token, tokens, at)
            found += [Word(";")] if found and found[-1].text != ";" else []
            starts = True
        elif starts and tokens[at - 1 : at + 1] == ["(", "("]:
            at = _calculated(state, tokens, at - 1)
        elif starts and token == DOCUMENT:
            _write(state, documents[int(tokens[at])])
            at += 1
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
        elif starts and (assigned := ASSIGNMENT.fullmatch(token)):
            at = assign(state, assigned, tokens, at)
            state.succeeded = True if state.chained else state.succeeded
        elif starts and (element := ELEMENT.fullmatch(token)):
            assign_element(state, *element.groups())
        elif starts and token == "eval":
            at = _evaluated(state, tokens, at, found)
            starts = False
        elif starts and token == "let" and calculate(state, "".join(tokens[at : command_end(tokens, at)])):
            at = command_end(tokens, at)
        elif starts and (token in _CHANGING or tokens[at - 1 : at + 1] == ["printf", "-v"]):
            at = _forget(state, tokens, at)
        elif starts and token in _PRINTING:
            at = command_end(tokens, at)
            state.succeeded = True if state.chained else state.succeeded
        elif starts and (token in PREFIXES or token.startswith("-") and tokens[at - 2] in PREFIXES):
            refer(state, token)
        else:
            if starts:
                _call(state, token)
            starts = False
            found += _expanded(state, token) if state.runs is not False else []
            if _SHELL.fullmatch(token) and at + 1 < len(tokens) and _ITS_COMMANDS.fullmatch(tokens[at]):
                at = _of_another_shell(state, tokens, at, found)
    return Shell(tuple(found), state.defaults, tuple(state.sourced), state.environment, state.files)


def _call(state: State, name: str) -> None:
    """Note what a command that begins with ``name`` changes: a function of the script's own what it sets, others nothing; and
    whether it succeeds, which all do whose answer is not asked for."""
    changed = state.functions.get(name, set()) if state.runs is not False else set()
    for variable in list(state.variables) if EVERY in changed else changed:
        set_variable(state, variable, None)
    if state.chained:
        state.succeeded = None if name in _ASKING else True


def _write(state: State, document: Document) -> None:
    """Note what a here-document writes to a file, with the script's variables put in."""
    if document.target and state.runs:
        text = document.text if document.quoted else plain_text(expanded_word(state, document.text).text)
        state.files[plain_text(expanded_word(state, document.target).text)] = text


def _passed(tokens: Sequence[str]) -> frozenset[str]:
    """Return the functions of a script that it calls with other arguments than its own; "" where it sets its own anew."""
    heads = {tokens[i - 1] for i in range(1, len(tokens) - 1) if tokens[i : i + 2] == ["(", ")"]}
    heads |= {after for before, after in pairwise(tokens) if before == "function"} | {"set"}
    begins = (*SEPARATORS, *KEYWORDS)
    found = set()
    for i, token in enumerate(tokens):
        if token in heads and (i == 0 or tokens[i - 1] in begins) and tokens[i + 1 : i + 2] != ["("]:
            words = list(takewhile(lambda word: word not in SEPARATORS and word != "}", islice(tokens, i + 1, None)))
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
    close = {"[": ("]",), "[[": ("]]",)}.get(tokens[at], SEPARATORS)
    end = next((i for i in range(at, len(tokens)) if tokens[i] in close), len(tokens) - 1) + (close is not SEPARATORS)
    if state.chained is not False:
        used: set[str] = set()
        state.succeeded = condition(state, tokens[at:end], used) if state.chained else None
        state.tested |= used
    return end


def _calculated(state: State, tokens: Sequence[str], at: int) -> int:
    """Evaluate (( )) as a command: an assignment, a comparison, or else what may change all that it names; return where the
    commands go on."""
    end = next((i + 2 for i in range(at, len(tokens) - 1) if tokens[i : i + 2] == [")", ")"]), len(tokens))
    used: set[str] = set()
    if calculate(state, "".join(tokens[at + 2 : end - 2])):
        return end
    holds = compared(state, tokens[at + 2 : end - 2], used)
    if holds is None and re.search(r"(?<![=!<>])=(?!=)|\+\+|--", "".join(tokens[at:end])):
        _forget(state, tokens[:end], at)
    if state.chained is not False:
        state.succeeded = holds if state.chained else None
        state.tested |= used
    return end


def _forget(state: State, tokens: Sequence[str], at: int) -> int:
    """Mark the variables that the words of a command name as unknown; return where the commands go on."""
    end = command_end(tokens, at)
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
    if at < end and (over or end == at + 1 or tokens[at] != "("):
        set_variable(state, tokens[at], once)
    state.branches.append(Branch(True if once else None))
    return end


def _evaluated(state: State, tokens: Sequence[str], at: int, found: list[Word]) -> int:
    """Add the words that eval runs as a command; return where the commands go on. What it may set is not known."""
    end = command_end(tokens, at)
    if state.runs is False:
        return end
    words = [word for token in tokens[at:end] for word in _expanded(state, token)]
    for word in words:
        if assigned := re.match(r"([A-Za-z_]\w*)(?:\[.*\])?\+?=", word.text):
            set_variable(state, assigned[1], None)
    found += [Word(";") if word.text in SEPARATORS else word for word in words]
    return end


def _of_another_shell(state: State, tokens: Sequence[str], at: int, found: list[Word]) -> int:
    """Add the commands that a shell is given as one word, each behind what starts it; return where the commands go on."""
    given = expanded_word(state, tokens[at + 1])
    if state.runs is False:
        return at + 2
    inner = read_shell(plain_text(given.text), state.environment)  # which hold no variables: it cannot start itself
    starting = list(takewhile(lambda word: word.text != ";", reversed(found)))[:0:-1]
    del found[len(found) - len(starting) - 1 :]
    state.defaults |= inner.defaults
    state.sourced += inner.sourced
    for ends, words in groupby(inner.words, lambda word: word.text == ";"):
        told = [
            Word(word.text, word.defaults | given.defaults | state.decided_by, (*inner.environment.items(), *word.environment))
            for word in words
        ]
        found += told if ends else [*starting, *told]
    return at + 2


def _expanded(state: State, token: str) -> list[Word]:
    """Return the words that a token stands for: what comes from variables is split at blanks, $@ is taken to be empty."""
    word = expanded_word(state, token)
    parts = word.text.split() if "$" in token else [word.text]
    return [Word(plain_text(text), word.defaults | state.decided_by) for text in parts]
