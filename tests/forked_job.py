"""A measuring run of one process, forked from that of the tests, which has torch imported: a start takes four seconds less."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from gen_profiler_data import end, main


class ForkedJob:
    """The part of subprocess.Popen that the tests use, for ``gen_profiler_data.py --quick --no-pictures`` and ``flags``.

    most_bytes: to which a file may grow.
    """

    def __init__(self, *flags: str, most_bytes: int | None = None) -> None:
        self._said = Path(tempfile.mkdtemp())
        arguments = ["--quick", "--no-pictures", *flags]
        self._job = get_context("fork").Process(target=_measure, args=(arguments, self._said, most_bytes))
        self._job.start()

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._job.exitcode

    def send_signal(self, number: int) -> None:
        assert self._job.pid
        os.kill(self._job.pid, number)

    def kill(self) -> None:
        self._job.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; return what it printed, and on stderr."""
        self._job.join(timeout)
        if self._job.exitcode is None:
            self._job.kill()
            raise TimeoutError(f"the job did not end within {timeout:g} s")
        return (self._said / "1").read_text(), (self._said / "2").read_text()


def _measure(arguments: Sequence[str], said: Path, most_bytes: int | None) -> None:
    for stream in (1, 2):
        os.dup2(os.open(said / str(stream), os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    end(main(arguments))
