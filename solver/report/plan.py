"""Tokens, a deadline, a budget -> GPUs, days, GPU-hours, money, energy: the best layout on every number of GPUs that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from predictor.estimate import Z90
from profiler.errors import InputError
from solver.report.explain import explain
from solver.report.goodput import Goodput
from solver.report.words import DAY
from solver.search.laid_out import search_with_strings
from solver.search.search import SearchResult
from solver.spec.feasibility import MAX_WORLD_SIZE
from solver.step.problem import Problem


@dataclass(frozen=True)
class Machine:
    """What a training may run on. price: of a GPU for an hour. watts: a GPU's power limit. None: not known."""

    name: str = ""
    price: float | None = None
    watts: float | None = None


UNNAMED = Machine()


@dataclass(frozen=True, eq=False)
class Training:
    """A training run on some GPUs, with the best layout: days as (5th percentile, median, 95th percentile).

    Each is equal to itself only: a result holds arrays.
    goodput: what failures, checkpoints and evaluation leave; None where they are left out. spare_gpus: those of spare nodes,
    which are paid for as long.
    """

    world_size: int
    days: tuple[float, float, float]
    result: SearchResult
    goodput: Goodput | None = None
    machine: Machine = UNNAMED
    spare_gpus: int = 0

    def interrupted(self, found: Goodput, spare_gpus: int = 0) -> Training:
        """Return the run with what interrupts it: longer on average, and less sure."""
        low, middle, high = self.days
        days = middle / found.share
        std = math.hypot(math.log(high / low) / 2 / Z90, found.days_std(days) / days)
        spread = math.exp(Z90 * std)
        return replace(self, days=(days / spread, days, days * spread), goodput=found, spare_gpus=spare_gpus)

    @property
    def gpu_hours(self) -> float:
        return 24.0 * self.days[1] * (self.world_size + self.spare_gpus)

    @property
    def money(self) -> float | None:
        """What the GPU-hours cost; None without a price."""
        return None if self.machine.price is None else self.gpu_hours * self.machine.price

    @property
    def energy_mwh(self) -> float | None:
        """The megawatt-hours of the GPUs that train, at their limit all the while; None where it is not known."""
        return None if self.machine.watts is None else 24.0 * self.days[1] * self.world_size * self.machine.watts / 1e6

    @property
    def cost(self) -> float:
        """Money, or GPU-hours without a price."""
        return self.gpu_hours if self.money is None else self.money


def trainings(
    on: Callable[[int], Problem],
    batch: Callable[[int], int],
    tokens: float,
    worlds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
    *,
    machine: Machine = UNNAMED,
    fixed: Mapping[str, Any] | None = None,
    jobs: int = 1,
) -> tuple[list[Training], dict[int, str]]:
    """Return the training of ``tokens`` on each of ``worlds`` GPUs that the batch divides over and on which something fits, and
    why there is none on the others.

    on, batch: the problem, and the sequences of a step, on so many GPUs.
    Raises InputError where nothing fits on any of them.
    """
    found, none = [], {}
    for number, world in enumerate(worlds, 1):
        try:
            _, result = search_with_strings(on(world), batch(world), 1, fixed=fixed, jobs=jobs)
        except InputError as error:
            none[world] = str(error)
        else:
            low, high = explain(result.best, 0).interval
            steps = tokens / float(result.best.tokens[0])
            low, median, high = (steps * seconds / DAY for seconds in (low, float(result.best.times.seconds[0]), high))
            days = (low, median, high)
            found.append(Training(world, days, result, machine=machine))
        if progress:
            progress(number, len(worlds))
    if not found:
        raise InputError(f"none of these numbers of GPUs works: {', '.join(map(str, worlds))}; of the last: {none[worlds[-1]]}")
    return found, none


def worlds_between(least: int, most: int, per_node: int) -> list[int]:
    """Return the parts of a node, and 1, 2, 3, 4, 6, 8 and so on nodes, from ``least`` GPUs up to ``most``, and these two where
    they are whole nodes."""
    most = min(most, MAX_WORLD_SIZE)
    found = {nodes * per_node << doublings for doublings in range(MAX_WORLD_SIZE.bit_length()) for nodes in (1, 3)}
    found |= {gpus for gpus in range(1, per_node) if per_node % gpus == 0}
    found |= {end for end in (least, most) if end % per_node == 0}
    found = {gpus for gpus in found if least <= gpus <= most}
    if not found:
        raise InputError(
            f"there are no whole nodes of {per_node} GPUs from {least} to {most}, one of these or 1, 2, 3, 4, 6 and so on nodes"
        )
    return sorted(found)


def fewest(found: Sequence[Training], days: float) -> Training | None:
    """Return the fewest GPUs whose median meets the deadline, if any do."""
    return next((one for one in found if one.days[1] <= days), None)


def efficient(found: Sequence[Training]) -> list[Training]:
    """Return the Pareto front: the trainings of which no other is both faster and cheaper (in GPU-hours without prices)."""
    front, least = [], math.inf
    for one in sorted(found, key=lambda one: (one.days[1], one.cost)):
        if one.cost < least:
            front.append(one)
            least = one.cost
    return front


def cheapest(found: Sequence[Training], days: float | None, budget: float | None) -> Training | None:
    """Return the cheapest training whose median meets a deadline and whose price a budget; with a budget alone the fastest."""
    meets = [one for one in found if (days is None or one.days[1] <= days) and (budget is None or one.cost <= budget)]
    by_days = days is None and budget is not None
    return min(meets, key=lambda one: one.days[1] if by_days else one.cost, default=None)
