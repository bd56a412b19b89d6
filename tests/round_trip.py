"""Random layouts of a framework, exported and read again: the same layout of the same model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from toy import DEVICE, make_problem, some_layouts, toy_cost

from profiler.errors import InputError
from solver.formats.config_file import RunConfig, load_run_config, read_source
from solver.formats.export import exported, write_export
from solver.formats.file_run import FileRun, Source
from solver.formats.same_layout import effective, refuse_other_model, stated_strategy
from solver.spec.cluster import cluster_of
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.problem import problem_of
from solver.step.solutions import estimate_layouts

_ON_DISK = 10  #: layouts of which files are written


EVERY_FORMAT = toy_cost(device=replace(DEVICE, peak_flops={"bf16": 1e15, "fp8": 2e15, "mxfp8": 2e15, "nvfp4": 4e15}))


def model_of(name: str) -> ModelSpec:
    return load_run_config(f"configs/models/{name}.json").model


def load(folder: Path, text: str) -> RunConfig:
    """Read the text of a YAML file."""
    path = folder / "run.yaml"
    path.write_text(text)
    return load_run_config(path)


def same_model(one: ModelSpec, other: ModelSpec, tp: int = 1) -> bool:
    """Whether two descriptions are of the same work with ``tp`` tensor-parallel ranks."""
    try:
        refuse_other_model(one, other, tp, "the other description")
    except InputError:
        return False
    return True


def layouts_of(
    model: ModelSpec, framework: str, count: int, world: int = 64, seed: int = 3, seq_len: int = 4096, **constants: Any
) -> list[Strategy]:
    """Return random layouts of a search, with the framework's defaults where ``constants`` say nothing."""
    flags = {key: value for key, value in framework_of(framework).flags.items() if key != "zero"}
    problem = make_problem(model, world, EVERY_FORMAT, seq_len, framework=framework, **{**flags, **constants})
    found = some_layouts(problem, 4 * world, count, seed)
    return [found.strategy(index, problem.run) for index in range(len(found))]


def round_trips(model: ModelSpec, runs: list[Strategy], ending: str, folder: Path) -> tuple[int, Counter[str]]:
    """Export every layout and read it again; return how many came back, and how often each setting refused one."""
    came, refused = 0, Counter[str]()
    for run in runs:
        path = folder / f"run{ending}"
        try:
            texts = exported(path, model, run, 8)
        except InputError as error:
            refused[str(error).split(" ")[0]] += 1
            continue
        if came < _ON_DISK:
            write_export(path, model, run, 8)
            config: FileRun | RunConfig = load_run_config(path)
        else:
            config = read_source(Source(path, texts[path.name], texts.get))
        back = stated_strategy(config.layout, run.world_size)
        assert effective(model, back) == effective(model, run.replace(framework=back.framework)), texts
        assert same_model(config.model, model, run.tp)
        came += 1
    return came, refused


def assert_same_estimate(model: ModelSpec, runs: list[Strategy]) -> None:
    """Assert that what ``effective`` leaves out of a layout changes neither its time nor its memory."""
    cost = EVERY_FORMAT
    for run in runs:
        one, other = (
            estimate_layouts(problem_of(model, same, cluster_of(cost.device, {}), cost), Layouts.of([same]))
            for same in (run, effective(model, run))
        )
        assert one.times.seconds[0] == other.times.seconds[0], run
        assert one.memory.device[0] == other.memory.device[0], run
