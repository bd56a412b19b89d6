"""The words of a shell script with its own variables put in. The script is read, never run.

Understood are assignments (also arrays, +=), $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}, whole-number $((...)), and
conditions that compare such values. What depends on the environment, on files or on programs stays as it is written, with
its ``$``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from solver.formats.shell_tokens import KEPT, tokens_of

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"\$\{([^{}$]*)\}|\$([A-Za-z_]\w*)|\$\[([^\[\]$]*)\]")
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^{}]*\})")  #: what the script itself is called with
_BRACED = re.compile(r"(\w+)(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_PREFIXES = ("export", "declare", "local", "readonly")
_CHANGING = ("unset", "read", "let", "mapfile", "readarray")  #: commands that change the variables that they name
_PRINTING = ("echo", "printf")  #: commands that only show their words
_BLOCKS = ("for", "while", "until", "case")
_KEYWORDS = (*_BLOCKS, "if", "then", "elif", "else", "fi", "do", "done", "esac", "{", "}")
_SEPARATORS = (";", "\n", "&", "&&", "|", "||")
_DEEPEST = 100  #: blocks within each other
_LONGEST = 100_000  #: characters of a variable, and times that it is expanded: beyond them a script is not meant to be read


@dataclass(frozen=True)
class Word:
    """A word of a command. defaults: the variables of the environment in it for which the script's own default stands."""

    text: str
    defaults: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Branch:
    """Of an if, or of a loop. earlier: whether one before it ran. defaults: of the environment, which decided."""

    runs: bool | None = None
    earlier: bool | None = None
    defaults: frozenset[str] = frozenset()


@dataclass
class _State:
    """variables: name -> value, None where it is not known. defaults: name -> value of ${NAME:-value}."""

    variables: dict[str, Word | None] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    branches: list[_Branch] = field(default_factory=list)
    chained: bool | None = True  #: whether the present command runs as far as && and || before it say
    tested: frozenset[str] = frozenset()  #: defaults of the environment that decide ``chained``
    succeeded: bool | None = True  #: of the command before it; what is no test is taken to succeed

    @property
    def runs(self) -> bool | None:
        """Whether the present command runs: None where a condition cannot be told."""
        return _all([self.chained, *(branch.runs for branch in self.branches)])

    @property
    def decided_by(self) -> frozenset[str]:
        """The variables whose defaults decide that it runs."""
        return self.tested.union(*(branch.defaults for branch in self.branches))


@dataclass(frozen=True)
class Shell:
    """words: those of the commands that run, or may run; ";" stands between two commands. defaults: variable -> value."""

    words: tuple[Word, ...]
    defaults: dict[str, str]


def read_shell(text: str) -> Shell:
    """Return the words of a script. Raises ValueError for quotes or lists that stay open, and for blocks nested too deeply."""
    state, tokens, at = _State(), tokens_of(text), 0
    found: list[Word] = []
    starts = True  # whether the next token begins a command
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token in _SEPARATORS or (starts and token in _KEYWORDS):
            at = _control(state, token, tokens, at)
            found += [Word(";")] if found and found[-1].text != ";" else []
            starts = True
        elif starts and tokens[at - 1 : at + 1] == ["(", "("]:  # an arithmetic command may change what it names
            at = _forget(state, tokens, at)
        elif token in ("(", ")"):  # of a function's head, a pattern of case, a subshell: what follows is a command
            starts = True
        elif starts and token in ("[", "[["):
            at = _tested(state, tokens, at - 1)
            starts = False
        elif starts and (assigned := _ASSIGNMENT.fullmatch(token)):
            at = _assign(state, assigned, tokens, at)
            state.succeeded = True if state.chained else state.succeeded
        elif starts and token in _CHANGING:
            at = _forget(state, tokens, at)
        elif starts and token in _PRINTING:
            at = next((i for i in range(at, len(tokens)) if tokens[i] in _SEPARATORS), len(tokens))
            state.succeeded = True if state.chained else state.succeeded
        elif not (starts and (token in _PREFIXES or token.startswith("-") and tokens[at - 2] in _PREFIXES)):
            starts = False
            state.succeeded = True if state.chained else state.succeeded
            found += _expanded(state, token) if state.runs is not False else []
    return Shell(tuple(found), state.defaults)


def _tested(state: _State, tokens: Sequence[str], at: int) -> int:
    """Evaluate a test that is a command of its own; return where the commands go on."""
    close = {"[": "]", "[[": "]]"}[tokens[at]]
    end = next((i for i in range(at, len(tokens)) if tokens[i] == close), len(tokens) - 1) + 1
    if state.chained is not False:
        used: set[str] = set()
        state.succeeded = _condition(state, tokens[at:end], used) if state.chained else None
        state.tested |= used
    return end


def _forget(state: _State, tokens: Sequence[str], at: int) -> int:
    """Mark the variables that the words of a command name as unknown; return where the commands go on."""
    end = next((i for i in range(at, len(tokens)) if tokens[i] in _SEPARATORS), len(tokens))
    for name in re.findall(r"[A-Za-z_]\w*", " ".join(tokens[at:end])):
        state.variables[name] = None
    return end


def _control(state: _State, token: str, tokens: Sequence[str], at: int) -> int:
    """Enter or leave a branch; return where the commands go on."""
    if len(state.branches) > _DEEPEST:
        raise ValueError("blocks are nested too deeply")
    if token in ("&&", "||"):
        state.chained = state.succeeded if token == "&&" else _not(state.succeeded)
        return at
    state.chained, state.succeeded, state.tested = True, True, frozenset()
    if token in ("if", "elif"):
        end = next((i for i in range(at, len(tokens)) if tokens[i] == "then"), len(tokens))
        used: set[str] = set()
        holds = _condition(state, [t for t in tokens[at:end] if t not in (";", "\n")], used)
        before = state.branches.pop() if token == "elif" and state.branches else _Branch(earlier=False)
        runs, earlier = _all([holds, _not(before.earlier)]), _any([holds, before.earlier])
        state.branches.append(_Branch(runs, earlier, before.defaults | used))
        return end
    if token == "else" and state.branches:
        before = state.branches.pop()
        state.branches.append(_Branch(_not(before.earlier), True, before.defaults))
    elif token in _BLOCKS:
        state.branches.append(_Branch())
    elif token == "{":  # a function's body runs when it is called; other braces run now
        head = [word for word in tokens[max(at - 6, 0) : at - 1] if word != "\n"]
        of_function = head[-2:] == ["(", ")"] or head[-2:-1] == ["function"]
        state.branches.append(_Branch() if of_function else _Branch(True))
    elif token in ("fi", "done", "esac", "}") and state.branches:
        state.branches.pop()
    return at


def _assign(state: _State, match: re.Match[str], tokens: Sequence[str], at: int) -> int:
    """Set a variable; return where the commands go on, after the elements of an array."""
    name, more, value = match.groups()
    parts, joint = [value], ""
    if not value and at < len(tokens) and tokens[at] == "(":
        end = next((i for i in range(at, len(tokens)) if tokens[i] == ")"), len(tokens))
        if end == len(tokens):
            raise ValueError(f"the list that {name} is set to has no closing parenthesis")
        parts, joint, at = [token for token in tokens[at + 1 : end] if token != "\n"], " ", end + 1
    if state.runs is False:
        return at
    words = [_word(state, part) for part in parts]
    before = state.variables.get(name, Word("")) if more else Word("")
    if state.runs is None or before is None:
        state.variables[name] = None
        return at
    text = joint.join(filter(None, (before.text, *(word.text for word in words))))
    defaults = state.decided_by.union(before.defaults, *(word.defaults for word in words))
    state.variables[name] = Word(text[:_LONGEST], defaults)
    return at


def _expanded(state: _State, token: str) -> list[Word]:
    """Return the words that a token stands for: what comes from variables is split at blanks, $@ is taken to be empty."""
    word = _word(state, token)
    parts = word.text.split() if "$" in token else [word.text]
    return [Word(_plain(text), word.defaults | state.decided_by) for text in parts]


def _plain(text: str) -> str:
    """Return a word as the script writes it, where nothing is put in for its variables."""
    return re.sub(r"\$\[([^]]*)\]", r"$((\1))", text.translate(KEPT))


def _word(state: _State, token: str) -> Word:
    """Return a token with its variables put in, innermost first; what is not known stays hidden from further expansion."""
    used: set[str] = set()

    token = _ARGUMENTS.sub("", token)

    def value(match: re.Match[str]) -> str:
        braced, plain, sum_ = match.groups()
        found = _arithmetic(state, sum_, used) if sum_ is not None else _value(state, braced or plain or "", used)
        return "\0" + match[0][1:].replace("$", "\0") if found is None else found

    for _ in range(_LONGEST):
        token, count = _EXPANSION.subn(value, token)
        if not count or len(token) > _LONGEST:
            break
    return Word(token, frozenset(used))


def _value(state: _State, written: str, used: set[str]) -> str | None:
    """Return what ${written} is, or None where that is not known."""
    match = _BRACED.fullmatch(written)
    if not match:
        return None
    name, how, default = match.groups()
    if name in state.variables and (how is None or (state.variables[name] or Word("?")).text or ":" not in how):
        known = state.variables[name]
        used |= known.defaults if known else set()
        return known.text if known else None
    if how is None:
        return None
    if name not in state.variables:
        used.add(name)
        state.defaults[name] = _plain(default)
    return str(default)


def _arithmetic(state: _State, written: str, used: set[str]) -> str | None:
    """Return the whole number that $((written)) is, or None."""

    def number(match: re.Match[str]) -> str:
        return _value(state, match[0], used) or "?"

    text = re.sub(r"[A-Za-z_]\w*", number, written.translate(KEPT))
    if not re.fullmatch(r"[\d+\-*/%() ]{1,100}", text):
        return None
    try:
        return str(_sum(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _sum(node: ast.AST) -> int:
    kinds: dict[type, Callable[[int, int], int]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
    }  # fmt: skip
    if isinstance(node, ast.BinOp) and type(node.op) in kinds:
        return kinds[type(node.op)](_sum(node.left), _sum(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_sum(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"{ast.dump(node)} is no sum of whole numbers")


def _condition(state: _State, tokens: Sequence[str], used: set[str]) -> bool | None:
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
        holds = (_all if joint == "&&" else _any)([holds, _test(state, part, used)])
    return holds


def _test(state: _State, tokens: Sequence[str], used: set[str]) -> bool | None:
    if tokens and tokens[0] == "!":
        return _not(_test(state, tokens[1:], used))
    if len(tokens) == 2 and tokens[0] in ("-n", "-z") and (name := _of_environment(state, tokens[1])):
        used.add(name)
        state.defaults[name] = "not set"
        return tokens[0] == "-z"
    found = [_word(state, token) for token in tokens]
    used.update(*(word.defaults for word in found))
    words = [_plain(word.text) for word in found]
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


def _of_environment(state: _State, token: str) -> str:
    """Return the name of the variable that a token is, if only the environment may have it; otherwise ""."""
    match = re.fullmatch(r"\$(?:\{([A-Za-z_]\w*)(?::?-)?\}|([A-Za-z_]\w*))", token)
    name = (match[1] or match[2]) if match else ""
    return "" if name in state.variables else name


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _all(values: Sequence[bool | None] | Iterator[bool | None]) -> bool | None:
    found = list(values)
    return False if False in found else None if None in found else True


def _any(values: Sequence[bool | None]) -> bool | None:
    return True if True in values else None if None in values else False
