"""Arguments of the commands: how they are declared, and what they may not say together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from profiler.files import check_name
from profiler.profile.attention_times import TIMING_SECONDS
from profiler.profile.profiles import DEFAULT_PROFILE, derived_profiles, shipped_profiles
from solver.search.fixed import LIMITED
from solver.search.variants import CONSTANT_AXES
from solver.spec.bounds import number, whole_number
from solver.spec.run import DEFAULT_SEQ_LEN
from solver.spec.strategy import AXES

DEFAULT_TOKENS = 4_194_304
DEFAULT_WORLD_SIZE = 128
DEFAULT_MODEL = "7"
_PICTURES = ("plot", "plot_scaling", "plot_stages")
_OF_A_SEARCH = ("search", "also", *(f"max_{name}" for name in LIMITED))
_OF_A_PREDICTION = (
    "run_all_solu",
    "config",
    "model_size",
    "world_size",
    "global_batch_size",
    "pre_profiling_data_path",
    "profile",
    "as_device",
    "cluster",
    "seq_len",
    "framework",
    "memory_limit_gib",
    "csv",
    "fix",
    "round_batch",
    "health",
    "balance",
    "export",
    "trace",
    "memory_trace",
    "learned",
    "set",
    "no_timing",
    *_PICTURES,
    *_OF_A_SEARCH,
)


_NAMES = ("cluster", "as_device")  #: of something known, or a file
#: Arguments that name files, those that are read first, and what those that are no options are called.
_READ = ("config", "pre_profiling_data_path", "learned", "validate", "health", "log", "file", *_NAMES)
_FILES = (*_READ, "runs", "output", "json", "csv", "measurements", "export", "trace", "memory_trace", "report", *_PICTURES)
_ARGUMENTS = {
    ("import", "log"): "LOG",
    ("health", "log"): "LOG",
    ("validate", "file"): "FILE",
    ("learn", "runs"): "RUNS",
    ("sweep", "output"): "OUT",
    ("export", "export"): "OUT",
}


class StoreOnce(argparse.Action):
    """Stores the value of an option; the same option a second time is an error, not the one that counts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        given = vars(namespace).setdefault("given", set())
        if self.dest in given:
            parser.error(f"{option_string} is given twice")
        if values == [] and self.nargs is None:  # what argparse makes of --OPTION=--
            parser.error(f"{option_string} needs a value")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def add_machine_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is trained, and on what."""
    p.register("action", None, StoreOnce)
    p.add_argument("--config", type=Path, help="a framework's file, Hugging Face config.json or model file (docs/formats.md)")
    p.add_argument(
        "--env",
        action="append",
        metavar="NAME=VALUE",
        help="an environment variable that the script in --config reads (repeatable)",
    )
    p.add_argument("--vocab_size", type=int, help="vocabulary size, where the config names a tokenizer without it")
    p.add_argument("--model_size", help="a shipped model: a name of configs/models, or 7 (InternLM2, the default), 20, 70, 104")
    p.add_argument(
        "--global_batch_size",
        type=int,
        help="tokens per step (default: the config's own batch, on as "
        f"many GPUs, where it states its micro batches, else {DEFAULT_TOKENS})",
    )
    p.add_argument(
        "--round_batch",
        action="store_true",
        help="round a global batch that does not divide: to whole sequences, "
        "and to a multiple of the GPUs of a search, or of the config's dp * micro batch",
    )
    p.add_argument("--pre_profiling_data_path", type=Path, help="a profile written by gen_profiler_data.py")
    p.add_argument(
        "--profile",
        help=f"a shipped profile: {', '.join(shipped_profiles())}; one derived from these: "
        f"{', '.join(derived_profiles())}; or data, measured here (default {DEFAULT_PROFILE}, or that of --cluster)",
    )
    p.add_argument(
        "--as",
        dest="as_device",
        metavar="DEVICE",
        help="rescale the profile to another device: one of configs/devices, or a device file of your own (.json)",
    )
    p.add_argument("--cluster", help="a name under configs/clusters or a file: GPUs per node, network, memory")
    p.add_argument(
        "--seq_len",
        type=int,
        help=f"tokens of a sequence (default: the config's, else {DEFAULT_SEQ_LEN}, or as many as the model has positions for)",
    )
    p.add_argument(
        "--framework",
        help="the framework, or its release, that will run it (default: InternEvo for its configs, else megatron-core)",
    )
    p.add_argument("--set", metavar="KEY=VALUE,...", help="constants of the run, as in precision=fp8,moe_dispatcher=deepep")
    p.add_argument("--memory_limit_gib", type=float, help="memory limit per GPU (default: the cluster's)")
    p.add_argument("--learned", type=Path, metavar="FILE", help="what foretrain learn wrote: factors from your own runs")
    add_approximate_argument(p)


def add_prediction_arguments(p: argparse.ArgumentParser, of_one: bool = True) -> None:
    """Add the arguments of a prediction, of one layout or of all. of_one: those too that only one layout has."""
    add_machine_arguments(p)
    add_world_size_argument(p)
    p.add_argument(
        "--no-timing",
        action="store_true",
        help="do not time new attention shapes on this machine's "
        f"GPU (default: up to {TIMING_SECONDS:.0f} s where it is the profile's device)",
    )
    if of_one:
        p.add_argument(
            "--health",
            type=Path,
            metavar="FILE",
            help="what was measured of the config's layout: a trainer's log, "
            'one of nccl-tests, or JSON such as {"step_s": 16.1}; says what differs from it',
        )
    p.add_argument(
        "--balance",
        action="store_true",
        help="assign the layers of the (best) layout to its stages one by one, "
        "and recompute to match, so that none is waited for",
    )
    p.add_argument(
        "--export",
        type=Path,
        metavar="OUT",
        help="write the (best) layout as its framework runs it: a script, .py, .toml, .yaml or .json (docs/formats.md)",
    )
    p.add_argument(
        "--trace",
        type=Path,
        metavar="OUT",
        help="one step of the (best) layout pass by pass: a Chrome or Perfetto trace (.json), or a picture of it (.png, .svg)",
    )
    p.add_argument(
        "--memory_trace",
        type=Path,
        metavar="OUT",
        help="memory of every stage through one step of it: a picture "
        "(.png, .svg), or a snapshot (.pickle) for torch's memory viewer",
    )
    p.add_argument("--plot_stages", type=Path, metavar="OUT", help="draw time and memory of every pipeline stage of the layout")
    add_json_argument(p)
    p.add_argument("--csv", type=Path, metavar="OUT", help="write the best layouts as a table")


def add_world_size_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("--world_size", type=int, help=f"GPUs (default: the config's, else {DEFAULT_WORLD_SIZE})")


def add_approximate_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("--approximate", action="store_true", help="leave out a model's soft caps instead of refusing the model")


def add_search_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments that only a search has."""
    p.add_argument("--top", type=int, default=10, help="layouts to show and write (default 10)")
    p.add_argument("--jobs", type=int, default=1, help="processes that share a search (default 1)")
    p.add_argument("--fix", metavar="AXIS=VALUE,...", help=f"search only layouts with these, of {', '.join(AXES)}")
    p.add_argument(
        "--search",
        metavar="AXIS,...",
        help="vary these axes; sizes (tp, cp, pp and the like) that are left out are as the config states them, or 1, and "
        "recomputation, ZeRO, tp_mode and micro batch as it states them, or free",
    )
    p.add_argument(
        "--also",
        metavar="AXIS[=VALUE/...],...",
        help="vary these constants of the run too, over all values or "
        f"these, each combination in a search of its own: {', '.join(CONSTANT_AXES)}",
    )
    for name in LIMITED:
        p.add_argument(f"--max-{name}", type=int, metavar="N", help=f"search only layouts of {name} up to N")
    p.add_argument("--plot", type=Path, metavar="OUT", help="draw tokens/GPU/s against memory of the Pareto-optimal layouts")
    p.add_argument("--report", type=Path, metavar="OUT.html", help="write the answer and what there is to decide as one page")
    p.add_argument(
        "--plot_scaling",
        type=Path,
        metavar="OUT",
        help="search an eighth to eight times as many GPUs too, with the same global batch, and draw tokens/s against GPUs",
    )


def add_json_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", type=Path, metavar="OUT", help="write every number as JSON, in SI units (docs/json.md)")


def check_machine_arguments(args: argparse.Namespace) -> None:
    """Raise InputError for values of what every command has that cannot be used, alone or together."""
    for name in ("world_size", "global_batch_size", "seq_len", "top", "jobs"):
        if getattr(args, name, None) is not None:
            whole_number(name, getattr(args, name))
    if getattr(args, "memory_limit_gib", None) is not None:
        number("memory_limit_gib", args.memory_limit_gib)
    if getattr(args, "profile", None) is not None and args.pre_profiling_data_path is not None:
        raise InputError("--profile and --pre_profiling_data_path both name a profile; give one")
    if getattr(args, "config", None) is not None and args.model_size is not None:
        raise InputError("--config and --model_size both name a model; give one")
    for name in ("framework", "set", "fix", "also", "search", "profile", "cluster", "model_size", "as_device"):
        value = getattr(args, name, None)
        if value is not None and not str(value).strip():
            raise InputError(f"{_option(name)} is empty; leave it out for the default")
    _check_outputs(args)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise InputError for values of a search or a prediction that cannot be used, alone or together."""
    check_machine_arguments(args)
    given: set[str] = getattr(args, "given", set())
    search = "--best" if getattr(args, "command", "") == "export" else "--run_all_solu"
    if args.validate:
        ignored = [name for name in _OF_A_PREDICTION if getattr(args, name)] + ["top"] * ("top" in given)
        if ignored:
            option = _option(ignored[0])
            raise InputError(f"{option} has no effect with --validate: each case names its own hardware, model and layout")
    if args.jobs > 1 and not args.run_all_solu:
        raise InputError(f"--jobs shares a search; give {search} too")
    if args.fix is not None and not args.run_all_solu:
        raise InputError(f"--fix fixes axes of a search; give {search} too")
    for name in (*_OF_A_SEARCH, "top"):
        if (name in given if name == "top" else getattr(args, name) is not None) and not args.run_all_solu:
            raise InputError(f"{_option(name)} belongs to a search; give {search} too")
    for name in (*(f"max_{axis}" for axis in LIMITED), "vocab_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"{_option(name)} is {getattr(args, name)}; it must be a positive whole number")
    if args.health and args.run_all_solu:
        raise InputError("--health compares a job with one layout, the config's; leave out --run_all_solu")
    for name in ("plot", "plot_scaling", "report"):
        if getattr(args, name) and not args.run_all_solu:
            raise InputError(f"--{name} shows layouts of a search; give --run_all_solu too")
    check_report(args.report)
    for name in (*_PICTURES, "trace", "memory_trace"):
        path, also = getattr(args, name), {"trace": (".json",), "memory_trace": (".pickle",)}.get(name, ())
        check_picture(name, path, also)


def _option(name: str) -> str:
    """Return an option as it is typed."""
    hyphens = name.startswith("max_") or name == "no_timing"
    return "--as" if name == "as_device" else f"--{name.replace('_', '-') if hyphens else name}"


def check_report(path: Path | None) -> None:
    """Raise InputError for a report that is no page."""
    if path and path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--report {path}: the file must end in .html")


def check_picture(name: str, path: Path | None, also: tuple[str, ...] = ()) -> None:
    """Raise InputError where the file of option ``name`` ends like no picture; also: further endings that it may have."""
    if path and path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".pdf", ".svg", *also):
        raise InputError(f"--{name} {path}: the file must end in {', '.join(('.png', '.jpg', '.pdf', *also))} or .svg")


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise InputError where two outputs, or an output and an input, are one file."""
    seen: dict[Path, tuple[str, bool]] = {}
    for name in _FILES:
        reads = name in _READ or (name == "runs" and getattr(args, "command", "") == "learn")
        given = getattr(args, name, None)
        for path in map(Path, given if isinstance(given, list) else [given] if given else []):
            check_name(path)
            if (name in _NAMES or path.exists()) and not path.is_file():  # a device or a pipe may take several
                continue
            real, option = path.resolve(), _ARGUMENTS.get((getattr(args, "command", ""), name), _option(name))
            if seen.get(real, ("", False))[0] == option:
                raise InputError(f"{option} names {path} twice")
            first, only_read = seen.setdefault(real, (option, reads))
            if first != option and not (only_read and reads):
                raise InputError(f"{first} and {option} are both {path}; the one would overwrite the other")
