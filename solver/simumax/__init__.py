"""For users of SimuMax: its three JSON files, its calls and its names of results, priced by this program."""

from solver.formats.simumax.configs import ModelConfig, StrategyConfig, SystemConfig
from solver.simumax.perf import PerfLLM
from solver.simumax.results import Result

__all__ = ["ModelConfig", "PerfLLM", "Result", "StrategyConfig", "SystemConfig"]
