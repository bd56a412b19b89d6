"""Goodput: which share of the wall time trains, with failures, checkpoints, restarts, spare nodes and pauses for evaluation.

Failures arrive as a Poisson process. With a mean time M between them, checkpoints every tau seconds of work that each stop the
training for delta, and R to restart, work W takes

    W / tau * M * exp(R / M) * (exp((tau + delta) / M) - 1)

of wall time on average (J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, eq. 20;
exact for exponential failures, which may hit a restart too). A checkpoint that is written beside the training stops it only for
the copy to the host, but is there only when it is written: a failure loses that time as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from profiler.errors import InputError
from solver.report.words import DAY, HOUR, seconds


@dataclass(frozen=True)
class Failures:
    """What interrupts a job, and what follows.

    mtbf_gpu, mtbf_node, mtbf_link: mean hours between failures of one GPU, one host, one network link (one a GPU); inf: never.
    restart: seconds from a failure to the first new step: noticing, starting, reading the checkpoint, warming up. spares:
    nodes that wait to take over. repair: hours until a failed node is back.
    """

    mtbf_gpu: float = math.inf
    mtbf_node: float = math.inf
    mtbf_link: float = math.inf
    restart: float = 600.0
    spares: int = 0
    repair: float = 0.0

    def mtbf(self, gpus: int, per_node: int) -> float:
        """Return the mean seconds between failures of a job."""
        nodes = -(-gpus // per_node)
        rate = gpus / self.mtbf_gpu + nodes / self.mtbf_node + gpus / self.mtbf_link
        return HOUR / rate if rate else math.inf

    def available(self, mtbf: float) -> float:
        """Return the share of the time in which there are enough nodes: 1 - B(spares + 1, repair / mtbf).

        A job of which every node is needed stops when one more node than there are spares is in repair; then nothing fails.
        Nodes in repair are so the customers of a loss system of spares + 1 servers, and B is Erlang's formula.
        """
        offered, blocked = self.repair * HOUR / mtbf, 1.0
        for servers in range(1, self.spares + 2):
            blocked = offered * blocked / (servers + offered * blocked)
        return 1.0 - blocked


@dataclass(frozen=True)
class Checkpoints:
    """What checkpoints cost a job.

    stall: seconds that a checkpoint stops the training for. write: seconds until it is on storage. interval: seconds of
    training from one to the next, None for the best.
    """

    stall: float
    write: float
    interval: float | None = None


@dataclass(frozen=True)
class Goodput:
    """How much of the wall time a job trains that is interrupted.

    share: seconds of training per second of wall time, the mean. interval: seconds of training between checkpoints.

    mtbf: seconds between failures. parts: the lost shares of the wall time by cause; with ``share`` they add up to 1.
    second_moment: mean of the square of the seconds that one failure costs.
    """

    share: float
    interval: float
    mtbf: float
    parts: dict[str, float]
    second_moment: float

    def days_std(self, days: float) -> float:
        """Return the standard deviation of ``days`` of wall time that chance leaves: a compound Poisson sum of losses."""
        failures = days * DAY / self.mtbf if math.isfinite(self.mtbf) else 0.0
        return math.sqrt(failures * self.second_moment) / DAY


def check_host_link(host_link: float) -> None:
    """Raise InputError where the link [bytes/s] over which checkpoints beside the training leave a GPU is not known (0)."""
    if not host_link:
        raise InputError(
            "checkpoints beside the training are copied to the host first: state host_link_gb_s in the cluster file"
        )


def checkpoints(
    size: float,
    gpus: int,
    per_node: int,
    *,
    storage: float,
    node: float = math.inf,
    host_link: float = 0.0,
    asynchronous: bool = False,
    one_writer: bool = False,
    interval: float | None = None,
) -> Checkpoints:
    """Return what a checkpoint of ``size`` bytes costs.

    storage, node: bytes/s that storage takes from the job, that a node writes. one_writer: one node writes everything; else
    every node its share. asynchronous: training goes on while it is written, after each GPU's share is copied over
    ``host_link`` [bytes/s]. Raises InputError where that link is not known.
    """
    nodes = 1 if one_writer else -(-gpus // per_node)
    write = size / min(storage, node * nodes)
    if not asynchronous:
        return Checkpoints(write, write, interval)
    check_host_link(host_link)
    return Checkpoints(size / gpus / host_link, write, interval)


def goodput(failures: Failures, gpus: int, per_node: int, saved: Checkpoints, evaluation: float = 0.0) -> Goodput:
    """Return the goodput of a job. evaluation: seconds of evaluation per second of training.

    Raises InputError where a job fails so often that a checkpoint is hardly ever reached.
    """
    mtbf = failures.mtbf(gpus, per_node)
    overlapped = max(saved.write - saved.stall, 0.0)  # the time in which a checkpoint is written while the training goes on
    if math.isinf(mtbf):
        interval = saved.interval or math.inf
        work = 1.0 + evaluation + (saved.stall / interval if math.isfinite(interval) else 0.0)
        return Goodput(1 / work, interval, mtbf, _parts(work, interval, saved, evaluation, 1.0, 1.0), 0.0)
    interval = saved.interval or _best_interval(mtbf, failures.restart, saved)
    elapsed = _elapsed(interval, mtbf, failures.restart, saved)
    if elapsed > 100:
        raise InputError(
            f"{gpus} GPUs fail every {seconds(mtbf)}: with a restart of {seconds(failures.restart)} and checkpoints of "
            f"{seconds(saved.write)} less than 1% of the time would train"
        )
    available = failures.available(mtbf)
    work = elapsed + evaluation
    lost = (interval + saved.stall) / 2 + overlapped + failures.restart
    wait = failures.repair * HOUR / (failures.spares + 1)  # until the first of the nodes in repair is back; exponential
    second = lost**2 + (interval + saved.stall) ** 2 / 12 + 2 * wait * mtbf * (1 - available) / available
    parts = _parts(work, interval, saved, evaluation, elapsed, available)
    return Goodput(available / work, interval, mtbf, parts, second)


def _elapsed(interval: float, mtbf: float, restart: float, saved: Checkpoints) -> float:
    """Return wall time per time of training, without evaluation (Daly, eq. 20); work that a checkpoint still being written
    does not hold yet is lost too, as if the restart took that long."""
    lost = restart + max(saved.write - saved.stall, 0.0)
    if (interval + saved.stall + lost) / mtbf > 50:
        return math.inf
    return mtbf * math.exp(lost / mtbf) * math.expm1((interval + saved.stall) / mtbf) / interval


def _best_interval(mtbf: float, restart: float, saved: Checkpoints) -> float:
    """Return the seconds of training between checkpoints that lose least; none begins before the last one is written."""
    from scipy.optimize import minimize_scalar  # importing it takes half as long as a prediction

    least = max(saved.write - saved.stall, 1.0)
    young = max(math.sqrt(2 * saved.stall * mtbf), least)
    found = minimize_scalar(
        lambda x: _elapsed(math.exp(x), mtbf, restart, saved), bounds=(math.log(least), math.log(20 * young)), method="bounded"
    )
    return max(math.exp(float(found.x)), least)


def _parts(
    work: float, interval: float, saved: Checkpoints, evaluation: float, elapsed: float, available: float
) -> dict[str, float]:
    """Return shares of the wall time that are lost, by cause."""
    stall = saved.stall / interval if math.isfinite(interval) else 0.0
    again = max(elapsed - 1.0 - stall, 0.0)
    shares = {"checkpoints": stall, "restarts and work lost": again, "evaluation": evaluation}
    return {name: available * share / work for name, share in shares.items()} | {"waiting for nodes": 1 - available}
