"""Imports go one way between packages and between their sub-packages, and modules never import each other in a cycle."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Sub-packages by level, lowest first; a sub-package may import only from levels below its own.
LEVELS = (
    (
        "profiler.errors",
        "profiler.units",
    ),
    ("profiler.files", "profiler.argument_parser", "profiler.text_file"),
    ("profiler.profile",),
    ("profiler.train", "profiler.published"),
    ("profiler.measure",),
    ("predictor.estimate", "predictor.learned"),
    ("predictor.kernels", "predictor.network"),
    ("predictor.corrections",),
    ("predictor.kernel_costs", "predictor.network_costs", "predictor.host_costs"),
    ("predictor.cost_model",),
    ("predictor.derived",),
    ("predictor.fitted",),
    ("predictor.fit_shipped",),
    ("predictor.accuracy",),
    ("solver.spec",),
    ("solver.formats", "solver.schedule", "solver.layers"),
    ("solver.step",),
    ("solver.search",),
    ("solver.report", "solver.api"),
    ("solver.options", "solver.largest", "solver.learning"),
    ("solver.answers", "solver.sweep"),
    ("solver.simumax", "solver.simai"),
    ("solver.commands",),
)
LEVEL = {subpackage: level for level, subpackages in enumerate(LEVELS) for subpackage in subpackages}
PACKAGES = ("profiler", "predictor", "solver")


def modules() -> dict[str, Path]:
    """Map the dotted name of every module of the three packages to its file."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(path: Path, known: Collection[str]) -> Iterator[str]:
    """Yield which of the ``known`` modules a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            yield from (full if (full := f"{node.module}.{name.name}") in known else node.module for name in node.names)


def subpackage(module: str) -> str:
    return ".".join(module.split(".")[:2])


MODULES = modules()


@pytest.fixture(scope="session", name="found")
def _found() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {module: set(imports(path, MODULES)) - {module} for module, path in MODULES.items()}


def test_every_module_is_in_a_subpackage_that_has_a_level() -> None:
    assert {subpackage(module) for module in MODULES} - set(PACKAGES) == set(LEVEL)


def test_imports_between_subpackages_go_down(found: dict[str, set[str]]) -> None:
    upward = {
        (module, other)
        for module in set(MODULES) - set(PACKAGES)
        for other in found[module]
        if subpackage(other) != subpackage(module) and LEVEL[subpackage(other)] >= LEVEL[subpackage(module)]
    }
    assert not upward


def test_no_import_cycles(found: dict[str, set[str]]) -> None:
    try:
        order = list(TopologicalSorter(found).static_order())
    except CycleError as error:
        pytest.fail(f"imports form a cycle: {' -> '.join(error.args[1])}")
    assert len(order) == len(MODULES) > 100


def test_every_subpackage_has_a_docstring_that_ends_with_a_period() -> None:
    for path in (path for path in MODULES.values() if path.name == "__init__.py" and len(path.relative_to(ROOT).parts) == 3):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring and docstring.endswith("."), path
