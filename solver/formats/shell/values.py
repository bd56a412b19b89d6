"""The variables of a shell script, what is put in for them, and whether a command runs.

What cannot be told from the script is None, and stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from solver.formats.shell.arithmetic import calculated
from solver.formats.shell.strings import OPERATION, transformed
from solver.formats.shell.tokens import KEPT, Document

_EXPANSION = re.compile(r"\$\{([^{}$]*)\}|\$([A-Za-z_]\w*)|\$\[([^\[\]$]*)\]")
OWN_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^{}]*\})")  #: what the script itself is called with
_BRACED = re.compile(r"(\w+)(?:\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_SUBSTITUTED = re.compile("\0\1([^\1\2]*)\2")  #: $(...), hidden from the splitting
_COUNTED = re.compile(r"#(\w+)(\[[@*]\])?")
_ELEMENT = re.compile(r"(\w+)\[([^\]@*]+)\]")
LONGEST = 100_000  #: characters of a variable, and times that it is expanded: beyond them a script is not meant to be read

EVERY = "*"  #: among the variables that a function changes: it has a reference to one that it is given


@dataclass(frozen=True)
class Word:
    """A word of a command. defaults: the variables of the environment in it for which the script's own default stands.
    environment: variables and values that the shell which runs the command sets beyond the script's own. elements: of an
    array, (index or key, value); empty where it is none, or one whose elements are not known."""

    text: str
    defaults: frozenset[str] = frozenset()
    environment: tuple[tuple[str, str], ...] = ()
    elements: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Branch:
    """Of an if, of a loop, or of a case. earlier: whether one before it ran. defaults: of the environment, which decided.
    subject: the word of the case."""

    runs: bool | None = None
    earlier: bool | None = None
    defaults: frozenset[str] = frozenset()
    subject: Word | None = None


@dataclass
class State:
    """The variables of a shell at one place of a script: name -> value, None where it is not known.

    defaults: name -> value of ${NAME:-value}.
    """

    variables: dict[str, Word | None] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    chained: bool | None = True  #: whether the present command runs as far as && and || before it say
    tested: frozenset[str] = frozenset()  #: defaults of the environment that decide ``chained``
    #: Functions that are called with other arguments than the script's own; "": the script sets its own anew.
    passed: frozenset[str] = frozenset()
    assigned_until: int = -1  #: token behind the present run of assignments, which are of the environment of one command or not
    assigns_environment: bool = False
    #: Branches around each, and variables and environment before it; None: other brackets.
    subshells: list[tuple[int, tuple[dict[str, Word | None], dict[str, str]] | None]] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  #: here-documents that are written, by the file's name
    functions: dict[str, set[str]] = field(default_factory=dict)  #: of the script's own, and what they set
    inside: list[str] = field(default_factory=list)  #: the functions whose bodies the present command is in; "": other braces
    environment: dict[str, str] = field(default_factory=dict)  #: of the commands that the script starts
    succeeded: bool | None = True  #: of the command before it; what is no test is taken to succeed
    words: list[Word] = field(default_factory=list)  #: of the commands until here that run, or may run; ";" between two
    documents: Sequence[Document] = ()  #: here-documents, in the order in which they stand in the script

    @property
    def runs(self) -> bool | None:
        """Whether the present command runs: None where a condition cannot be told."""
        return all_of([self.chained, *(branch.runs for branch in self.branches)])

    @property
    def hides_arguments(self) -> bool:
        """Whether the arguments here are others than those that the script is called with."""
        return bool(self.passed & {"", *self.inside}) and ("" in self.passed or any(self.inside))

    @property
    def decided_by(self) -> frozenset[str]:
        """The variables whose defaults decide that it runs."""
        return self.tested.union(*(branch.defaults for branch in self.branches))


def expanded_word(state: State, token: str) -> Word:
    """Return a token with its variables put in, innermost first; what is not known stays hidden from further expansion."""
    used: set[str] = set()

    token = token if state.hides_arguments else OWN_ARGUMENTS.sub("", token).replace("$#", "0")

    def value(match: re.Match[str]) -> str:
        braced, plain, sum_ = match.groups()
        found = arithmetic(state, sum_, used) if sum_ is not None else variable_value(state, braced or plain or "", used)
        return "\0" + match[0][1:].replace("$", "\0") if found is None else found

    for _ in range(LONGEST):
        token, count = _EXPANSION.subn(value, token)
        if not count or len(token) > LONGEST:
            break
    token = _SUBSTITUTED.sub(lambda match: _answer(state, match, used), token)
    return Word(token, frozenset(used))


def expanded_words(state: State, token: str) -> list[Word]:
    """Return the words that a token stands for: what comes from variables is split at blanks, $@ is taken to be empty."""
    word = expanded_word(state, token)
    parts = word.text.split() if "$" in token else [word.text]
    return [Word(plain_text(text), word.defaults | state.decided_by) for text in parts]


def _answer(state: State, match: re.Match[str], used: set[str]) -> str:
    """Return what a command in $(...) prints where that follows from its words, else the command as it is hidden."""
    try:
        words = [expanded_word(state, word) for word in match[1].translate(KEPT).split()]
    except RecursionError:
        return match[0]
    used.update(*(word.defaults for word in words))
    texts = [word.text for word in words]
    printed = None
    if texts and not any("\0" in text or "$" in text for text in texts):
        program, *given = texts
        if program == "expr" or (program == "echo" and given[-2:] == ["|", "bc"]):
            printed = arithmetic(state, " ".join(given if program == "expr" else given[:-2]), used)
        elif program == "echo" and given[:1] != ["-e"] and not set("".join(given)) & set("|;&<>"):
            printed = " ".join(given)
        elif program == "basename" and given:
            printed = given[0].rstrip("/").rpartition("/")[2].removesuffix(given[1] if len(given) > 1 else "")
    return match[0] if printed is None else printed


def variable_value(state: State, written: str, used: set[str]) -> str | None:
    """Return what ${written} is, or None where that is not known."""
    match = _BRACED.fullmatch(written)
    if not match:
        return _of_parts(state, written, used)
    name, how, default = match.groups()
    if name.isdecimal() and state.hides_arguments:
        return None
    if how and "+" in how:
        return _alternative(state, name, how, str(default), used)
    if name in state.variables and (how is None or (state.variables[name] or Word("?")).text or ":" not in how):
        known = state.variables[name]
        used |= known.defaults if known else set()
        return known.text if known else None
    if how is None:
        return None
    if name not in state.variables:
        used.add(name)
        state.defaults[name] = plain_text(default)
    if "=" in how:
        state.variables[name] = Word(str(default), frozenset({name}))
    return str(default)


def _of_parts(state: State, written: str, used: set[str]) -> str | None:
    """Return a number of characters or elements, an element of an array, or a part of a variable's text; None: not known."""
    counted, element, changed = _COUNTED.fullmatch(written), _ELEMENT.fullmatch(written), OPERATION.fullmatch(written)
    match = counted or element or changed
    known = state.variables.get(match[1]) if match else None
    if match is None or known is None or "\0" in known.text:
        return None
    used |= known.defaults
    if counted:
        elements = len(known.elements) if known.elements or not known.text else None
        count = elements if counted[2] else len(known.text)
        return None if count is None else str(count)
    if element:
        of, index = dict(known.elements), element[2]
        number = arithmetic(state, index, used) or index
        if number.startswith("-") and list(of) == [str(i) for i in range(len(of))]:
            number = str(len(of) + int(number))
        return of[index] if index in of else of.get(number)
    return transformed(known.text, written[len(match[1]) :])


def _alternative(state: State, name: str, how: str, text: str, used: set[str]) -> str | None:
    """Return what ${name+text} is: nothing where the variable is not set, and with ``:+`` where it is empty."""
    if name not in state.variables:  # only the environment may set it
        used.add(name)
        state.defaults[name] = "not set"
        return ""
    known = state.variables[name]
    if known is None:
        return None
    used |= known.defaults
    return text if known.text or ":" not in how else ""


def set_variable(state: State, name: str, word: Word | None) -> None:
    """Set a variable, or mark it as not known (None), here and wherever the function whose body this is is called."""
    state.variables[name] = word
    for function in filter(None, state.inside):
        state.functions[function].add(name)
    if word is None:
        state.environment.pop(name, None)
    else:
        state.environment[name] = plain_text(word.text)


def plain_text(text: str) -> str:
    """Return a word as the script writes it, where nothing is put in for its variables."""
    return re.sub(r"\$\[([^]]*)\]", r"$((\1))", text.translate(KEPT))


def arithmetic(state: State, written: str, used: set[str]) -> str | None:
    """Return the whole number that $((written)) is, or None."""

    def number(name: str) -> int:
        return int(variable_value(state, name, used) or "?")

    try:
        return str(calculated(written.translate(KEPT), number))
    except (ValueError, RecursionError):
        return None


def not_of(value: bool | None) -> bool | None:
    return None if value is None else not value


def all_of(values: Sequence[bool | None] | Iterator[bool | None]) -> bool | None:
    found = list(values)
    return False if False in found else None if None in found else True


def any_of(values: Sequence[bool | None]) -> bool | None:
    return True if True in values else None if None in values else False
