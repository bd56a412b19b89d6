"""An argument parser that answers wrong options with one sentence."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from profiler.errors import closest, printable

_NO_NUMBER = re.compile(r"(argument .*): invalid (int|float) value: '(.*)'")
_NO_CHOICE = re.compile(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)")
_ABBREVIATED = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kmgtb])i?", re.IGNORECASE)
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def _written_out(message: str) -> str:
    """Return argparse's message; of a number with a letter for thousands or millions, how it is written instead; of a command
    that there is not, which one resembles it."""
    if wrong := _NO_CHOICE.fullmatch(message):
        word, known = wrong.groups()
        known = known.replace("'", "")
        return f"no command is called {word!r}{closest(word, known.split(', '))}; choose one of {known}"
    if not (found := _NO_NUMBER.fullmatch(message)):
        return message
    option, kind, text = found.groups()
    if not (short := _ABBREVIATED.fullmatch(text)):
        return f"{option} is {printable(text)!r}; it must be a {'whole ' * (kind == 'int')}number"
    value = float(short[1]) * _FACTORS[short[2].lower()]
    if kind == "float":
        return f"{option} is {text!r}; write it out, as {value:g}"
    power = 1024 ** round(math.log(_FACTORS[short[2].lower()], 1e3))
    return f"{option} is {text!r}; write it out, as {int(value)} or {int(float(short[1]) * power)}"


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, without the usage of all options before an error; ``--help`` prints it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {_written_out(message)}; {self.prog} --help lists the options\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, but an option that is not known is an error of the command that it was given to, one before the
        command is named as such, and hyphens and underscores in options are one spelling."""
        args = self._spelt(sys.argv[1:] if args is None else args)
        first = next(iter(args), "")
        if self._commands() and first.startswith("--") and first not in self._option_string_actions:
            self.error(f"the command comes first: {self.prog} COMMAND {first} ...")
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self._commands().get(str(getattr(found, "command", "")), self)
            option = unknown[0].split("=")[0]
            meant = closest(option, [*command._option_string_actions]) if option.startswith("--") else ""
            others = [name for name, parser in self._commands().items() if option in parser._option_string_actions]
            meant = f" ({option} is an option of {self.prog} {others[0]})" if others else meant
            command.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found

    def _spelt(self, words: Sequence[str]) -> list[str]:
        """Return words with options as they were added."""
        parsers = (self, *self._commands().values())
        known = {option.replace("_", "-"): option for parser in parsers for option in parser._option_string_actions}

        def one(word: str) -> str:
            name, equals, value = word.partition("=")
            return known.get(name.replace("_", "-"), name) + equals + value if word.startswith("--") else word

        return [one(word) for word in words]

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        return {
            name: parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, parser in action.choices.items()
        }
