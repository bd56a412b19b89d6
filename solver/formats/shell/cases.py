"""The clauses of a shell script's case: which of them runs, as its word and their patterns say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from solver.formats.shell.values import Branch, State, Word, all_of, any_of, expanded_word, not_of, plain_text


def begin_case(state: State, tokens: Sequence[str], at: int) -> int:
    """Enter the first clause of the case whose word is at ``at``; return where its commands begin.

    Raises ValueError where no ``in`` follows the word.
    """
    word = at + 1
    while tokens[word : word + 1] == ["\n"]:
        word += 1
    if tokens[word : word + 1] != ["in"]:
        raise ValueError("a case statement has no 'in' after its word")
    return _enter(state, Branch(earlier=False, subject=expanded_word(state, tokens[at])), tokens, word + 1)


def ends_clause(state: State, tokens: Sequence[str], at: int) -> bool:
    """Whether the separator before ``at`` is the first of ;; or ;& of a clause of a case."""
    inside = bool(state.branches) and state.branches[-1].subject is not None
    return inside and tokens[at - 1] == ";" and tokens[at : at + 1] in ([";"], ["&"])


def next_clause(state: State, tokens: Sequence[str], at: int) -> int:
    """Leave a clause and enter the one after its ;; (whose second part is at ``at``); return where its commands begin."""
    before, falls = state.branches.pop(), tokens[at] == "&" or tokens[at + 1 : at + 2] == ["&"]
    while tokens[at : at + 1] in ([";"], ["&"]):
        at += 1
    at = _enter(state, before, tokens, at)
    if falls and before.runs is not False:  # into the next clause, or on to further patterns
        state.branches[-1] = replace(state.branches[-1], runs=None)
    return at


def _enter(state: State, before: Branch, tokens: Sequence[str], at: int) -> int:
    """Enter the clause whose patterns are at ``at``, or stay before ``esac``; return where its commands begin."""
    while tokens[at : at + 1] == ["\n"]:
        at += 1
    at += tokens[at : at + 1] == ["("]
    end = next((i for i in range(at, len(tokens)) if tokens[i] in (")", "esac")), len(tokens))
    if tokens[end : end + 1] != [")"]:  # no clause follows
        state.branches.append(replace(before, runs=False))
        return end
    patterns = [expanded_word(state, token) for token in tokens[at:end] if token not in ("|", "\n")]
    subject = before.subject or Word("")
    holds = any_of([_matches(subject, pattern) for pattern in patterns])
    used = before.defaults.union(subject.defaults, *(pattern.defaults for pattern in patterns))
    runs = all_of([holds, not_of(before.earlier)])
    state.branches.append(Branch(runs, any_of([holds, before.earlier]), used, before.subject))
    return end + 1


def _matches(word: Word, pattern: Word) -> bool | None:
    """Whether a word is what a pattern says; None where one of them is not known."""
    text, like = plain_text(word.text), plain_text(pattern.text)
    if like == "*":
        return True
    return None if "$" in text + like else fnmatchcase(text, like)
