"""Imports run one way: between the packages, between the wings of a package, and never in a circle between modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Wings from the ground up; a wing may import those of floors below its own, and of packages before its own.
FLOORS = (
    ("profiler.errors",),
    ("profiler.files",),
    ("profiler.profile",),
    ("profiler.train", "profiler.published"),
    ("profiler.measure",),
    ("predictor.estimate",),
    ("predictor.kernels", "predictor.network"),
    ("predictor.cost_model",),
    ("predictor.accuracy",),
    ("solver.spec",),
    ("solver.formats", "solver.schedule", "solver.layers"),
    ("solver.step",),
    ("solver.search",),
    ("solver.report", "solver.api"),
    ("solver.command_line",),
)
FLOOR = {wing: floor for floor, wings in enumerate(FLOORS) for wing in wings}
PACKAGES = ("profiler", "predictor", "solver")


def modules() -> dict[str, Path]:
    """Dotted name of every module of the three packages -> its file."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(path: Path) -> Iterator[str]:
    """Modules of the three packages that a file imports anywhere, inside functions too."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            yield from (full if (full := f"{node.module}.{name.name}") in known else node.module for name in node.names)


def wing(module: str) -> str:
    return ".".join(module.split(".")[:2])


IMPORTS = {module: set(imports(path)) - {module} for module, path in modules().items()}


def test_every_module_lives_in_a_wing_that_has_a_floor() -> None:
    assert {wing(module) for module in IMPORTS} - set(PACKAGES) == set(FLOOR)


@pytest.mark.parametrize("module", sorted(set(IMPORTS) - set(PACKAGES)))
def test_imports_between_wings_run_downward(module: str) -> None:
    upward = {other for other in IMPORTS[module] if wing(other) != wing(module) and FLOOR[wing(other)] >= FLOOR[wing(module)]}
    assert not upward


def test_no_module_imports_itself_through_others() -> None:
    try:
        order = list(TopologicalSorter(IMPORTS).static_order())
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' -> '.join(error.args[1])}")
    assert len(order) == len(IMPORTS) > 100


def test_a_wing_says_in_one_sentence_what_it_is() -> None:
    for path in (path for path in modules().values() if path.name == "__init__.py" and len(path.relative_to(ROOT).parts) == 3):
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert told and told.endswith("."), path
