"""The restated files of SimuMax under tests/data/simumax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solver.simumax import ModelConfig, PerfLLM, StrategyConfig

DATA = Path(__file__).resolve().parents[2] / "data" / "simumax"
PROFILE = "a100_pcie_80gb"


@pytest.fixture(scope="session")
def configured() -> Callable[..., PerfLLM]:
    """Return a function that configures files: model, system (a name, or a file of DATA), and changed strategy fields."""

    def of(model: str = "llama3_8b", system: str = PROFILE, strategy: str = "tp2_pp1_dp4_mbs1", **changes: Any) -> PerfLLM:
        perf = PerfLLM()
        path = DATA / f"{system}.json"
        perf.configure(
            strategy_config=StrategyConfig.init_from_config_file(DATA / f"{strategy}.json").changed(**changes),
            model_config=ModelConfig.init_from_config_file(DATA / f"{model}.json"),
            system_config=path if path.exists() else system,
        )
        return perf

    return of


@pytest.fixture(scope="session")
def estimated(configured: Callable[..., PerfLLM]) -> Callable[..., PerfLLM]:
    """The same, estimated."""

    def of(*names: str, **changes: Any) -> PerfLLM:
        perf = configured(*names, **changes)
        perf.run_estimate()
        return perf

    return of
