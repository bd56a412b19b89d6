"""Ranks that measure together: who they are, how they agree, and how a lost rank is detected and named."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from profiler.errors import InputError
from profiler.train.allocator import keep_freed_memory

RANKS_PER_NODE = "FORETRAIN_RANKS_PER_NODE"  #: environment variable: this many ranks count as one node (to fake nodes on one)
STALL_SECONDS = 180.0  #: a rank without a heartbeat for this long is lost; no measurement takes as long, compiled or connected
_POLL_SECONDS = 2.0
_BEAT_SECONDS = 1.0
_WAIT = timedelta(seconds=240)  # of PyTorch's own waits: longer than ours, so that ours reports first


@dataclass(frozen=True)
class Session:
    """This rank among all. Nodes hold ``ranks_per_node`` consecutive ranks each. control: group for decisions (gloo)."""

    rank: int
    world: int
    ranks_per_node: int
    device: torch.device
    backend: str
    store: Any
    control: Any = None
    parent: int = field(default_factory=os.getppid)  #: process that started this rank
    _beaten: dict[str, float] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return self.world // self.ranks_per_node

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, value: float) -> float:
        """Return the largest ``value`` of all ranks."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.control)
        return float(shared)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, a plain object."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def beat(self) -> None:
        """Send a heartbeat, at most one per second. Each measurement begins with one."""
        if time.monotonic() - self._beaten.get("at", 0.0) > _BEAT_SECONDS:
            self._beaten["at"] = time.monotonic()
            self.store.set(f"beat/{self.rank}", str(time.monotonic()))

    def close(self) -> None:
        """Wait for all ranks. Gloo's groups are left to the end of the process: destroying them sometimes aborts it."""
        if self.world > 1:
            dist.barrier(group=self.control)
            if self.backend == "nccl":
                dist.destroy_process_group()


def open_session() -> Session:
    """Join the job that torchrun started; without torchrun, a job of one rank. NCCL where there are GPUs, else gloo."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    per_node = _ranks_per_node(os.environ, world)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        if local >= torch.cuda.device_count():
            raise InputError(f"rank {rank}: this node has {torch.cuda.device_count()} GPUs; start one rank for each at most")
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    backend = "nccl" if cuda else "gloo"
    if world == 1:
        return Session(0, 1, 1, device, backend, dist.HashStore())  # type: ignore[attr-defined]
    store, _, _ = next(rendezvous("env://", timeout=_WAIT))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_WAIT)
    control = dist.new_group(backend="gloo", timeout=_WAIT) if cuda else dist.group.WORLD
    session = Session(rank, world, per_node, device, backend, PrefixStore("foretrain", store), control)
    session.store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
    session.beat()
    dist.barrier(group=control)  # from here on, every rank's process and first heartbeat are known
    return session


def _ranks_per_node(environment: Mapping[str, str], world: int) -> int:
    given = environment.get(RANKS_PER_NODE) or environment.get("LOCAL_WORLD_SIZE", "1")
    if not given.isdigit() or int(given) < 1 or world % int(given):
        raise InputError(f"{RANKS_PER_NODE} is {given!r}; it must divide the {world} ranks of this job")
    return int(given)


def lost_ranks(session: Session) -> list[int]:
    """Return the ranks on this host whose process is gone (or waits to be reaped), but for those that were told to end."""
    if session.world == 1:
        return []
    lost = []
    for rank in range(session.world):
        host, pid = session.store.get(f"process/{rank}").decode().split()
        if host == socket.gethostname() and not _alive(int(pid)) and not session.store.check([f"ending/{rank}"]):
            lost.append(rank)
    return lost


def announce_end(session: Session) -> None:
    """Tell the other ranks that this one was told to end, so that they do not report it as lost."""
    if session.world > 1:
        with contextlib.suppress(RuntimeError):  # the store may be gone already
            session.store.set(f"ending/{session.rank}", "told")


def launcher_died(session: Session) -> bool:
    """Whether torchrun, which started this rank, is gone: its children then have another parent."""
    return session.world > 1 and os.getppid() != session.parent


def _alive(pid: int) -> bool:
    """Whether a process of this host runs; where there is no /proc (macOS) a zombie counts as one."""
    if not Path("/proc/self").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def named(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 3, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def watch(session: Session, lost: Callable[[str], None]) -> None:
    """Watch all ranks from a thread of rank 0 (rank 0 from the other ranks); call ``lost`` once, with what happened.

    PyTorch's collectives wait in C++ and cannot be interrupted, so ``lost`` must end the process itself.
    """
    if session.world > 1:
        threading.Thread(target=_watch, args=(session, lost), daemon=True, name="watchdog").start()


def _watch(session: Session, lost: Callable[[str], None]) -> None:
    store = session.store.clone() if hasattr(session.store, "clone") else session.store
    watched = range(1, session.world) if session.leads else (0,)
    seen: dict[int, tuple[bytes, float]] = {}
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            beats = {rank: bytes(store.get(f"beat/{rank}")) for rank in watched}
        except (RuntimeError, dist.DistError):
            return  # the store is gone: torchrun is ending the job
        now = time.monotonic()
        for rank, beat in beats.items():
            if seen.get(rank, (b"", 0.0))[0] != beat:
                seen[rank] = (beat, now)
        ages = {rank: now - since for rank, (_, since) in seen.items()}
        oldest = max(ages.values())
        if oldest > STALL_SECONDS:
            # ranks that wait for the lost one fall silent after it: name only those within one poll of the oldest
            silent = [rank for rank, age in ages.items() if age > oldest - _POLL_SECONDS]
            lost(f"{named(silent)} gave no sign of life for {oldest:.0f} s")


def leave(message: str, status: int) -> None:
    """End this process at once, whatever its other threads wait for."""
    if message:
        print(message, file=sys.stderr, flush=True)
    os._exit(status)
