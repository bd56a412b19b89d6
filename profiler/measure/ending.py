"""How a measuring run ends before its time: by a signal, a lost rank or a failed kernel, with all measurements kept."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from types import FrameType

from profiler.errors import InputError
from profiler.measure.session import Session, announce_end, launcher_died, leave, lost_ranks, named
from profiler.profile.recorder import Recorder

SAID = "said"  #: key of the job's store: rank 0 ends and states why
INTERRUPTED = 130  #: exit status after Ctrl-C, as in shells


class StoppedError(BaseException):
    """A signal requested the end of this process. lost: ranks whose processes were gone at that moment."""

    def __init__(self, number: int, lost: list[int]) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.lost = number, lost


def _ignore_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def handle_signals(session: Session) -> None:
    """Raise StoppedError in this process when it is asked to end; first find the ranks that are gone."""

    def stop(number: int, _: FrameType | None) -> None:
        _ignore_signals()
        announce_end(session)
        # torchrun ends all ranks when one dies: find the lost ranks before the others end too
        lost: list[int] = []
        with contextlib.suppress(RuntimeError):  # the store ends with torchrun
            lost = lost_ranks(session)
        raise StoppedError(number, lost)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def _kept(recorder: Recorder | None) -> str:
    """Write what there is; return a message about it."""
    if recorder is None:
        return ""
    try:
        recorder.write()
    except InputError as error:
        return f"; {error}"
    return f"; {len(recorder.rows)} measurements are kept in {recorder.path}, and --resume goes on from there"


def end_rank(session: Session, recorder: Recorder | None, message: str, status: int) -> None:
    """End this rank with a message: rank 0 reports for all ranks, unless it is the lost one."""
    message = f"gen_profiler_data.py: {message}{_kept(recorder)}"
    leave(message if session.leads or status == 1 else "", status)


def stopped(session: Session, recorder: Recorder | None, stop: StoppedError) -> None:
    if stop.number == signal.SIGINT:
        status, message = INTERRUPTED, "interrupted"
    elif stop.lost:
        status, message = 1, f"{named(stop.lost)} died"
    else:
        status, message = 128 + stop.number, f"ended by {stop}"
    _end_quietly_unless(session, recorder, message, status, stop.lost)


def broken(session: Session, recorder: Recorder | None, error: RuntimeError) -> None:
    """End after a failed collective or kernel; name the rank that is gone, if it is on this host."""
    _ignore_signals()  # torchrun ends this rank too, which must first report the reason
    time.sleep(0.5)  # a dying process closes its sockets before it is gone
    if launcher_died(session):  # its store is gone, so the ranks cannot agree on anything: each ends, rank 0 with the sentence
        end_rank(session, recorder, "torchrun died", 1 if session.leads else 128 + signal.SIGTERM)
    lost = lost_ranks(session)
    if not lost:
        traceback.print_exc()
    message = f"{named(lost)} died" if lost else f"rank {session.rank} met: {str(error).splitlines()[0]}"
    _end_quietly_unless(session, recorder, message, 1, lost)


def _rank_0_said_why(session: Session) -> bool:
    with contextlib.suppress(RuntimeError):  # the store may be gone too
        return bool(session.store.check([SAID]))
    return False


def _end_quietly_unless(session: Session, recorder: Recorder | None, message: str, status: int, lost: list[int]) -> None:
    """End this rank; rank 0 reports, or another rank if rank 0 is lost or if the error is its own."""
    if 0 in lost and _rank_0_said_why(session):
        leave("", status)
    if session.leads or 0 in lost or (status == 1 and not lost):
        end_rank(session, recorder, message, status)
    leave("", status)
