"""Write docs/settings.md: the settings of a run, from the fields of Strategy and the remarks beside them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from accuracy_tables import table

from profiler.files import write_text
from solver.search.fixed import AXES
from solver.spec.choices import CHOICES, OPTIONAL_SWITCHES, SWITCHES
from solver.spec.frameworks import FRAMEWORKS
from solver.spec.strategy import Strategy

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_FIELD = re.compile(r"    (\w+): (.+?)(?: = (.+?))?(?:  #: (.+))?$")
_HEAD = """# The settings of a run

Written by `python benchmarks/settings.py` from `solver/spec/strategy.py`. A search varies the *axes* (`--fix` fixes them,
`--search` frees them); the others are constants of a run: `--set NAME=VALUE`, `--also NAME` for a search with each of its
values, `layout` of a config, `run` of a [case](cases.md). A key that changes nothing in a run is refused.

"""
_FRAMEWORKS = """
## Defaults of the frameworks

Where a release has another default than the table above ([frameworks](frameworks.md)). A search takes what its release can
do in addition (`best_practice` in `solver/spec/frameworks`).

"""


def remarks() -> Iterator[tuple[str, str, str]]:
    """Yield (field, default, meaning) of Strategy in its order."""
    above: list[str] = []
    for line in inspect.getsource(Strategy).splitlines():
        if line.startswith("    #: "):
            above.append(line.removeprefix("    #: "))
        elif (found := _FIELD.match(line)) and found[1] in Strategy.__dataclass_fields__:
            yield found[1], (found[3] or "").replace('"', ""), found[4] or " ".join(above)
            above = []


def values(name: str) -> str:
    """Return what a field may be, in words."""
    if name in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[name])
    if name in SWITCHES or name in OPTIONAL_SWITCHES:
        return "`true`, `false`" + ", absent" * (name in OPTIONAL_SWITCHES)
    return {"int": "a whole number", "float": "a number", "str": "a text"}[str(Strategy.__dataclass_fields__[name].type)]


def _shown(default: str) -> str:
    """Return a default in the words of a command line: none for an empty text, and for what a framework implies."""
    return "" if default in ("", "None") else f"`{default.lower() if default in ('True', 'False') else default}`"


def page() -> str:
    """Return the page."""
    rows = [
        [f"`{name}`", values(name), _shown(default), "axis" if name in AXES else "", meaning.replace("|", "\\|")]
        for name, default, meaning in remarks()
    ]
    plain = {name: default for name, default, _ in remarks()}
    defaults = []
    for framework in FRAMEWORKS:
        other = [f"{key} {str(value).lower()}" for key, value in sorted(framework.flags.items()) if str(value) != plain[key]]
        defaults.append([f"`{framework.name}`", ", ".join(other)])
    head = ["setting", "values", "default", "", "what it is"]
    return _HEAD + table(head, rows, range(5)) + _FRAMEWORKS + table(["framework", "its defaults"], defaults, (0, 1))


if __name__ == "__main__":
    write_text(OUTPUT, page())
