"""Whole-number arithmetic of a shell: the operators of C that scripts use, over the script's own variables."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(\*\*|&&|\|\||[=!<>]=|[-+*/%()<>!?:]))")
_LONGEST, _MOST, _MOST_EXPONENT = 200, 1 << 63, 62


def _binary() -> tuple[Mapping[str, Callable[[int, int], int]], ...]:
    """Return the operators by how strongly they bind, weakest first; of one strength they run from left to right."""
    return (
        {"||": lambda a, b: int(bool(a or b))},
        {"&&": lambda a, b: int(bool(a and b))},
        {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
        {"<": lambda a, b: int(a < b), "<=": lambda a, b: int(a <= b)}
        | {">": lambda a, b: int(a > b), ">=": lambda a, b: int(a >= b)},
        {"+": operator.add, "-": operator.sub},
        {"*": operator.mul, "/": _divided, "%": lambda a, b: a - b * _divided(a, b)},
    )


def _divided(a: int, b: int) -> int:
    """Return a / b as C divides: towards zero."""
    if not b:
        raise ValueError("division by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY = _binary()


class _Expression:
    """An expression being read; value: gives the number that a name stands for."""

    def __init__(self, text: str, value: Callable[[str], int]) -> None:
        self.tokens, self.at, self.value = _tokens(text), 0, value

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str = "") -> str:
        found = self.next()
        if not found or token and found != token:
            raise ValueError(f"{token or 'a number'} is missing")
        self.at += 1
        return found

    def choice(self) -> int:
        condition = self.binary(0)
        if self.next() != "?":
            return condition
        self.take("?")
        first = self.choice()
        self.take(":")
        second = self.choice()
        return first if condition else second

    def binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self.power()
        found = self.binary(level + 1)
        while self.next() in _BINARY[level]:
            operation = _BINARY[level][self.take()]
            found = operation(found, self.binary(level + 1))
            if abs(found) >= _MOST:
                raise ValueError("a number does not fit 64 bits")
        return found

    def power(self) -> int:
        base = self.unary()
        if self.next() != "**":
            return base
        self.take("**")
        exponent = self.power()
        if not 0 <= exponent <= _MOST_EXPONENT or abs(base) ** exponent >= _MOST:
            raise ValueError("a power does not fit 64 bits")
        return int(base**exponent)

    def unary(self) -> int:
        token = self.take()
        if token in ("-", "+", "!"):
            value = self.unary()
            return {"-": -value, "+": value, "!": int(not value)}[token]
        if token == "(":
            value = self.choice()
            self.take(")")
            return value
        return int(token) if token.isdecimal() else self.value(token)


def _tokens(text: str) -> list[str]:
    found, at, text = [], 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at:][:20]!r} is no arithmetic")
        found.append(next(part for part in match.groups() if part))
        at = match.end()
    return found


def calculated(text: str, value: Callable[[str], int]) -> int:
    """Return the number that an expression is; value: of a name. Raises ValueError where it is none."""
    if len(text) > _LONGEST:
        raise ValueError("the expression is too long")
    expression = _Expression(text, value)
    found = expression.choice()
    if expression.next():
        raise ValueError(f"{expression.next()!r} follows the expression")
    return found
