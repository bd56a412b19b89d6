"""Ranks that are forked from the process of the tests, which has torch imported: each starts four seconds sooner so.

Otherwise they are what torchrun starts.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gen_profiler_data import end, main


def forked_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Start ``work(*arguments)`` on so many ranks of one job, in the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs: list[BaseProcess] = []
    for rank in range(ranks):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        jobs.append(get_context("fork").Process(target=_as_rank, args=(environment, work, *arguments)))
        jobs[-1].start()
    return jobs


def _as_rank(environment: Mapping[str, Any], work: Callable[..., None], *arguments: Any) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    work(*arguments)


class ForkedJob:
    """The part of subprocess.Popen that the tests use, for ``gen_profiler_data.py --quick --no-pictures`` and ``flags``.

    ranks: of a job; 0: a process that no launcher started. most_bytes: to which a file may grow. environment: variables.
    """

    def __init__(
        self, *flags: str, ranks: int = 0, most_bytes: int | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._said = Path(tempfile.mkdtemp())
        arguments = ["--quick", "--no-pictures", *flags], self._said, most_bytes, environment or {}
        if ranks:
            self._jobs = forked_ranks(ranks, _measure, *arguments)
        else:
            self._jobs = [get_context("fork").Process(target=_measure, args=arguments)]
            self._jobs[0].start()

    @property
    def returncode(self) -> int | None:
        """The exit status, of a job the first that is not 0; None while it runs."""
        codes = [job.exitcode for job in self._jobs]
        return None if None in codes else next((code for code in codes if code), 0)

    def send_signal(self, number: int) -> None:
        for job in self._jobs:
            assert job.pid
            os.kill(job.pid, number)

    def kill(self) -> None:
        for job in self._jobs:
            job.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; return what it printed, and on stderr."""
        for job in self._jobs:
            job.join(timeout)
        if self.returncode is None:
            self.kill()
            raise TimeoutError(f"the job did not end within {timeout:g} s")
        return (self._said / "1").read_text(), (self._said / "2").read_text()


def _measure(arguments: Sequence[str], said: Path, most_bytes: int | None, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(said / str(stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    end(main(arguments))
