"""Share work and measurements between ranks through the job's key-value store, without waiting for each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from profiler.measure.session import Session


@dataclass(frozen=True)
class WorkQueue:
    """A queue of numbers that ranks claim, and messages from every rank to rank 0."""

    session: Session
    _counts: dict[str, int] = field(default_factory=dict)

    def claim(self, queue: str) -> int:
        """Return the next number of a queue: 0, 1, ... Each goes to one rank."""
        return int(self.session.store.add(f"queue/{queue}", 1)) - 1

    def post(self, message: Any) -> None:
        """Send a plain object to rank 0."""
        rank = self.session.rank
        number = self._counts.get("posted", 0)
        self.session.store.set(f"mail/{rank}/{number}", json.dumps(message))
        self._counts["posted"] = number + 1

    def collect(self) -> list[Any]:
        """Return what the other ranks posted since the last call; for rank 0."""
        messages = []
        for rank in range(1, self.session.world):
            while self.session.store.check([key := f"mail/{rank}/{self._counts.get(f'read/{rank}', 0)}"]):
                messages.append(json.loads(self.session.store.get(key)))
                self._counts[f"read/{rank}"] = self._counts.get(f"read/{rank}", 0) + 1
        return messages
