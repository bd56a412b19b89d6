"""Write docs/settings.md: the settings of a run, from the fields of Strategy and the remarks beside them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from accuracy_tables import table

from profiler.files import write_text
from solver.spec.choices import CHOICES
from solver.spec.frameworks import FRAMEWORKS
from solver.spec.run import Run
from solver.spec.strategy import AXES, Strategy

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_FIELD = re.compile(r"    (\w+): (.+?)(?: = (.+?))?(?:  #: (.+))?$")
_HEAD = """# The settings of a run

Written by `python benchmarks/settings.py` from `solver/spec/strategy.py` and `solver/spec/run.py`. All of them may stand under
`layout` of a config and `run` of a [case](cases.md). A key that changes nothing in a run is refused.

"""
_AXES = """## Axes of a layout

A search varies them; `--fix NAME=VALUE` fixes them, `--search NAME` frees them.

"""
_CONSTANTS = """
## Constants of a run

All layouts of a search have them: `--set NAME=VALUE`, or `--also NAME` for a search with each of its values.

"""
_FRAMEWORKS = """
## Defaults of the frameworks

Where a release has another default than the table above ([frameworks](frameworks.md)). A search takes what its release can
do in addition (`best_practice` in `solver/spec/frameworks`).

"""


def remarks() -> Iterator[tuple[str, str, str]]:
    """Yield (field, default, meaning) of a layout and of its run, in their order."""
    above: list[str] = []
    for line in (*inspect.getsource(Strategy).splitlines(), *inspect.getsource(Run).splitlines()):
        if line.startswith("    #: "):
            above.append(line.removeprefix("    #: "))
        elif (found := _FIELD.match(line)) and found[1] in Strategy.__dataclass_fields__:
            yield found[1], (found[3] or "").replace('"', ""), found[4] or " ".join(above)
            above = []


def values(name: str) -> str:
    """Return what a field may be, in words."""
    if name in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[name])
    switch, absent = "`true`, `false`", ", absent"
    words = {"int": "a whole number", "float": "a number", "str": "a text", "bool": switch, "bool | None": switch + absent}
    return words[str(Strategy.__dataclass_fields__[name].type)]


def _shown(default: str) -> str:
    """Return a default in the words of a command line: none for an empty text, and for what a framework implies."""
    return "" if default in ("", "None") else f"`{default.lower() if default in ('True', 'False') else default}`"


def page() -> str:
    """Return the page."""
    of_axes, of_run = (
        table(
            ["setting", "values", "default", "what it is"],
            [
                [f"`{name}`", values(name), _shown(default), meaning.replace("|", "\\|")]
                for name, default, meaning in remarks()
                if (name in AXES) == axes
            ],
            range(4),
        )
        for axes in (True, False)
    )
    plain = {name: default for name, default, _ in remarks()}
    defaults = []
    for framework in FRAMEWORKS:
        other = [f"{key} {str(value).lower()}" for key, value in sorted(framework.flags.items()) if str(value) != plain[key]]
        defaults.append([f"`{framework.name}`", ", ".join(other)])
    return _HEAD + _AXES + of_axes + _CONSTANTS + of_run + _FRAMEWORKS + table(["framework", "its defaults"], defaults, (0, 1))


if __name__ == "__main__":
    write_text(OUTPUT, page())
