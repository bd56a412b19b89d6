"""What still fits in memory: the largest micro batch and sequence of a layout, the fewest GPUs, and what breaks next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm
from typing import Any

from profiler.errors import InputError
from profiler.units import GIB
from solver.api import configured_strategy, estimate, without_filling
from solver.formats.config_file import RunConfig
from solver.spec.bounds import WHOLE_NUMBERS
from solver.spec.division import MIN_LOCAL_TOKENS
from solver.spec.strategy import Strategy
from solver.step.memory import AT_RISK, FITS, MEMORY_PARTS, OUT_OF_MEMORY
from solver.step.problem import Problem
from solver.step.solutions import Solutions

_GRAIN = 1024  #: tokens; sequences are tried in steps of this
_ONE_BY_ONE = 64  #: sequences of a micro batch
_DOUBLINGS = 10  #: of a batch or a number of GPUs beyond what was asked


@dataclass(frozen=True)
class Tried:
    """One value of what is varied, and the estimate with it."""

    value: int
    solutions: Solutions

    @property
    def verdict(self) -> str:
        return self.solutions.verdict(0)

    def text(self) -> str:
        """Return peak and bound, against what there is."""
        memory, limit = self.solutions.memory, self.solutions.problem.cluster.memory_bytes
        return f"{memory.device[0] / GIB:.1f} GiB, at most {memory.bound[0] / GIB:.1f}, of {limit / GIB:.1f}"

    def largest_part(self) -> tuple[str, float]:
        """Return the largest part of the memory and its bytes."""
        parts = self.solutions.memory.parts[:, 0]
        return MEMORY_PARTS[int(parts.argmax())].replace("_", " "), float(parts.max())


@dataclass(frozen=True)
class Limit:
    """The most of something that fits. surely: the best value whose bound fits. likely: the best that fits at the point
    estimate. breaks: the one after it; where it is None, ``ends`` says why no further one was tried. refused: why the first
    value that cannot be run cannot, or "". note: what holds for the best one."""

    what: str
    surely: Tried | None
    likely: Tried | None
    breaks: Tried | None
    ends: str
    refused: str = ""
    note: str = ""


def largest_micro_batch(problem: Problem, layout: Strategy) -> Limit:
    """Return how many sequences a micro batch may hold: those that divide the batch of a data-parallel rank and run, then, with
    as many micro batches as the layout has and so a larger batch, more: up to 64 one by one, then twice as many and so on.
    """
    each, count = layout.micro_batch_size * layout.num_micro_batches, layout.num_micro_batches
    most, refused = WHOLE_NUMBERS["micro_batch_size"][1], list[str]()

    def tried(sizes: Iterable[tuple[int, int]]) -> Iterator[Tried]:
        return _tried(
            (
                (size, problem, layout.replace(micro_batch_size=size, num_micro_batches=number))
                for size, number in sizes
                if size <= most
            ),
            refused,
        )

    def larger() -> Iterator[Tried]:
        found = list(tried((size, each // size) for size in range(1, each + 1) if each % size == 0))
        yield from found
        last = found[-1].value if found else 0
        sizes = chain(range(last + 1, _ONE_BY_ONE + 1), (_ONE_BY_ONE << doubling for doubling in range(1, _DOUBLINGS + 1)))
        yield from tried((size, count) for size in sizes if size > last)

    found = _limit("micro batch", larger(), "no larger one was tried")
    return replace(found, refused=next(iter(refused), ""))


def longest_sequence(problem: Problem, layout: Strategy) -> Limit:
    """Return how many tokens a sequence may have, in steps of 1,024 that its ranks divide, at the layout's micro batch."""
    ranks = layout.tp * layout.cp
    unit, refused = lcm(_GRAIN, 2 * ranks), list[str]()

    def with_length(count: int) -> Tried | None:
        longer = problem.with_run(seq_len=count * unit)
        return next(_tried([(count * unit, longer, layout.replace(seq_len=count * unit))], refused), None)

    tried: dict[int, Tried | None] = {}
    least, most = -(-MIN_LOCAL_TOKENS * ranks // unit), WHOLE_NUMBERS["seq_len"][1] // unit
    for allowed in ((FITS,), (FITS, AT_RISK)):  # the bound's limit, and the point estimate's
        _bisect(with_length, allowed, range(least, most + 1), tried)
    found = _limit("sequence", [one for _, one in sorted(tried.items()) if one is not None], "no longer one was tried")
    positions, best = problem.model.max_position_embeddings, found.surely or found.likely
    over = best is not None and 0 < positions < best.value
    note = f"{problem.model.name} states {positions:,} positions: a longer one is of a model that has more" if over else ""
    return replace(found, refused=next(iter(refused), ""), note=note)


def fewest_gpus(problem: Problem, config: RunConfig, sequences: int) -> Limit:
    """Return on how few GPUs the config's tp, cp, pp and ep fit, with the same batch: fewer data-parallel ranks shard less.

    Tried are the layout's own number of GPUs and fewer, from the most to the fewest; before them twice as many and so on, as
    far as the batch divides, where its own are too few. As many instances of the optimizer stay where their number divides.
    """
    own = configured_strategy(problem, config, sequences)
    free = without_filling(config, own)
    broken: dict[int, InputError] = {}

    def layout(dp: int) -> dict[str, Any]:
        shard, rest = divmod(own.zero_shard_size * dp, own.dp)
        if "zero_shard_size" in free:
            return {k: v for k, v in free.items() if k != "zero_shard_size"} | ({} if rest else {"zero_shard_size": shard})
        return free

    def on(dp: int) -> Iterator[Tried]:
        world = own.world_size // own.dp * dp
        try:
            other = problem.for_world(world)
            yield Tried(world, estimate(other, [configured_strategy(other, replace(config, layout=layout(dp)), sequences)]))
        except InputError as error:
            broken[dp] = error

    tried = [one for dp in range(own.dp, 0, -1) for one in on(dp)]
    if tried and tried[0].verdict == OUT_OF_MEMORY:
        more = [one for doubling in range(1, _DOUBLINGS + 1) for one in on(own.dp << doubling)]
        tried = [*reversed(more), *tried]
    fewest = (
        f"with one data-parallel rank it does not run: {broken[1]}" if 1 in broken else "one data-parallel rank is the fewest"
    )
    return replace(_limit("GPUs", tried, fewest), refused=str(next(iter(broken.values()), "")))


def _limit(what: str, tried: Iterable[Tried], ends: str) -> Limit:
    """Return the limit among values that need more and more memory, up to the first that does not fit; ends: as in Limit."""
    surely = likely = None
    for one in tried:
        if one.verdict == OUT_OF_MEMORY:
            return Limit(what, surely, likely, one, ends)
        likely = one
        surely = one if one.verdict == FITS else surely
    return Limit(what, surely, likely, None, ends)


def _bisect(
    estimated: Callable[[int], Tried | None], allowed: Collection[str], counts: range, tried: dict[int, Tried | None]
) -> None:
    """Add to ``tried`` the largest of ``counts`` whose verdict is allowed, and the one after it: doubled, then bisected."""

    def good(count: int) -> bool:
        if count not in tried:
            tried[count] = estimated(count)
        found = tried[count]
        return found is not None and found.verdict in allowed

    low, high = counts.start - 1, counts.start
    while high < counts.stop and good(high):
        low, high = high, 2 * high
    high = min(high, counts.stop)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)


def _tried(changed: Iterable[tuple[int, Problem, Strategy]], refused: list[str]) -> Iterator[Tried]:
    """Yield the estimates of the values with which a framework can run the layout; append to ``refused`` why it cannot."""
    for value, problem, layout in changed:
        if (one := _one(value, problem, layout, refused)) is not None:
            yield one


def _one(value: int, problem: Problem, layout: Strategy, refused: list[str]) -> Tried | None:
    try:
        return Tried(value, estimate(problem, [layout]))
    except InputError as error:
        refused.append(str(error))
        return None
