"""The words of a shell script with its own variables put in. The script is read, never run.

Understood are assignments (also arrays, +=), $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}, ${NAME:+word}, whole-number
$((...)), and conditions that compare such values; commands that another shell is given as one word are among the script's.
What depends on the environment, on files or on programs stays as it is written, with its ``$``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, pairwise, takewhile

from solver.formats.shell.blocks import pass_bracket, pass_separator
from solver.formats.shell.commands import call, reader_of
from solver.formats.shell.tokens import DOCUMENT, KEYWORDS, SEPARATORS, Document, tokens_of, without_documents
from solver.formats.shell.values import OWN_ARGUMENTS, State, Word, expanded_word, expanded_words, plain_text

_SHELL, _ITS_COMMANDS = re.compile(r"(?:/\S*/)?(?:ba|z)?sh"), re.compile(r"-[a-z]*c")
_SUBMITS = re.compile(r"(?:/\S*/)?(?:sbatch|(?:ba|z)?sh)")  #: programs that run the commands of their input, or of a file


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
    text, documents = without_documents(f"{text}\n")
    tokens, at = tokens_of(text), 0
    variables: dict[str, Word | None] = {name: Word(value.replace("$", "\0")) for name, value in (known or {}).items()}
    state = State(variables, passed=_passed(tokens), documents=documents)
    starts = True  # whether the next token begins a command
    while at < len(tokens):
        at, starts = _read(state, tokens, at, starts)
    return Shell(tuple(state.words), state.defaults, tuple(state.sourced), state.environment, state.files)


def _read(state: State, tokens: Sequence[str], at: int, starts: bool) -> tuple[int, bool]:
    """Read what stands at ``at``; return where the tokens go on, and whether a command begins there."""
    token = tokens[at]
    if token in SEPARATORS:
        _run_written(state)
    if token in SEPARATORS or (starts and token in KEYWORDS):
        at = pass_separator(state, token, tokens, at + 1)
        state.words += [Word(";")] if state.words and state.words[-1].text != ";" else []
        return at, True
    if starts and token == DOCUMENT:
        _run_input(state, state.documents[int(tokens[at + 1])])
    if starts and (reader := reader_of(tokens, at)):
        return reader(state, tokens, at + 1)
    if token in ("(", ")"):  # of a function's head, a subshell: what follows is a command
        pass_bracket(state, token, starts)
        return at + 1, True
    if starts:
        call(state, token)
    state.words += expanded_words(state, token) if state.runs is not False else []
    if _SHELL.fullmatch(token):
        own = next((i for i in range(at + 1, len(tokens)) if not re.fullmatch(r"-[a-z]+", tokens[i])), at + 1)
        if own > at + 1 and own < len(tokens) and _ITS_COMMANDS.fullmatch(tokens[own - 1]):
            return _of_another_shell(state, tokens, own - 1), False
    return at + 1, False


def _run_input(state: State, document: Document) -> None:
    """Add the commands of a here-document that is the input of a shell, or of Slurm's sbatch."""
    command = _last_command(state)
    if document.target or not command or not _SUBMITS.fullmatch(command[0].text) or state.runs is False:
        return
    if any(not word.text.startswith("-") for word in command[1:]):  # a program of its own reads the input
        return
    text = document.text.replace("\\$", "\0")
    _add(state, document.text if document.quoted else plain_text(expanded_word(state, text).text))


def _run_written(state: State) -> None:
    """Add the commands of a file that the script writes, where the command that ends here runs them."""
    command = _last_command(state)
    if not command or not _SUBMITS.fullmatch(command[0].text) or state.runs is False:
        return
    name = next((word.text for word in command[1:] if not word.text.startswith("-")), "")
    if text := state.files.pop(name, ""):  # once, or a file that runs itself would never end
        _add(state, text)


def _last_command(state: State) -> list[Word]:
    """Return the words of the command that ended last."""
    words = [*state.words]
    while words and words[-1].text == ";":
        words.pop()
    return list(takewhile(lambda word: word.text != ";", reversed(words)))[::-1]


def _add(state: State, text: str) -> None:
    """Add the commands of another script, which knows what this one exports and what Slurm tells both."""
    slurm = {name: word for name, word in state.variables.items() if name.startswith("SLURM_") and word}
    inner = read_shell(text, {**{name: plain_text(word.text) for name, word in slurm.items()}, **state.environment})
    state.defaults |= inner.defaults
    state.sourced += inner.sourced
    state.words += [Word(";")]
    for word in inner.words:
        state.words.append(replace(word, environment=(*inner.environment.items(), *word.environment)))


def _of_another_shell(state: State, tokens: Sequence[str], at: int) -> int:
    """Add the commands that a shell is given as one word, each behind what starts it; return where the commands go on."""
    given, found = expanded_word(state, tokens[at + 1]), state.words
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
