"""SimuMax's configurations as problems, and their layouts estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from profiler.profile.profile import Profile
from profiler.profile.profiles import find_profile
from profiler.units import GIB
from solver.api import configured_strategy, estimate, load_problem
from solver.formats.config_file import RunConfig
from solver.formats.simumax.configs import ModelConfig, StrategyConfig, SystemConfig
from solver.formats.simumax.model import model_of
from solver.formats.simumax.strategy import layout_of
from solver.simumax.listed import with_listed
from solver.simumax.system import profile_of
from solver.spec.frameworks import release_for_search
from solver.spec.strategy import AXES, Strategy
from solver.step.problem import Problem
from solver.step.solutions import Solutions

_Key = tuple[Any, ...]
_NOT_CONSTANTS = {*AXES, "world_size", "seq_len"}


@dataclass(frozen=True)
class Machine:
    """What a layout runs on. config: the system file that describes it; None: a shipped profile. profile_text: in words."""

    profile: Profile
    config: SystemConfig | None
    profile_text: str

    @property
    def memory(self) -> float:
        """Bytes of one accelerator."""
        return self.profile.device.memory_bytes


@dataclass(frozen=True)
class Priced:
    """One strategy and its estimate: layout ``index`` of ``solutions``. notes: see LayoutRead. measured: whether the times are
    of a profile that was measured, not of a system file."""

    strategy: StrategyConfig
    solutions: Solutions
    index: int
    notes: tuple[str, ...]
    measured: bool

    @property
    def seconds(self) -> float:
        return float(self.solutions.times.seconds[self.index])

    @property
    def allocated(self) -> float:
        """Bytes of the fullest stage."""
        return float(self.solutions.memory.allocated[self.index])

    @property
    def reserved(self) -> float:
        """The same as the allocator holds them: by the file's mem_factor where it states one, else by this program's law."""
        if self.strategy.stated.get("mem_factor"):
            return self.allocated / float(self.strategy.mem_factor)
        return float(self.solutions.memory.reserved[self.index])


@dataclass(frozen=True)
class Rejected:
    """A strategy that cannot be run or is not modelled."""

    strategy: StrategyConfig
    reason: str


def machine_of(given: SystemConfig | Profile | Mapping[str, Any] | str | Path | None) -> Machine:
    """Return the machine of a system file (a configuration, a mapping, a path) or of a profile (by its name, or itself)."""
    if isinstance(given, Profile):
        return Machine(given, None, f"profile: {given.name}")
    if isinstance(given, str) and not given.endswith(".json"):
        profile, profile_text = find_profile(given)
        return Machine(profile, None, profile_text)
    config = SystemConfig.of(given)
    profile_text = f"profile: {config.sys_name}, as its system file states it; nothing was measured here"
    return Machine(profile_of(config), config, profile_text)


def price(strategies: Sequence[StrategyConfig], model: ModelConfig, machine: Machine) -> list[Priced | Rejected]:
    """Return the estimate of every strategy, or why there is none, in order; those with equal constants are priced together."""
    problems = _Problems(model, machine, {})
    groups: dict[_Key, list[tuple[int, Strategy, tuple[str, ...]]]] = {}
    found: dict[int, Priced | Rejected] = {}
    for number, config in enumerate(strategies):
        placed = problems.place(config)
        if isinstance(placed, Rejected):
            found[number] = placed
        else:
            key, layout, notes = placed
            groups.setdefault(key, []).append((number, layout, notes))
    for key, members in groups.items():
        solutions = estimate(problems.known[key], [layout for _, layout, _ in members])
        for index, (number, _, notes) in enumerate(members):
            found[number] = Priced(strategies[number], solutions, index, notes, machine.config is None)
    return [found[number] for number in range(len(strategies))]


@dataclass(frozen=True)
class _Problems:
    """Problems by their constants; the first lends its cost model to the others."""

    model: ModelConfig
    machine: Machine
    known: dict[_Key, Problem]

    def place(self, config: StrategyConfig) -> tuple[_Key, Strategy, tuple[str, ...]] | Rejected:
        """Return (key of the problem, the layout, notes), or why a strategy cannot be priced."""
        try:
            read, spec = layout_of(config, self.model), model_of(self.model, config.tp_size)
            name = self.model.model_name
            run = RunConfig(name, spec, read.fields, config.seq_len, Path(name))
            constants = {name: value for name, value in read.fields.items() if name not in _NOT_CONSTANTS}
            key = (spec, config.world_size, config.seq_len, tuple(sorted(constants.items())))
            if key not in self.known:
                base = next(iter(self.known.values()), None)
                self.known[key] = _problem(base, run, constants, config.world_size, self.machine)
            return key, configured_strategy(self.known[key], run), read.notes
        except InputError as error:
            return Rejected(config, str(error))


def _problem(base: Problem | None, run: RunConfig, constants: Mapping[str, Any], world: int, machine: Machine) -> Problem:
    """Return the problem of a run; ``base``, if it is of as many ranks and the same framework, lends the cost model."""
    seq_len, framework = run.layout["seq_len"], release_for_search(constants["framework"])
    if base is not None and (base.run.world_size, base.run.seq_len, base.run.framework) == (world, seq_len, framework):
        return replace(base, model=run.model, run=base.run.replace(**{**constants, "framework": framework}))
    problem = load_problem(run, world, profile=machine.profile)
    return replace(problem, cost=with_listed(problem.cost, machine.profile)) if machine.config else problem


def price_one(strategy: StrategyConfig, model: ModelConfig, machine: Machine) -> Priced:
    """Return the estimate of one strategy. Raises InputError where it cannot be run or is not modelled."""
    (only,) = price([strategy], model, machine)
    if isinstance(only, Rejected):
        raise InputError(only.reason)
    return only


def limit_of(machine: Machine, gmi_error: float) -> float:
    """Return bytes that a layout may take where ``gmi_error`` GiB of an accelerator are kept free.

    Raises InputError for a margin that is negative or leaves nothing.
    """
    if isinstance(gmi_error, bool) or not isinstance(gmi_error, int | float) or not 0 <= gmi_error * GIB < machine.memory:
        raise InputError(
            f"gmi_error is {gmi_error!r:.40}; it must be GiB to keep free of the {machine.memory / GIB:.4g} of an accelerator"
        )
    return machine.memory - gmi_error * GIB
