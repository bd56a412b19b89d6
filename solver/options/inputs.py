"""What the options of a command name: its config, cluster and profile, and the problem that they make."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from predictor.learned import conditions_of, read_learned
from predictor.network.measured_groups import describe_links, describe_network
from profiler.errors import InputError, printable
from profiler.profile.attention_times import FOLDER
from profiler.profile.profile import Profile
from profiler.profile.profiles import PROF_DATA
from solver.api import chosen_profile, load_problem
from solver.formats.config_file import RunConfig, find_model, load_cluster, load_run_config
from solver.formats.topology_cluster import TOPOLOGY
from solver.options.arguments import DEFAULT_MODEL, DEFAULT_WORLD_SIZE
from solver.options.axes import parse_constants
from solver.options.notes import cluster_notes, config_notes, profile_notes
from solver.search.space import OF_ONE_LAYOUT
from solver.step.problem import Problem


@dataclass(frozen=True)
class Inputs:
    """What the options of a command name, read and checked, and the problem that it makes.

    profile_text: what the profile is. network: where the times between nodes are from. times: folder of the attention times
    measured on this machine. takes_gpus: nothing states a number of GPUs, so that the default is taken.
    """

    config: RunConfig
    profile: Profile
    profile_text: str
    problem: Problem
    network: str
    times: Path
    takes_gpus: bool = False

    def notes(self, *lines: str, stated: set[str] | None = None, problem: Problem | None = None) -> str:
        """Return what else a reader must know, a line each: what is left out, what of the config was not read, ``lines``.

        stated: axes of a layout that the config states, where its own layout is predicted.
        """
        of = problem or self.problem
        left_out = f"left out of the estimate: {'; '.join(of.left_out)}" if of.left_out else ""
        of_config = config_notes(self.config, of, stated, self.takes_gpus)
        machine = (*profile_notes(self.profile), *cluster_notes(of.cluster, of.cost.device), self.network, *of.inferred_network)
        found = (left_out, *machine, *lines, *of_config)
        return "\n".join(filter(None, found))

    def for_search(self, varied: Collection[str] | None = None) -> Inputs:
        """Return what a search starts from: without what the config's own layout says of its single stages.

        varied: the only axes that the search varies; None: all. Where the pipeline's sizes are not among them, the layers that
        its chunks hold stay as they are.
        """
        run, stated = self.problem.run, self.config.layout
        own = [key for key in OF_ONE_LAYOUT if stated.get(key) and getattr(run, key) == stated[key]]
        if varied is not None and not {"pp", "vpp"} & set(varied):
            own = [key for key in own if key != "pipeline_layout"]
        if not own:
            return self
        note = f"{' and '.join(own)} of the config's own layout: left out, as a search divides layers itself"
        config = replace(self.config, notes=(*self.config.notes, note))
        return replace(self, config=config, problem=self.problem.with_run(**dict.fromkeys(own, "")))

    @property
    def plain(self) -> dict[str, Any]:
        """What belongs to the answer's JSON: the network in words, and every key of the config that was not read."""
        return {"network": self.network, "not_read": list(self.config.ignored)}


def named_config(args: argparse.Namespace, world: int = 0) -> RunConfig:
    """Return the config that the options name, or the default one. world: GPUs; 0: those that the options state, if they do."""
    if args.vocab_size is not None and args.vocab_size < 1:
        raise InputError(f"--vocab_size is {args.vocab_size}; it must be a positive number of tokens")
    file = args.config or find_model(args.model_size or DEFAULT_MODEL)
    world = world or getattr(args, "world_size", None) or 0
    return load_run_config(file, world, args.vocab_size or 0, environment_of(args))


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of --env. Raises InputError for what is none, or is given twice."""
    found: dict[str, str] = {}
    for text in args.env or ():
        name, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")  # --env=-- is a list
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or name in found:
            raise InputError(f"--env {printable(str(text))}: give each variable once, as in --env TP=4 --env MBS=2")
        found[name] = value
    return found


def load_inputs(args: argparse.Namespace, config: RunConfig | None = None, *, of_sweep: bool = False) -> Inputs:
    """Read what the options name. Raises InputError for what is not there, cannot be read, or contradicts the rest.

    config: is used instead of the file that the options name. of_sweep: one of many problems: no progress is shown, and
    --approximate may change nothing for some of them.
    """
    config = config or named_config(args)
    cluster = load_cluster(args.cluster) if args.cluster else {}
    profile, profile_text = chosen_profile(args.profile, cluster, args.as_device, args.pre_profiling_data_path)
    constants = parse_constants(args.set or "") | ({"framework": args.framework} if args.framework is not None else {})
    status = Console(stderr=True).status(f"fitting {profile.name} (kept for later starts)")
    with nullcontext() if of_sweep else status:
        problem = load_problem(
            config,
            _world_size(args.world_size, config),
            profile=profile,
            cluster=cluster,
            seq_len=args.seq_len,
            memory_limit_gib=args.memory_limit_gib,
            approximate=args.approximate,
            **constants,
        )
    if not of_sweep and args.approximate and not (config.model.capped_scores or config.model.capped_logits):
        raise InputError(f"--approximate changes nothing: {config.model.name} has no soft caps; leave it out")
    if getattr(args, "learned", None):
        problem, profile_text = _learned(args.learned, problem, profile_text)
    world, cluster_of_run = problem.run.world_size, problem.cluster
    links = describe_links(profile, cluster_of_run.gpus_per_node) if world > 1 else ""
    between = describe_network(profile) if world > cluster_of_run.gpus_per_domain else ""
    network = "\n".join(filter(None, (links, between)))
    if TOPOLOGY in cluster:
        simulated: Any = problem.cost.network.collectives
        network = simulated.text()
        announcing = replace(problem.cost.network, collectives=replace(simulated, notice=_tell))
        problem = replace(problem, cost=replace(problem.cost, network=announcing))
    times = (args.pre_profiling_data_path.parent if args.pre_profiling_data_path else PROF_DATA) / FOLDER
    takes = args.world_size is None and "world_size" not in config.layout and bool(config.layout)
    return Inputs(config, profile, profile_text, problem, network, times, takes)


def _tell(text: str) -> None:
    """Say in a terminal what takes its time."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(text, style="dim", markup=False)


def _learned(path: Path, problem: Problem, profile_text: str) -> tuple[Problem, str]:
    """Return the problem with what own runs taught, and what to say of it.

    Raises InputError where they were of another kind.
    """
    learned, cost = read_learned(path), problem.cost
    learned.check(conditions_of(cost.device.name, problem.framework.name, problem.run.precision, cost.network.bandwidth))
    return replace(problem, cost=cost.with_learned(learned)), f"{profile_text}; {learned.text()}"


def _world_size(given: int | None, config: RunConfig) -> int:
    """Return the number of GPUs; a config that states one must agree with the option."""
    stated = config.layout.get("world_size")
    if given is not None and stated not in (None, given):
        raise InputError(f"--world_size is {given}, but {config.source} states a layout of {stated}; leave one out")
    return int(given or stated or DEFAULT_WORLD_SIZE)
