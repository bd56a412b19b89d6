"""Measured runs, predicted and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from profiler.profile.profiles import (
    OWN_NAME,
    OWN_PROFILE,
    PROF_DATA,
    find_profile,
    known_profiles,
)
from solver.api import CACHE
from solver.formats.cases.reading import read_cases
from solver.options.terminal_run import progress_bar
from solver.report.output import (
    write_json,
)
from solver.report.scores import confusion, memory_scores, regret, time_scores, worst
from solver.report.validate import as_json, predict_cases
from solver.report.validation_tables import show_validation


def validate(path: Path, json_path: Path | None, approximate: bool, console: Console) -> None:
    """Predict the measured runs of a JSON-lines file; print the errors, and write every prediction to ``json_path``."""
    cases = read_cases(path)
    with progress_bar("predicting cases") as report:
        predictions = predict_cases(cases, CostModels(known_profiles()), report, approximate)
    show_validation(
        console,
        predictions,
        time_scores(predictions),
        memory_scores(predictions),
        confusion(predictions),
        regret(predictions),
        worst(predictions),
    )
    if json_path:
        write_json(json_path, {"cases": as_json(predictions)})
        console.print(f"wrote {json_path}", markup=False)


class CostModels:
    """Cost models by hardware and network; each profile is read and fitted once.

    hardware: a shipped profile's name, ``data`` for this machine's own profile, or the path of a profile (ending in .pt).
    """

    def __init__(self, known: Sequence[str]) -> None:
        self._known = set(known)
        self._models: dict[str, CostModel] = {}

    def __call__(self, hardware: str, network_bandwidth: float | None) -> CostModel | None:
        path = PROF_DATA / OWN_PROFILE if hardware == OWN_NAME else Path(hardware)
        own = path.suffix == ".pt"
        if not own and hardware not in self._known:
            return None
        if hardware not in self._models:
            profile, _ = find_profile(path=path) if own else find_profile(hardware)
            self._models[hardware] = cost_model(profile, cache_dir=CACHE)
        return self._models[hardware].with_network(network_bandwidth)
