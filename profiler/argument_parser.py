"""An argument parser that answers wrong options with one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, without the usage of all options before an error; ``--help`` prints it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; {self.prog} --help lists the options\n")
