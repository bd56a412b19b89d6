"""The command ``python -m solver.simai``: SimAI-Analytical's step, a price, an export, or filled compute columns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from profiler.errors import InputError
from solver.api import configured_strategy, estimate, time_attention
from solver.options.arguments import check_machine_arguments
from solver.options.batch import stated_batch
from solver.options.inputs import load_inputs
from solver.options.terminal_run import run
from solver.simai.aiob import read_kernel_times, write_kernel_times
from solver.simai.aiob_fill import fill_csv, fill_csv_as_aicb, fill_text, fill_text_as_aicb
from solver.simai.analytical import StepTime, analytical_step
from solver.simai.analytical_csv import write_analytical_csv
from solver.simai.export_csv import csv_workload
from solver.simai.export_text import text_workload
from solver.simai.export_times import kernel_times
from solver.simai.given import check_output, default_prefix, machine_of, mode_of, overlaps_of
from solver.simai.options import parser
from solver.simai.pricing import show_prices
from solver.simai.stage_work import SimaiStageWork, notes_of, stage_work
from solver.simai.step_work import StepWork, step_work
from solver.simai.workload_csv import read_workload_csv, write_workload_csv
from solver.simai.workload_text import TextWorkload, read_workload_text, write_workload_text
from solver.spec.strategy import Strategy

_TEXT, _CSV, _AIOB = ".txt", ".csv", ".aiob"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one mode; return the exit status (2 for input that cannot be used)."""
    args = parser().parse_args(arguments)

    def command(console: Console) -> None:
        mode = mode_of(args)
        check_machine_arguments(args)
        _MODES[mode](args, console)

    return run(command)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def analytical(args: argparse.Namespace, console: Console) -> None:
    """Write SimAI-Analytical's file for a workload, and print its summary."""
    if bool(args.analytical) == bool(args.workload):
        raise InputError("--analytical needs one workload: --analytical FILE, or --analytical -w FILE")
    path = Path(args.analytical or args.workload)
    workload, machine = read_workload_text(path), machine_of(args)
    step = analytical_step(workload, machine, args.gpus, overlaps_of(args))
    prefix = default_prefix(args, path, machine)
    output = args.output or (args.result_folder or Path("results")) / f"{prefix}EndToEnd.csv"
    check_output(output, path)
    for text in analytical_notes(args, workload, step):
        _note(text)
    write_analytical_csv(output, step, prefix.rsplit("/")[-1])
    parts = ", ".join(f"{name} {value:,.0f}" for name, value in step.parts.items() if value)
    console.print(f"{step.total:,.0f} us a step as SimAI-Analytical computes it: {parts} us", markup=False)
    console.print(f"wrote {output}", markup=False)


def analytical_notes(args: argparse.Namespace, workload: TextWorkload, step: StepTime) -> list[str]:
    """Return what of the input is ignored or assumed, a sentence each."""
    header, found = workload.header, []
    if args.visual not in (None, "0"):
        found.append("-v is ignored: no HTML picture is drawn")
    if args.language not in (None, "en"):
        found.append("-l is ignored: messages are in English")
    if args.nvlink and args.gpu_type:
        found.append("-g_type is ignored beside -nv, as in SimAI-Analytical")
    if args.nic_busbw and args.nic_type:
        found.append("-nic_t is ignored beside -nic, as in SimAI-Analytical")
    if step.assumed and header.entries:
        found.append(f"the first line states no {', '.join(key.rstrip(':') for key in step.assumed)}: read as 1, or from -g")
    stated = header.value("all_gpus:")
    if args.gpus and stated and args.gpus != stated:
        found.append(f"-g {args.gpus} counts, not the {stated} GPUs of the workload's first line, as in SimAI-Analytical")
    if any(part.comm >= 1 << 62 for row in step.rows for part in (row.forward, row.input_grad, row.weight_grad)):
        found.append(
            "collectives over one GPU of 1 MiB or more take 2^63 ns in SimAI-Analytical, which divides by a bandwidth of 0"
        )
    return found


def export(args: argparse.Namespace, console: Console) -> None:
    """Write the layout that the config states as a workload with predicted times."""
    kind = args.export.suffix.lower()
    if kind not in (_TEXT, _CSV, _AIOB):
        formats = ".txt (SIMAI_workload), .csv (AICB Workload) or .aiob (kernel times)"
        raise InputError(f"--export {args.export}: the file must end in {formats}")
    inputs = load_inputs(args)
    check_output(args.export, inputs.config.source)
    batch, rounded = stated_batch(args, inputs.problem, inputs.config)
    strategies = [configured_strategy(inputs.problem, inputs.config, batch)]
    problem, _ = time_attention(inputs.problem, inputs.profile, strategies, timing=False, folder=inputs.times)
    solutions = estimate(problem, strategies)
    layout = solutions.layouts.strategy(0, problem.run)
    stage, step = stage_work(solutions, 0, args.stage), step_work(solutions, 0)
    lines = _write(args.export, kind, layout, stage, step)
    for note in (*notes_of(layout), *filter(None, [rounded])):
        _note(note)
    what = f"stage {stage.stage} of {layout.pp}" if layout.pp > 1 else "the step"
    seconds = float(solutions.times.seconds[0])
    console.print(f"{problem.model.name}: {what}, {lines:,} rows; predicted step {seconds:.4g} s", markup=False)
    console.print(f"wrote {args.export}", markup=False)


def _write(path: Path, kind: str, layout: Strategy, stage: SimaiStageWork, step: StepWork) -> int:
    """Write a stage in the format of the file's name; return the number of its rows."""
    if kind == _TEXT:
        text = text_workload(layout, stage, step)
        write_workload_text(path, text)
        return len(text.rows)
    if kind == _CSV:
        table = csv_workload(layout, stage, step)
        write_workload_csv(path, table)
        return len(table.items)
    times = kernel_times(stage, step)
    write_kernel_times(path, times)
    return len(times.kernels)


def fill(args: argparse.Namespace, console: Console) -> None:
    """Write a workload with compute columns from a kernel-time file."""
    if args.kernel_times is None or args.output is None:
        raise InputError("--fill needs --kernel_times FILE, the times, and -o OUT, the file to write")
    if args.recompute_activations and not args.as_aicb:
        raise InputError("--recompute_activations belongs to --as_aicb; our times are of what the kernels' names say")
    check_output(args.output, args.fill, args.kernel_times)
    times, again = read_kernel_times(args.kernel_times), args.recompute_activations
    if args.fill.suffix.lower() == _CSV:
        table = read_workload_csv(args.fill)
        write_workload_csv(args.output, fill_csv_as_aicb(table, times, again) if args.as_aicb else fill_csv(table, times))
    else:
        text = read_workload_text(args.fill)
        write_workload_text(args.output, fill_text_as_aicb(text, times, again) if args.as_aicb else fill_text(text, times))
    console.print(f"wrote {args.output}", markup=False)


_MODES: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "analytical": analytical,
    "price": show_prices,
    "export": export,
    "fill": fill,
}
