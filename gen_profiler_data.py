"""Measure this machine's kernels and collectives: ``torchrun --nproc-per-node=8 gen_profiler_data.py``.

Writes OUTPUT/data.pt, which predictions use with --profile data, and OUTPUT/pics. Uses NCCL and CUDA where there are GPUs,
otherwise gloo and the CPU. Without torchrun it runs as a single process.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from predictor.network.measured_groups import own_network
from predictor.network.reached import reached
from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError, require_torch, say_once
from profiler.profile.merge import merged
from profiler.profile.plan import DEFAULT_MINUTES, ModelDims
from profiler.profile.profiles import OWN_PROFILE, PROF_DATA, find_profile
from profiler.profile.recorder import NOT_RUN
from profiler.profile.store import read_profile, write_profile
from profiler.published.nccl_rows import OPS
from profiler.published.nccl_tests import import_into
from solver.formats.config_file import load_cluster, load_run_config
from solver.spec.cluster import cluster_of
from solver.spec.run import DEFAULT_SEQ_LEN


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of the command."""
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, default=PROF_DATA, metavar="DIR", help="folder of data.pt and pics (%(default)s)")
    p.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_MINUTES,
        metavar="MINUTES",
        help="time to measure for, the most informative measurements first (%(default)g)",
    )
    p.add_argument(
        "--config",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="model files whose exact shapes are measured besides the grid",
    )
    p.add_argument(
        "--measurements",
        type=Path,
        metavar="FILE.csv",
        help="measure these shapes first: what foretrain explain --measurements wrote",
    )
    p.add_argument("--resume", action="store_true", help="continue data.pt: what it holds is not measured again")
    p.add_argument("--append", action="store_true", help="measure into data.pt: its measurements stay until they are repeated")
    instead = p.add_mutually_exclusive_group()
    instead.add_argument(
        "--merge",
        type=Path,
        nargs=2,
        metavar=("A.pt", "B.pt"),
        help="measure nothing: join two profiles of one device into data.pt; those of B win",
    )
    instead.add_argument(
        "--import-nccl-tests",
        type=Path,
        nargs="+",
        default=[],
        metavar="LOG",
        help="measure nothing: join the collectives of logs of nccl-tests to data.pt",
    )
    p.add_argument(
        "--profile",
        metavar="NAME|FILE",
        help="whose kernels go with the logs where there is no data.pt yet (the default profile)",
    )
    p.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="the cluster that the logs are of, where its network or nodes differ "
        "from the profile's (a name under configs/clusters or a file)",
    )
    p.add_argument(
        "--nccl-test", choices=sorted(OPS), help="which test the logs are of, where neither they nor their names say"
    )
    p.add_argument("--quick", action="store_true", help="tiny sizes only, to see that all of it runs; not for predictions")
    p.add_argument("--no-pictures", action="store_true", help="do not fit the measurements and draw the fits")
    return p


def model_dims(path: Path) -> ModelDims:
    """Return the sizes of a model file that the solver reads."""
    config = load_run_config(path)
    m = config.model
    return ModelDims(
        m.hidden_size,
        m.intermediate_size,
        m.num_attention_heads,
        m.num_key_value_heads,
        m.head_dim,
        m.vocab_size,
        m.gated_mlp,
        config.seq_len or DEFAULT_SEQ_LEN,
        m.num_experts,
        m.moe_intermediate_size,
        m.num_experts_per_tok,
    )


#: Options for measuring, and options for reading logs.
_OF_MEASURING = ("config", "measurements", "resume", "append")
_OF_LOGS = ("profile", "nccl_test", "cluster")


def check(args: argparse.Namespace) -> None:
    """Raise InputError for options that are invalid on their own or together."""
    if not args.budget > 0:
        raise InputError(f"--budget is {args.budget:g} minutes; it must be positive")
    instead = "--merge" if args.merge else "--import-nccl-tests" if args.import_nccl_tests else ""
    ignored = [name for name in _OF_MEASURING if getattr(args, name)] if instead else []
    if not args.import_nccl_tests:
        ignored += [name for name in _OF_LOGS if getattr(args, name)]
    if ignored:
        beside = f"{instead}, which measures nothing" if instead else "a measurement; it goes with --import-nccl-tests"
        raise InputError(f"--{ignored[0].replace('_', '-')} has no effect with {beside}")


def how_to_use(output: Path) -> str:
    """Return the options of a prediction that use the profile in ``output``."""
    return "--profile data" if output.resolve() == PROF_DATA else f"--pre_profiling_data_path {output / OWN_PROFILE}"


def merge(first: Path, second: Path, output: Path) -> None:
    """Join two profiles into ``output``/data.pt."""
    joined = merged(read_profile(first), read_profile(second))
    write_profile(output / OWN_PROFILE, joined)
    rows = sum(len(table) for table in joined.tables.values())
    print(f"{rows} measurements of {joined.device.name} in {output / OWN_PROFILE}")


def instead_of_measuring(args: argparse.Namespace) -> None:
    """Make data.pt from existing profiles or logs."""
    if args.merge:
        merge(args.merge[0], args.merge[1], args.output)
    else:
        cluster = load_cluster(args.cluster) if args.cluster else {}
        named = args.profile or cluster.get("hardware")
        place = cluster_of(find_profile(named)[0].device, cluster, str(args.cluster)) if args.cluster else None
        done, warnings = import_into(
            args.output,
            args.import_nccl_tests,
            named,
            args.nccl_test,
            place and place.gpus_per_node,
            place and place.network_bandwidth,
        )
        imported = read_profile(args.output / OWN_PROFILE)
        network = imported.device.network_bandwidth
        found = reached(imported.tables, imported.device) if own_network(imported) else ()
        print("\n".join([*done, *(each.text(network) for each in found)]))
        print("".join(f"warning: {line}\n" for line in warnings), end="", file=sys.stderr)
        print(f"use it: python simulation_train_formulaic.py --run_all_solu {how_to_use(args.output)}")


def draw(output: Path) -> None:
    """Fit the measurements, print the errors on held-out measurements, and draw the fits.

    Prints one sentence instead if there are too few measurements.
    """
    from rich.console import Console

    from predictor.accuracy import command as accuracy

    profile = read_profile(output / OWN_PROFILE)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        scores = accuracy.measure(profile.name, profile)
        pictures = accuracy.draw(scores, output / "pics", output / ".cache")
    except (InputError, ValueError, ArithmeticError, LookupError) as error:  # too few measurements for a fit
        console.print(
            f"no pictures: too few measurements to fit ({type(error).__name__}: {error}); measure longer with --resume"
        )
        return
    if scores.scores:
        console.print(accuracy.score_table(f"{profile.device.name}: error on held-out measurements", scores.scores))
    for op, why in scores.missing.items():
        console.print(f"{op}: no score, {why}")
    console.print(f"{len(pictures)} pictures in {output / 'pics'}", soft_wrap=True)


def say_what_failed(output: Path) -> None:
    """Print how many shapes of each table no kernel of this machine ran, by reason."""
    refused = read_profile(output / OWN_PROFILE).meta.get(NOT_RUN, {})
    for (op, why), count in Counter((label.partition(" ")[0], why) for label, why in refused.items()).items():
        print(f"{op}: {count} of its shapes not measured: {why}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(arguments)
    leads = os.environ.get("RANK", "0") == "0"
    try:
        check(args)
        if args.merge or args.import_nccl_tests:
            if leads:
                instead_of_measuring(args)
            return 0
        require_torch("measuring")
        from profiler.measure.run import Options, run
        from profiler.measure.wanted import Wanted, read_wanted

        models = [model_dims(path) for path in args.config]
        command = shlex.join([Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)])
        wanted = read_wanted(args.measurements) if args.measurements else Wanted()
        options = Options(args.output, args.budget * 60, models, args.resume, args.append, args.quick, command, wanted)
        status = run(options)
        if leads:
            say_what_failed(args.output)
        if leads and not args.no_pictures:
            draw(args.output)
        if leads and status == 0:
            few = " (its few sizes try the harness; predictions need a run without --quick)" if args.quick else ""
            print(f"wrote {args.output / OWN_PROFILE}; use it with {how_to_use(args.output)}{few}", flush=True)
        return status
    except InputError as error:
        say_once(f"gen_profiler_data.py: {error}")
        return 2


def end(status: int) -> None:
    """Exit with ``status``; a rank of a job exits without destructors, since those of gloo's threads sometimes abort."""
    if "RANK" in os.environ and "torch" in sys.modules:
        from profiler.measure.session import leave

        sys.stdout.flush()
        leave("", status)
    sys.exit(status)


if __name__ == "__main__":
    end(main())
