"""The words and separators of a shell script, before anything is put in for its variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

SEPARATORS = (";", "\n", "&", "&&", "|", "||")
KEYWORDS = ("for", "while", "until", "case", "if", "then", "elif", "else", "fi", "do", "done", "esac", "{", "}")
_PUNCTUATION = ";&|()\n"
_TARGET = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s&|;("'<>])+"""
_REDIRECTION = re.compile(rf"(?<=\s)(?:[\d&]?>>?[ \t]*>\([^()]*\)|[\d&]?>>?(?:&\d|[ \t]*{_TARGET})|<[ \t]*{_TARGET})")
_PIPE_OF_BOTH = re.compile(r"(?<=\s)\|&(?=\s)")  #: of output and errors
_WRITTEN = re.compile(rf"(?:^|[^>\d])>[ \t]*({_TARGET})|(?:^|\s)tee[ \t]+({_TARGET})")  #: the file that a line writes
DOCUMENT = ":document"  #: stands where a here-document is written
_HERE = re.compile(r"(?<![<\w)])<<(?!<)-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1")
_CONDITION = re.compile(r"\(\([^\n]*?\)\)")  #: that compares numbers, and redirects nothing
_BRACKET = re.compile("[()]")
_COMPARING = str.maketrans("<>", "\7\10")
_COMPARED = str.maketrans("\7\10", "<>")
#: Stand for characters that are quoted, or that belong to what $(...) runs.
KEPT = str.maketrans({"\0": "$", "\1": "(", "\2": ")", "\3": " ", "\4": ";", "\5": "|", "\6": "&"})
_HIDDEN = str.maketrans({value: key for key, value in zip("\1\2\3\4\5\6", "() ;|&", strict=True)})


class Document(NamedTuple):
    """A here-document. target: the file that it is written to, as the script names it; "" for another command's input. text:
    its lines. quoted: nothing is put in for variables."""

    target: str
    text: str
    quoted: bool


def command_end(tokens: Sequence[str], at: int) -> int:
    """Return where the command ends that goes on at ``at``."""
    return next((i for i in range(at, len(tokens)) if tokens[i] in (*SEPARATORS, ")")), len(tokens))


def tokens_of(text: str) -> list[str]:
    """Return the words and separators of a script, with what $(...) runs hidden from the splitting.

    Raises ValueError for a line that seems to go on and does not, and where quotes stay open.
    """
    text = _prepared(text)  # comments first: a backslash ends none of them
    if re.search(r"\\[ \t]+\n", text):
        raise ValueError("a blank stands behind a backslash at the end of a line, which therefore does not go on")
    text = text.replace("\\\n", " ")
    text = _without_sums(text)
    text = _without_commands(text)
    text = _CONDITION.sub(lambda m: m[0].translate(_COMPARING), text)
    text = _PIPE_OF_BOTH.sub("|", _REDIRECTION.sub(" ", text)).translate(_COMPARED)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[str] = []
    for token in lexer:
        if token and set(token) <= set(_PUNCTUATION):
            parts = (("".join(same),) if key in "&|" else tuple(same) for key, same in groupby(token))
            found += [part for several in parts for part in several]
        else:
            found.append(token)
    return found


def _without_commands(text: str) -> str:
    """Return a script with what $(...) holds hidden from the splitting, however many brackets are in it."""
    found, at = [], 0
    while (begin := text.find("$(", at)) >= 0:
        end = _closing(text, begin + 2, 1)
        if end is None:  # it stays open
            break
        found.append(text[at:begin] + "\0" + text[begin + 1 : end].replace("$", "\0").translate(_HIDDEN))
        at = end
    return "".join([*found, text[at:]])


def _closing(text: str, at: int, depth: int) -> int | None:
    """Return the place behind the bracket that closes the outermost of ``depth`` open ones; None where none does."""
    for place in _BRACKET.finditer(text, at):
        depth += 1 if place[0] == "(" else -1
        if not depth:
            return place.end()
    return None


def _without_sums(text: str) -> str:
    """Return a script with $((...)) written $[...], and what it holds hidden from the splitting."""
    found, at = [], 0
    while (begin := text.find("$((", at)) >= 0:
        end = _closing(text, begin + 3, 2) or 0
        if text[end - 2 : end] != "))":  # no sum: $( (...) )
            found.append(text[at : begin + 3])
            at = begin + 3
            continue
        found.append(f"{text[at:begin]}$[{text[begin + 3 : end - 2].translate(_HIDDEN)}]")
        at = end
    return "".join([*found, text[at:]])


def without_documents(text: str) -> tuple[str, list[Document]]:
    """Return a script with each here-document replaced by ``DOCUMENT N``, and the documents."""
    found: list[str] = []
    documents: list[Document] = []
    lines = iter(text.replace("\r\n", "\n").split("\n"))
    for line in lines:
        here = None if line.lstrip().startswith("#") else _HERE.search(line)
        if here is None:
            found.append(line)
            continue
        line, end = line[: here.start()] + line[here.end() :], here[2]
        held: list[str] = []
        for one in lines:
            if one.strip() == end:
                break
            held.append(one)
        target = _WRITTEN.search(line)
        documents.append(Document((target[1] or target[2]).strip("\"'") if target else "", "\n".join(held), bool(here[1])))
        found.append(f"{line}\n{DOCUMENT} {len(documents) - 1}")
    return "\n".join(found), documents


def _prepared(text: str) -> str:
    """Return a script without comments, with what is quoted from expansion hidden from it, and "$NAME" written "${NAME}"."""
    found, at = [], 0
    while at < len(text):
        char, end = text[at], at + 1
        if char == "\\":
            end = at + 2
            found.append(text[at:end].replace("$", "\0"))
        elif char == "'":
            end = text.find("'", at + 1) + 1 or len(text)
            found.append(text[at:end].replace("$", "\0"))
        elif char == '"':
            quoted = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL).match(text, at)
            end = quoted.end() if quoted else end
            found.append(re.sub(r"\$([A-Za-z_]\w*)", r"${\1}", text[at:end].replace("\\$", "\0")))
        elif char == "#" and (at == 0 or text[at - 1] in " \t\r\n;&|("):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
        else:
            found.append(char)
        at = end
    return "".join(found)
