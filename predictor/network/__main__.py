"""``python -m predictor.network``: make, read and draw topologies, and simulate collectives on them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from predictor.network.flows.command import add_flow_arguments, run_flows
from predictor.network.topology.command import add_topology_arguments, run_topology, stated_options
from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError, printable

_EXAMPLES = """examples:
  python -m predictor.network -topo Spectrum-X -g 128 -gt A100 -bw 100Gbps -nvbw 2400Gbps -o topologies
  python -m predictor.network -topo NVL -gps 72 -g 576 --picture nvl72.png
  python -m predictor.network --file topologies/Spectrum-X_128g_8gps_100Gbps_A100
  python -m predictor.network --flows cases.jsonl --json times.json
"""
_MOST_MESSAGE = 1200  # characters of an error message


def parser() -> argparse.ArgumentParser:
    p = ArgumentParser(
        prog="python -m predictor.network",
        description="Make a topology file as SimAI's generator does, read or draw one, or simulate collectives on topologies.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_topology_arguments(p)
    add_flow_arguments(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status (2 for input that cannot be used)."""
    args = parser().parse_args(arguments)
    try:
        if args.flows:
            stated = [*stated_options(args), *(f"--{name}" for name in ("file", "picture") if getattr(args, name))]
            if stated:
                raise InputError(f"{stated[0]} cannot be combined with --flows: each case names its own topology")
            run_flows(args)
        elif args.json:
            raise InputError("--json writes simulated times; name the cases with --flows")
        else:
            run_topology(args)
    except InputError as error:
        print(f"error: {printable(str(error), _MOST_MESSAGE)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
