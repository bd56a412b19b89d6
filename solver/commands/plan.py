"""The command ``foretrain plan``: GPUs, days, GPU-hours, money and energy of training a number of tokens."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from profiler.errors import InputError
from profiler.profile.devices import DATASHEETS, device_named
from profiler.profile.profile import Profile
from solver.formats.config_file import RunConfig, load_cluster
from solver.options.arguments import add_json_argument, add_machine_arguments, check_picture
from solver.options.axes import parse_fixed
from solver.options.batch import searched_batch, uneven_worlds
from solver.options.inputs import Inputs, load_inputs, named_config
from solver.options.interruptions import add_interruption_arguments, check_interruptions, goodput_of, interrupted
from solver.options.machines import MACHINES, check_machine, machine_options
from solver.options.terminal_run import progress_bar
from solver.report.goodput import check_host_link
from solver.report.output import write_json
from solver.report.picture_plan import plan_figure
from solver.report.pictures import save_figure
from solver.report.plan import Machine, Training, trainings, worlds_between
from solver.report.plan_table import answer, plan_rows, plan_table
from solver.spec.bounds import whole_number
from solver.step.memory import FITS
from solver.step.problem import Problem

_LEAST, _MOST = 8, 16384
_FEW_TOKENS = 1e6  #: fewer than a step of any batch that is not stated has
_APART = 1.02  #: a factor beyond which the kernels of a measured machine and of one derived from it are not compared in silence
#: Options that name one machine, or its price.
_OF_ONE = ("profile", "as_device", "cluster", "pre_profiling_data_path", "learned", "price")


def add_plan_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of a plan."""
    add_machine_arguments(p)
    p.add_argument("--tokens", type=float, required=True, help="tokens to train on, as in 15e12")
    p.add_argument(
        "--days", type=float, help="deadline: the fewest GPUs that meet it are named, of several machines the cheapest"
    )
    p.add_argument("--budget", type=float, metavar="MONEY", help="name the fastest training within this budget")
    p.add_argument("--min_gpus", type=int, default=_LEAST, metavar="GPUS", help=f"fewest GPUs to look at (default {_LEAST})")
    p.add_argument("--max_gpus", type=int, default=_MOST, metavar="GPUS", help=f"most GPUs to look at (default {_MOST})")
    p.add_argument("--price", type=float, metavar="MONEY", help="price of a GPU-hour")
    p.add_argument(
        "--machines", metavar="NAME=PRICE,...", help="compare machines, each with the price of a GPU-hour: " + MACHINES
    )
    add_interruption_arguments(p)
    p.add_argument("--fix", metavar="AXIS=VALUE,...", help="search only layouts with these")
    p.add_argument("--jobs", type=int, default=1, help="processes that share each search (default 1)")
    p.add_argument("--plot", type=Path, metavar="OUT", help="draw money (or GPU-hours) against days")
    add_json_argument(p)


def _check(args: argparse.Namespace) -> None:
    """Refuse figures that no plan can have."""
    for name in ("tokens", "days", "price", "budget"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e18:
            raise InputError(f"--{name} is {value}; it must be a positive number")
    whole_number("world_size", args.max_gpus, "--max_gpus")
    if not 1 <= args.min_gpus <= args.max_gpus:
        raise InputError(
            f"--min_gpus is {args.min_gpus} and --max_gpus {args.max_gpus}; they must be positive, "
            "the first no more than the second"
        )
    check_interruptions(args)
    if args.tokens < (args.global_batch_size or _FEW_TOKENS):
        raise InputError(f"--tokens is {args.tokens:g}, which is less than a step; write 15e12 for 15 trillion")
    check_picture("plot", args.plot)


def plan(args: argparse.Namespace, console: Console) -> None:
    """Print what training ``--tokens`` takes on each number of GPUs, and write it to ``--json``."""
    _check(args)
    prices = _prices(args)
    if args.budget is not None and None in prices.values():
        raise InputError("--budget needs a price: --price, or --machines NAME=PRICE,...")
    config = _config(args)
    asked = [(Machine(name, price), _named(args, name, config)) for name, price in prices.items()]
    offers = [(machine, named, load_inputs(named, config)) for machine, named in asked]  # names are checked before any search
    tried = [_on_machine(named, inputs, machine) for machine, named, inputs in offers]
    found, failed = [one for some, _ in tried for one in some], [error for _, error in tried if error]
    if not found:
        raise InputError(failed[0])
    notes = _notes({machine.name: inputs.notes(_sequences(args, inputs)[1]).splitlines() for machine, _, inputs in offers})
    notes |= dict.fromkeys(inputs.profile_text for *_, inputs in offers if inputs.problem.cost.origin == "derived")
    notes |= dict.fromkeys(_beside_their_base([inputs for *_, inputs in offers]))
    title = _title(args, offers[0][2], bool(args.machines))
    console.print("\n".join([title, *notes, *failed]), markup=False)
    console.print(answer(found, args.days, args.budget), style="bold", markup=False)
    console.print(plan_table(found))
    left_out = "" if interrupted(args) else "Days without failures, checkpoints and evaluation (--mtbf counts them). "
    risky = any(one.result.best.verdict(0) != FITS for one in found)
    front = "?: may not fit. " * risky + ("*: no other is both faster and cheaper. " if args.machines else "")
    console.print(
        f"{front}{left_out}Energy assumes GPUs at their power limit throughout; hosts, network and cooling are not included.",
        style="dim",
    )
    if args.plot:
        save_figure(plan_figure(found, title, args.days, args.budget), args.plot)
        console.print(f"wrote {args.plot}", markup=False)
    if args.json:
        write_json(args.json, {"tokens": args.tokens, "plan": plan_rows(found)})
        console.print(f"wrote {args.json}", markup=False)


def _notes(of: Mapping[str, Sequence[str]]) -> dict[str, None]:
    """Return the notes of all machines in order; behind a machine's name those that not all have."""
    common = set.intersection(*map(set, of.values()))
    return dict.fromkeys(line if line in common else f"{name}: {line}" for name, lines in of.items() for line in lines)


def _beside_their_base(offers: Sequence[Inputs]) -> list[str]:
    """Return what sets a derived machine apart from the measured one beside it, other than the chips."""
    measured, found = {inputs.profile.name: inputs for inputs in offers}, []
    for inputs in offers:
        derivation = inputs.profile.derivation
        base = measured.get(derivation.kernels.name) if derivation else None
        apart = base.problem.cost.kernels.deratings.linear / inputs.problem.cost.kernels.deratings.linear if base else 1.0
        if base and apart > _APART:
            found.append(
                f"{inputs.profile.name} beside {base.profile.name}: GEMMs and attention of the latter carry a factor of "
                f"{apart:.2f} that a second laboratory showed; {inputs.profile.name}, not measured, does not"
            )
    return found


def _prices(args: argparse.Namespace) -> dict[str, float | None]:
    """Return the price of each machine by its name; "" is the one that the other options name."""
    if args.machines is None:
        return {"": args.price}
    if given := [option for option in _OF_ONE if getattr(args, option) is not None]:
        raise InputError(f"--machines names the machines and their prices; leave out --{given[0].removesuffix('_device')}")
    found: dict[str, float | None] = {}
    for word in args.machines.split(","):
        name, equals, written = word.strip().partition("=")
        try:
            price = float(written) if equals else None
        except ValueError:
            price = 0.0
        if name in found:
            raise InputError(f"--machines {args.machines} names {name} twice")
        if name:
            check_machine(name)
        if not name or not (price is None or 0 < price < 1e18):
            raise InputError(f"--machines {word.strip()!r} must be a machine and a positive price, as in h100_sxm=2.5")
        found[name] = price
    if len({price is None for price in found.values()}) > 1:
        raise InputError(f"--machines {args.machines}: either all machines have a price or none has")
    return found


def _config(args: argparse.Namespace) -> RunConfig:
    """Return the config of a plan; one whose ranks follow from the number of GPUs is read for the fewest."""
    try:
        return named_config(args)
    except InputError as first:
        try:
            return named_config(argparse.Namespace(**vars(args), world_size=args.min_gpus))
        except InputError as error:
            raise first if str(first) == str(error) else InputError(f"on --min_gpus {args.min_gpus} GPUs: {error}") from None


def _named(args: argparse.Namespace, name: str, config: RunConfig) -> argparse.Namespace:
    """Return the options of a plan on one machine; a config is read for the GPUs that it states, if it does."""
    named = argparse.Namespace(**vars(args))
    named.world_size = None if "world_size" in config.layout else args.min_gpus
    if name:
        vars(named).update(machine_options(name))
    return named


def _sequences(args: argparse.Namespace, inputs: Inputs, world: int = 1) -> tuple[int, str]:
    """Return the sequences of a step on ``world`` GPUs, for which they may be rounded, and what there is to say of them."""
    config, note = inputs.config, ""
    if args.global_batch_size is None and "num_micro_batches" in config.layout and "dp" not in config.layout:
        note = "global batch: the default, because the config's micro batches make one only together with a dp"
        config = replace(config, layout={name: value for name, value in config.layout.items() if name != "num_micro_batches"})
    sequences, rounded = searched_batch(args, inputs.problem, config, group=world)
    return sequences, "\n".join(filter(None, (note, rounded)))


def _on_machine(args: argparse.Namespace, inputs: Inputs, machine: Machine) -> tuple[Sequence[Training], str]:
    """Return the trainings on one machine, and why there are none, or none on some number of GPUs."""
    problem, device = inputs.problem, inputs.problem.cost.device
    if args.async_checkpoints:
        check_host_link(problem.cluster.host_link)
    stated = load_cluster(args.cluster) if args.cluster else {}
    domain = int(stated.get("nvlink_domain", device.nvlink_domain))

    told = (
        "world_size" not in inputs.config.layout and {"all_reduce_busbw_gb_s", "all_reduce_busbw_in_node_gb_s"} & stated.keys()
    )

    def batch(world: int) -> int:
        return _sequences(args, inputs, world)[0]

    def on(world: int) -> Problem:
        if not told:
            return problem.for_world(world, domain)
        options = argparse.Namespace(**{**vars(args), "world_size": world})  # what an all-reduce over all of these reached
        return load_inputs(options, inputs.config, of_sweep=True).problem

    fixed, front = parse_fixed(args.fix or ""), f"{machine.name}: " if machine.name else ""
    try:
        worlds = worlds_between(args.min_gpus, args.max_gpus, problem.cluster.gpus_per_node)
        with progress_bar(f"searching {machine.name}".rstrip()) as report:
            found, none = trainings(
                on,
                batch,
                args.tokens,
                worlds,
                report,
                machine=replace(machine, watts=_watts(inputs.profile)),
                fixed=fixed,
                jobs=args.jobs,
            )
    except InputError as error:
        return [], f"{front}{error}"
    if interrupted(args):
        spares = (args.spares or 0) * problem.cluster.gpus_per_node
        found = [one.interrupted(goodput_of(args, one.result.best), spares) for one in found]
    left_out = f"left out: {'; '.join(f'{world} GPUs, {why}' for world, why in none.items())}" if none else ""
    uneven = uneven_worlds(batch, [one.world_size for one in found], args.round_batch)
    return found, "\n".join(f"{front}{line}" for line in (left_out, uneven) if line)


def _title(args: argparse.Namespace, inputs: Inputs, several: bool) -> str:
    """Return what is trained, and on what where the rows do not say it."""
    problem, run = inputs.problem, inputs.problem.run
    states = args.global_batch_size is not None or "num_micro_batches" in inputs.config.layout
    rounded = ", or the nearest that the GPUs divide" if args.round_batch or not states else ""
    return (
        f"{problem.model.name}, {args.tokens:.3g} tokens, sequences of {run.seq_len}, "
        f"{_sequences(args, inputs)[0] * run.seq_len:,} tokens a step{rounded}, {run.precision}, {run.framework}"
        f"{'' if several else f', {problem.cost.device.name}'}"
    )


def _watts(profile: Profile) -> float | None:
    """Return the power limit of a GPU: of the device's file, or of the known device that was measured."""
    if profile.derivation is not None:
        return profile.derivation.power
    sheet = DATASHEETS.get(device_named(profile.device.name))
    return None if sheet is None else sheet.power
