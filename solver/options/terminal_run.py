"""How a command runs in a terminal: its exit status, one sentence for input that cannot be used, its progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from profiler.errors import InputError, printable

_MOST_MESSAGE = 1200  #: characters of an error message


class _Terminal(Console):
    """A console whose reader may leave (``| head``): the command goes on, and writes its files."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(command: Callable[[Console], None]) -> int:
    """Run ``command`` on a console; return the exit status, and print one sentence for input that cannot be used."""
    console = _Terminal(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        command(console)
    except InputError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"error: {printable(str(error), _MOST_MESSAGE)}", markup=False
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that updates a progress bar; no bar is shown where standard error is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
