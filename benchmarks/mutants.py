"""``make mutants``: whether the tests notice a changed formula of the core.

    python benchmarks/mutants.py --mutants 250 --seed 0

A mutant is the core with one operator, comparison or number changed by cosmic-ray, or one function of SWAPS. A seeded sample of
all mutants is tested in a copy of the working tree: the tests of the same folder, then those of the published runs, then those
of all formulas, until one fails. The score is the share of mutants that fail a test; the others are listed. Cached fits are
those of the unchanged code, as fitting all profiles takes minutes: a change of fitting code fails only tests that fit.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from predictor.fitted import code_version

ROOT = Path(__file__).resolve().parent.parent
CORE = (
    "solver/step/*.py",
    "solver/layers/*.py",
    "solver/schedule/*.py",
    "solver/spec/feasibility.py",
    "predictor/c*.py",
    "predictor/kernels/*.py",
    "predictor/network/[!_f]*.py",
    "predictor/network/fit.py",
)
#: Operators that leave most formulas running; others (a shift of floats) would only raise errors, which say little.
OPERATORS = [
    "NumberReplacer",
    *(
        f"Replace{kind}{name}"
        for kind, names in (
            ("BinaryOperator_", "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitAnd_BitOr"),
            ("ComparisonOperator_", "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq"),
            ("UnaryOperator_", "USub_UAdd Delete_Invert"),
            ("", "TrueWithFalse FalseWithTrue AndWithOr OrWithAnd"),
        )
        for name in names.split()
    ),
]
SWAPS = {
    "np.minimum(": "np.maximum(",
    "np.maximum(": "np.minimum(",
    " min(": " max(",
    " max(": " min(",
    ".sum(": ".max(",
    ".max(": ".min(",
    "np.median(": "np.max(",
    "np.ceil(": "np.floor(",
}
STAGES = (
    ("tests/benchmarks/test_published_runs.py",),
    ("tests/solver", "tests/predictor", "tests/profiler/measure/test_attention_timing.py"),
)


def source_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def changes(path: str) -> list[tuple[str, str, int]]:
    """Return (path, name, occurrence) of every change of a file."""
    nodes = list(ast_nodes(get_ast(source_of(path))))
    counts = {name: sum(len(list(get_operator(f"core/{name}")().mutation_positions(n))) for n in nodes) for name in OPERATORS}
    counts |= {swap: source_of(path).count(swap) for swap in SWAPS}
    return [(path, name, i) for name, count in counts.items() for i in range(count)]


def mutant(path: str, name: str, occurrence: int) -> str | None:
    """Return the code of the changed file, or None where it is not Python or the same."""
    code = source_of(path)
    if name in SWAPS:
        found = [*re.finditer(re.escape(name), code)][occurrence]
        code = code[: found.start()] + SWAPS[name] + code[found.end() :]
    else:
        code = mutate_code(code, get_operator(f"core/{name}")(), occurrence)
    try:
        return code if ast.dump(ast.parse(code)) != ast.dump(ast.parse(source_of(path))) else None
    except SyntaxError:
        return None


def described(path: str, code: str) -> str:
    """Return the place and the line before and after the change."""
    pairs = zip(source_of(path).splitlines(), code.splitlines(), strict=False)
    line, (old, new) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"{path}:{line}\n    - {old.strip()}\n    + {new.strip()}"


class Copy:
    """A copy of the working tree in ``folder``, in which mutants are tested."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.seconds, start = folder / "tree", 900.0, time.monotonic()
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__"))
        self.cache = self.tree / "prof_data" / ".cache"
        if failing := [tests for tests in STAGES if not self._passes(*tests)]:  # this also fills the cache of fits
            sys.exit(f"{failing[0]} fail without any change")
        self.seconds, files = 1.5 * (time.monotonic() - start), self.cache.glob(f"*-{code_version()}.npz")
        self.fits = {file.name.split("-")[0]: file.read_bytes() for file in files}

    def noticed_by(self, path: str, code: str) -> str:
        """Return the first tests that fail on a mutant; "" where all pass."""
        (self.tree / path).write_text(code, encoding="utf-8")
        shutil.rmtree(self.cache)
        self.cache.mkdir()
        version = code_version.__wrapped__(self.tree / "predictor")
        for profile, fits in self.fits.items():
            (self.cache / f"{profile}-{version}.npz").write_bytes(fits)
        near = str(next(f for f in (Path("tests", path).parent, Path("tests/solver")) if (self.tree / f).is_dir()))
        runs = ((near,), *((*tests, f"--ignore={near}") for tests in STAGES))
        by = next((tests[0] for tests in runs if not self._passes(*tests)), "")
        shutil.copy2(ROOT / path, self.tree / path)
        return by

    def _passes(self, *tests: str) -> bool:
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
        path = {**os.environ, "PYTHONPATH": str(self.tree)}
        try:
            return subprocess.run(command, cwd=self.tree, env=path, capture_output=True, timeout=self.seconds).returncode in (
                0,
                5,
            )
        except subprocess.TimeoutExpired:
            return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30,) * 2)  # a mutant that never stops may fill the memory first
    every = [change for name in CORE for file in sorted(ROOT.glob(name)) for change in changes(str(file.relative_to(ROOT)))]
    random.Random(options.seed).shuffle(every)
    sample = [(change[0], code) for change in every[: 2 * options.mutants] if (code := mutant(*change))][: options.mutants]
    print(f"{len(sample)} of {len(every)} mutants are tested", flush=True)
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for number, changed in enumerate(sample, 1):
            start, by = time.monotonic(), copy.noticed_by(*changed)
            survivors += [] if by else [described(*changed)]
            print(f"{number} {described(*changed)}\n    {by or 'SURVIVES'} ({time.monotonic() - start:.0f} s)", flush=True)
    print(*survivors, f"score: {1 - len(survivors) / len(sample):.1%} of {len(sample)} mutants fail a test", sep="\n")


if __name__ == "__main__":
    main()
